//! Offloaded connections of the packet engine: user space's side of `bpf/offload.h`, which describes the
//! states, the layout and who writes what.

mod question;

pub use question::{Answered, Question};

use super::memory::Shared;
use super::{Map, MapKind, MapShape};
use question::{ANSWERED, QUESTION, QUESTION_OF, QUESTIONS_MAX};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Bytes and offsets of `struct flow` and `struct flow_side`.
const FLOW: usize = 288;
const SIDES: usize = 32;
const SIDE: usize = 128;
const REMOTE: usize = 0;
const LOCAL: usize = 16;
const PORTS: usize = 32;
const ADD: usize = 36;
const SENT: usize = 40;
const ACKNOWLEDGED: usize = 48;
const EDGE: usize = 52;
const STAMP: usize = 56;
const PACKETS: usize = 60;
const GIVEN: usize = 64;
const DONE: usize = 68;
const JOINED: usize = 72;
const STAMP_ADD: usize = 76;
const STAMP_FIRST: usize = 80;
const EGRESS: usize = 84;
const LINK: usize = 88;
const MSS: usize = 100;
const FIX: usize = 104;
const V6: usize = 108;
const FIN: usize = 112;
const FINS: usize = 116;
const LAST_NS: usize = 120;

/// `enum` of `flow.state`.
const FREE: u32 = 0;
const LENT: u32 = 1;
const RETURNED: u32 = 2;
const ENDED: u32 = 3;
const ASKED: u32 = 4;
const BINDING: u32 = 5;

/// `enum` of `flow_side.fins`.
const FIN_SEEN: u32 = 1;
const FIN_ACKED: u32 = 2;
const FIN_SECOND: u32 = 4;

/// Number of places in a bucket.
const PLACES: usize = 8;
const BUCKET: usize = PLACES * 8;
/// Bytes of `struct lending` and `struct taken`.
const LENDING: usize = 24;
const TAKEN: usize = 16;
/// Bytes of `struct over_head`.
const HEAD: usize = 64;

/// The sequence numbers of one side, each as that side sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// The number after the last byte it sent.
    pub sent: u32,
    /// The highest number it acknowledged.
    pub acknowledged: u32,
    /// The highest number its window ever allowed.
    pub edge: u32,
    /// Its last time stamp.
    pub stamp: u32,
}

/// One side of a connection to offload: the addresses of its packets, the way to it, and what is added to its
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LentSide {
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
    pub numbers: Numbers,
}

/// A FIN that a program in XDP forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenFin {
    /// The number after it, as `Numbers::sent`.
    pub end: u32,
    /// True if the peer's FIN was seen first.
    pub is_second: bool,
}

/// The state of one side of an offloaded connection, as the kernel sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Its sequence numbers so far.
    pub numbers: Numbers,
    /// `numbers.sent` in 64 bits: the upper half counts wraps.
    pub sent: u64,
    /// Packets that the kernel forwarded. A GSO frame that stands for several counts once.
    pub packets: u32,
    /// Segments with payload that were left to user space. Each is counted after it is in a socket.
    pub given: u32,
    /// True once user space has no segment of this side left to send; the kernel forwards all that follow.
    pub joined: bool,
    /// Its FIN, if the kernel forwarded one.
    pub fin: Option<SeenFin>,
    /// Monotonic clock at the last packet that the kernel forwarded, nanoseconds; 0: none.
    pub last_ns: u64,
}

/// The number of an offloaded connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lent(u32);

