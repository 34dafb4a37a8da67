//! Packets on their way to viewers: those whose flow may not be known yet, and those that are kept.

use sidetrack_core::capture::{Found, Looked, Table, hello_random, readdress};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a packet waits for its flow: policy decides about a flow after its first packets, and secrets of TLS come with the
/// handshake.
pub(super) const DELAY: Duration = Duration::from_millis(500);

/// Most bytes of packets that wait. The oldest are looked up earlier then.
const WAITING_MAX: usize = 32 << 20;

/// What a packet takes beside its bytes, roughly.
const OVERHEAD: usize = 128;

/// A packet whose flow may not be known yet.
#[derive(Debug)]
pub(super) struct Waiting {
    /// When it was read.
    pub since: Instant,
    /// Nanoseconds since 1970.
    pub time_ns: u64,
    /// Its ring and its interface.
    pub interface: (usize, i32),
    pub is_outgoing: bool,
    pub data: Vec<u8>,
    /// Its length in the network.
    pub length: u32,
    pub looked: Looked,
}

/// A packet of a flow.
#[derive(Debug)]
pub(super) struct Packet {
    pub time_ns: u64,
    pub interface: (usize, i32),
    pub is_outgoing: bool,
    /// With the addresses that the client or the server sees.
    pub data: Vec<u8>,
    pub length: u32,
    pub found: Found,
    /// The random of the TLS ClientHello with which its payload begins.
    pub random: Option<[u8; 32]>,
}

/// Packets that wait, and those that are kept, each in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Packets {
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    kept: VecDeque<Packet>,
    kept_bytes: usize,
    /// The number of the first kept packet.
    first: u64,
}

impl Packets {
    pub(super) fn came(&mut self, packet: Waiting) {
        self.waiting_bytes += packet.data.len() + OVERHEAD;
        self.waiting.push_back(packet);
    }

    /// Looks up the flows of packets that have waited long enough. Keeps those that have one.
    pub(super) fn look_up(&mut self, now: Instant, table: &Table) {
        while let Some(oldest) = self.waiting.front() {
            if now.saturating_duration_since(oldest.since) < DELAY && self.waiting_bytes <= WAITING_MAX {
                return;
            }
            let Some(packet) = self.waiting.pop_front() else { return };
            self.waiting_bytes -= packet.data.len() + OVERHEAD;
            if let Some(found) = table.find(&packet.looked.ends) {
                self.keep(packet, found);
            }
        }
    }

    /// Whether a packet waits that is not younger than this.
    pub(super) fn waits(&self, time_ns: u64) -> bool {
        self.waiting.iter().any(|packet| packet.time_ns <= time_ns)
    }

    fn keep(&mut self, packet: Waiting, found: Found) {
        let Waiting { time_ns, interface, is_outgoing, mut data, length, looked, .. } = packet;
        readdress(&mut data, &looked, found.from, found.to);
        let random = looked.payload.and_then(|at| hello_random(data.get(at..)?));
        self.kept_bytes += data.len() + OVERHEAD;
        self.kept.push_back(Packet { time_ns, interface, is_outgoing, data, length, found, random });
    }

    /// Forgets the oldest kept packets beyond this number of bytes.
    pub(super) fn forget(&mut self, beyond_bytes: u64) {
        while self.kept_bytes as u64 > beyond_bytes {
            let Some(oldest) = self.kept.pop_front() else { return };
            self.kept_bytes -= oldest.data.len() + OVERHEAD;
            self.first += 1;
        }
    }

    /// The number of the next packet that will be kept.
    pub(super) fn next(&self) -> u64 {
        self.first + self.kept.len() as u64
    }

    /// The number of the first kept packet that is not older than this.
    pub(super) fn since(&self, time_ns: u64) -> u64 {
        self.first + self.kept.partition_point(|packet| packet.time_ns < time_ns) as u64
    }

    /// The kept packets from this number on.
    pub(super) fn from(&self, number: u64) -> impl Iterator<Item = &Packet> {
        let skip = usize::try_from(number.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.kept.range(skip.min(self.kept.len())..)
    }
}
