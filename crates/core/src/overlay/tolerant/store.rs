//! The packets that wait for one neighbour.
//!
//! Each source has its own queues, one for each priority. The source that was served least is served next, counted in bytes
//! (start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996). So a source that sends ten times its share gets its share,
//! and the others do not notice. Of one source, the packet with the highest priority goes first, and of equal ones the newest.
//!
//! ```text
//!   put --> queue of the source --> take, at the rate
//!              |        |    |
//!              |        |    older than its budget: expired
//!              |        the neighbour has it: removed
//!              full: the source with most bytes loses its oldest packet of the lowest priority
//! ```
//!
//! The memory is at most [`PACKETS_MAX`] packets and [`BYTES_MAX`] bytes for each neighbour.

use super::super::NodeId;
use super::super::frame::{PRIORITIES, Vouched};
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Most packets that wait for a neighbour.
pub const PACKETS_MAX: usize = 512;

/// Most bytes of packets that wait for a neighbour.
pub const BYTES_MAX: usize = 2 << 20;

/// How long a packet without a budget waits at most.
pub const WAIT_MAX: Duration = Duration::from_secs(60);

/// How far sending may be ahead of the rate, as time.
const BURST: Duration = Duration::from_millis(5);

/// Bytes that each packet counts beyond its payload: the frame and the datagram around it, about.
const AROUND_BYTES: usize = 300;

/// A rate, bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub u64);

/// A packet that waits.
#[derive(Clone, Debug)]
struct Waiting {
    packet: Arc<Vouched>,
    since: Instant,
    until: Instant,
}

/// The packets of one source.
#[derive(Clone, Debug, Default)]
struct Queue {
    /// By priority, the lowest first; in each the oldest first.
    waiting: [VecDeque<Waiting>; PRIORITIES.end().abs_diff(*PRIORITIES.start()) as usize + 1],
    bytes: usize,
    /// The virtual time at which its last packet ended.
    served: u64,
}

/// The packets that wait for one neighbour.
#[derive(Clone, Debug)]
pub struct Store {
    rate: Rate,
    /// When all that was sent is paid off at the rate.
    paid: Instant,
    /// By source. A source keeps its entry, so that it cannot begin anew: at most one for each member.
    queues: BTreeMap<NodeId, Queue>,
    packets: usize,
    bytes: usize,
    /// The virtual time: where the packet that was sent last began.
    time: u64,
    expired: u64,
}

fn size(packet: &Vouched) -> usize {
    packet.packet.payload.len() + AROUND_BYTES
}

fn slot(packet: &Vouched) -> usize {
    usize::from(packet.priority.clamp(*PRIORITIES.start(), *PRIORITIES.end()) - PRIORITIES.start())
}

impl Store {
    /// Makes an empty store whose packets are sent at this rate.
    pub fn new(rate: Rate, now: Instant) -> Self {
        let (queues, paid) = (BTreeMap::new(), now);
        Self { rate, paid, queues, packets: 0, bytes: 0, time: 0, expired: 0 }
    }

    /// Changes the rate.
    pub fn set_rate(&mut self, rate: Rate) {
        self.rate = rate;
    }

    /// Returns how many packets wait.
    pub fn len(&self) -> usize {
        self.packets
    }

    /// Whether no packet waits.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Returns the bytes of the packets that wait.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns how many packets have expired since the last call.
    pub fn take_expired(&mut self) -> u64 {
        std::mem::take(&mut self.expired)
    }

    /// Stores a packet. Returns how many packets lost their places.
    pub fn put(&mut self, now: Instant, packet: Arc<Vouched>) -> u64 {
        let until = now + packet.packet.left().unwrap_or(WAIT_MAX).min(WAIT_MAX);
        let bytes = size(&packet);
        let queue = self.queues.entry(packet.packet.subgraph.source()).or_default();
        if queue.bytes == 0 {
            queue.served = queue.served.max(self.time);
        }
        queue.bytes += bytes;
        queue.waiting[slot(&packet)].push_back(Waiting { packet, since: now, until });
        (self.packets, self.bytes) = (self.packets + 1, self.bytes + bytes);
        let mut lost = 0;
        while self.packets > PACKETS_MAX || self.bytes > BYTES_MAX {
            let most = self.queues.iter().max_by_key(|(_, queue)| queue.bytes).map(|(source, _)| *source);
            if !most.is_some_and(|most| self.drop_one(most)) {
                break;
            }
            lost += 1;
        }
        lost
    }

    /// Drops the oldest packet of the lowest priority of a source.
    fn drop_one(&mut self, source: NodeId) -> bool {
        let queue = self.queues.entry(source).or_default();
        let Some(lost) = queue.waiting.iter_mut().find_map(VecDeque::pop_front) else { return false };
        self.left(source, &lost.packet);
        true
    }

    fn left(&mut self, source: NodeId, packet: &Vouched) {
        let bytes = size(packet);
        (self.packets, self.bytes) = (self.packets - 1, self.bytes - bytes);
        if let Some(queue) = self.queues.get_mut(&source) {
            queue.bytes -= bytes;
        }
    }

    /// The neighbour has this packet.
    pub fn remove(&mut self, source: NodeId, sequence: u64) {
        let Some(queue) = self.queues.get_mut(&source).filter(|queue| queue.bytes > 0) else { return };
        let removed = queue.waiting.iter_mut().find_map(|waiting| {
            let at = waiting.iter().position(|waiting| waiting.packet.packet.sequence == sequence)?;
            waiting.remove(at)
        });
        if let Some(removed) = removed {
            self.left(source, &removed.packet);
        }
    }

    /// Returns the next packet if the rate allows it now, and how long it has waited.
    pub fn take(&mut self, now: Instant) -> Option<(Arc<Vouched>, Duration)> {
        // Time that was not used is lost, or a store that was empty for long would send all at once.
        let burst = u64::try_from(BURST.as_nanos()).unwrap_or(0);
        self.paid = self.paid.max(Instant::from_nanos(now.as_nanos().saturating_sub(burst)));
        while self.paid <= now {
            let busy = self.queues.iter().filter(|(_, queue)| queue.bytes > 0);
            let source = *busy.min_by_key(|(_, queue)| queue.served)?.0;
            let queue = self.queues.get_mut(&source)?;
            let next = queue.waiting.iter_mut().rev().find_map(VecDeque::pop_back)?;
            let bytes = size(&next.packet);
            self.left(source, &next.packet);
            if next.until < now {
                self.expired += 1;
                continue;
            }
            let queue = self.queues.get_mut(&source)?;
            self.time = self.time.max(queue.served);
            queue.served = queue.served.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX));
            self.paid = self.paid + self.rate.time(bytes);
            return Some((next.packet, now.since(next.since)));
        }
        None
    }

    /// Returns when [`Store::take`] may return a packet. `None`: no packet waits.
    pub fn deadline(&self) -> Option<Instant> {
        (!self.is_empty()).then_some(self.paid)
    }
}

impl Rate {
    /// Returns the time that this number of bytes takes.
    pub(super) fn time(self, bytes: usize) -> Duration {
        let nanos = u128::try_from(bytes).unwrap_or(u128::MAX).saturating_mul(1_000_000_000);
        let nanos = nanos / u128::from(self.0.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}
