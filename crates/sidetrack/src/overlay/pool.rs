//! Warm connections to neighbours: a flow that is to go on finds one waiting and costs no handshake.
//!
//! The end that dials a link keeps some ready for itself and some for the other end, which may be unable to dial.

use super::circuit;
use super::control::Event;
use super::shared::Shared;
use super::stream::Stream;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::Purpose;
use std::collections::{BTreeMap, VecDeque};
use std::future::{pending, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Connections kept ready for each end of a link.
const WARM: usize = 4;

/// Most connections that are parked for one neighbour: what the other end dialled and we have not used.
const IDLE_MAX: usize = 256;

/// Most connections that wait to be used by the other end at a time, however many it wants.
const OFFERED_MAX: usize = 256;

/// Most flows that wait for a connection to one neighbour, and most connections that a neighbour may want at a time.
const WAITING_MAX: usize = 4096;

/// Connections to one neighbour that are being made for flows at a time. More would not stand sooner: each of them costs both ends
/// processor time, and a thousand at once run into their time-outs together.
const DIALS_MAX: usize = 256;

/// How long a flow waits for the other end to dial: less than a flow's path may take by default, so that its record says where it
/// waited.
const WAIT: Duration = Duration::from_secs(8);

/// How long to wait after a dial that failed.
const DIAL_REST: Duration = Duration::from_millis(200);

/// What is kept for one neighbour.
#[derive(Default)]
struct Shelf {
    idle: VecDeque<Stream>,
    waiting: VecDeque<oneshot::Sender<Stream>>,
}

/// See the module.
#[derive(Default)]
pub struct Pool {
    shelves: Mutex<BTreeMap<NodeId, Shelf>>,
    /// Something was taken or is wanted.
    used: Notify,
    /// Connections that wait for the other end to use them, by neighbour; and those it asked for on top, which nobody dials yet.
    offered: Mutex<BTreeMap<NodeId, Arc<AtomicUsize>>>,
    wanted: Mutex<BTreeMap<NodeId, usize>>,
    /// Leaves to dial a neighbour.
    dials: Mutex<BTreeMap<NodeId, Arc<Semaphore>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Puts a connection where the next flow to this neighbour finds it.
    pub fn put(&self, neighbour: NodeId, mut stream: Stream) {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.entry(neighbour).or_default();
        while let Some(waiting) = shelf.waiting.pop_front() {
            match waiting.send(stream) {
                Ok(()) => return,
                Err(back) => stream = back,
            }
        }
        if shelf.idle.len() < IDLE_MAX {
            shelf.idle.push_back(stream);
        }
    }

    fn pop(&self, neighbour: NodeId) -> Option<Stream> {
        let stream = lock(&self.shelves).get_mut(&neighbour)?.idle.pop_front();
        self.used.notify_waiters();
        stream
    }

    fn wait(&self, neighbour: NodeId) -> Option<oneshot::Receiver<Stream>> {
        let mut shelves = lock(&self.shelves);
        let shelf = shelves.entry(neighbour).or_default();
        shelf.waiting.retain(|waiting| !waiting.is_closed());
        if shelf.waiting.len() >= WAITING_MAX {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        shelf.waiting.push_back(sender);
        Some(receiver)
    }

    /// Forgets what was kept for a neighbour whose link is down.
    fn clear(&self, neighbour: NodeId) {
        lock(&self.shelves).remove(&neighbour);
        lock(&self.wanted).remove(&neighbour);
    }

    /// The other end of a link that we dial asks for so many more connections.
    pub fn want(&self, neighbour: NodeId, connections: u16) {
        let mut wanted = lock(&self.wanted);
        let count = wanted.entry(neighbour).or_default();
        *count = (*count + usize::from(connections)).min(WAITING_MAX);
        self.used.notify_waiters();
    }

    /// Whether the other end wants one more connection than are being dialled for it; this one is counted as dialled.
    fn is_wanted(&self, neighbour: NodeId) -> bool {
        let mut wanted = lock(&self.wanted);
        let Some(count) = wanted.get_mut(&neighbour).filter(|count| **count > 0) else { return false };
        *count -= 1;
        true
    }

    /// Connections kept for flows to this neighbour.
    pub fn idle(&self, neighbour: NodeId) -> usize {
        lock(&self.shelves).get(&neighbour).map_or(0, |shelf| shelf.idle.len())
    }

    fn dials(&self, neighbour: NodeId) -> Arc<Semaphore> {
        let leaves = || Arc::new(Semaphore::new(DIALS_MAX));
        lock(&self.dials).entry(neighbour).or_insert_with(leaves).clone()
    }

    fn offered(&self, neighbour: NodeId) -> Arc<AtomicUsize> {
        lock(&self.offered).entry(neighbour).or_default().clone()
    }
}

/// A connection to this neighbour for one flow.
///
/// # Errors
/// In words.
pub async fn take(shared: &Shared, neighbour: NodeId) -> Result<Stream, String> {
    if shared.link(neighbour).is_none() {
        return Err(format!("the link to {} is down", shared.identity.name(neighbour)));
    }
    if let Some(stream) = ready(shared, neighbour).await {
        return Ok(stream);
    }
    let name = || shared.identity.name(neighbour);
    if shared.identity.member(neighbour).is_some_and(|member| member.address.is_some()) {
        let _leave = shared.pool.dials(neighbour).acquire_owned().await.map_err(|error| error.to_string())?;
        // While we waited one may have been made.
        if let Some(stream) = ready(shared, neighbour).await {
            return Ok(stream);
        }
        return shared
            .dial(neighbour, Purpose::FromDialer)
            .await
            .map_err(|error| format!("{}: {error:#}", name()));
    }
    let stream = shared.pool.wait(neighbour).ok_or_else(|| format!("too many flows wait for {}", name()))?;
    // If the control thread is busy, the connections kept ready are still coming.
    let _ = shared.control.try_send(Event::Want(neighbour));
    match timeout(WAIT, stream).await {
        Ok(Ok(stream)) => Ok(stream),
        _ => Err(format!("{} opened no connection in time", name())),
    }
}

/// One that waits for a flow, if there is any.
async fn ready(shared: &Shared, neighbour: NodeId) -> Option<Stream> {
    while let Some(mut stream) = shared.pool.pop(neighbour) {
        // Nothing comes on a connection that waits but its end.
        let is_quiet = poll_fn(|cx| Poll::Ready(stream.poll_frame(cx).is_pending())).await;
        if is_quiet {
            return Some(stream);
        }
    }
    None
}

/// Keeps connections to a neighbour that we dial ready, for ever.
pub async fn maintain(shared: Arc<Shared>, neighbour: NodeId) {
    loop {
        let number = shared.link_is_up(neighbour).await;
        tokio::select! {
            () = refill(&shared, neighbour, number) => {}
            () = shared.link_is_down(neighbour, number) => {}
        }
        shared.pool.clear(neighbour);
    }
}

/// A dial that is over.
struct Dialled {
    purpose: Purpose,
    /// The other end had asked for it on top.
    wanted: bool,
    stream: anyhow::Result<Stream>,
}

/// What is being dialled to have connections ready, and for whom.
#[derive(Default)]
struct Refilling {
    dials: JoinSet<Dialled>,
    for_us: usize,
    for_them: usize,
}

impl Refilling {
    /// Starts as many dials as connections are missing: a thousand flows of the other end are not to wait for a thousand
    /// handshakes one after the other.
    fn start(&mut self, shared: &Arc<Shared>, neighbour: NodeId, offered: usize) {
        while self.dials.len() < DIALS_MAX {
            let ready = offered + self.for_them;
            let mut wanted = false;
            let purpose = if shared.pool.idle(neighbour) + self.for_us < WARM {
                self.for_us += 1;
                Purpose::FromDialer
            } else {
                wanted = ready >= WARM;
                if wanted && (ready >= OFFERED_MAX || !shared.pool.is_wanted(neighbour)) {
                    return;
                }
                self.for_them += 1;
                Purpose::FromAcceptor
            };
            let shared = shared.clone();
            self.dials.spawn(async move {
                let stream = shared.dial(neighbour, purpose).await;
                Dialled { purpose, wanted, stream }
            });
        }
    }

    /// The next dial that is over; waits for ever while there is none. None: one has panicked, and all are forgotten with it.
    async fn next(&mut self) -> Option<Dialled> {
        match self.dials.join_next().await {
            Some(Ok(dialled)) => {
                match dialled.purpose {
                    Purpose::FromDialer => self.for_us -= 1,
                    _ => self.for_them -= 1,
                }
                Some(dialled)
            }
            Some(Err(_)) => {
                *self = Self::default();
                None
            }
            None => pending().await,
        }
    }
}

async fn refill(shared: &Arc<Shared>, neighbour: NodeId, number: u64) {
    let offered = shared.pool.offered(neighbour);
    let mut refilling = Refilling::default();
    loop {
        let used = shared.pool.used.notified();
        refilling.start(shared, neighbour, offered.load(Relaxed));
        let dialled = tokio::select! {
            () = used => continue,
            dialled = refilling.next() => dialled,
        };
        let Some(Dialled { purpose, wanted, stream }) = dialled else {
            sleep(DIAL_REST).await;
            continue;
        };
        match stream {
            Ok(stream) if purpose == Purpose::FromDialer => shared.pool.put(neighbour, stream),
            Ok(stream) => offer(shared, neighbour, number, stream, &offered),
            Err(error) => {
                tracing::debug!(neighbour = %shared.identity.name(neighbour), error = format!("{error:#}"), "cannot dial");
                if wanted {
                    shared.pool.want(neighbour, 1);
                }
                sleep(DIAL_REST).await;
            }
        }
    }
}

/// Waits for the other end to send a flow on this connection.
fn offer(shared: &Arc<Shared>, neighbour: NodeId, number: u64, stream: Stream, offered: &Arc<AtomicUsize>) {
    offered.fetch_add(1, Relaxed);
    let (shared, offered) = (shared.clone(), offered.clone());
    tokio::spawn(async move {
        let opened = circuit::wait_for_open(&shared, stream, neighbour, number).await;
        offered.fetch_sub(1, Relaxed);
        shared.pool.used.notify_waiters();
        if let Some((stream, open)) = opened {
            circuit::serve(shared, stream, neighbour, open).await;
        }
    });
}
