//! `sidetrack up`: runs a node until it is told to stop.

use super::node::{Node, Prepared};
use super::orchestrator::Orchestrator;
use super::outgoing::{self, Paths};
use super::shunt::ShuntFlows;
use super::systemd::Systemd;
use crate::admin::{self, AdminSocket, AdminState, Readiness, Stage, Tokens};
use crate::capture::{Captures, Settings as CaptureSettings};
use crate::config::{Admin, AdminAt, CaptureAt, Config, LogFormat, RecordTo};
use crate::export::{Around, Exports};
use crate::live::Ledger;
use crate::log::{self, Shape};
use crate::metrics::Metrics;
use crate::record::history::{History, Settings};
use crate::record::{Feed, RecordWriter, Recorder, Target};
use crate::reload::{ReloadHandle, Reloader};
use crate::rights::DataUser;
use crate::worker::Wires;
use anyhow::Context;
use arc_swap::ArcSwap;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::sync::lock;
use sidetrack_sys::undo::Guard;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// How often `drain` checks whether the flows have ended.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// The command line of `up`.
#[derive(Clone, Debug)]
pub struct UpOptions {
    /// The configuration file.
    pub config: PathBuf,
}

/// Runs until SIGTERM or SIGINT. Then flows may go on for `limits.drain_ms`, or until a second such signal.
///
/// # Errors
/// What could not be set up, and where.
pub fn up(options: &UpOptions) -> anyhow::Result<()> {
    let path = &options.config;
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read {}: give the file with -c FILE", path.display()))?;
    let name = path.display().to_string();
    let mut config = Config::from_text(&name, &text).map_err(crate::config::BadConfiguration::from)?;
    if config.wire.is_none() && Wires::are_left() {
        // The rules decide about the flows that an earlier process has left.
        config.wire = Some(crate::config::Wire::default());
    }
    log_as(&config);
    warn(&name, &text, &config);
    // Before other processes are started, because they inherit this.
    sidetrack_sys::confine::leave_no_core().context("RLIMIT_CORE")?;
    let nofile = caps::raise_open_files_limit().context("RLIMIT_NOFILE")?;
    let systemd = Systemd::from_environment().map(Arc::new);
    // The order matters: use the rights, give them up, and only then bind sockets, start threads and read peers' bytes.
    let user = DataUser::of(&config.user)?;
    let config = Arc::new(config);
    let names = super::dns::names(&config);
    let mut prepared = Prepared::new(&config, user.as_ref(), names.clone())?;
    let shunt = ShuntFlows::start(&config, &name, &text)?;
    let node_to_be = Arc::new(OnceLock::<Arc<Node>>::new());
    let (reloader, handle) = reloader(path, config, node_to_be.clone());
    let reloader = told_to(systemd.clone(), reloader);
    let windows = Windows::open(&handle.current().load())?;
    let guard = windows.guard(user.as_ref())?;
    // After all processes are started, so that none of them keeps the port when this one is gone.
    let dns = super::dns::Bound::open(&handle.current().load(), names)?;
    let captures = captures(&handle.current().load());
    prepared.give_up_rights(&handle.current().load(), path, user.as_ref(), windows.admin_path())?;
    let node = Arc::new(prepared.start(handle.current().clone(), nofile)?);
    // The reloader does not run yet, so that no reload can come before this.
    let _ = node_to_be.set(node.clone());
    *lock(&node.resolver) = dns.map(|dns| dns.serve(&node, handle.current())).transpose()?;
    control_runtime()?.block_on(run(node, reloader, handle, windows, shunt, systemd, captures))?;
    guard.map_or(Ok(()), |guard| guard.finish().context("the guard of the admin socket"))
}

/// Opens what reads packets, while the process has the right to.
fn captures(config: &Config) -> Arc<Captures> {
    let CaptureAt { packets, ring_bytes, ring_snap_bytes: snap_bytes } = config.capture;
    if !packets {
        return Captures::none("its configuration says `packets = false` in [capture]");
    }
    Captures::of_this_network(CaptureSettings { ring_bytes, snap_bytes })
}

