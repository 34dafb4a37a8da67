//! Offloaded connections of the packet engine: user space's side of `bpf/offload.h`, which describes the
//! states, the layout and who writes what.

mod handshake;

use super::layout::engine::{
    FIN_ACKED, FIN_SECOND, FIN_SEEN, FLOW_COMPLETING, FLOW_ENDED, FLOW_FREE, FLOW_OFFLOADED, FLOW_RETURNED,
    FLOW_SYN_SENT, PLACES, bucket, flow as flow_at, flow_side, handshake as handshake_at,
    offload as settings_at, over_head, taken as taken_at,
};
use super::memory::Shared;
use super::{Map, MapKind, MapShape};
use handshake::HANDSHAKES_MAX;
use sidetrack_core::engine::{Fin, Standing};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// One side of a connection to offload: the addresses of its packets, the way to it, and what is added to its
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadSide {
    /// The host on this side. All addresses of a connection are of one IP version.
    pub remote: SocketAddr,
    /// Our address and port that it talks to.
    pub local: SocketAddr,
    /// What is added to its sequence numbers, modulo 2^32.
    pub add: u32,
    /// What is added to its time stamps.
    pub stamp_add: u32,
    /// Lower bound of the echoed time stamps that this side is shown.
    pub stamp_first: u32,
    /// Index of the interface towards it.
    pub egress: u32,
    /// Link-layer address of the next hop on that interface.
    pub to: [u8; 6],
    /// Our own link-layer address there.
    pub from: [u8; 6],
    /// Largest payload it accepts, TCP options included, bytes.
    pub mss: u16,
    /// Window scale of the windows it sends, 0 to 14.
    pub shift: u8,
    /// Window scale of the windows it is shown, 0 to 14.
    pub shown_shift: u8,
    /// True if it has sent its FIN and the FIN was acknowledged.
    pub finished: bool,
    /// Its sequence numbers so far.
    pub standing: Standing,
}

/// The state of one side of an offloaded connection, as the kernel sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Its sequence numbers so far.
    pub standing: Standing,
    /// `standing.sent` in 64 bits: the upper half counts wraps.
    pub sent: u64,
    /// Packets that the kernel forwarded. A GSO frame that stands for several counts once.
    pub packets: u32,
    /// Segments with payload that were left to user space. Each is counted after it is in a socket.
    pub to_user: u32,
    /// True once user space has no segment of this side left to send; the kernel forwards all that follow.
    pub joined: bool,
    /// Its FIN, if the kernel forwarded one.
    pub fin: Option<Fin>,
    /// Monotonic clock at the last packet that the kernel forwarded, nanoseconds; 0: none.
    pub last_ns: u64,
}

/// The number of an offloaded connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Offloaded(u32);

