//! What flows of all workers share of a function.

use sidetrack_core::flow::Side;
use sidetrack_core::function::{ByteBucket, Interest, Stage, Tokens};
use sidetrack_core::time::Instant;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

/// What has passed a function since it was made.
#[derive(Debug, Default)]
pub struct Tally {
    flows: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
}

impl Tally {
    /// One more flow.
    pub(super) fn flow(&self) {
        self.flows.fetch_add(1, Relaxed);
    }

    /// Flows so far.
    pub fn flows(&self) -> u64 {
        self.flows.load(Relaxed)
    }

    /// Bytes from clients to servers, and from servers to clients, that a function of kind `count` has seen.
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes_up.load(Relaxed), self.bytes_down.load(Relaxed))
    }
}

/// Counts the bytes of one flow; the kernel may move them.
pub(super) struct Counter(pub Arc<Tally>);

impl Stage for Counter {
    fn interest(&self, _from: Side) -> Interest {
        Interest::Count
    }

    fn count(&mut self, _now: Instant, from: Side, bytes: usize) {
        let counter = match from {
            Side::Client => &self.0.bytes_up,
            Side::Server => &self.0.bytes_down,
        };
        counter.fetch_add(bytes as u64, Relaxed);
    }
}

/// A bandwidth that all flows of a function have together.
#[derive(Clone, Debug)]
pub(super) struct SharedBucket(pub Arc<Mutex<ByteBucket>>);

impl Tokens for SharedBucket {
    fn available(&mut self, now: Instant) -> Result<u64, Instant> {
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Tokens::available(&mut *bucket, now)
    }

    fn take(&mut self, now: Instant, bytes: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take(now, bytes);
    }
}