/// Sets the format of log lines, if the configuration names one.
pub(super) fn log_as(config: &Config) {
    match config.log_format {
        Some(LogFormat::Json) => log::set_shape_of_all(Shape::Json),
        Some(LogFormat::Text) => log::set_shape_of_all(Shape::Text),
        None => {}
    }
}

fn warn(name: &str, text: &str, config: &Config) {
    if !config.warnings.is_empty() {
        let warnings = crate::config::ConfigError::of_warnings(name, text, &config.warnings);
        tracing::warn!("\n{}", warnings.render(false));
    }
}

/// Makes the event loop for everything except the data path.
pub(super) fn control_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().context("cannot make the control event loop")
}

fn reloader(path: &Path, config: Arc<Config>, node: Arc<OnceLock<Arc<Node>>>) -> (Reloader, ReloadHandle) {
    Reloader::new(
        path,
        config,
        Box::new(move |change| match node.get() {
            Some(node) => node.apply(change),
            None => anyhow::bail!("sidetrack is still starting; try again"),
        }),
    )
}

/// Lets the service manager know about every reload.
fn told_to(systemd: Option<Arc<Systemd>>, reloader: Reloader) -> Reloader {
    match systemd {
        None => reloader,
        Some(systemd) => {
            reloader.telling(move |begins| if begins { systemd.reloading() } else { systemd.ready() })
        }
    }
}

/// The sockets where users and services connect to this program itself.
struct Windows {
    admin: Option<AdminSocket>,
    metrics: Option<(std::net::TcpListener, Arc<[String]>)>,
    page: Option<PageAt>,
    /// Where services ask for paths.
    outgoing: Option<std::net::TcpListener>,
    /// Whom the page asks for applications.
    orchestrator: Option<Orchestrator>,
}

/// Where browsers log in.
struct PageAt {
    listener: std::net::TcpListener,
    tokens: Tokens,
    hosts: Arc<[String]>,
}

impl PageAt {
    /// Opens the page's address, and reads its tokens, while the process has root's rights.
    fn open(settings: &Admin, address: SocketAddr, socket: Option<&Path>) -> anyhow::Result<Self> {
        let listener =
            std::net::TcpListener::bind(address).with_context(|| format!("[admin] page = \"{address}\""))?;
        let path = settings.page_tokens.clone().unwrap_or_else(|| Tokens::default_path(socket));
        let tokens = Tokens::load(&path)?;
        let address = listener.local_addr()?;
        tracing::info!(tokens = %path.display(), "the page is at http://{address}/; log in with a token of this file");
        Ok(Self { listener, tokens, hosts: settings.page_hosts.clone().into() })
    }
}

impl Windows {
    fn open(config: &Config) -> anyhow::Result<Self> {
        let admin = match &config.admin.socket {
            AdminAt::Default => Some(AdminSocket::bind_default(&admin::default_socket())?),
            AdminAt::Path(path) => Some(AdminSocket::bind(path)?),
            AdminAt::None => None,
        };
        let metrics = config
            .admin
            .metrics
            .map(|address| {
                std::net::TcpListener::bind(address)
                    .with_context(|| format!("[admin] metrics = \"{address}\""))
            })
            .transpose()?;
        let socket = admin.as_ref().map(AdminSocket::path);
        let page =
            config.admin.page.map(|address| PageAt::open(&config.admin, address, socket)).transpose()?;
        let outgoing = config.outgoing.as_ref().map(outgoing::listen).transpose()?;
        let metrics = metrics.map(|listener| (listener, config.admin.metrics_hosts.clone().into()));
        let orchestrator = config.admin.orchestrator.as_ref().map(Orchestrator::new).transpose()?;
        Ok(Self { admin, metrics, page, outgoing, orchestrator })
    }

    fn admin_path(&self) -> Option<&Path> {
        self.admin.as_ref().map(AdminSocket::path)
    }

    /// Starts the process that removes the admin socket at our end, if the data plane's user may not remove it.
    fn guard(&self, user: Option<&DataUser>) -> anyhow::Result<Option<Guard>> {
        let Some(socket) = self.admin.as_ref().filter(|_| user.is_some()) else { return Ok(None) };
        let guard = Guard::spawn_fixed(vec![socket.undo()], CapabilitySet::DAC_OVERRIDE);
        guard.map(Some).context("cannot start the guard of the admin socket")
    }