impl Lent {
    /// Returns it as a number.
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// The memory of offloaded connections, for all workers of an engine.
#[derive(Debug)]
pub struct Lending {
    buckets: Shared,
    flows: Shared,
    over: Shared,
    over_heads: Shared,
    questions: Shared,
    settings: Map,
    taken: Map,
    seed: u64,
    mask: u32,
    /// Number of flows of each worker, and of places in its ring.
    share: u32,
    ring: u32,
    /// Number of questions of each worker.
    asks: u32,
}

/// One worker's part of the memory. When it is dropped, all its connections leave the kernel.
#[derive(Debug)]
pub struct LendingPart {
    whole: Arc<Lending>,
    first: u32,
    count: u32,
    free: Vec<u32>,
    /// Numbers of free questions.
    free_questions: Vec<u32>,
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

fn ports(side: &LentSide) -> u32 {
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
fn fix(own: &LentSide, other: &LentSide) -> u32 {
    let fold = |sum: u64| (0..4).fold(sum, |sum, _| (sum & 0xffff) + (sum >> 16));
    let old = fold(sum(own.remote.ip()) + sum(own.local.ip()));
    let new = sum(other.remote.ip()) + sum(other.local.ip());
    u32::try_from(fold((0xffff - old) + new)).unwrap_or(0)
}

impl Lending {
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
        let asks = (QUESTIONS_MAX.min(flows_max) / workers).max(1);
        let map = |kind, name, value_bytes| {
            Map::create(MapShape { kind, name, key_bytes: 4, value_bytes, entries_max: 1 })
        };
        let lending = Self {
            buckets: Shared::new("buckets", BUCKET, buckets)?,
            flows: Shared::new("flows", FLOW, flows_max)?,
            over: Shared::new("over", 8, workers * ring)?,
            over_heads: Shared::new("over_heads", HEAD, workers)?,
            questions: Shared::new("questions", QUESTION, asks * workers)?,
            settings: map(MapKind::Array, "lending", LENDING)?,
            taken: map(MapKind::PerCpuArray, "taken", TAKEN)?,
            seed,
            mask: buckets - 1,
            share,
            ring,
            asks,
        };
        let words = [lending.mask, share, ring - 1, 0].map(u32::to_ne_bytes);
        let value = [&seed.to_ne_bytes()[..], words.as_flattened()].concat();
        lending.settings.put(&[0; 4], &value)?;
        Ok(lending)
    }

    /// Returns the maps that the programs need.
    pub(super) fn maps(&self) -> [&Map; 7] {
        let shared =
            [&self.buckets, &self.flows, &self.over, &self.over_heads, &self.questions].map(Shared::map);
        let [buckets, flows, over, over_heads, questions] = shared;
        [buckets, flows, over, over_heads, questions, &self.settings, &self.taken]
    }

    /// Returns the part of a worker, counted from 0; the last part if the number is too large. Discards what
    /// an earlier owner of the part has left in its ring.
    pub fn part(self: &Arc<Self>, worker: u32) -> LendingPart {
        let worker = worker.min(self.over_heads.bytes() as u32 / HEAD as u32 - 1);
        let (first, count) = (self.share * worker, self.share);
        let free = (first..first + count).rev().collect();
        let free_questions = (self.asks * worker..self.asks * (worker + 1)).rev().collect();
        let mut part =
            LendingPart { whole: self.clone(), first, count, free, free_questions, worker, taken: 0 };
        part.taken = self.over_heads.u32(worker as usize * HEAD).load(Acquire);
        for place in 0..self.ring {
            part.place(place).store(0, Relaxed);
        }
        part
    }

    /// Returns the offset of a side's bucket, and the upper half of its place.
    fn home(&self, side: &LentSide) -> (usize, u64) {
        let [remote, local] = [words(side.remote.ip()), words(side.local.ip())];
        let hash = remote.iter().chain(&local).fold(self.seed, |hash, word| mix(hash, *word));
        let hash = mix(hash, u64::from(ports(side)));
        ((hash as u32 & self.mask) as usize * BUCKET, hash & !u64::from(u32::MAX))
    }

    /// Returns the offset of a word of a side.
    const fn at(flow: u32, side: usize, word: usize) -> usize {
        flow as usize * FLOW + SIDES + side * SIDE + word
    }

    fn set(&self, flow: u32, side: usize, word: usize, value: u32) {
        self.flows.u32(Self::at(flow, side, word)).store(value, Relaxed);
    }

    fn read(&self, flow: u32, side: usize, word: usize) -> u32 {
        self.flows.u32(Self::at(flow, side, word)).load(Acquire)
    }

    fn write(&self, flow: u32, side: usize, own: &LentSide, other: &LentSide) {
        let double = |word, value| self.flows.u64(Self::at(flow, side, word)).store(value, Relaxed);
        let ([remote0, remote1], [local0, local1]) = (words(own.remote.ip()), words(own.local.ip()));
        for (word, value) in [(REMOTE, remote0), (REMOTE + 8, remote1), (LOCAL, local0), (LOCAL + 8, local1)]
        {
            double(word, value);
        }
        double(SENT, 1 << 32 | u64::from(own.numbers.sent));
        double(LAST_NS, 0);
        let ([a, b, c, d, e, f], [g, h, i, j, k, l]) = (own.to, own.from);
        for (number, bytes) in [[a, b, c, d], [e, f, g, h], [i, j, k, l]].into_iter().enumerate() {
            self.set(flow, side, LINK + number * 4, u32::from_ne_bytes(bytes));
        }
        let [low, high] = own.mss.to_ne_bytes();
        for (word, value) in [
            (PORTS, ports(own)),
            (ADD, own.add),
            (ACKNOWLEDGED, own.numbers.acknowledged),
            (EDGE, own.numbers.edge),
            (STAMP, own.numbers.stamp),
            (PACKETS, 0),
            (GIVEN, 0),
            (DONE, u32::MAX),
            (JOINED, 0),
            (STAMP_ADD, own.stamp_add),
            (STAMP_FIRST, own.stamp_first),
            (EGRESS, own.egress),
            (MSS, u32::from_ne_bytes([low, high, own.shift, own.shown_shift])),
            (FIX, fix(own, other)),
            (V6, u32::from(own.remote.is_ipv6())),
            (FIN, own.numbers.sent),
            (FINS, if own.finished { FIN_SEEN | FIN_ACKED } else { 0 }),
        ] {
            self.set(flow, side, word, value);
        }
    }

    /// Puts a side into its bucket, where programs find it; false if the bucket is full.
    fn place(&self, flow: u32, side: usize, own: &LentSide) -> bool {
        let (bucket, tag) = self.home(own);
        let place = tag | u64::from(flow * 2 + side as u32 + 1);
        (0..PLACES).any(|number| {
            self.buckets.u64(bucket + number * 8).compare_exchange(0, place, AcqRel, Relaxed).is_ok()
        })
    }

    /// Removes a side from its bucket.
    fn displace(&self, flow: u32, side: usize) {
        let wanted = flow * 2 + side as u32 + 1;
        let word = |word| self.flows.u64(Self::at(flow, side, word)).load(Relaxed);
        let hash = [REMOTE, REMOTE + 8, LOCAL, LOCAL + 8]
            .into_iter()
            .fold(self.seed, |hash, at| mix(hash, word(at)));
        let hash = mix(hash, u64::from(self.read(flow, side, PORTS)));
        let bucket = (hash as u32 & self.mask) as usize * BUCKET;
        for number in 0..PLACES {
            let place = self.buckets.u64(bucket + number * 8);
            // Only user space adds and removes places, so no program competes.
            if place.load(Relaxed) as u32 == wanted {
                place.store(0, Release);
            }
        }
    }
}

impl LendingPart {
    /// Returns the lowest number of a connection of this part.
    pub const fn first(&self) -> u32 {
        self.first
    }

