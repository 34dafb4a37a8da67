//! How a running node comes to its end: a signal, the end of the keeper, or another process that goes on.

use crate::admin::{Readiness, Stage};
use crate::app::node::Node;
use crate::app::systemd;
use crate::app::upgrade::{Go, Heir, Old, Ours, Parting, Returning, Starter, Verdict, say_counters};
use crate::app::windows::Open;
use crate::config::{Config, OnCrash};
use crate::metrics::Carried;
use arc_swap::ArcSwap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// How often `drain` checks whether the flows have ended.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Why a node ends that was started with `--confirm`.
const NOT_CONFIRMED: &str =
    "the configuration was not confirmed within the time of --confirm (`sidetrack reload --confirmed`)";

/// How a node has ended.
pub(super) enum End {
    /// It was told to stop, or cannot go on for this reason.
    Stopped(Option<String>),
    /// The configuration that it was started with was not confirmed.
    Unconfirmed,
    /// Another process goes on.
    Gone(Parting),
    /// It has given everything back to the process before it, and writes its last records into this pipe.
    Returned(OwnedFd),
}

impl End {
    /// Ends what is left, after the last record.
    pub(super) fn leave(&self, open: &Open, starter: Option<&Starter>) {
        match self {
            Self::Gone(parting) => say_counters(&parting.pipe, &open.metrics_text()),
            Self::Returned(pipe) => say_counters(pipe, &open.metrics_text()),
            Self::Stopped(_) | Self::Unconfirmed => {}
        }
        open.close();
        starter.into_iter().for_each(Starter::finish);
    }

    /// `left`: the flows that had to be ended.
    pub(super) fn result(self, node: &Node, left: usize) -> anyhow::Result<()> {
        match self {
            Self::Stopped(Some(gone)) => anyhow::bail!("{gone}"),
            Self::Stopped(None) => node.take_back(),
            Self::Unconfirmed => {
                node.take_back()?;
                anyhow::bail!("{NOT_CONFIRMED}")
            }
            Self::Gone(parting) => {
                parting.done(left);
                Ok(())
            }
            Self::Returned(_) => Ok(()),
        }
    }
}

/// What is watched over until the end.
pub(super) struct Watch {
    pub ours: Ours,
    pub current: Arc<ArcSwap<Config>>,
    pub on_crash: OnCrash,
    pub readiness: Readiness,
    pub starter: Option<Arc<Starter>>,
    /// The configuration file.
    pub path: PathBuf,
}

/// The processes before and after this one.
struct Others {
    /// What the process before this one says of the change.
    verdict: Option<oneshot::Receiver<Verdict>>,
    /// For records after everything was given back.
    to_before: Option<OwnedFd>,
    old: Option<Arc<Old>>,
    gone: Option<oneshot::Receiver<Parting>>,
}

impl Watch {
    /// Announces that the node serves, and waits for SIGTERM, SIGINT, the end of the keeper, or another process. Then the flows in
    /// flight go on for `limits.drain_ms`.
    pub(super) async fn until_told(
        self,
        before: Option<(Arc<Heir>, Go)>,
        mut unconfirmed: Option<oneshot::Receiver<()>>,
    ) -> anyhow::Result<End> {
        // Before "ready" is announced: until now these signals end the process at once.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        self.readiness.set(Stage::Ready);
        self.ours.node.announce();
        let mut others = self.others(before)?;
        if others.verdict.is_none() {
            self.is_main();
        }
        let end = loop {
            let is_main = others.verdict.is_none();
            tokio::select! {
                _ = terminate.recv() => break self.or_gone(&mut others).await,
                _ = interrupt.recv() => break self.or_gone(&mut others).await,
                gone = self.ours.node.keeper_gone(self.on_crash) => break End::Stopped(Some(gone)),
                () = of(&mut unconfirmed) => break End::Unconfirmed,
                parting = of(&mut others.gone) => break End::Gone(parting),
                verdict = of(&mut others.verdict) => {
                    others.verdict = None;
                    match (verdict, others.to_before.take()) {
                        (Verdict::Back, Some(pipe)) => break End::Returned(pipe),
                        _ => self.stays(),
                    }
                }
                never = self.beats(is_main) => match never {},
            }
        };
        self.readiness.set(Stage::Stopping);
        self.end(&end, [&mut terminate, &mut interrupt]).await;
        Ok(end)
    }