    /// The TCP addresses.
    fn addresses(&self) -> Vec<SocketAddr> {
        self.metrics
            .iter()
            .map(|(listener, _)| listener)
            .chain(self.page.iter().map(|page| &page.listener))
            .chain(&self.outgoing)
            .filter_map(|listener| listener.local_addr().ok())
            .collect()
    }

    fn serve(
        self,
        state: AdminState,
        paths: Option<Arc<Paths>>,
        stop: &watch::Receiver<bool>,
    ) -> Vec<JoinHandle<std::io::Result<()>>> {
        let admin = self.admin.map(|socket| tokio::spawn(admin::serve(state.clone(), socket, stop.clone())));
        let page = self.page.map(|PageAt { listener, tokens, hosts }| {
            tokio::spawn(admin::serve_page(state.clone(), listener, tokens, hosts, stop.clone()))
        });
        let metrics = self.metrics.map(|(listener, names)| {
            tokio::spawn(admin::serve_metrics(state, listener, names, stop.clone()))
        });
        let outgoing = self.outgoing.zip(paths);
        let outgoing =
            outgoing.map(|(listener, paths)| tokio::spawn(outgoing::serve(paths, listener, stop.clone())));
        admin.into_iter().chain(page).chain(metrics).chain(outgoing).collect()
    }
}

async fn run(
    node: Arc<Node>,
    reloader: Reloader,
    handle: ReloadHandle,
    mut windows: Windows,
    shunt: Option<Arc<ShuntFlows>>,
    systemd: Option<Arc<Systemd>>,
    captures: Arc<Captures>,
) -> anyhow::Result<()> {
    node.set_windows(windows.addresses());
    let config = handle.current().load_full();
    let (stop, stopped) = watch::channel(false);
    let mut ledgers = node.ledgers();
    ledgers.extend(shunt.as_ref().map(|shunt| shunt.ledger().clone()));
    let feed = Arc::new(Feed::new(config.record.recent));
    let metrics = Arc::new(Metrics::new());
    let writer = writer(&config)?;
    if let Some(writer) = &writer {
        tokio::spawn(writer.reopen_on_signal()?);
    }
    let history = history(&config, &ledgers)?;
    let recorder =
        Recorder::new(ledgers.clone(), feed.clone(), writer, metrics.clone()).keeping(history.clone());
    let (stop_records, records_stopped) = watch::channel(false);
    let exports = Exports::new(&config.export);
    let records = tokio::spawn(record(recorder, records_stopped, exports.clone()));
    node.record_kernel_flows();
    let shunting = shunt.clone().map(|shunt| tokio::spawn(shunt.record(node.clone(), stopped.clone())));
    let following = tokio::spawn(super::agreement::follow(node.clone(), handle.clone()));
    let current = handle.current().clone();
    let orchestrator = windows.orchestrator.take();
    let control = Arc::new(super::control::ControlOf::new(node.clone(), handle, shunt.clone(), orchestrator));
    let paths =
        config.outgoing.as_ref().map(|settings| Paths::new(settings.clone(), node.clone(), current.clone()));
    let state = AdminState::new(ledgers.clone(), feed, metrics, control).with_history(history);
    let state = exporting(state.with_captures(captures.begin(ledgers)), exports, node.mark())?;
    let (state, readiness) = state.starting();
    let windows = windows.serve(state, paths, &stopped);
    let (ready, watching) = oneshot::channel();
    let reloads = tokio::spawn(reloader.run(ready));
    let _ = watching.await;
    let failure = serve_until_told(&node, &config, &current, systemd.as_deref(), &readiness).await?;
    reloads.abort();
    following.abort();
    let _ = stop.send(true);
    tokio::task::spawn_blocking({
        let node = node.clone();
        move || {
            let resolver = lock(&node.resolver).take();
            resolver.into_iter().for_each(super::dns::Resolving::stop);
            node.stop();
        }
    })
    .await?;
    node.end_kernel_flows().await;
    if let Some(shunting) = shunting {
        shunting.await?;
    }
    // The recorder stops after all flows have ended, so that every flow has its record.
    let _ = stop_records.send(true);
    records.await?;
    for window in windows {
        window.await??;
    }
    match failure {
        Some(gone) => anyhow::bail!("{gone}"),
        None => node.take_back(),
    }
}