impl Offloaded {
    /// Returns it as a number.
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// The memory of offloaded connections, for all workers of an engine.
#[derive(Debug)]
pub struct OffloadMemory {
    buckets: Shared,
    flows: Shared,
    over: Shared,
    over_heads: Shared,
    handshakes: Shared,
    settings: Map,
    taken: Map,
    seed: u64,
    mask: u32,
    /// Number of flows of each worker, and of places in its ring.
    share: u32,
    ring: u32,
    /// Number of handshakes of each worker.
    handshakes_each: u32,
}

/// One worker's part of the memory. When it is dropped, all its connections leave the kernel.
#[derive(Debug)]
pub struct OffloadPart {
    whole: Arc<OffloadMemory>,
    first: u32,
    count: u32,
    free: Vec<u32>,
    /// Numbers of free handshakes.
    free_handshakes: Vec<u32>,
    worker: u32,
    /// How many entries were taken out of the ring of ended connections.
    taken: u32,
}

fn mix(hash: u64, word: u64) -> u64 {
    let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash ^ hash >> 32
}

/// An address as two words in memory order; an IPv4 address as `::ffff:a.b.c.d`.
fn words(ip: IpAddr) -> [u64; 2] {
    let bytes = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    let (words, _) = bytes.as_chunks::<8>();
    [u64::from_ne_bytes(words[0]), u64::from_ne_bytes(words[1])]
}

fn ports(side: &OffloadSide) -> u32 {
    u32::from(side.remote.port()) << 16 | u32::from(side.local.port())
}

/// The one's complement sum of an address, of words in memory order.
fn sum(ip: IpAddr) -> u64 {
    let add =
        |bytes: &[u8]| bytes.as_chunks::<2>().0.iter().map(|word| u64::from(u16::from_ne_bytes(*word))).sum();
    match ip {
        IpAddr::V4(ip) => add(&ip.octets()),
        IpAddr::V6(ip) => add(&ip.octets()),
    }
}

/// The change of a checksum when a packet from `own` gets the addresses of a packet to `other`.
fn fix(own: &OffloadSide, other: &OffloadSide) -> u32 {
    let fold = |sum: u64| (0..4).fold(sum, |sum, _| (sum & 0xffff) + (sum >> 16));
    let old = fold(sum(own.remote.ip()) + sum(own.local.ip()));
    let new = sum(other.remote.ip()) + sum(other.local.ip());
    u32::try_from(fold((0xffff - old) + new)).unwrap_or(0)
}

/// Writes a side (`struct flow_side`) at this offset of a map.
pub(super) fn write_side(memory: &Shared, at: usize, own: &OffloadSide, other: &OffloadSide) {
    let set = |word, value| memory.u32(at + word).store(value, Relaxed);
    let double = |word, value| memory.u64(at + word).store(value, Relaxed);
    let ([remote0, remote1], [local0, local1]) = (words(own.remote.ip()), words(own.local.ip()));
    for (word, value) in [
        (flow_side::REMOTE, remote0),
        (flow_side::REMOTE + 8, remote1),
        (flow_side::LOCAL, local0),
        (flow_side::LOCAL + 8, local1),
        (flow_side::SENT, 1 << 32 | u64::from(own.standing.sent)),
        (flow_side::LAST_NS, 0),
    ] {
        double(word, value);
    }
    let ([a, b, c, d, e, f], [g, h, i, j, k, l]) = (own.to, own.from);
    for (number, bytes) in [[a, b, c, d], [e, f, g, h], [i, j, k, l]].into_iter().enumerate() {
        set(flow_side::TO + number * 4, u32::from_ne_bytes(bytes));
    }
    let [low, high] = own.mss.to_ne_bytes();
    for (word, value) in [
        (flow_side::PORTS, ports(own)),
        (flow_side::ADD, own.add),
        (flow_side::ACKNOWLEDGED, own.standing.acknowledged),
        (flow_side::EDGE, own.standing.edge),
        (flow_side::STAMP, own.standing.stamp),
        (flow_side::PACKETS, 0),
        (flow_side::TO_USER, 0),
        (flow_side::USER_SENT, u32::MAX),
        (flow_side::JOINED, 0),
        (flow_side::STAMP_ADD, own.stamp_add),
        (flow_side::STAMP_FIRST, own.stamp_first),
        (flow_side::EGRESS, own.egress),
        (flow_side::MSS, u32::from_ne_bytes([low, high, own.shift, own.shown_shift])),
        (flow_side::FIX, fix(own, other)),
        (flow_side::V6, u32::from(own.remote.is_ipv6())),
        (flow_side::FIN, own.standing.sent),
        (flow_side::FINS, if own.finished { FIN_SEEN | FIN_ACKED } else { 0 }),
    ] {
        set(word, value);
    }
}

/// Reads source and destination of the packets of a side (`struct flow_side`) at this offset of a map.
pub(super) fn ends_of(memory: &Shared, at: usize) -> (SocketAddr, SocketAddr) {
    let address = |word| {
        let [low, high] = [word, word + 8].map(|word| memory.u64(at + word).load(Relaxed).to_ne_bytes());
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&low);
        bytes[8..].copy_from_slice(&high);
        IpAddr::from(bytes).to_canonical()
    };
    let ports = memory.u32(at + flow_side::PORTS).load(Acquire);
    let (remote, local) = ((ports >> 16) as u16, ports as u16);
    (SocketAddr::new(address(flow_side::REMOTE), remote), SocketAddr::new(address(flow_side::LOCAL), local))
}

