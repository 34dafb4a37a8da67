//! `sidetrack up`: runs a node until it is told to stop.

mod told;

use super::memory::Watched;
use super::node::{Node, Prepared};
use super::outgoing::Paths;
use super::shunt::ShuntFlows;
use super::systemd::Parent;
use super::upgrade::{Go, Heir, Ours, Starter};
use super::windows::{self, Open, Windows};
use crate::admin::{AdminState, HISTORY, RECORDS, Written};
use crate::capture::{Captures, Settings as CaptureSettings};
use crate::config::{CaptureAt, Config, LogFormat};
use crate::export::{Around, Exports};
use crate::live::Ledger;
use crate::log::{self, Shape};
use crate::metrics::Metrics;
use crate::record::history::History;
use crate::record::{Feed, Recorder, Switch};
use crate::reload::{ReloadHandle, Reloader};
use crate::rights::DataUser;
use crate::worker::Wires;
use anyhow::Context;
use sidetrack_common::systemd::Systemd;
use sidetrack_sys::caps;
use sidetrack_sys::sync::lock;
use sidetrack_sys::undo::Guard;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use told::Watch;

/// The command line of `up`.
#[derive(Clone, Debug)]
pub struct UpOptions {
    /// The configuration file.
    pub config: PathBuf,
    /// The node ends by itself unless its configuration is confirmed within this time.
    pub confirm: Option<Duration>,
}

/// Runs until SIGTERM or SIGINT. Then flows may go on for `limits.drain_ms`, or until a second such signal.
///
/// # Errors
/// What could not be set up, and where.
pub fn up(options: &UpOptions) -> anyhow::Result<()> {
    run_node(options, None)
}

/// As [`up`], but takes over from a running process of the same node, which is connected by standard input.
///
/// # Errors
/// As [`up`], or what is in the way of the hand-over. Then the other process goes on.
pub fn take_over(options: &UpOptions) -> anyhow::Result<()> {
    let heir = Arc::new(Heir::begin()?);
    run_node(options, Some(heir.clone())).inspect_err(|error| heir.failed(error))
}

fn run_node(options: &UpOptions, heir: Option<Arc<Heir>>) -> anyhow::Result<()> {
    let parent = Arc::new(Parent::from_environment()?);
    let path = &options.config;
    let (name, text, mut config) = read(path)?;
    // Before other processes are started, because they inherit this.
    sidetrack_sys::confine::leave_no_core().context("RLIMIT_CORE")?;
    let nofile = caps::raise_open_files_limit().context("RLIMIT_NOFILE")?;
    parent.check(&config);
    let systemd = parent.systemd.clone();
    let heritage = heir.as_ref().map(|heir| heir.checked(&config)).transpose()?.flatten();
    // Without an offer, the process before this one was killed: this is a start like any other.
    let heir = heir.filter(|_| heritage.is_some());
    if config.wire.is_none() && heritage.as_ref().is_some_and(|heritage| heritage.has_wire()) {
        config.wire = Some(crate::config::Wire::default());
    }
    // The order matters: use the rights, give them up, and only then bind sockets, start threads and read peers' bytes.
    let user = DataUser::of(&config.user)?;
    let config = Arc::new(config);
    let names = super::dns::names(&config);
    let before = (parent.clone(), heritage.clone());
    let mut prepared = Prepared::new(&config, user.as_ref(), names.clone(), before)?;
    let shunt = ShuntFlows::start(&config, [name, text], heritage.as_deref())?;
    let node_to_be = Arc::new(OnceLock::<Arc<Node>>::new());
    let (reloader, handle) = reloader(path, config, node_to_be.clone());
    let reloader = told_to(systemd.clone(), reloader, node_to_be.clone());
    let (reloader, unconfirmed) = must_be_confirmed(options.confirm, reloader);
    let windows = Windows::open(&handle.current().load(), heritage.as_deref(), &parent.passed)?;
    let starter = starter(&windows, path, heir.is_some())?;
    let guard = windows.guard(user.as_ref())?;
    // After all processes are started, so that none of them keeps the port when this one is gone.
    let dns = super::dns::Bound::open(&handle.current().load(), names, heritage.as_deref())?;
    let captures = captures(&handle.current().load());
    let memory = Watched::open();
    prepared.give_up_rights(&handle.current().load(), path, user.as_ref(), windows.admin_path())?;
    // The process before this one serves while containers get healthy.
    prepared.start_functions(&handle.current().load(), heir.is_some())?;
    let go = heir.as_ref().map(|heir| heir.ready()).transpose()?;
    go.iter().for_each(|go| go.ask_shunt(shunt.as_deref()));
    let node = Arc::new(prepared.start(
        handle.current().clone(),
        (nofile, memory.look().map(|(memory, _)| memory)),
        go.as_ref(),
    )?);
    memory.watch(&node, handle.current().clone()).context("the thread that looks at the memory")?;
    // The reloader does not run yet, so that no reload can come before this.
    let _ = node_to_be.set(node.clone());
    *lock(&node.resolver) = dns.map(|dns| dns.serve(&node, handle.current())).transpose()?;
    let guard = Arc::new(Mutex::new(guard));
    let before = heir.zip(go);
    let ready = Ready {
        node,
        windows,
        shunt,
        systemd,
        starter,
        guard: guard.clone(),
        before,
        path: path.clone(),
        captures,
        unconfirmed,
    };
    control_runtime()?.block_on(run(ready, reloader, handle))?;
    let guard = lock(&guard).take();
    guard.map_or(Ok(()), |guard| guard.finish().context("the guard of the admin socket"))
}

