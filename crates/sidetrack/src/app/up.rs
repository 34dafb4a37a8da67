//! `sidetrack up`: a node of listeners and interceptors.

use super::kernel;
use super::sockets::{self, Bound};
use super::threads::{Fleet, Serving};
use crate::carry::Dialing;
use crate::config::{Config, RecordTo};
use crate::keeper::Keeper;
use crate::live::{Clock, Ledger};
use crate::metrics::Metrics;
use crate::process::Owners;
use crate::record::{Feed, RecordWriter, Recorder, Target};
use crate::session::PIPES_MAX;
use crate::steer::{OWN_MARK, Steer};
use crate::worker::Shared;
use anyhow::Context;
use arc_swap::ArcSwap;
use sidetrack_core::flow::Process;
use sidetrack_core::limit::Budget;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::cgroup;
use sidetrack_sys::conntrack::Events;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Descriptors kept back from flows: listeners, epoll, records, admin clients, resolver.
const DESCRIPTOR_RESERVE: u64 = 128;

/// What `up` is told on the command line.
#[derive(Clone, Debug)]
pub struct UpOptions {
    /// The configuration file.
    pub config: PathBuf,
}

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// What could not be set up, and where.
pub fn up(options: &UpOptions) -> anyhow::Result<()> {
    let node = Node::start(&options.config)?;
    let control = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot make the control event loop")?;
    control.block_on(node.run())
}

/// Everything that runs.
struct Node {
    fleet: Fleet,
    serving: Vec<Serving>,
    shared: Arc<Shared>,
    steered: Steered,
}

/// What the kernel does for us.
struct Steered {
    keeper: Option<Arc<Keeper>>,
    steer: Steer,
    events: Option<Events>,
}

impl Node {
    fn start(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}: give the file with -c FILE", path.display()))?;
        let name = path.display().to_string();
        let config =
            Config::from_text(&name, &text).map_err(|error| anyhow::anyhow!("{}", error.render(false)))?;
        let nofile = caps::raise_open_files_limit().context("RLIMIT_NOFILE")?;
        let workers = workers(&config);
        let bound = config
            .listeners
            .iter()
            .map(|listener| sockets::bind(listener, &config, workers))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let bound: Vec<_> = bound.into_iter().flatten().collect();
        let steered = Steered::start(&name, &text, &config, &bound)?;
        steered.give_up_rights()?;
        let dialing = Dialing {
            mark: steered.keeper.as_ref().map(|_| OWN_MARK.value),
            own: bound.iter().map(|bound| bound.listening.address).collect(),
        };
        let owners = steered.keeper.clone().map_or(Owners::Ourselves, ask_keeper);
        let budget = budget(&config, nofile, workers);
        let config = Arc::new(ArcSwap::from_pointee(config));
        let shared = Arc::new(Shared::new(config, dialing, owners, budget, Clock::start()));
        let fleet = Fleet::start(&shared, workers)?;
        let serving = bound.into_iter().map(|bound| fleet.serve(bound)).collect();
        Ok(Self { fleet, serving, shared, steered })
    }

    async fn run(self) -> anyhow::Result<()> {
        let config = self.shared.config.load_full();
        let (stop_records, stopped) = watch::channel(false);
        // One ledger more than workers: the kernel's flows.
        let kernel_ledger = Arc::new(Ledger::default());
        let ledgers: Vec<_> = self.fleet.ledgers().iter().cloned().chain([kernel_ledger.clone()]).collect();
        let recorder = recorder(&config, &ledgers)?;
        let records = tokio::spawn(recorder.run(stopped));
        if let Some(events) = self.steered.events {
            let paths = kernel::Paths::new(&self.steered.steer, &config);
            tokio::spawn(kernel::record(events, paths, self.shared.clone(), kernel_ledger));
        }
        for serving in &self.serving {
            let listening = &serving.listening;
            tracing::info!(listener = %listening.name, address = %listening.address, "listening");
        }
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        drop(self.serving);
        let fleet = self.fleet;
        tokio::task::spawn_blocking(move || fleet.stop()).await?;
        let _ = stop_records.send(true);
        records.await?;
        drop(self.shared);
        if let Some(keeper) = self.steered.keeper {
            keeper.finish().context("the keeper")?;
        }
        Ok(())
    }
}

impl Steered {
    /// Starts the keeper if the kernel has something to do, and lets it do it.
    fn start(name: &str, text: &str, config: &Config, bound: &[Bound]) -> anyhow::Result<Self> {
        let addresses: Vec<(Arc<str>, SocketAddr)> =
            bound.iter().map(|bound| (bound.listening.name.clone(), bound.listening.address)).collect();
        let steer = Steer::new(config, &addresses, &cgroup::find_match)?;
        if steer.is_empty() || !needed(&steer)? {
            return Ok(Self { keeper: None, steer, events: None });
        }
        let keeper = Keeper::start().context("cannot start the keeper")?;
        let addresses = addresses.into_iter().map(|(name, address)| (name.to_string(), address)).collect();
        let (warnings, events) = keeper.steer(name, text, addresses)?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        Ok(Self { keeper: Some(Arc::new(keeper)), steer, events })
    }

    /// From here on peers' bytes are read: nothing but what marked and transparent sockets need is kept.
    fn give_up_rights(&self) -> anyhow::Result<()> {
        let held = caps::capabilities().context("capabilities")?.permitted;
        let wanted = if self.keeper.is_some() { CapabilitySet::NET_RAW } else { CapabilitySet::empty() };
        caps::keep_only(held & wanted).context("cannot give up capabilities")
    }
}

/// The keeper may see all processes of this host; we may not.
fn ask_keeper(keeper: Arc<Keeper>) -> Owners {
    Owners::Asked(Arc::new(move |local, remote| {
        keeper.owner(local, remote).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot look up a process");
            Process::default()
        })
    }))
}

/// Whether the kernel's part is possible; an error where a listener cannot do without.
fn needed(steer: &Steer) -> anyhow::Result<bool> {
    if caps::is_network_root() {
        return Ok(true);
    }
    anyhow::ensure!(
        steer.steering.redirects.is_empty() && steer.steering.tproxies.is_empty(),
        "listeners of kind redirect and tproxy need root (CAP_NET_ADMIN): start with sudo, or use \
         'sidetrack run -- COMMAND', which needs no rights"
    );
    tracing::info!("without CAP_NET_ADMIN nothing is left to the kernel; all flows pass through user space");
    Ok(false)
}

/// The workers to start.
fn workers(config: &Config) -> usize {
    match config.workers {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        workers => workers,
    }
}

/// How many flows the limit on open files and the configuration allow.
fn budget(config: &Config, nofile: u64, workers: usize) -> Budget {
    let pipes = (workers * PIPES_MAX) as u64;
    let budget = Budget::with_pipes(nofile, DESCRIPTOR_RESERVE, pipes.min(nofile / 16));
    match config.limits.max_flows {
        Some(most) => budget.at_most(most.into()),
        None => budget,
    }
}

fn recorder(config: &Config, ledgers: &[Arc<Ledger>]) -> anyhow::Result<Recorder> {
    let target = match &config.record.to {
        RecordTo::None => None,
        RecordTo::Stdout => Some(Target::Stdout),
        RecordTo::Stderr => Some(Target::Stderr),
        RecordTo::File(path) => Some(Target::File(path.clone())),
    };
    let writer = target.map(RecordWriter::start).transpose().context("records")?;
    let feed = Arc::new(Feed::new(config.record.recent));
    Ok(Recorder::new(ledgers.to_vec(), feed, writer, Arc::new(Metrics::new())))
}
