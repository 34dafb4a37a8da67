//! Decided connections of the packet engine, which XDP handles from the SYN on: user space's side of
//! `bpf/decided.h`, which describes the states, the layout and who writes what.

use super::layout::engine::{
    DECIDED_CLIENT_RESET, DECIDED_FIN, DECIDED_FREE, DECIDED_KILLED, DECIDED_OK, DECIDED_OPEN,
    DECIDED_PLACES, DECIDED_REFUSED, DECIDED_SERVER_RESET, DECIDED_SYN, DECIDED_SYN_ACK,
    decided as settings_at, decided_bucket, decided_flow, decided_side, decision, decision_key,
};
use super::memory::Shared;
use super::{Map, MapKind, MapShape};
use crate::sync::lock;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// At most this many decided connections: each has a source port of its own.
pub const DECIDED_MAX: u32 = 65_535;
/// At most this many clients with a decision.
const DECISIONS_MAX: u32 = 65_536;
/// At most this many interfaces.
const DEVICES_MAX: u32 = 64;

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedState {
    /// The client has sent its SYN.
    Syn,
    /// The server has sent its SYN-ACK.
    SynAck,
    /// The client has acknowledged the SYN-ACK.
    Open,
    /// It has ended.
    Closed,
    /// User space has ended it.
    Killed,
}

/// How a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedReason {
    /// Both sides closed, and both FINs were acknowledged.
    Ok,
    /// The client reset it.
    ClientReset,
    /// The server reset it.
    ServerReset,
    /// The server refused the SYN by a reset.
    Refused,
    /// It never was a connection: its bucket was full.
    Unused,
}

/// Which connections a decision is for: those of one client to one listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DecidedKey {
    /// The client's address.
    pub client: IpAddr,
    /// The address and port it connects to.
    pub local: SocketAddr,
}

/// The decision: where the connections go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecidedRoute {
    /// Generation of the rules that made it; see [`DecidedMemory::renew`].
    pub generation: u32,
    /// The caller's number for it, as in [`DecidedFlow::number`].
    pub number: u32,
    /// The server.
    pub server: SocketAddr,
    /// Our source address towards it.
    pub source: IpAddr,
    /// The interface towards it, as numbered by [`DecidedMemory::device`].
    pub egress: u16,
    /// Link-layer address of the next hop.
    pub to: [u8; 6],
    /// Our own link-layer address there.
    pub from: [u8; 6],
}

/// One side of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecidedSide {
    /// The number after the last sequence number it used.
    pub sent: u32,
    /// The highest number it acknowledged.
    pub acknowledged: u32,
    /// Bytes of payload, without retransmissions.
    pub bytes: u64,
    /// Number of its packets.
    pub packets: u32,
    /// Monotonic (coarse) clock at its last packet, nanoseconds; 0: none came.
    pub last_ns: u64,
    /// The interface towards it, as numbered by [`DecidedMemory::device`].
    pub egress: usize,
    /// Link-layer address of the next hop to it.
    pub to: [u8; 6],
    /// Our own link-layer address there.
    pub from: [u8; 6],
}

/// A decided connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecidedFlow {
    /// Its state.
    pub state: DecidedState,
    /// How it ended, once the state is `Closed`.
    pub reason: DecidedReason,
    /// [`DecidedRoute::number`].
    pub number: u32,
    /// Monotonic clock at its SYN, nanoseconds.
    pub opened_ns: u64,
    /// Monotonic clock at the server's SYN-ACK, nanoseconds; 0: none came.
    pub connected_ns: u64,
    /// Monotonic clock at its end, nanoseconds.
    pub closed_ns: u64,
    /// The client.
    pub client: SocketAddr,
    /// The address and port it connected to.
    pub local: SocketAddr,
    /// The server.
    pub server: SocketAddr,
    /// Our source address and port towards the server.
    pub source: SocketAddr,
    /// The client's side and the server's.
    pub sides: [DecidedSide; 2],
}

/// What the record of an ended connection needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecidedEnd {
    /// How it ended.
    pub reason: DecidedReason,
    /// [`DecidedRoute::number`].
    pub number: u32,
    /// Payload of the client and of the server.
    pub bytes: [u64; 2],
    /// As [`DecidedFlow::opened_ns`].
    pub opened_ns: u64,
    /// As [`DecidedFlow::connected_ns`].
    pub connected_ns: u64,
    /// As [`DecidedFlow::closed_ns`].
    pub closed_ns: u64,
}