/// Starts to send to collectors. Returns the state that counts that, too.
fn exporting(state: AdminState, exports: Arc<Exports>, mark: Option<u32>) -> anyhow::Result<AdminState> {
    let counting = exports.clone();
    let state = state.with_exports(move || counting.counts());
    let (ledgers, shown) = (state.ledgers.clone(), state.clone());
    let metrics = Arc::new(move || shown.metrics_text());
    exports.start(&Around { mark, ledgers, metrics }).context("[export]")?;
    Ok(state)
}

/// Records flows until `stop` becomes true, and then sends what waits for collectors.
async fn record(recorder: Recorder, stop: watch::Receiver<bool>, exports: Arc<Exports>) {
    recorder.offering(exports.places()).run(stop).await;
    // The threads are awaited on another thread: this one has other work.
    if tokio::task::spawn_blocking(move || exports.close()).await.is_err() {
        tracing::error!("a panic: reports of flows may not have been sent");
    }
}

/// Announces that the node serves, and waits for SIGTERM, SIGINT or the end of the keeper, which it returns. After a signal the
/// flows in flight go on for `limits.drain_ms`.
async fn serve_until_told(
    node: &Arc<Node>,
    config: &Config,
    current: &ArcSwap<Config>,
    systemd: Option<&Systemd>,
    readiness: &Readiness,
) -> anyhow::Result<Option<String>> {
    // Before "ready" is announced: until now these signals end the process at once.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    readiness.set(Stage::Ready);
    node.announce();
    let workers = node.worker_ledgers();
    let watching = async {
        match systemd {
            Some(systemd) => {
                systemd.ready();
                systemd.watch(workers).await
            }
            None => std::future::pending().await,
        }
    };
    let served = async {
        let failure = tokio::select! {
            _ = terminate.recv() => None,
            _ = interrupt.recv() => None,
            gone = node.keeper_gone(config.on_crash) => Some(gone),
        };
        readiness.set(Stage::Stopping);
        match &failure {
            Some(gone) => tracing::error!("{gone}; stopping"),
            None => {
                let drain_ms = current.load().limits.drain_ms;
                systemd.iter().for_each(|systemd| systemd.stopping(node.flows_in_flight(), drain_ms));
                drain(node, drain_ms, [&mut terminate, &mut interrupt]).await;
            }
        }
        failure
    };
    tokio::select! {
        failure = served => Ok(failure),
        never = watching => match never {},
    }
}

/// Accepts no new connections and waits until all flows have ended, for at most `drain_ms` or until the next signal.
async fn drain(node: &Arc<Node>, drain_ms: u64, [terminate, interrupt]: [&mut Signal; 2]) {
    let leaving = node.clone();
    if tokio::task::spawn_blocking(move || leaving.stop_accepting()).await.is_err() {
        tracing::error!("a panic: the listeners stay open until the end");
    }
    let flows = node.flows_in_flight();
    if flows > 0 && drain_ms > 0 {
        tracing::info!(flows, drain_ms, "draining; a second signal ends the flows at once");
    }
    let ended = async {
        while node.flows_in_flight() > 0 {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    };
    tokio::select! {
        () = ended => {}
        () = tokio::time::sleep(Duration::from_millis(drain_ms)) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

fn history(config: &Config, ledgers: &[Arc<Ledger>]) -> anyhow::Result<Option<Arc<History>>> {
    let settings = config.history.as_ref().map(|history| Settings {
        path: history.path.clone(),
        bytes_max: history.max_bytes,
        keep: history.keep,
        counters: history.counters,
    });
    let open = settings.map(|settings| History::open(&settings, ledgers.to_vec()));
    Ok(open.transpose().context("[history]")?.map(Arc::new))
}

fn writer(config: &Config) -> anyhow::Result<Option<RecordWriter>> {
    let target = match &config.record.to {
        RecordTo::None => None,
        RecordTo::Stdout => Some(Target::Stdout),
        RecordTo::Stderr => Some(Target::Stderr),
        RecordTo::File(path) => Some(Target::File(path.clone())),
    };
    target.map(RecordWriter::start).transpose().context("[record] to")
}
