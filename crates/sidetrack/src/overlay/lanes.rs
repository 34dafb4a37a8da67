//! The near end of a session that uses several paths: opens those that are missing, and replaces those that die.
//!
//! The session itself is in [`endpoint`](super::endpoint). A path that died is replaced while the others go on, so nothing waits
//! for a new path. Only a session without any path is in danger: it ends if none comes back in time.

use super::control::names;
use super::endpoint::{Broken, Ended, Endpoint, Lane, Path};
use super::ingress::{Ingress, Setback};
use super::shared::Shared;
use super::status::SessionPathsView;
use crate::live::Spread;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{self, ResetReason, Resume, SessionId};
use sidetrack_core::overlay::redundancy::openings;
use sidetrack_core::overlay::session::{Attempt, Mode, PATHS_MAX};
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// How often the network is looked at for paths that are missing.
const LOOK: Duration = Duration::from_millis(200);

/// How long the relays of a path that could not be opened are avoided, if there are other paths.
const AVOIDED: Duration = Duration::from_secs(1);

/// Shortest time between two attempts to open a path with the same number.
const REST: Duration = Duration::from_millis(20);

/// What a session does with its paths.
pub(super) struct Usage {
    /// The node at the far end.
    pub to: NodeId,
    /// How it uses its paths.
    pub mode: Mode,
    /// The paths that exist, by number, each with its serial.
    lanes: Mutex<Vec<Option<(u64, frame::Path)>>>,
    /// Notified when a path is gone.
    lost: Notify,
    /// The next byte that this end expects, and the limit of the other end.
    next: AtomicU64,
    limit: AtomicU64,
    /// What the flow's record tells of its paths.
    spread: Arc<Spread>,
}

impl Usage {
    fn new(to: NodeId, (mode, most): (Mode, u8), first: Option<frame::Path>, spread: Arc<Spread>) -> Self {
        let mut lanes = vec![None; usize::from(most.clamp(1, PATHS_MAX))];
        if let Some(first) = first {
            lanes[0] = Some((0, first));
            spread.opened();
        }
        let (next, limit) = (AtomicU64::new(0), AtomicU64::new(u64::from(Endpoint::first_window())));
        Self { to, mode, lanes: Mutex::new(lanes), lost: Notify::new(), next, limit, spread }
    }

    /// Notes that a path is gone.
    pub(super) fn lost(&self, lane: Lane) {
        if let Some(at) = lock(&self.lanes).get_mut(usize::from(lane.number))
            && at.as_ref().is_some_and(|(serial, _)| *serial == lane.serial)
        {
            *at = None;
        }
        self.lost.notify_one();
    }

    /// Notes what this end expects now.
    pub(super) fn set_expected(&self, (next, limit): (u64, u64)) {
        self.next.store(next, Relaxed);
        self.limit.store(limit, Relaxed);
    }

    /// Notes that bytes of the flow were sent on a path.
    pub(super) fn sent(&self, path: u8, bytes: usize) {
        self.spread.sent(path, bytes);
    }

    /// Returns the paths that exist, each with the bytes that were sent on it and on earlier paths with its number.
    pub(super) fn paths(&self) -> Vec<(frame::Path, u64)> {
        let lanes = lock(&self.lanes);
        lanes
            .iter()
            .zip(self.spread.sent_bytes())
            .filter_map(|(lane, sent)| Some((lane.as_ref()?.1.clone(), sent)))
            .collect()
    }

    fn existing(&self) -> Vec<Option<frame::Path>> {
        lock(&self.lanes).iter().map(|lane| Some(lane.as_ref()?.1.clone())).collect()
    }
}

/// Most sets of paths that the status shows for a node.
const SHOWN_MAX: usize = 16;

/// Sessions over the same paths: their number, and the bytes sent on each path.
type Sums = (u64, Vec<u64>);

