//! Keeps connections to neighbours ready, so that a flow can continue without waiting for a handshake.
//!
//! The end that dials a link keeps some connections ready for itself, and some for the other end, which may be unable to
//! dial. A flow that finds none waits for the next one; the dialling end opens one for each waiting flow. A connection
//! belongs to no flow before its handshake is done. So a connection that was begun for a flow that gave up serves the
//! next flow, and no handshake is wasted. Surplus connections are closed: they would hold memory for flows that may never
//! come.

use super::circuit;
use super::control::Event;
use super::paced;
use super::shared::Shared;
use super::stream::Stream;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::Purpose;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, VecDeque};
use std::future::{pending, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The number of connections kept ready for each end of a link.
const WARM: usize = 4;

/// Most connections kept for one neighbour that the other end dialled and we have not used.
const IDLE_MAX: usize = 256;

/// Most connections that wait at a time to be used by the other end, regardless of how many it asks for.
const OFFERED_MAX: usize = 256;

/// Most flows that wait for a connection to one neighbour, and most connections that a neighbour may ask for at a time.
const WAITING_MAX: usize = 4096;

/// Most connections to one neighbour that are dialled at a time, for each of its ends. With more, none would be ready
/// sooner: each handshake costs both ends processor time, and a thousand at once would all time out.
const DIALS_MAX: usize = 256;

/// How long a flow waits for a connection: less than a flow's default time for its path, so that its record shows where
/// it waited.
const WAIT: Duration = Duration::from_secs(8);

/// How long to wait after a dial that failed.
const DIAL_REST: Duration = Duration::from_millis(200);

/// The answer to a waiting flow: its connection, or why there is none.
type Answer = Result<Stream, String>;

/// The connections and waiting flows of one neighbour. Flows wait only while no connection is idle.
#[derive(Default)]
struct Shelf {
    idle: VecDeque<Stream>,
    waiting: VecDeque<oneshot::Sender<Answer>>,
}

impl Shelf {
    /// Answers the flow that has waited longest. Returns the answer if no flow waits.
    fn answer(&mut self, mut answer: Answer) -> Option<Answer> {
        while let Some(waiting) = self.waiting.pop_front() {
            match waiting.send(answer) {
                Ok(()) => return None,
                Err(back) => answer = back,
            }
        }
        Some(answer)
    }

    fn forget_who_gave_up(&mut self) {
        self.waiting.retain(|waiting| !waiting.is_closed());
    }
}

/// The connections to all neighbours.
#[derive(Default)]
pub(super) struct Pool {
    shelves: Mutex<BTreeMap<NodeId, Shelf>>,
    /// Notified when a connection was taken or is wanted.
    used: Notify,
    /// By neighbour: connections that wait for the other end to use them; and further ones it asked for that are not
    /// dialled yet.
    offered: Mutex<BTreeMap<NodeId, Arc<AtomicUsize>>>,
    wanted: Mutex<BTreeMap<NodeId, usize>>,
}

impl Pool {
    /// Stores a connection that the neighbour has dialled, for the next flow.
    pub(super) fn put(&self, neighbour: NodeId, stream: Stream) {
        self.put_within(neighbour, stream, IDLE_MAX);
    }

    /// Stores a connection that we have dialled and no flow has used.
    pub(super) fn put_back(&self, neighbour: NodeId, stream: Stream) {
        self.put_within(neighbour, stream, WARM);
    }

    fn put_within(&self, neighbour: NodeId, stream: Stream, most: usize) {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.entry(neighbour).or_default();
        if let Some(Ok(stream)) = shelf.answer(Ok(stream))
            && shelf.idle.len() < most
        {
            shelf.idle.push_back(stream);
        }
    }

    /// Reports a failed dial to the flow that has waited longest.
    fn fail(&self, neighbour: NodeId, detail: String) {
        if let Some(shelf) = lock(&self.shelves).get_mut(&neighbour) {
            shelf.answer(Err(detail));
        }
    }

    fn pop(&self, neighbour: NodeId) -> Option<Stream> {
        let stream = lock(&self.shelves).get_mut(&neighbour)?.idle.pop_front();
        self.used.notify_waiters();
        stream
    }

    fn wait(&self, neighbour: NodeId) -> Option<oneshot::Receiver<Answer>> {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.entry(neighbour).or_default();
        if shelf.waiting.len() >= WAITING_MAX {
            shelf.forget_who_gave_up();
        }
        if shelf.waiting.len() >= WAITING_MAX {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        shelf.waiting.push_back(sender);
        self.used.notify_waiters();
        Some(receiver)
    }

    /// Returns how many connections our flows lack: those that they wait for, and those that are kept ready.
    fn missing(&self, neighbour: NodeId) -> usize {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.entry(neighbour).or_default();
        shelf.forget_who_gave_up();
        (WARM + shelf.waiting.len()).saturating_sub(shelf.idle.len())
    }

    /// Removes the connections on legs that are left.
    fn remove_left(&self, shared: &Shared, neighbour: NodeId) {
        if let Some(shelf) = lock(&self.shelves).get_mut(&neighbour) {
            shelf.idle.retain(|stream| !shared.is_left(neighbour, stream));
        }
    }

    /// Removes everything kept for a neighbour whose link is down. Flows that wait for it get an error.
    fn clear(&self, neighbour: NodeId) {
        lock(&self.shelves).remove(&neighbour);
        lock(&self.wanted).remove(&neighbour);
    }

    /// Notes that the other end of a link that we dial asks for this number of further connections.
    pub(super) fn want(&self, neighbour: NodeId, connections: u16) {
        let mut wanted = lock(&self.wanted);
        let count = wanted.entry(neighbour).or_default();
        *count = (*count + usize::from(connections)).min(WAITING_MAX);
        self.used.notify_waiters();
    }

    /// True if the other end wants one more connection than we are dialling for it. This one then counts as dialled.
    fn is_wanted(&self, neighbour: NodeId) -> bool {
        let mut wanted = lock(&self.wanted);
        let Some(count) = wanted.get_mut(&neighbour).filter(|count| **count > 0) else { return false };
        *count -= 1;
        true
    }

    /// Returns the number of connections kept for flows to this neighbour.
    pub(super) fn idle(&self, neighbour: NodeId) -> usize {
        lock(&self.shelves).get(&neighbour).map_or(0, |shelf| shelf.idle.len())
    }

    fn offered(&self, neighbour: NodeId) -> Arc<AtomicUsize> {
        lock(&self.offered).entry(neighbour).or_default().clone()
    }
}

/// Returns a connection to this neighbour for one flow.
///
/// # Errors
/// Returns the reason in words.
pub(super) async fn take(shared: &Shared, neighbour: NodeId) -> Answer {
    let name = || shared.identity.name(neighbour);
    if shared.link(neighbour).is_none() {
        return Err(format!("the link to {} is down", name()));
    }
    // A stream of a paced link needs no handshake.
    if let Some(stream) = paced::open(shared, neighbour) {
        return Ok(stream);
    }
    if let Some(stream) = ready(shared, neighbour).await {
        return Ok(stream);
    }
    // The flow is queued before the other end is asked: a connection that comes at once finds it.
    let answer = shared.pool.wait(neighbour).ok_or_else(|| format!("too many flows wait for {}", name()))?;
    if !is_dialled(shared, neighbour) {
        // If the control thread is busy, the connections kept ready will still come.
        let _ = shared.control.try_send(Event::Want(neighbour));
    }
    match timeout(WAIT, answer).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(format!("the link to {} went down", name())),
        Err(_) => Err(format!("no connection to {} in time", name())),
    }
}

/// Returns an idle connection, if there is one.
async fn ready(shared: &Shared, neighbour: NodeId) -> Option<Stream> {
    while let Some(mut stream) = shared.pool.pop(neighbour) {
        // The only thing that can come on an idle connection is its end.
        let is_quiet = poll_fn(|cx| Poll::Ready(stream.poll_frame(cx).is_pending())).await;
        if is_quiet && !shared.is_left(neighbour, &stream) {
            return Some(stream);
        }
    }
    None
}

/// True if we dial this neighbour; otherwise it dials us.
fn is_dialled(shared: &Shared, neighbour: NodeId) -> bool {
    shared.identity.member(neighbour).is_some_and(|member| !member.addresses.is_empty())
}

/// Keeps connections to a neighbour ready, without end: those that we dial, and those that it dials.
pub(super) async fn maintain(shared: Arc<Shared>, neighbour: NodeId) {
    loop {
        let number = shared.link_is_up(neighbour).await;
        let refill = async {
            match is_dialled(&shared, neighbour) {
                true => refill(&shared, neighbour, number).await,
                false => pending().await,
            }
        };
        tokio::select! {
            () = refill => {}
            () = shared.link_is_down(neighbour, number) => {}
        }
        shared.pool.clear(neighbour);
    }
}

/// The connections to one neighbour that are being dialled, and for which end.
#[derive(Default)]
struct Dials {
    tasks: JoinSet<Purpose>,
    for_us: usize,
    for_them: usize,
}

/// The purpose of a dial.
#[derive(Clone, Copy)]
struct Aim {
    neighbour: NodeId,
    /// The number of its link.
    number: u64,
    purpose: Purpose,
    /// The other end has asked for it in addition to those kept ready.
    wanted: bool,
}

impl Dials {
    /// Starts a dial for each missing connection at once: a thousand flows must not wait for a thousand handshakes in
    /// sequence.
    fn start(&mut self, shared: &Arc<Shared>, neighbour: NodeId, number: u64, offered: usize) {
        let missing = shared.pool.missing(neighbour).min(DIALS_MAX);
        let ours = Aim { neighbour, number, purpose: Purpose::FromDialer, wanted: false };
        while self.for_us < missing {
            self.for_us += 1;
            self.tasks.spawn(dial(shared.clone(), ours));
        }
        while self.for_them < DIALS_MAX {
            let ready = offered + self.for_them;
            let wanted = ready >= WARM;
            if wanted && (ready >= OFFERED_MAX || !shared.pool.is_wanted(neighbour)) {
                return;
            }
            self.for_them += 1;
            let theirs = Aim { purpose: Purpose::FromAcceptor, wanted, ..ours };
            self.tasks.spawn(dial(shared.clone(), theirs));
        }
    }

    /// Waits until the next dial is over; without end while there is none.
    async fn over(&mut self) {
        match self.tasks.join_next().await {
            Some(Ok(Purpose::FromDialer)) => self.for_us -= 1,
            Some(Ok(_)) => self.for_them -= 1,
            // A task has panicked, and its purpose is unknown: start counting again.
            Some(Err(_)) => *self = Self::default(),
            None => pending().await,
        }
    }
}

/// Dials a connection and hands it to where it is needed.
async fn dial(shared: Arc<Shared>, aim: Aim) -> Purpose {
    let Aim { neighbour, number, purpose, wanted } = aim;
    match shared.dial(neighbour, purpose).await {
        Ok(stream) if purpose == Purpose::FromDialer => {
            shared.pool.put_back(neighbour, stream);
        }
        Ok(stream) => offer(&shared, neighbour, number, stream),
        Err(error) => {
            let (name, error) = (shared.identity.name(neighbour), format!("{error:#}"));
            tracing::debug!(neighbour = %name, %error, "cannot dial");
            if purpose == Purpose::FromDialer {
                shared.pool.fail(neighbour, format!("{name}: {error}"));
            } else if wanted {
                shared.pool.want(neighbour, 1);
            }
            // The task counts as a running dial until the rest is over, which delays the next dial.
            sleep(DIAL_REST).await;
        }
    }
    purpose
}

async fn refill(shared: &Arc<Shared>, neighbour: NodeId, number: u64) {
    let offered = shared.pool.offered(neighbour);
    let mut dials = Dials::default();
    let mut legs = shared.datagrams.legs.subscribe();
    loop {
        let used = shared.pool.used.notified();
        dials.start(shared, neighbour, number, offered.load(Relaxed));
        tokio::select! {
            () = used => {}
            () = dials.over() => {}
            // The sender lives as long as `shared`.
            _ = legs.changed() => shared.pool.remove_left(shared, neighbour),
        }
    }
}

/// Waits until the other end sends a flow on this connection.
fn offer(shared: &Arc<Shared>, neighbour: NodeId, number: u64, stream: Stream) {
    let (shared, offered) = (shared.clone(), shared.pool.offered(neighbour));
    offered.fetch_add(1, Relaxed);
    tokio::spawn(async move {
        let opened = circuit::wait_for_open(&shared, stream, neighbour, number).await;
        offered.fetch_sub(1, Relaxed);
        shared.pool.used.notify_waiters();
        if let Some((stream, open)) = opened {
            circuit::serve(shared, stream, neighbour, open).await;
        }
    });
}