/// Reads the configuration file: its name, its text, and what it says.
fn read(path: &Path) -> anyhow::Result<(String, String, Config)> {
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
    Ok((name, text, config))
}

/// Starts the process that starts what replaces this one. `waits`: not before the process before this one has made the change
/// final.
fn starter(windows: &Windows, config: &Path, waits: bool) -> anyhow::Result<Option<Arc<Starter>>> {
    let Some((socket, path)) = windows.upgrades() else { return Ok(None) };
    let starter = Starter::start().context("cannot start the process that starts upgrades")?;
    if !waits {
        starter.listen(socket, path, config).context("the process that starts upgrades")?;
    }
    Ok(Some(Arc::new(starter)))
}

/// Opens what reads packets, while the process has the right to.
fn captures(config: &Config) -> Arc<Captures> {
    let CaptureAt { packets, ring_bytes, ring_snap_bytes: snap_bytes } = config.capture;
    if !packets {
        return Captures::none(
            "its configuration does not allow it: `packets = true` in [capture], and a restart",
        );
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

/// The node ends by itself unless its configuration is confirmed within this time.
fn must_be_confirmed(
    within: Option<Duration>,
    reloader: Reloader,
) -> (Reloader, Option<oneshot::Receiver<()>>) {
    let Some(within) = within else { return (reloader, None) };
    let (give_up, given_up) = oneshot::channel();
    (reloader.unconfirmed(within, give_up), Some(given_up))
}

/// Lets the service manager know about every reload.
fn told_to(systemd: Option<Arc<Systemd>>, reloader: Reloader, node: Arc<OnceLock<Arc<Node>>>) -> Reloader {
    let Some(systemd) = systemd else { return reloader };
    reloader.telling(move |begins| {
        if begins {
            return systemd.reloading();
        }
        node.get().into_iter().for_each(|node| node.keep_listeners());
        systemd.ready();
    })
}

/// What `up` has prepared before the event loop runs.
struct Ready {
    node: Arc<Node>,
    windows: Windows,
    shunt: Option<Arc<ShuntFlows>>,
    systemd: Option<Arc<Systemd>>,
    starter: Option<Arc<Starter>>,
    guard: Arc<Mutex<Option<Guard>>>,
    /// The process before this one, and where to go on.
    before: Option<(Arc<Heir>, Go)>,
    /// The configuration file.
    path: PathBuf,
    captures: Arc<Captures>,
    /// Says that the configuration was not confirmed.
    unconfirmed: Option<oneshot::Receiver<()>>,
}

/// The records of a running node.
struct Records {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
    switch: Switch,
    history: Option<Arc<History>>,
    exports: Arc<Exports>,
    /// What says why records and the history cannot be written.
    written: Vec<Written>,
}

impl Records {
    fn start(
        config: &Config,
        ledgers: &[Arc<Ledger>],
        feed: &Arc<Feed>,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        let writer = windows::writer(config)?;
        if let Some(writer) = &writer {
            tokio::spawn(writer.reopen_on_signal()?);
        }
        let history = windows::history(config, ledgers)?;
        let records = writer.as_ref().map(|writer| (RECORDS, writer.trouble()));
        let stored = history.as_ref().map(|history| (HISTORY, history.trouble()));
        let written = records.into_iter().chain(stored).collect();
        let recorder = Recorder::new(ledgers.to_vec(), feed.clone(), writer, metrics.clone());
        let recorder = recorder.keeping(history.clone());
        let switch = recorder.switch();
        let (stop, stopped) = watch::channel(false);
        let exports = Exports::new(&config.export);
        let task = tokio::spawn(record(recorder, stopped, exports.clone()));
        Ok(Self { task, stop, switch, history, exports, written })
    }
}

async fn run(ready: Ready, reloader: Reloader, handle: ReloadHandle) -> anyhow::Result<()> {
    let Ready { node, mut windows, shunt, systemd, starter, guard, before, path, captures, unconfirmed } =
        ready;
    node.set_windows(windows.addresses());
    let config = handle.current().load_full();
    let (stop, stopped) = watch::channel(false);
    let mut ledgers = node.ledgers();
    ledgers.extend(shunt.as_ref().map(|shunt| shunt.ledger().clone()));
    let feed = Arc::new(Feed::new(config.record.recent));
    let metrics = Arc::new(Metrics::new());
    let Records { task: records, stop: stop_records, switch, history, exports, written } =
        Records::start(&config, &ledgers, &feed, &metrics)?;
    node.record_kernel_flows();
    let shunting = shunt.clone().map(|shunt| tokio::spawn(shunt.record(node.clone(), stopped.clone())));
    let following = tokio::spawn(super::agreement::follow(node.clone(), handle.clone()));
    let current = handle.current().clone();
    let orchestrator = windows.orchestrator.take();
    let control = Arc::new(super::control::ControlOf::new(node.clone(), handle, shunt.clone(), orchestrator));
    let paths =
        config.outgoing.as_ref().map(|settings| Paths::new(settings.clone(), node.clone(), current.clone()));
    let state = AdminState::new(ledgers.clone(), feed, metrics.clone(), control)
        .with_history(history)
        .writing(written);
    let state = exporting(state.with_captures(captures.begin(ledgers)), exports, node.mark())?;
    let (state, readiness) = state.starting();
    if let Some((paths, (_, go))) = paths.as_ref().zip(before.as_ref()) {
        paths.take(&std::mem::take(&mut *lock(&go.paths)))?;
    }
    let open = Arc::new(Open::new(windows, state, paths, config.clone()));
    open.serve();
    let (ready, watching) = oneshot::channel();
    let reloads = tokio::spawn(reloader.run(ready));
    let _ = watching.await;
    let ours = Ours { node: node.clone(), open: open.clone(), switch, metrics, systemd, shunt, guard };
    let watch = Watch { ours, current, on_crash: config.on_crash, readiness, starter: starter.clone(), path };
    let end = watch.until_told(before, unconfirmed).await?;
    reloads.abort();
    following.abort();
    let _ = stop.send(true);
    let windows = open.rest();
    let left = node.flows_in_flight();
    stop_node(node.clone()).await?;
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
    end.leave(&open, starter.as_deref());
    end.result(&node, left)
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

async fn stop_node(node: Arc<Node>) -> anyhow::Result<()> {
    let stop = move || {
        let resolver = lock(&node.resolver).take();
        resolver.into_iter().for_each(super::dns::Resolving::stop);
        node.stop();
    };
    Ok(tokio::task::spawn_blocking(stop).await?)
}