/// Returns the paths of the sessions to a node that use several.
pub(super) fn view(shared: &Shared, to: NodeId) -> Vec<SessionPathsView> {
    let mut sets: BTreeMap<(Mode, Vec<Vec<NodeId>>), Sums> = BTreeMap::new();
    for usage in shared.sessions.usages().iter().filter(|usage| usage.to == to) {
        let mut paths = usage.paths();
        paths.sort_by(|one, other| one.0.nodes().cmp(other.0.nodes()));
        let nodes = paths.iter().map(|(path, _)| path.nodes().to_vec()).collect();
        let (sessions, sent) = sets.entry((usage.mode, nodes)).or_default();
        *sessions += 1;
        sent.resize(paths.len(), 0);
        sent.iter_mut().zip(&paths).for_each(|(sum, (_, bytes))| *sum += bytes);
    }
    let view = |((mode, paths), (sessions, sent_bytes)): ((Mode, Vec<Vec<NodeId>>), _)| SessionPathsView {
        dissemination: mode.name().to_owned(),
        sessions,
        paths: paths.iter().map(|path| names(&shared.identity, path)).collect(),
        sent_bytes,
    };
    sets.into_iter().take(SHOWN_MAX).map(view).collect()
}

/// Where a session over several paths begins.
pub(super) enum Begin {
    /// With its first path.
    First(Box<Path>, frame::Path),
    /// With the state of another process of this node, and the latest attempts to open its paths. It has no path.
    Again(Vec<u8>, Vec<u32>),
}

/// Moves the flow's bytes over several paths until the session is over, or leaves this process.
pub(super) async fn carry(
    ingress: Arc<Ingress>,
    session: SessionId,
    begin: Begin,
    (leg, spread): (TcpStream, Arc<Spread>),
) {
    let (first, state) = match begin {
        Begin::First(path, route) => (Some((path, route)), None),
        Begin::Again(state, attempts) => (None, Some((state, attempts))),
    };
    let (first, route) = first.unzip();
    let (to, carrier) = (ingress.to, ingress.order.carrier.clone());
    let usage = Arc::new(Usage::new(to, (carrier.mode, carrier.paths), route, spread.clone()));
    let shared = ingress.shared.clone();
    let (paths, arriving) = mpsc::channel(1);
    if let Some(first) = first {
        let _ = paths.send(*first).await;
    }
    let lanes = usage.existing().len();
    let mut attempts = vec![0; lanes];
    let mut end = Endpoint::new(shared.clone(), leg, arriving, None).over_paths(usage.clone());
    if let Some((state, latest)) = state {
        attempts.iter_mut().zip(latest).for_each(|(attempt, latest)| *attempt = latest);
        end = match end.with_state(&state) {
            Ok(end) => end,
            Err(error) => return tracing::error!(%error, "a session of the other process is lost"),
        };
        // The first attempts say what this end expects.
        end.note_expected();
    }
    shared.sessions.note(session, usage.clone());
    let mut keeper = Keeper {
        ingress: ingress.clone(),
        session,
        usage,
        paths,
        opening: JoinSet::new(),
        asked: vec![None; lanes],
        attempts,
        rested_at: vec![Instant::now(); lanes],
        avoided: Vec::new(),
        serial: 0,
    };
    let ended = tokio::select! {
        ended = end.run() => ended,
        () = keeper.run() => Ended::Over(Err(Broken { reason: ResetReason::PathLost, is_here: false })),
    };
    shared.sessions.forget(session);
    ingress.ended(session, ended, (std::mem::take(&mut keeper.attempts), Some(spread)));
}

/// The result of an attempt to open a path: its number, its nodes, and the path.
type Opened = (u8, frame::Path, Result<Path, Setback>);

/// Keeps the paths of one session.
struct Keeper {
    ingress: Arc<Ingress>,
    session: SessionId,
    usage: Arc<Usage>,
    /// Takes new paths to the session.
    paths: mpsc::Sender<Path>,
    opening: JoinSet<Opened>,
    /// The paths that are being opened, by number.
    asked: Vec<Option<frame::Path>>,
    /// How often a path with each number was opened.
    attempts: Vec<u32>,
    /// When a path with each number may be opened again.
    rested_at: Vec<Instant>,
    /// Relays to avoid, and until when.
    avoided: Vec<(NodeId, Instant)>,
    serial: u64,
}

