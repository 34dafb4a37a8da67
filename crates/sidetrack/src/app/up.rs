//! `sidetrack up`: a node of listeners and interceptors.

use super::sockets;
use super::threads::{Fleet, Serving};
use crate::carry::Dialing;
use crate::config::{Config, RecordTo};
use crate::live::{Clock, Ledger};
use crate::metrics::Metrics;
use crate::record::{Feed, RecordWriter, Recorder, Target};
use crate::session::PIPES_MAX;
use crate::worker::Shared;
use anyhow::Context;
use arc_swap::ArcSwap;
use sidetrack_core::limit::Budget;
use sidetrack_sys::caps;
use std::path::PathBuf;
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
    let config = Config::load(&options.config).map_err(miette_to_anyhow)?;
    let node = Node::start(config)?;
    let control = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot make the control event loop")?;
    control.block_on(node.run())
}

fn miette_to_anyhow(error: crate::config::ConfigError) -> anyhow::Error {
    anyhow::anyhow!("{}", error.render(false))
}

/// Everything that runs.
struct Node {
    fleet: Fleet,
    serving: Vec<Serving>,
    shared: Arc<Shared>,
}

impl Node {
    fn start(config: Config) -> anyhow::Result<Self> {
        let nofile = caps::raise_open_files_limit().context("RLIMIT_NOFILE")?;
        let workers = workers(&config);
        let bound = config
            .listeners
            .iter()
            .map(|listener| sockets::bind(listener, &config, workers))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let own = bound.iter().flatten().map(|bound| bound.listening.address).collect();
        let budget = budget(&config, nofile, workers);
        let config = Arc::new(ArcSwap::from_pointee(config));
        let dialing = Dialing { mark: None, own };
        let shared = Arc::new(Shared::new(config, dialing, budget, Clock::start()));
        let fleet = Fleet::start(&shared, workers)?;
        let serving = bound.into_iter().flatten().map(|bound| fleet.serve(bound)).collect();
        Ok(Self { fleet, serving, shared })
    }

    async fn run(self) -> anyhow::Result<()> {
        let config = self.shared.config.load_full();
        let (stop_records, stopped) = watch::channel(false);
        let recorder = recorder(&config, self.fleet.ledgers())?;
        let records = tokio::spawn(recorder.run(stopped));
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
        Ok(())
    }
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
