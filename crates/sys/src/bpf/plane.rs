//! Decided connections of the packet engine, which XDP handles from the SYN on: user space's side of
//! `bpf/plane.h`, which describes the states, the layout and who writes what.

use super::memory::Shared;
use super::{Map, MapKind, MapShape};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// At most this many decided connections: each has a source port of its own.
pub const PLANE_CONNECTIONS_MAX: u32 = 65_535;
/// At most this many clients with a decision.
const DECISIONS_MAX: u32 = 65_536;
/// At most this many interfaces.
const DEVICES_MAX: u32 = 64;

/// Bytes and offsets of the structures of `bpf/plane.h`.
const KEY: usize = 40;
const DECISION: usize = 56;
const FLOW: usize = 320;
const SIDE: usize = 64;
const BUCKET: usize = 64;
const PLACES: usize = 8;
const PLANE: usize = 256;
const REASON: usize = 4;
const NUMBER: usize = 8;
const PLACE: usize = 12;
const OPENED: usize = 16;
const CONNECTED: usize = 24;
const CLOSED: usize = 32;
const CLIENT: usize = 64;
const LOCAL: usize = 80;
const SERVER: usize = 96;
const SOURCE: usize = 112;
const PORTS: usize = 128;
const TO_CLIENT: usize = 136;
const TO_SERVER: usize = 148;
const SIDES: usize = 192;
const LAST: usize = 8;
const FIRST: usize = 24;
const ACKNOWLEDGED: usize = 28;
const PACKETS: usize = 32;
const FINS: usize = 40;
const EGRESS: usize = 44;
const GENERATION: usize = 24;
const FREE_HEAD: usize = 64;
const FREE_TAIL: usize = 128;
const FULL: usize = 192;
const REFUSED: usize = 200;

/// `PLANE_FREE` and `PLANE_KILLED`.
const FREE: u32 = 0;
const KILLED: u32 = 5;

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneState {
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
pub enum PlaneReason {
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
pub struct PlaneKey {
    /// The client's address.
    pub client: IpAddr,
    /// The address and port it connects to.
    pub local: SocketAddr,
}

/// The decision: where the connections go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneRoute {
    /// Generation of the rules that made it; see [`Plane::renew`].
    pub generation: u32,
    /// The caller's number for it, as in [`PlaneFlow::number`].
    pub number: u32,
    /// The server.
    pub server: SocketAddr,
    /// Our source address towards it.
    pub source: IpAddr,
    /// The interface towards it, as numbered by [`Plane::device`].
    pub egress: u16,
    /// Link-layer address of the next hop.
    pub to: [u8; 6],
    /// Our own link-layer address there.
    pub from: [u8; 6],
}

/// One side of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaneSide {
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
    /// The interface towards it, as numbered by [`Plane::device`].
    pub egress: usize,
    /// Link-layer address of the next hop to it.
    pub to: [u8; 6],
    /// Our own link-layer address there.
    pub from: [u8; 6],
}

/// A decided connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneFlow {
    /// Its state.
    pub state: PlaneState,
    /// How it ended, once the state is `Closed`.
    pub reason: PlaneReason,
    /// [`PlaneRoute::number`].
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
    pub sides: [PlaneSide; 2],
}

/// What the record of an ended connection needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneEnd {
    /// How it ended.
    pub reason: PlaneReason,
    /// [`PlaneRoute::number`].
    pub number: u32,
    /// Payload of the client and of the server.
    pub bytes: [u64; 2],
    /// As [`PlaneFlow::opened_ns`].
    pub opened_ns: u64,
    /// As [`PlaneFlow::connected_ns`].
    pub connected_ns: u64,
    /// As [`PlaneFlow::closed_ns`].
    pub closed_ns: u64,
}

/// What the programs did not forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaneCounts {
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