    /// Offloads a connection (client, server); `None` if there is no room. In tc the kernel forwards nothing
    /// until [`LendingPart::done`] has told what user space sent on.
    pub fn lend(&mut self, sides: &[LentSide; 2]) -> Option<Lent> {
        self.lend_as(sides, None)
    }

    fn lend_as(&mut self, sides: &[LentSide; 2], question: Option<u32>) -> Option<Lent> {
        let flow = self.free.pop()?;
        let (at, flows) = (flow as usize * FLOW, &self.whole.flows);
        flows.u64(at + ANSWERED).store(0, Relaxed);
        flows.u32(at + QUESTION_OF).store(question.map_or(0, |number| number + 1), Relaxed);
        let [client, server] = sides;
        for (side, own, other) in [(0, client, server), (1, server, client)] {
            self.whole.write(flow, side, own, other);
        }
        self.state(flow, if question.is_some() { ASKED } else { LENT });
        let both = self.whole.place(flow, 0, client) && self.whole.place(flow, 1, server);
        if both {
            return Some(Lent(flow));
        }
        self.take_back(Lent(flow));
        self.forget(Lent(flow));
        None
    }

    fn state(&self, flow: u32, state: u32) {
        self.whole.flows.u32(flow as usize * FLOW).store(state, Release);
    }