/// What the programs did not forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecidedCounts {
    /// SYNs that found no free slot and went to user space.
    pub full: u64,
    /// Segments with impossible sequence numbers, which were dropped.
    pub refused: u64,
}

/// User space's positions in the rings of free and ended slots.
#[derive(Debug, Default)]
struct Cursor {
    free_tail: u32,
    done: u32,
}

/// The memory of decided connections. Only one caller at a time may use [`DecidedMemory::ended`] and
/// [`DecidedMemory::release`].
#[derive(Debug)]
pub struct DecidedMemory {
    settings: Shared,
    flows: Shared,
    places: Shared,
    free: Shared,
    done: Shared,
    decisions: Map,
    devices: Map,
    ingresses: Map,
    first: u16,
    count: u32,
    ring: u32,
    cursor: Mutex<Cursor>,
}

/// The slot of a connection that user space may read, kill or release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Closing(u32);

impl Closing {
    /// Returns it as a number.
    pub const fn number(self) -> u32 {
        self.0
    }
}

const fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

impl DecidedKey {
    fn to_bytes(self) -> Vec<u8> {
        [&mapped(self.client)[..], &mapped(self.local.ip()), &self.local.port().to_ne_bytes(), &[0; 6]]
            .concat()
    }
}

impl DecidedRoute {
    fn to_bytes(self) -> Vec<u8> {
        [
            &self.generation.to_ne_bytes()[..],
            &self.number.to_ne_bytes(),
            &mapped(self.server.ip()),
            &mapped(self.source),
            &self.server.port().to_ne_bytes(),
            &self.egress.to_ne_bytes(),
            &self.to,
            &self.from,
        ]
        .concat()
    }
}

impl DecidedMemory {
    /// Makes room for `count` connections, whose source ports begin with `first`. `seed` is part of the hash;
    /// it has to be secret, or clients could fill one bucket.
    ///
    /// # Errors
    /// EPERM without CAP_BPF, ENOMEM.
    pub fn new(first: u16, count: u32, seed: u64) -> io::Result<Self> {
        Self::with_buckets(first, count, count / 2, seed)
    }

    /// Does the same with about this many buckets of eight places.
    ///
    /// # Errors
    /// As [`DecidedMemory::new`].
    pub fn with_buckets(first: u16, count: u32, buckets: u32, seed: u64) -> io::Result<Self> {
        let count = count.clamp(1, DECIDED_MAX.min(65_536 - u32::from(first)));
        let ring = count.next_power_of_two();
        let buckets = buckets.max(1).next_power_of_two();
        let map = |kind, name, key_bytes, value_bytes, entries_max| {
            Map::create(MapShape { kind, name, key_bytes, value_bytes, entries_max })
        };
        let decided = Self {
            settings: Shared::new("decided", settings_at::SIZE, 1)?,
            flows: Shared::new("decided_flows", decided_flow::SIZE, count)?,
            places: Shared::new("decided_places", decided_bucket::SIZE, buckets)?,
            free: Shared::new("decided_free", 8, ring)?,
            done: Shared::new("decided_done", 8, ring)?,
            decisions: map(MapKind::Hash, "decisions", decision_key::SIZE, decision::SIZE, DECISIONS_MAX)?,
            devices: map(MapKind::Devices, "devices", 4, 4, DEVICES_MAX)?,
            ingresses: map(MapKind::Hash, "ingresses", 4, 4, DEVICES_MAX)?,
            first,
            count,
            ring,
            cursor: Mutex::default(),
        };
        decided.settings.u64(settings_at::SEED).store(seed, Relaxed);
        for (at, value) in [
            (settings_at::BUCKET_MASK, buckets - 1),
            (settings_at::RING_MASK, ring - 1),
            (settings_at::FIRST, first.into()),
            (settings_at::COUNT, count),
            (settings_at::GENERATION, 1),
        ] {
            decided.settings.u32(at).store(value, Relaxed);
        }
        (0..count).for_each(|slot| decided.give(&mut decided.cursor(), slot));
        Ok(decided)
    }

    /// Returns the maps that the program needs.
    pub(super) fn maps(&self) -> [&Map; 8] {
        let shared = [&self.settings, &self.flows, &self.places, &self.free, &self.done].map(Shared::map);
        let [settings, flows, places, free, done] = shared;
        [settings, flows, places, free, done, &self.decisions, &self.devices, &self.ingresses]
    }