/// The memory of decided connections. Only one caller at a time may use [`Plane::ended`] and
/// [`Plane::release`].
#[derive(Debug)]
pub struct Plane {
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

impl PlaneKey {
    fn to_bytes(self) -> Vec<u8> {
        [&mapped(self.client)[..], &mapped(self.local.ip()), &self.local.port().to_ne_bytes(), &[0; 6]]
            .concat()
    }
}

impl PlaneRoute {
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

impl Plane {
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
    /// As [`Plane::new`].
    pub fn with_buckets(first: u16, count: u32, buckets: u32, seed: u64) -> io::Result<Self> {
        let count = count.clamp(1, PLANE_CONNECTIONS_MAX.min(65_536 - u32::from(first)));
        let ring = count.next_power_of_two();
        let buckets = buckets.max(1).next_power_of_two();
        let map = |kind, name, key_bytes, value_bytes, entries_max| {
            Map::create(MapShape { kind, name, key_bytes, value_bytes, entries_max })
        };
        let plane = Self {
            settings: Shared::new("plane", PLANE, 1)?,
            flows: Shared::new("plane_flows", FLOW, count)?,
            places: Shared::new("plane_places", BUCKET, buckets)?,
            free: Shared::new("plane_free", 8, ring)?,
            done: Shared::new("plane_done", 8, ring)?,
            decisions: map(MapKind::Hash, "decisions", KEY, DECISION, DECISIONS_MAX)?,
            devices: map(MapKind::Devices, "devices", 4, 4, DEVICES_MAX)?,
            ingresses: map(MapKind::Hash, "ingresses", 4, 4, DEVICES_MAX)?,
            first,
            count,
            ring,
            cursor: Mutex::default(),
        };
        plane.settings.u64(0).store(seed, Relaxed);
        for (at, value) in
            [(8, buckets - 1), (12, ring - 1), (16, first.into()), (20, count), (GENERATION, 1)]
        {
            plane.settings.u32(at).store(value, Relaxed);
        }
        (0..count).for_each(|slot| plane.give(&mut plane.cursor(), slot));
        Ok(plane)
    }

    /// Returns the maps that the program needs.
    pub(super) fn maps(&self) -> [&Map; 8] {
        let shared = [&self.settings, &self.flows, &self.places, &self.free, &self.done].map(Shared::map);
        let [settings, flows, places, free, done] = shared;
        [settings, flows, places, free, done, &self.decisions, &self.devices, &self.ingresses]
    }

    fn cursor(&self) -> std::sync::MutexGuard<'_, Cursor> {
        self.cursor.lock().unwrap_or_else(PoisonError::into_inner)
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
    pub fn decide(&self, key: &PlaneKey, route: &PlaneRoute) -> io::Result<()> {
        self.decisions.put(&key.to_bytes(), &route.to_bytes())
    }

    /// Removes the decision: new connections of this client go to user space again.
    ///
    /// # Errors
    /// What bpf(2) reports.
    pub fn forget(&self, key: &PlaneKey) -> io::Result<()> {
        self.decisions.remove(&key.to_bytes()).map(drop)
    }

    /// Makes all decisions of other generations invalid.
    pub fn renew(&self, generation: u32) {
        self.settings.u32(GENERATION).store(generation, Release);
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
        tail.wrapping_sub(self.settings.u32(FREE_HEAD).load(Acquire))
    }

    /// Returns what the programs did not forward.
    pub fn counts(&self) -> PlaneCounts {
        let read = |at| self.settings.u64(at).load(Relaxed);
        PlaneCounts { full: read(FULL), refused: read(REFUSED) }
    }

    fn give(&self, cursor: &mut Cursor, slot: u32) {
        let at = cursor.free_tail & (self.ring - 1);
        self.free.u64(at as usize * 8).store(slot.into(), Relaxed);
        cursor.free_tail = cursor.free_tail.wrapping_add(1);
        self.settings.u32(FREE_TAIL).store(cursor.free_tail, Release);
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
        self.flows.u32(slot as usize * FLOW + at).load(Acquire)
    }

    fn double(&self, slot: u32, at: usize) -> u64 {
        self.flows.u64(slot as usize * FLOW + at).load(Acquire)
    }

    /// Returns a slot if a connection stands there that has not ended.
    pub fn standing(&self, slot: u32) -> Option<Closing> {
        (slot < self.count && matches!(self.word(slot, 0), 1..=3)).then_some(Closing(slot))
    }

    /// Returns how the connection in a slot ended.
    pub fn end(&self, slot: Closing) -> PlaneEnd {
        let slot = slot.0;
        PlaneEnd {
            reason: self.reason(slot),
            number: self.word(slot, NUMBER),
            bytes: [0, 1].map(|side| self.bytes(slot, side)),
            opened_ns: self.double(slot, OPENED),
            connected_ns: self.double(slot, CONNECTED),
            closed_ns: self.double(slot, CLOSED),
        }
    }

    fn reason(&self, slot: u32) -> PlaneReason {
        match self.word(slot, REASON) {
            0 => PlaneReason::Ok,
            1 => PlaneReason::ClientReset,
            2 => PlaneReason::ServerReset,
            3 => PlaneReason::Refused,
            _ => PlaneReason::Unused,
        }
    }

    fn bytes(&self, slot: u32, side: usize) -> u64 {
        let at = SIDES + side * SIDE;
        let sent = self.double(slot, at);
        if sent == 0 {
            return 0;
        }
        let fin = u64::from(self.word(slot, at + FINS) & 1);
        // SYN and FIN each take one sequence number.
        (sent - (1 << 32)).saturating_sub(u64::from(self.word(slot, at + FIRST)) + 1 + fin)
    }