    /// Returns the state of both sides, the client first.
    pub fn look(&self, lent: Lent) -> [Seen; 2] {
        [0, 1].map(|side| {
            let word = |word| self.whole.read(lent.0, side, word);
            let double = |word| self.whole.flows.u64(Lending::at(lent.0, side, word)).load(Acquire);
            // The program writes a FIN's number before its mark, and everything else before both: read the
            // mark first.
            let (fins, sent) = (word(FINS), double(SENT));
            Seen {
                numbers: Numbers {
                    sent: sent as u32,
                    acknowledged: word(ACKNOWLEDGED),
                    edge: word(EDGE),
                    stamp: word(STAMP),
                },
                sent,
                packets: word(PACKETS),
                given: word(GIVEN),
                joined: word(JOINED) != 0,
                fin: (fins & FIN_SEEN != 0)
                    .then(|| SeenFin { end: word(FIN), is_second: fins & FIN_SECOND != 0 }),
                last_ns: double(LAST_NS),
            }
        })
    }

    /// True if a packet came that user space has to handle: the program has left the connection to user
    /// space.
    pub fn is_returned(&self, lent: Lent) -> bool {
        let state = self.whole.flows.u32(lent.0 as usize * FLOW).load(Acquire);
        !matches!(state, LENT | ENDED | ASKED | BINDING)
    }

    fn place(&self, number: u32) -> &AtomicU64 {
        let at = self.worker * self.whole.ring + (number & (self.whole.ring - 1));
        self.whole.over.u64(at as usize * 8)
    }

    /// Returns the next connection whose sides have both closed, as seen by a program in XDP. User space may
    /// have taken it back before.
    pub fn over(&mut self) -> Option<Lent> {
        let place = self.place(self.taken);
        let found = place.load(Acquire) as u32;
        let flow = found.checked_sub(1)?;
        place.store(0, Release);
        self.taken = self.taken.wrapping_add(1);
        Some(Lent(flow))
    }

    /// Moves the kernel's copy of a side's numbers forward to `numbers`; numbers that are ahead already stay.
    /// Returns `numbers.sent` in 64 bits, counted like [`Seen::sent`].
    pub fn advance(&self, lent: Lent, side: usize, numbers: &Numbers) -> u64 {
        let sent = self.whole.flows.u64(Lending::at(lent.0, side, SENT));
        let ahead = |old: u64| {
            old.wrapping_add_signed(i64::from(numbers.sent.wrapping_sub(old as u32).cast_signed()))
        };
        let before = sent.fetch_update(AcqRel, Acquire, |old| (ahead(old) > old).then(|| ahead(old)));
        for (word, to) in [(ACKNOWLEDGED, numbers.acknowledged), (EDGE, numbers.edge)] {
            let is_after = |old: u32| to.wrapping_sub(old).cast_signed() > 0;
            let number = self.whole.flows.u32(Lending::at(lent.0, side, word));
            // It fails if the kernel is ahead, which is fine.
            let _ = number.fetch_update(AcqRel, Acquire, |old| is_after(old).then_some(to));
        }
        before.map_or_else(ahead, ahead)
    }

    /// Tells how many of the segments that were left to user space it has sent on, counted as
    /// [`Seen::given`]. Once both are equal, the kernel forwards the next segment.
    pub fn done(&self, lent: Lent, side: usize, given: u32) {
        self.whole.flows.u32(Lending::at(lent.0, side, DONE)).store(given, Release);
    }