impl OffloadMemory {
    /// Makes room for `flows_max` connections, at least one for each worker. `seed` is part of the hash; it
    /// has to be secret, or clients could fill one bucket.
    ///
    /// # Errors
    /// EPERM without CAP_BPF, ENOMEM.
    pub fn new(flows_max: u32, workers: u32, seed: u64) -> io::Result<Self> {
        let workers = workers.clamp(1, 1024);
        let flows_max = flows_max.clamp(workers, 1 << 22);
        let share = flows_max / workers;
        // Each connection is in the ring at most once, so the ring cannot overflow.
        let ring = share.next_power_of_two();
        // Each connection has two entries; half of the places stay free.
        let buckets = (flows_max / 2).max(1).next_power_of_two();
        let handshakes_each = (HANDSHAKES_MAX.min(flows_max) / workers).max(1);
        let map = |kind, name, value_bytes| {
            Map::create(MapShape { kind, name, key_bytes: 4, value_bytes, entries_max: 1 })
        };
        let memory = Self {
            buckets: Shared::new("buckets", bucket::SIZE, buckets)?,
            flows: Shared::new("flows", flow_at::SIZE, flows_max)?,
            over: Shared::new("over", 8, workers * ring)?,
            over_heads: Shared::new("over_heads", over_head::SIZE, workers)?,
            handshakes: Shared::new("handshakes", handshake_at::SIZE, handshakes_each * workers)?,
            settings: map(MapKind::Array, "offload", settings_at::SIZE)?,
            taken: map(MapKind::PerCpuArray, "taken", taken_at::SIZE)?,
            seed,
            mask: buckets - 1,
            share,
            ring,
            handshakes_each,
        };
        let words = [memory.mask, share, ring - 1, 0].map(u32::to_ne_bytes);
        let value = [&seed.to_ne_bytes()[..], words.as_flattened()].concat();
        memory.settings.put(&[0; 4], &value)?;
        Ok(memory)
    }

    /// Returns the maps that the programs need.
    pub(super) fn maps(&self) -> [&Map; 7] {
        let shared =
            [&self.buckets, &self.flows, &self.over, &self.over_heads, &self.handshakes].map(Shared::map);
        let [buckets, flows, over, over_heads, handshakes] = shared;
        [buckets, flows, over, over_heads, handshakes, &self.settings, &self.taken]
    }

    /// Returns the part of a worker, counted from 0; the last part if the number is too large. Discards what
    /// an earlier owner of the part has left in its ring.
    pub fn part(self: &Arc<Self>, worker: u32) -> OffloadPart {
        let worker = worker.min(self.over_heads.bytes() as u32 / over_head::SIZE as u32 - 1);
        let (first, count) = (self.share * worker, self.share);
        let free = (first..first + count).rev().collect();
        let free_handshakes =
            (self.handshakes_each * worker..self.handshakes_each * (worker + 1)).rev().collect();
        let mut part =
            OffloadPart { whole: self.clone(), first, count, free, free_handshakes, worker, taken: 0 };
        part.taken = self.over_heads.u32(worker as usize * over_head::SIZE).load(Acquire);
        for place in 0..self.ring {
            part.place(place).store(0, Relaxed);
        }
        part
    }

    /// Returns the offset of a side's bucket, and the upper half of its place.
    fn home(&self, side: &OffloadSide) -> (usize, u64) {
        let [remote, local] = [words(side.remote.ip()), words(side.local.ip())];
        let hash = remote.iter().chain(&local).fold(self.seed, |hash, word| mix(hash, *word));
        let hash = mix(hash, u64::from(ports(side)));
        ((hash as u32 & self.mask) as usize * bucket::SIZE, hash & !u64::from(u32::MAX))
    }

    /// Returns the offset of a word of a side.
    const fn at(flow: u32, side: usize, word: usize) -> usize {
        flow as usize * flow_at::SIZE + flow_at::SIDE + side * flow_side::SIZE + word
    }

    fn set(&self, flow: u32, side: usize, word: usize, value: u32) {
        self.flows.u32(Self::at(flow, side, word)).store(value, Relaxed);
    }

    fn read(&self, flow: u32, side: usize, word: usize) -> u32 {
        self.flows.u32(Self::at(flow, side, word)).load(Acquire)
    }

    /// Puts a side into its bucket, where programs find it; false if the bucket is full.
    fn place(&self, flow: u32, side: usize, own: &OffloadSide) -> bool {
        let (bucket, tag) = self.home(own);
        let place = tag | u64::from(flow * 2 + side as u32 + 1);
        (0..PLACES as usize).any(|number| {
            self.buckets.u64(bucket + number * 8).compare_exchange(0, place, AcqRel, Relaxed).is_ok()
        })
    }