    fn others(&self, before: Option<(Arc<Heir>, Go)>) -> anyhow::Result<Others> {
        let old = self.starter.clone().map(|starter| Arc::new(Old::new(self.ours.clone(), starter)));
        let mut others = Others { verdict: None, to_before: None, old, gone: None };
        if let Some((heir, go)) = before {
            let Go { metrics, from_old, to_old, .. } = go;
            self.ours.metrics.carry(Carried::of(&metrics));
            Returning::Earlier.follow(from_old, self.ours.switch.clone(), self.ours.metrics.clone());
            let steered = self.ours.node.steered.used.load(Relaxed);
            let (ours, pipe) = (self.ours.clone(), to_old.try_clone()?);
            others.verdict = Some(heir.serving(steered, (ours, pipe))?);
            others.to_before = Some(to_old);
        }
        others.gone = others.old.clone().map(Old::follow).transpose()?;
        Ok(others)
    }

    /// The change is final: this process is the node.
    fn stays(&self) {
        tracing::info!("upgrade: this process goes on with the node");
        if let Some(starter) = &self.starter {
            self.ours.open.listen(starter, &self.path);
        }
        self.is_main();
    }

    fn is_main(&self) {
        self.ours.systemd.iter().for_each(|systemd| systemd.ready());
        self.ours.node.keep_listeners();
    }

    async fn beats(&self, is_main: bool) -> std::convert::Infallible {
        match &self.ours.systemd {
            Some(systemd) if is_main => systemd::watch(systemd, self.ours.node.worker_ledgers()).await,
            _ => std::future::pending().await,
        }
    }

    /// This process is told to stop. An upgrade that is under way is ended first.
    async fn or_gone(&self, others: &mut Others) -> End {
        let Some(old) = &others.old else { return End::Stopped(None) };
        let stopped = old.clone();
        // A panic there was logged.
        let _ = tokio::task::spawn_blocking(move || stopped.stop()).await;
        match others.gone.as_mut().map(oneshot::Receiver::try_recv) {
            Some(Ok(parting)) => End::Gone(parting),
            _ => End::Stopped(None),
        }
    }

    async fn end(&self, end: &End, signals: [&mut Signal; 2]) {
        let node = &self.ours.node;
        let drain_ms = self.current.load().limits.drain_ms;
        match end {
            End::Stopped(Some(gone)) => tracing::error!("{gone}; stopping"),
            // The node may have cut the operator off: nothing is waited for.
            End::Unconfirmed => tracing::error!("{NOT_CONFIRMED}; stopping"),
            End::Stopped(None) => {
                let flows = node.flows_in_flight();
                let status = format!("draining {flows} flows, for at most {drain_ms} ms");
                self.ours.systemd.iter().for_each(|systemd| systemd.stopping(&status));
                let leaving = node.clone();
                if tokio::task::spawn_blocking(move || leaving.stop_accepting()).await.is_err() {
                    tracing::error!("a panic: the listeners stay open until the end");
                }
                drain(node, drain_ms, signals).await;
            }
            End::Gone(parting) => {
                parting.drains(node.flows_in_flight(), drain_ms);
                drain(node, drain_ms, signals).await;
            }
            End::Returned(_) => drain(node, drain_ms, signals).await,
        }
    }
}

/// Waits for a value. For ever, if there is none or its sender is gone.
async fn of<T>(receiver: &mut Option<oneshot::Receiver<T>>) -> T {
    match receiver {
        Some(waiting) => match waiting.await {
            Ok(value) => value,
            Err(_) => std::future::pending().await,
        },
        None => std::future::pending().await,
    }
}

/// Waits until all flows have ended, for at most `drain_ms` or until the next signal.
async fn drain(node: &Arc<Node>, drain_ms: u64, [terminate, interrupt]: [&mut Signal; 2]) {
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