    /// Sets [`LentSide::stamp_first`] later, when it is known.
    pub fn stamp_first(&self, lent: Lent, side: usize, stamp: u32) {
        self.whole.set(lent.0, side, STAMP_FIRST, stamp);
    }

    /// Returns the connection to user space: all packets from now on. Packets that a program is handling at
    /// this moment are still forwarded and counted.
    pub fn take_back(&self, lent: Lent) {
        let state = self.whole.flows.u32(lent.0 as usize * FLOW);
        // A program that has begun to take the SYN-ACK needs a microsecond more.
        while state.fetch_update(AcqRel, Acquire, |now| (now != BINDING).then_some(RETURNED)).is_err() {
            std::hint::spin_loop();
        }
        self.displace(lent.0);
    }

    /// Frees the connection's number, after [`LendingPart::take_back`]. Call it some milliseconds later: a
    /// program may still be handling a packet.
    pub fn forget(&mut self, lent: Lent) {
        self.close_question(lent);
        self.state(lent.0, FREE);
        self.free.push(lent.0);
    }

    fn displace(&self, flow: u32) {
        for side in [0, 1] {
            self.whole.displace(flow, side);
        }
    }

    /// Returns the ends of packets from each side: source and destination.
    pub fn ends(&self, lent: Lent) -> [(SocketAddr, SocketAddr); 2] {
        [0, 1].map(|side| {
            let word = |word| self.whole.flows.u64(Lending::at(lent.0, side, word)).load(Relaxed);
            let address = |at| {
                let [low, high] = [at, at + 8].map(|at| word(at).to_ne_bytes());
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&low);
                bytes[8..].copy_from_slice(&high);
                IpAddr::from(bytes).to_canonical()
            };
            let ports = self.whole.read(lent.0, side, PORTS);
            let (remote, local) = ((ports >> 16) as u16, ports as u16);
            (SocketAddr::new(address(REMOTE), remote), SocketAddr::new(address(LOCAL), local))
        })
    }
}

impl Drop for LendingPart {
    fn drop(&mut self) {
        let all = self.first..self.first + self.count;
        let lent = |flow: &u32| self.whole.flows.u32(*flow as usize * FLOW).load(Relaxed) != FREE;
        for flow in all.filter(lent) {
            self.displace(flow);
            self.state(flow, FREE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ENGINE, Object};
    use super::question::{
        ACKNOWLEDGES, BEHIND, CLIENT_STAMP, CLOCK, FRAME, LENGTH, NEEDS, NUMBER, OPTIONS, SCALE, SHOWN,
    };
    use super::*;

    #[test]
    fn rust_and_c_mean_the_same_layout() {
        /// The sizes, then offsets in the order of the table at the end of `bpf/engine.bpf.c`.
        const OURS: [usize; 46] = [
            FLOW,
            SIDE,
            BUCKET,
            LENDING,
            TAKEN, // sizes
            QUESTION_OF,
            ANSWERED,
            NUMBER,
            SIDES,
            REMOTE,
            LOCAL,
            PORTS,
            ADD,
            SENT,
            ACKNOWLEDGED,
            EDGE,
            STAMP,
            PACKETS,
            GIVEN,
            DONE,
            JOINED,
            STAMP_ADD,
            STAMP_FIRST,
            EGRESS,
            LINK,
            LINK + 6,
            MSS,
            MSS + 2,
            MSS + 3,
            FIX,
            V6,
            FIN,
            FINS,
            LAST_NS,
            QUESTION,
            BEHIND,
            CLOCK,
            ACKNOWLEDGES,
            SHOWN,
            CLIENT_STAMP,
            LENGTH,
            NEEDS,
            OPTIONS,
            OPTIONS + 1,
            SCALE,
            FRAME,
        ];
        let object = Object::parse(ENGINE).unwrap();
        let words = object.section("layout").unwrap().as_chunks::<4>().0;
        let theirs: Vec<usize> = words.iter().map(|word| u32::from_ne_bytes(*word) as usize).collect();
        assert_eq!(theirs, OURS);
    }
}