    /// Removes a side from its bucket.
    fn displace(&self, flow: u32, side: usize) {
        let wanted = flow * 2 + side as u32 + 1;
        let word = |word| self.flows.u64(Self::at(flow, side, word)).load(Relaxed);
        let hash = [flow_side::REMOTE, flow_side::REMOTE + 8, flow_side::LOCAL, flow_side::LOCAL + 8]
            .into_iter()
            .fold(self.seed, |hash, at| mix(hash, word(at)));
        let hash = mix(hash, u64::from(self.read(flow, side, flow_side::PORTS)));
        let bucket = (hash as u32 & self.mask) as usize * bucket::SIZE;
        for number in 0..PLACES as usize {
            let place = self.buckets.u64(bucket + number * 8);
            // Only user space adds and removes places, so no program competes.
            if place.load(Relaxed) as u32 == wanted {
                place.store(0, Release);
            }
        }
    }
}

impl OffloadPart {
    /// Returns the lowest number of a connection of this part.
    pub const fn first(&self) -> u32 {
        self.first
    }

    /// Offloads a connection (client, server); `None` if there is no room. In tc the kernel forwards nothing
    /// until [`OffloadPart::user_sent`] has told what user space sent on.
    pub fn offload(&mut self, sides: &[OffloadSide; 2]) -> Option<Offloaded> {
        self.offload_as(sides, None)
    }

    fn offload_as(&mut self, sides: &[OffloadSide; 2], handshake: Option<u32>) -> Option<Offloaded> {
        let flow = self.free.pop()?;
        let (at, flows) = (flow as usize * flow_at::SIZE, &self.whole.flows);
        flows.u64(at + flow_at::CONNECTED_NS).store(0, Relaxed);
        flows.u32(at + flow_at::HANDSHAKE).store(handshake.map_or(0, |number| number + 1), Relaxed);
        let [client, server] = sides;
        for (side, own, other) in [(0, client, server), (1, server, client)] {
            write_side(flows, OffloadMemory::at(flow, side, 0), own, other);
        }
        self.state(flow, if handshake.is_some() { FLOW_SYN_SENT } else { FLOW_OFFLOADED });
        let both = self.whole.place(flow, 0, client) && self.whole.place(flow, 1, server);
        if both {
            return Some(Offloaded(flow));
        }
        self.take_back(Offloaded(flow));
        self.forget(Offloaded(flow));
        None
    }

    fn state(&self, flow: u32, state: u32) {
        self.whole.flows.u32(flow as usize * flow_at::SIZE).store(state, Release);
    }

    /// Returns the state of both sides, the client first.
    pub fn look(&self, offloaded: Offloaded) -> [Seen; 2] {
        [0, 1].map(|side| {
            let word = |word| self.whole.read(offloaded.0, side, word);
            let double =
                |word| self.whole.flows.u64(OffloadMemory::at(offloaded.0, side, word)).load(Acquire);
            // The program writes a FIN's number before its mark, and everything else before both: read the
            // mark first.
            let (fins, sent) = (word(flow_side::FINS), double(flow_side::SENT));
            Seen {
                standing: Standing {
                    sent: sent as u32,
                    acknowledged: word(flow_side::ACKNOWLEDGED),
                    edge: word(flow_side::EDGE),
                    stamp: word(flow_side::STAMP),
                },
                sent,
                packets: word(flow_side::PACKETS),
                to_user: word(flow_side::TO_USER),
                joined: word(flow_side::JOINED) != 0,
                fin: (fins & FIN_SEEN != 0)
                    .then(|| Fin { end: word(flow_side::FIN), is_second: fins & FIN_SECOND != 0 }),
                last_ns: double(flow_side::LAST_NS),
            }
        })
    }

    /// True if a packet came that user space has to handle: the program has left the connection to user
    /// space.
    pub fn is_returned(&self, offloaded: Offloaded) -> bool {
        let state = self.whole.flows.u32(offloaded.0 as usize * flow_at::SIZE).load(Acquire);
        !matches!(state, FLOW_OFFLOADED | FLOW_ENDED | FLOW_SYN_SENT | FLOW_COMPLETING)
    }

