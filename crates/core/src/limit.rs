//! Limits computed, not guessed: how many flows the descriptor limit allows, how many from one source, and how
//! often a repeated event may be logged. Pure: the driver says what happened and what time it is.

use crate::time::Instant;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// Descriptors one flow holds: the client's socket and the server's.
pub const DESCRIPTORS_PER_FLOW: u64 = 2;

/// Descriptors one pipe holds; a flow that is spliced in both directions borrows two pipes.
pub const DESCRIPTORS_PER_PIPE: u64 = 2;

/// How many flows may live at once, beside the pipes for `splice(2)` that are set aside; counts flows and what was shed.
///
/// Pipes are lent by each worker's own pool, within its share of [`Self::pipes`]: nothing is locked for one.
/// Shedding is a decision taken before a descriptor is used, so that `accept` never meets EMFILE and never spins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    flows: Pool,
    pipes: u64,
    /// Flows without descriptors that live now, and how many may live of both kinds.
    beside: u64,
    most: u64,
}

/// Use of one bounded resource. All counts are since the start but `live`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Most that may live at once.
    pub max: u64,
    /// Alive now.
    pub live: u64,
    /// Most that were alive at once.
    pub peak: u64,
    /// Admitted in all.
    pub admitted: u64,
    /// Refused because `max` were alive.
    pub shed: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pool(Usage);

impl Pool {
    fn new(max: u64) -> Self {
        Self(Usage { max, ..Usage::default() })
    }

    fn admit(&mut self) -> bool {
        let usage = &mut self.0;
        if usage.live >= usage.max {
            usage.shed = usage.shed.saturating_add(1);
            return false;
        }
        usage.live += 1;
        usage.peak = usage.peak.max(usage.live);
        usage.admitted = usage.admitted.saturating_add(1);
        true
    }

    fn release(&mut self) {
        debug_assert!(self.0.live > 0, "released more than was admitted");
        self.0.live = self.0.live.saturating_sub(1);
    }
}

impl Budget {
    /// Most flows whatever the descriptor limit: the kernel's own default bound of one process (`fs.nr_open`,
    /// 1,048,576 descriptors) at two a flow. RLIM_INFINITY ends here.
    pub const MAX_FLOWS: u64 = (1 << 20) / DESCRIPTORS_PER_FLOW;

    /// Most pipes that [`Self::from_nofile`] sets aside. An ordinary user may have 1,024 pipes of 64 KiB
    /// (`fs.pipe-user-pages-soft`) before the kernel shrinks them to two pages.
    pub const MAX_PIPES: u64 = 1024;

    /// The share of descriptors set aside for pipes is one in this many. Only flows that move bulk data hold a
    /// pipe; the others, and those that find the pool empty, are copied.
    const PIPE_SHARE: u64 = 32;

    /// The budget under RLIMIT_NOFILE's soft limit `nofile`, of which `reserve` descriptors stay for all that is
    /// no flow: listeners, logs, the admin interface, a second happy-eyeballs attempt in progress.
    ///
    /// May allow no flow at all; say so at start (`max` of [`Self::flows`] is 0).
    pub fn from_nofile(nofile: u64, reserve: u64) -> Self {
        let usable = nofile.saturating_sub(reserve);
        let pipes = (usable / Self::PIPE_SHARE / DESCRIPTORS_PER_PIPE).min(Self::MAX_PIPES);
        let flows = (usable - pipes * DESCRIPTORS_PER_PIPE) / DESCRIPTORS_PER_FLOW;
        Self { flows: Pool::new(flows.min(Self::MAX_FLOWS)), pipes, beside: 0, most: u64::MAX }
    }

    /// The same with at most `flows` flows, those without descriptors counted.
    #[must_use]
    pub fn at_most(self, flows: u64) -> Self {
        Self { flows: Pool::new(self.flows.0.max.min(flows)), most: flows, ..self }
    }

    /// Whether one more flow may start; if so it is counted and must be released once.
    #[must_use]
    pub fn admit(&mut self) -> bool {
        if self.flows.0.live + self.beside >= self.most {
            self.flows.0.shed = self.flows.0.shed.saturating_add(1);
            return false;
        }
        self.flows.admit()
    }

    /// Whether one more flow may start that takes no descriptor, as those of the packet engine; if so it is counted and
    /// must be released once by [`Budget::release_beside`]. Only [`Budget::at_most`] bounds these.
    #[must_use]
    pub fn admit_beside(&mut self) -> bool {
        let admitted = self.flows.0.live + self.beside < self.most;
        self.beside += u64::from(admitted);
        admitted
    }

    /// A flow without descriptors has ended.
    pub fn release_beside(&mut self) {
        debug_assert!(self.beside > 0, "released more than was admitted");
        self.beside = self.beside.saturating_sub(1);
    }

    /// Most flows of both kinds, if there is such a bound.
    pub fn most(&self) -> Option<u64> {
        Some(self.most).filter(|most| *most < u64::MAX)
    }

    /// A flow that was admitted has ended and its descriptors are closed.
    pub fn release(&mut self) {
        self.flows.release();
    }

    /// Use of flows.
    pub const fn flows(&self) -> Usage {
        self.flows.0
    }

    /// How many pipes are set aside, for all workers together.
    pub const fn pipes(&self) -> u64 {
        self.pipes
    }
}

