//! State of a function that the flows of all workers share.

use sidetrack_core::flow::Side;
use sidetrack_core::function::{ByteBucket, Interest, LimitSpec, Stage, Tokens};
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// Counts of flows and bytes through a function since it was made.
#[derive(Debug, Default)]
pub struct Tally {
    flows: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
}

impl Tally {
    /// Counts one more flow.
    pub(super) fn flow(&self) {
        self.flows.fetch_add(1, Relaxed);
    }

    /// Flows so far.
    pub fn flows(&self) -> u64 {
        self.flows.load(Relaxed)
    }

    /// Bytes from clients to servers, and from servers to clients. Only a function of kind `count` counts them.
    pub fn bytes(&self) -> (u64, u64) {
        (self.bytes_up.load(Relaxed), self.bytes_down.load(Relaxed))
    }
}

/// Counts the bytes of one flow. The kernel may move them.
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

/// A bandwidth that all flows of a function share.
#[derive(Clone, Debug)]
pub(super) struct SharedBucket(pub Arc<Mutex<ByteBucket>>);

/// Most clients with a bandwidth at a time. Beyond this number, clients without flows are removed.
const CLIENTS_MAX: usize = 65_536;

/// Bandwidths by client address. An entry lives as long as a flow uses it, and afterwards while there is room.
#[derive(Debug, Default)]
pub(super) struct ClientBuckets(Mutex<HashMap<IpAddr, SharedBucket>>);

impl ClientBuckets {
    /// Returns the bandwidth of a client.
    pub(super) fn of(&self, client: IpAddr, limit: &LimitSpec, now: Instant) -> SharedBucket {
        let mut clients = lock(&self.0);
        if clients.len() >= CLIENTS_MAX && !clients.contains_key(&client) {
            clients.retain(|_, bucket| Arc::strong_count(&bucket.0) > 1);
        }
        clients.entry(client).or_insert_with(|| SharedBucket::new(limit, now)).clone()
    }
}

impl SharedBucket {
    /// A bucket that is full at the start.
    pub(super) fn new(limit: &LimitSpec, now: Instant) -> Self {
        Self(Arc::new(Mutex::new(ByteBucket::new(limit.bytes_per_second, limit.burst_bytes, now))))
    }
}

impl Tokens for SharedBucket {
    fn available(&mut self, now: Instant) -> Result<u64, Instant> {
        let mut bucket = lock(&self.0);
        Tokens::available(&mut *bucket, now)
    }

    fn take(&mut self, now: Instant, bytes: u64) {
        lock(&self.0).take(now, bytes);
    }
}