    fn address(&self, slot: u32, at: usize, port: usize) -> SocketAddr {
        let halves = [self.double(slot, at), self.double(slot, at + 8)].map(u64::to_ne_bytes);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&halves[0]);
        bytes[8..].copy_from_slice(&halves[1]);
        let ip = Ipv6Addr::from(bytes);
        let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
        let pair = self.word(slot, PORTS + port / 2 * 4).to_ne_bytes();
        let [low, high] = if port.is_multiple_of(2) { [pair[0], pair[1]] } else { [pair[2], pair[3]] };
        SocketAddr::new(ip, u16::from_ne_bytes([low, high]))
    }

    fn side(&self, slot: u32, side: usize) -> PlaneSide {
        let at = SIDES + side * SIDE;
        let mut link = [0; 12];
        let from = if side == 0 { TO_CLIENT } else { TO_SERVER };
        for (number, bytes) in link.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *bytes = self.word(slot, from + number * 4).to_ne_bytes();
        }
        let [a, b, c, d, e, f, rest @ ..] = link;
        PlaneSide {
            sent: self.double(slot, at) as u32,
            acknowledged: self.word(slot, at + ACKNOWLEDGED),
            bytes: self.bytes(slot, side),
            packets: self.word(slot, at + PACKETS),
            last_ns: self.double(slot, at + LAST),
            egress: self.word(slot, at + EGRESS) as usize,
            to: [a, b, c, d, e, f],
            from: rest,
        }
    }

    /// Returns everything about a connection.
    pub fn look(&self, slot: Closing) -> PlaneFlow {
        let slot = slot.0;
        PlaneFlow {
            state: match self.word(slot, 0) {
                1 => PlaneState::Syn,
                2 => PlaneState::SynAck,
                3 => PlaneState::Open,
                KILLED => PlaneState::Killed,
                _ => PlaneState::Closed,
            },
            reason: self.reason(slot),
            number: self.word(slot, NUMBER),
            opened_ns: self.double(slot, OPENED),
            connected_ns: self.double(slot, CONNECTED),
            closed_ns: self.double(slot, CLOSED),
            client: self.address(slot, CLIENT, 0),
            local: self.address(slot, LOCAL, 1),
            server: self.address(slot, SERVER, 2),
            source: self.address(slot, SOURCE, 3),
            sides: [self.side(slot, 0), self.side(slot, 1)],
        }
    }

    /// Returns the monotonic clock at the last packet of either side, nanoseconds.
    pub fn last_ns(&self, slot: Closing) -> u64 {
        self.double(slot.0, SIDES + LAST).max(self.double(slot.0, SIDES + SIDE + LAST))
    }

    /// Ends a connection from user space; false if it has ended already. Release it some milliseconds later:
    /// a program may still be handling a packet.
    pub fn kill(&self, slot: Closing) -> bool {
        let state = self.flows.u32(slot.0 as usize * FLOW);
        let end = |now| matches!(now, 1..=3).then_some(KILLED);
        state.fetch_update(AcqRel, Acquire, end).is_ok()
    }

    /// Frees a slot and its source port.
    pub fn release(&self, slot: Closing) {
        let bucket = self.word(slot.0, PLACE) as usize * BUCKET;
        for number in 0..PLACES {
            let place = self.places.u64(bucket + number * 8);
            let found = place.load(Relaxed);
            if found as u32 == slot.0 + 1 {
                // It fails if a program has reused the place meanwhile, which is fine.
                let _ = place.compare_exchange(found, 0, Release, Relaxed);
            }
        }
        self.flows.u32(slot.0 as usize * FLOW).store(FREE, Release);
        self.give(&mut self.cursor(), slot.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ENGINE, Object};
    use super::*;

    #[test]
    fn the_layout_is_the_programs() {
        let section = Object::parse(ENGINE).unwrap().section("plane_layout").unwrap();
        let found: Vec<usize> =
            section.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word) as usize).collect();
        let expected = [
            KEY,
            DECISION,
            FLOW,
            SIDE,
            BUCKET,
            PLANE,
            REASON,
            NUMBER,
            PLACE,
            OPENED,
            CONNECTED,
            CLOSED,
            CLIENT,
            LOCAL,
            SERVER,
            SOURCE,
            PORTS,
            TO_CLIENT,
            TO_SERVER,
            SIDES,
            LAST,
            FIRST,
            ACKNOWLEDGED,
            PACKETS,
            FINS,
            EGRESS,
            GENERATION,
            FREE_HEAD,
            FREE_TAIL,
            FULL,
            REFUSED,
        ];
        assert_eq!(found, expected);
    }
}