    fn cursor(&self) -> std::sync::MutexGuard<'_, Cursor> {
        lock(&self.cursor)
    }

    /// Gives number `number` to the interface with this index in this thread's network namespace.
    ///
    /// # Errors
    /// E2BIG if there are too many.
    pub fn device(&self, number: u32, index: u32) -> io::Result<()> {
        self.devices.put(&number.to_ne_bytes(), &index.to_ne_bytes())?;
        self.ingresses.put(&index.to_ne_bytes(), &number.to_ne_bytes())
    }

    /// Decides: XDP handles connections of this client to this listener from now on, from the SYN on.
    ///
    /// # Errors
    /// E2BIG if there are too many.
    pub fn decide(&self, key: &DecidedKey, route: &DecidedRoute) -> io::Result<()> {
        self.decisions.put(&key.to_bytes(), &route.to_bytes())
    }

    /// Removes the decision: new connections of this client go to user space again.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn forget(&self, key: &DecidedKey) -> io::Result<()> {
        self.decisions.remove(&key.to_bytes()).map(drop)
    }

    /// Makes all decisions of other generations invalid.
    pub fn renew(&self, generation: u32) {
        self.settings.u32(settings_at::GENERATION).store(generation, Release);
    }

    /// Returns the source ports of its connections.
    pub fn ports(&self) -> std::ops::RangeInclusive<u16> {
        let last = u32::from(self.first) + self.count - 1;
        self.first..=u16::try_from(last).unwrap_or(u16::MAX)
    }

    /// Returns the number of slots.
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Returns the number of free slots that programs can take.
    pub fn free(&self) -> u32 {
        let tail = self.cursor().free_tail;
        tail.wrapping_sub(self.settings.u32(settings_at::FREE_HEAD).load(Acquire))
    }

    /// Returns what the programs did not forward.
    pub fn counts(&self) -> DecidedCounts {
        let read = |at| self.settings.u64(at).load(Relaxed);
        DecidedCounts { full: read(settings_at::FULL), refused: read(settings_at::REFUSED) }
    }

    fn give(&self, cursor: &mut Cursor, slot: u32) {
        let at = cursor.free_tail & (self.ring - 1);
        self.free.u64(at as usize * 8).store(slot.into(), Relaxed);
        cursor.free_tail = cursor.free_tail.wrapping_add(1);
        self.settings.u32(settings_at::FREE_TAIL).store(cursor.free_tail, Release);
    }

    /// Returns the next connection that has ended. Its slot stays as it is until it is released.
    pub fn ended(&self) -> Option<Closing> {
        let mut cursor = self.cursor();
        let at = (cursor.done & (self.ring - 1)) as usize * 8;
        let slot = u32::try_from(self.done.u64(at).swap(0, AcqRel)).ok()?.checked_sub(1)?;
        cursor.done = cursor.done.wrapping_add(1);
        Some(Closing(slot))
    }

    fn word(&self, slot: u32, at: usize) -> u32 {
        self.flows.u32(slot as usize * decided_flow::SIZE + at).load(Acquire)
    }

    fn double(&self, slot: u32, at: usize) -> u64 {
        self.flows.u64(slot as usize * decided_flow::SIZE + at).load(Acquire)
    }

    /// Returns a slot if a connection stands there that has not ended.
    pub fn standing(&self, slot: u32) -> Option<Closing> {
        (slot < self.count && matches!(self.word(slot, 0), DECIDED_SYN..=DECIDED_OPEN))
            .then_some(Closing(slot))
    }

    /// Returns how the connection in a slot ended.
    pub fn end(&self, slot: Closing) -> DecidedEnd {
        let slot = slot.0;
        DecidedEnd {
            reason: self.reason(slot),
            number: self.word(slot, decided_flow::DECISION),
            bytes: [0, 1].map(|side| self.bytes(slot, side)),
            opened_ns: self.double(slot, decided_flow::OPENED_NS),
            connected_ns: self.double(slot, decided_flow::CONNECTED_NS),
            closed_ns: self.double(slot, decided_flow::CLOSED_NS),
        }
    }

    fn reason(&self, slot: u32) -> DecidedReason {
        match self.word(slot, decided_flow::REASON) {
            DECIDED_OK => DecidedReason::Ok,
            DECIDED_CLIENT_RESET => DecidedReason::ClientReset,
            DECIDED_SERVER_RESET => DecidedReason::ServerReset,
            DECIDED_REFUSED => DecidedReason::Refused,
            _ => DecidedReason::Unused,
        }
    }

    fn bytes(&self, slot: u32, side: usize) -> u64 {
        let at = decided_flow::SIDE + side * decided_side::SIZE;
        let sent = self.double(slot, at);
        if sent == 0 {
            return 0;
        }
        let fin = u64::from(self.word(slot, at + decided_side::FINS) & DECIDED_FIN);
        // SYN and FIN each take one sequence number.
        (sent - (1 << 32)).saturating_sub(u64::from(self.word(slot, at + decided_side::FIRST)) + 1 + fin)
    }

    fn address(&self, slot: u32, at: usize, port: usize) -> SocketAddr {
        let halves = [self.double(slot, at), self.double(slot, at + 8)].map(u64::to_ne_bytes);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&halves[0]);
        bytes[8..].copy_from_slice(&halves[1]);
        let ip = Ipv6Addr::from(bytes);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let pair = self.word(slot, decided_flow::CLIENT_PORT + port / 2 * 4).to_ne_bytes();
        let [low, high] = if port.is_multiple_of(2) { [pair[0], pair[1]] } else { [pair[2], pair[3]] };
        SocketAddr::new(ip, u16::from_ne_bytes([low, high]))
    }

    fn side(&self, slot: u32, side: usize) -> DecidedSide {
        let at = decided_flow::SIDE + side * decided_side::SIZE;
        let mut link = [0; 12];
        let from = if side == 0 { decided_flow::TO_CLIENT } else { decided_flow::TO_SERVER };
        for (number, bytes) in link.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *bytes = self.word(slot, from + number * 4).to_ne_bytes();
        }
        let [a, b, c, d, e, f, rest @ ..] = link;
        DecidedSide {
            sent: self.double(slot, at) as u32,
            acknowledged: self.word(slot, at + decided_side::ACKNOWLEDGED),
            bytes: self.bytes(slot, side),
            packets: self.word(slot, at + decided_side::PACKETS),
            last_ns: self.double(slot, at + decided_side::LAST_NS),
            egress: self.word(slot, at + decided_side::EGRESS) as usize,
            to: [a, b, c, d, e, f],
            from: rest,
        }
    }

    /// Returns everything about a connection.
    pub fn look(&self, slot: Closing) -> DecidedFlow {
        let slot = slot.0;
        DecidedFlow {
            state: match self.word(slot, 0) {
                DECIDED_SYN => DecidedState::Syn,
                DECIDED_SYN_ACK => DecidedState::SynAck,
                DECIDED_OPEN => DecidedState::Open,
                DECIDED_KILLED => DecidedState::Killed,
                _ => DecidedState::Closed,
            },
            reason: self.reason(slot),
            number: self.word(slot, decided_flow::DECISION),
            opened_ns: self.double(slot, decided_flow::OPENED_NS),
            connected_ns: self.double(slot, decided_flow::CONNECTED_NS),
            closed_ns: self.double(slot, decided_flow::CLOSED_NS),
            client: self.address(slot, decided_flow::CLIENT, 0),
            local: self.address(slot, decided_flow::LOCAL, 1),
            server: self.address(slot, decided_flow::SERVER, 2),
            source: self.address(slot, decided_flow::SOURCE, 3),
            sides: [self.side(slot, 0), self.side(slot, 1)],
        }
    }

    /// Returns the monotonic clock at the last packet of either side, nanoseconds.
    pub fn last_ns(&self, slot: Closing) -> u64 {
        self.double(slot.0, decided_flow::SIDE + decided_side::LAST_NS)
            .max(self.double(slot.0, decided_flow::SIDE + decided_side::SIZE + decided_side::LAST_NS))
    }

    /// Ends a connection from user space; false if it has ended already. Release it some milliseconds later:
    /// a program may still be handling a packet.
    pub fn kill(&self, slot: Closing) -> bool {
        let state = self.flows.u32(slot.0 as usize * decided_flow::SIZE);
        let end = |now| matches!(now, DECIDED_SYN..=DECIDED_OPEN).then_some(DECIDED_KILLED);
        state.fetch_update(AcqRel, Acquire, end).is_ok()
    }

    /// Frees a slot and its source port.
    pub fn release(&self, slot: Closing) {
        let bucket = self.word(slot.0, decided_flow::BUCKET) as usize * decided_bucket::SIZE;
        for number in 0..DECIDED_PLACES as usize {
            let place = self.places.u64(bucket + number * 8);
            let found = place.load(Relaxed);
            if found as u32 == slot.0 + 1 {
                // It fails if a program has reused the place meanwhile, which is fine.
                let _ = place.compare_exchange(found, 0, Release, Relaxed);
            }
        }
        self.flows.u32(slot.0 as usize * decided_flow::SIZE).store(DECIDED_FREE, Release);
        self.give(&mut self.cursor(), slot.0);
    }
}