/// A token bucket: bursts of at most `burst`, and `per_second` on average. No drift: the arithmetic is in whole
/// tokens times nanoseconds.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    burst: u32,
    per_second: u32,
    /// Tokens times [`NANOS`]; at most `burst * NANOS`.
    level: u64,
    updated: Instant,
    refused: u64,
}

/// Nanoseconds in a second.
const NANOS: u64 = 1_000_000_000;

impl TokenBucket {
    /// A full bucket of `burst` tokens (at least 1) that gains `per_second` tokens a second; 0 never refills.
    pub fn new(burst: u32, per_second: u32, now: Instant) -> Self {
        let burst = burst.max(1);
        Self { burst, per_second, level: u64::from(burst) * NANOS, updated: now, refused: 0 }
    }

    /// Takes one token if there is one, and says how many were refused since the last one taken.
    ///
    /// For a log: print on `Some(n)`, and mention `n` when it is not 0; stay silent on `None`.
    pub fn take(&mut self, now: Instant) -> Option<u64> {
        self.refill(now);
        if self.level < NANOS {
            self.refused = self.refused.saturating_add(1);
            return None;
        }
        self.level -= NANOS;
        Some(std::mem::take(&mut self.refused))
    }

    /// When the next token is there; `None` if there is one now or there never will be.
    pub fn deadline(&self) -> Option<Instant> {
        if self.level >= NANOS || self.per_second == 0 {
            return None;
        }
        let nanos = (NANOS - self.level).div_ceil(u64::from(self.per_second));
        Some(self.updated + Duration::from_nanos(nanos))
    }

    fn refill(&mut self, now: Instant) {
        let nanos = u64::try_from(now.since(self.updated).as_nanos()).unwrap_or(u64::MAX);
        let gained = nanos.saturating_mul(u64::from(self.per_second));
        self.level = self.level.saturating_add(gained).min(u64::from(self.burst) * NANOS);
        self.updated = self.updated.max(now);
    }
}

/// Live flows per source address, in a table of bounded size.
///
/// An IPv6 source is its /64: one host has that many addresses at will.
#[derive(Clone, Debug)]
pub struct SourceLimit {
    per_source: u32,
    capacity: usize,
    live: BTreeMap<IpAddr, u32>,
    shed: u64,
}

impl SourceLimit {
    /// At most `per_source` live flows of one source, and `capacity` sources at once. A flow of a source beyond
    /// that is refused: a table that forgot a source instead would let it start over.
    pub fn new(per_source: u32, capacity: usize) -> Self {
        Self { per_source, capacity, live: BTreeMap::new(), shed: 0 }
    }

    /// Whether one more flow from `source` may start; if so it is counted and must be released once.
    #[must_use]
    pub fn admit(&mut self, source: IpAddr) -> bool {
        let source = source_key(source);
        let live = self.live.get(&source).copied().unwrap_or(0);
        if live >= self.per_source || (live == 0 && self.live.len() >= self.capacity) {
            self.shed = self.shed.saturating_add(1);
            return false;
        }
        self.live.insert(source, live + 1);
        true
    }

    /// A flow from `source` that was admitted has ended.
    pub fn release(&mut self, source: IpAddr) {
        let source = source_key(source);
        match self.live.get_mut(&source) {
            Some(live) if *live > 1 => *live -= 1,
            Some(_) => drop(self.live.remove(&source)),
            None => debug_assert!(false, "released a source that was not admitted"),
        }
    }

    /// Live flows from `source` (or its /64).
    pub fn live(&self, source: IpAddr) -> u32 {
        self.live.get(&source_key(source)).copied().unwrap_or(0)
    }

    /// Sources with at least one live flow; never above the capacity.
    pub fn sources(&self) -> usize {
        self.live.len()
    }

    /// Flows refused since the start.
    pub const fn shed(&self) -> u64 {
        self.shed
    }
}

/// Places for those that wait, in a bounded number: where all are taken, the one who waits longest leaves for the new one.
///
/// A stranger who takes many places so pushes out his own, and one that is quick is never pushed out.
#[derive(Clone, Debug)]
pub struct OldestFirst<T> {
    most: usize,
    next: u64,
    waiting: BTreeMap<u64, T>,
    left: u64,
}

impl<T> OldestFirst<T> {
    /// At most `most` places, at least one.
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), next: 0, waiting: BTreeMap::new(), left: 0 }
    }

    /// Takes a place: its number, and who had to leave for it.
    pub fn enter(&mut self, who: T) -> (u64, Option<T>) {
        let oldest = if self.waiting.len() >= self.most { self.waiting.pop_first() } else { None };
        self.left += u64::from(oldest.is_some());
        let number = self.next;
        self.next += 1;
        self.waiting.insert(number, who);
        (number, oldest.map(|(_, who)| who))
    }

    /// Gives a place back; nothing happens if its owner had to leave before.
    pub fn leave(&mut self, number: u64) {
        self.waiting.remove(&number);
    }

    /// Those that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Most that may wait.
    pub const fn most(&self) -> usize {
        self.most
    }

    /// Those that had to leave, since the start.
    pub const fn left(&self) -> u64 {
        self.left
    }
}

/// What counts as one source: an IPv4 address, or the /64 of an IPv6 one; never an IPv4-mapped address.
fn source_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}
