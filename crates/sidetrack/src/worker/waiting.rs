//! Connections whose handshake or first request has not come: a bounded number, of which the oldest leaves first.

use super::Worker;
use sidetrack_core::limit::OldestFirst;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// What is said of a connection that had to leave.
pub const CROWDED: &str =
    "the handshake was not over when more clients came than limits.max_handshakes lets wait";

/// The places of a process.
#[derive(Debug)]
pub(super) struct Handshakes(Mutex<OldestFirst<Arc<Seat>>>);

/// What tells a connection that it has to leave.
#[derive(Debug, Default)]
struct Seat {
    lost: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handshakes {
    pub(super) fn new(most: usize) -> Self {
        Self(Mutex::new(OldestFirst::new(most)))
    }
}

/// The place of one connection that waits; given back when dropped.
#[derive(Debug)]
pub struct Place {
    worker: Arc<super::Shared>,
    number: u64,
    seat: Arc<Seat>,
}

impl Place {
    /// Takes a place; if all are taken, the connection that waits longest loses its own.
    pub fn enter(worker: &Worker) -> Self {
        let (seat, worker) = (Arc::new(Seat::default()), worker.shared.clone());
        let (number, oldest) = lock(&worker.handshakes.0).enter(seat.clone());
        if let Some(oldest) = oldest {
            oldest.lost.store(true, Relaxed);
            if let Some(waker) = lock(&oldest.waker).take() {
                waker.wake();
            }
            let most = lock(&worker.handshakes.0).most();
            tracing::warn!(
                "{most} clients (limits.max_handshakes) have not finished their handshake: the oldest is disconnected"
            );
        }
        Self { worker, number, seat }
    }

    fn poll_lost(&self, context: &Context<'_>) -> Poll<()> {
        if !self.seat.lost.load(Relaxed) {
            let mut waker = lock(&self.seat.waker);
            if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                *waker = Some(context.waker().clone());
            }
        }
        // Once more: it may have been lost before the waker was there.
        if self.seat.lost.load(Relaxed) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// What `work` gives; none if the place is lost before.
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

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.worker.handshakes.0).leave(self.number);
    }
}