    fn place(&self, number: u32) -> &AtomicU64 {
        let at = self.worker * self.whole.ring + (number & (self.whole.ring - 1));
        self.whole.over.u64(at as usize * 8)
    }

    /// Returns the next connection whose sides have both closed, as seen by a program in XDP. User space may
    /// have taken it back before.
    pub fn over(&mut self) -> Option<Offloaded> {
        let place = self.place(self.taken);
        let found = place.load(Acquire) as u32;
        let flow = found.checked_sub(1)?;
        place.store(0, Release);
        self.taken = self.taken.wrapping_add(1);
        Some(Offloaded(flow))
    }

    /// Moves the kernel's copy of a side's numbers forward to `standing`; numbers that are ahead already stay.
    /// Returns `standing.sent` in 64 bits, counted like [`Seen::sent`].
    pub fn advance(&self, offloaded: Offloaded, side: usize, standing: &Standing) -> u64 {
        let sent = self.whole.flows.u64(OffloadMemory::at(offloaded.0, side, flow_side::SENT));
        let ahead = |old: u64| {
            old.wrapping_add_signed(i64::from(standing.sent.wrapping_sub(old as u32).cast_signed()))
        };
        let before = sent.fetch_update(AcqRel, Acquire, |old| (ahead(old) > old).then(|| ahead(old)));
        for (word, to) in [(flow_side::ACKNOWLEDGED, standing.acknowledged), (flow_side::EDGE, standing.edge)]
        {
            let is_after = |old: u32| to.wrapping_sub(old).cast_signed() > 0;
            let number = self.whole.flows.u32(OffloadMemory::at(offloaded.0, side, word));
            // It fails if the kernel is ahead, which is fine.
            let _ = number.fetch_update(AcqRel, Acquire, |old| is_after(old).then_some(to));
        }
        before.map_or_else(ahead, ahead)
    }

    /// Tells how many of the segments that were left to user space it has sent on, counted as
    /// [`Seen::to_user`]. Once both are equal, the kernel forwards the next segment.
    pub fn user_sent(&self, offloaded: Offloaded, side: usize, to_user: u32) {
        self.whole
            .flows
            .u32(OffloadMemory::at(offloaded.0, side, flow_side::USER_SENT))
            .store(to_user, Release);
    }

    /// Sets [`OffloadSide::stamp_first`] later, when it is known.
    pub fn stamp_first(&self, offloaded: Offloaded, side: usize, stamp: u32) {
        self.whole.set(offloaded.0, side, flow_side::STAMP_FIRST, stamp);
    }

    /// Returns the connection to user space: all packets from now on. Packets that a program is handling at
    /// this moment are still forwarded and counted.
    pub fn take_back(&self, offloaded: Offloaded) {
        let state = self.whole.flows.u32(offloaded.0 as usize * flow_at::SIZE);
        // A program that has begun to take the SYN-ACK needs a microsecond more.
        while state
            .fetch_update(AcqRel, Acquire, |now| (now != FLOW_COMPLETING).then_some(FLOW_RETURNED))
            .is_err()
        {
            std::hint::spin_loop();
        }
        self.displace(offloaded.0);
    }

    /// Frees the connection's number, after [`OffloadPart::take_back`]. Call it some milliseconds later: a
    /// program may still be handling a packet.
    pub fn forget(&mut self, offloaded: Offloaded) {
        self.free_handshake(offloaded);
        self.state(offloaded.0, FLOW_FREE);
        self.free.push(offloaded.0);
    }

    fn displace(&self, flow: u32) {
        for side in [0, 1] {
            self.whole.displace(flow, side);
        }
    }

    /// Returns the ends of packets from each side: source and destination.
    pub fn ends(&self, offloaded: Offloaded) -> [(SocketAddr, SocketAddr); 2] {
        [0, 1].map(|side| ends_of(&self.whole.flows, OffloadMemory::at(offloaded.0, side, 0)))
    }
}

impl Drop for OffloadPart {
    fn drop(&mut self) {
        let all = self.first..self.first + self.count;
        let offloaded =
            |flow: &u32| self.whole.flows.u32(*flow as usize * flow_at::SIZE).load(Relaxed) != FLOW_FREE;
        for flow in all.filter(offloaded) {
            self.displace(flow);
            self.state(flow, FLOW_FREE);
        }
    }
}