impl Keeper {
    /// Keeps the paths until the far end no longer knows the session.
    async fn run(&mut self) {
        let usage = self.usage.clone();
        loop {
            self.open_missing();
            tokio::select! {
                Some(opened) = self.opening.join_next() => {
                    // A task that panicked has logged it. Its number stays in use until the session ends.
                    let Ok(opened) = opened else { continue };
                    if !self.opened(opened).await {
                        return;
                    }
                }
                () = usage.lost.notified() => {}
                () = sleep(LOOK) => {}
            }
        }
    }

    /// Starts to open the paths that the network has and the session lacks.
    fn open_missing(&mut self) {
        let now = Instant::now();
        self.avoided.retain(|(_, until)| *until > now);
        let avoid: BTreeSet<_> = self.avoided.iter().map(|(node, _)| *node).collect();
        let existing = self.usage.existing();
        // A path that is being opened counts instead of the one that it replaces.
        let lanes: Vec<_> = self
            .asked
            .iter()
            .zip(&existing)
            .map(|(asked, is)| asked.clone().or_else(|| is.clone()))
            .collect();
        let (graph, own) = (self.ingress.shared.graph.load(), self.ingress.shared.identity.own());
        let most = u8::try_from(lanes.len()).unwrap_or(PATHS_MAX);
        let mut wanted = graph.flow_paths(own, self.usage.to, most, &avoid);
        if wanted.is_empty() {
            wanted = graph.flow_paths(own, self.usage.to, most, &BTreeSet::new());
        }
        for (number, path) in openings(&wanted, &lanes) {
            if self.rested_at.get(usize::from(number)).is_some_and(|at| *at <= now) {
                self.open(number, path);
            }
        }
    }

    fn open(&mut self, number: u8, path: frame::Path) {
        let at = usize::from(number);
        self.attempts[at] = self.attempts[at].saturating_add(1);
        self.asked[at] = Some(path.clone());
        let (next, limit) = (self.usage.next.load(Relaxed), self.usage.limit.load(Relaxed));
        let window = u32::try_from(limit.saturating_sub(next)).unwrap_or(u32::MAX);
        let attempt = Attempt { mode: self.usage.mode, path: number, number: self.attempts[at] };
        let resume = Resume { attempt: attempt.to_bits(), next };
        let (ingress, session) = (self.ingress.clone(), self.session);
        self.opening.spawn(async move {
            let opened = ingress.open_path(session, resume, window, path.clone()).await;
            (number, path, opened)
        });
    }

    /// Handles a path that was opened or not. Returns false if the session cannot go on.
    async fn opened(&mut self, (number, route, opened): Opened) -> bool {
        let at = usize::from(number);
        self.asked[at] = None;
        let counters = &self.ingress.shared.counters;
        match opened {
            Ok(path) => {
                self.serial += 1;
                let lane = Lane { number, mode: self.usage.mode, serial: self.serial };
                if let Some(at) = lock(&self.usage.lanes).get_mut(at) {
                    *at = Some((self.serial, route));
                }
                counters.paths_opened.fetch_add(1, Relaxed);
                self.usage.spread.opened();
                // The receiver lives as long as the session, which runs beside this.
                let _ = self.paths.send(Path { lane, ..path }).await;
                return true;
            }
            Err(Setback::Final(reason, detail)) => {
                tracing::info!(node = %self.ingress.node(), ?reason, %detail, "a path of a session is refused");
                if self.usage.existing().iter().all(Option::is_none) {
                    return false;
                }
            }
            Err(Setback::Passing(detail)) => {
                tracing::debug!(node = %self.ingress.node(), number, %detail, "no further path yet");
            }
            Err(Setback::Late) => {
                tracing::debug!(node = %self.ingress.node(), number, "no further path in time");
            }
        }
        let now = Instant::now();
        self.rested_at[at] = now + REST;
        self.avoided.extend(route.relays().iter().map(|relay| (*relay, now + AVOIDED)));
        true
    }
}
