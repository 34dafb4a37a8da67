//! Connections that wait for their clients: for the end of a handshake, a first request, or the next one. If there is no
//! room for another, the one that has waited longest is closed.

use super::Worker;
use crate::reactor::timeout;
use sidetrack_core::limit::OldestFirst;
use sidetrack_sys::sync::lock;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The record's detail of a connection that was closed to make room for another.
pub const CROWDED: &str =
    "the handshake was not over when more clients came than limits.max_handshakes lets wait";

/// How long a connection must be idle before it counts as idle.
const QUIET: Duration = Duration::from_millis(500);

/// Waiting connections, the oldest first.
#[derive(Debug)]
pub(super) struct Places(Mutex<OldestFirst<Arc<Seat>>>);

/// Tells a connection that it has lost its place.
#[derive(Debug, Default)]
struct Seat {
    lost: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Seat {
    fn tell(&self) {
        self.lost.store(true, Relaxed);
        if let Some(waker) = lock(&self.waker).take() {
            waker.wake();
        }
    }
}

impl Places {
    /// Makes `most` places.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(OldestFirst::new(most))))
    }

    /// Takes the place of the connection that has waited longest; returns false if none waits.
    pub(super) fn tell_oldest(&self) -> bool {
        let oldest = lock(&self.0).leave_oldest();
        oldest.inspect(|oldest| oldest.tell()).is_some()
    }

    /// The number of places.
    pub(super) fn most(&self) -> usize {
        lock(&self.0).most()
    }

    /// Connections that lost their place since the start.
    pub(super) fn left(&self) -> u64 {
        lock(&self.0).left()
    }

    pub(super) fn enter(self: &Arc<Self>) -> (Place, bool) {
        let seat = Arc::new(Seat::default());
        let (number, oldest) = lock(&self.0).enter(seat.clone());
        let is_full = oldest.inspect(|oldest| oldest.tell()).is_some();
        (Place { places: self.clone(), number, seat }, is_full)
    }
}

/// The place of one waiting connection; given back on drop.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    number: u64,
    seat: Arc<Seat>,
}

impl Place {
    /// Takes a place for a connection before the end of its handshake or first request. If all are taken, the connection that
    /// has waited longest loses its place.
    pub fn enter(worker: &Worker) -> Self {
        let (place, is_full) = worker.shared.handshakes.enter();
        if is_full {
            let most = worker.shared.handshakes.most();
            tracing::warn!(
                "{most} clients (limits.max_handshakes) have not finished their handshake: the oldest is disconnected"
            );
        }
        place
    }

    /// Like [`Place::enter`], for a QUIC handshake of one listener and worker.
    pub(super) fn enter_quic(places: &Arc<Places>, worker: &Worker) -> Self {
        let (place, is_full) = places.enter();
        if is_full {
            worker.shared.quic_left.fetch_add(1, Relaxed);
            let most = places.most();
            tracing::warn!(
                "{most} QUIC handshakes of a tunnel listener are not finished: the oldest is ended"
            );
        }
        place
    }

    fn poll_lost(&self, context: &Context<'_>) -> Poll<()> {
        if !self.seat.lost.load(Relaxed) {
            let mut waker = lock(&self.seat.waker);
            if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                *waker = Some(context.waker().clone());
            }
        }
        // Check again: the place may have been lost before the waker was registered.
        if self.seat.lost.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Returns the result of `work`; `None` if the place is lost first.
    pub async fn while_kept<F: Future>(place: Option<&Self>, work: F) -> Option<F::Output> {
        let mut work = pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(Some(done));
            }
            place.map_or(Poll::Pending, |place| place.poll_lost(context).map(|()| None))
        })
        .await
    }
}

impl Place {
    /// Waits for `ready` while the connection is idle between requests, for at most `wait`. The place is taken only after
    /// [`QUIET`]: a client that soon sends its next request costs only a timer, and keeps its connection.
    pub async fn while_idle<F: Future>(worker: Option<&Worker>, wait: Duration, ready: F) -> Idle<F::Output> {
        let mut ready = pin!(ready);
        if let Ok(done) = timeout(QUIET.min(wait), ready.as_mut()).await {
            return Idle::Over(done);
        }
        let place = worker.map(|worker| worker.shared.idle.enter().0);
        match Self::while_kept(place.as_ref(), timeout(wait.saturating_sub(QUIET), ready)).await {
            Some(Ok(done)) => Idle::Over(done),
            Some(Err(_)) => Idle::Late,
            None => Idle::Lost,
        }
    }
}

/// How the idle time of a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle<T> {
    /// What it waited for has happened.
    Over(T),
    /// It did not happen in time.
    Late,
    /// The place was lost to another connection.
    Lost,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.places.0).leave(self.number);
    }
}
