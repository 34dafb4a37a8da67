//! Computed limits: how many flows the descriptor limit allows, how many from one source, and how often a repeated
//! event may be logged. Pure: the driver reports the events and the time.

use crate::time::Instant;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// Descriptors of one flow: the client's socket and the server's.
pub const DESCRIPTORS_PER_FLOW: u64 = 2;

/// Descriptors of one pipe. A flow that is spliced in both directions borrows two pipes.
pub const DESCRIPTORS_PER_PIPE: u64 = 2;

/// How many flows may exist at once, apart from the pipes for `splice(2)` that are reserved. Counts live and refused
/// flows.
///
/// Each worker has its own pool of pipes, with a share of [`Self::pipes`], so pipes need no lock. A flow is refused
/// before it uses a descriptor. So `accept` never meets EMFILE, and never spins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    flows: Pool,
    pipes: u64,
    /// Live flows without descriptors.
    beside: u64,
    /// Live flows with one descriptor: UDP associations.
    singles: u64,
    /// Descriptors that live flows without their own share.
    shared: u64,
    /// The most flows of all kinds.
    most: u64,
}

/// Use of one limited resource. All counts except `live` are totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Most that may exist at once.
    pub max: u64,
    /// Existing now.
    pub live: u64,
    /// The highest value of `live`.
    pub peak: u64,
    /// Admitted in total.
    pub admitted: u64,
    /// Refused because `max` existed.
    pub shed: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pool(Usage);

impl Pool {
    fn new(max: u64) -> Self {
        Self(Usage { max, ..Usage::default() })
    }

    /// `singles`: descriptors that other flows use.
    fn admit(&mut self, singles: u64) -> bool {
        let usage = &mut self.0;
        if usage.live + singles.div_ceil(DESCRIPTORS_PER_FLOW) >= usage.max {
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
    /// Most flows, whatever the descriptor limit is. It comes from the kernel's default limit of one process
    /// (`fs.nr_open`, 1,048,576 descriptors), with two descriptors per flow. RLIM_INFINITY is reduced to this.
    pub const MAX_FLOWS: u64 = (1 << 20) / DESCRIPTORS_PER_FLOW;

    /// Most pipes that [`Self::from_nofile`] reserves. An ordinary user may have 1,024 pipes of 64 KiB
    /// (`fs.pipe-user-pages-soft`). Beyond that, the kernel shrinks them to two pages.
    pub const MAX_PIPES: u64 = 1024;

    /// One in this number of descriptors is reserved for pipes. Only flows that move bulk data hold a pipe. The bytes
    /// of other flows, and of flows that find the pool empty, are copied.
    const PIPE_SHARE: u64 = 32;

    /// Makes the budget for the soft limit `nofile` of RLIMIT_NOFILE. `reserve` descriptors stay for everything else:
    /// listeners, logs, the admin interface, a second happy-eyeballs attempt.
    ///
    /// The budget may allow no flow at all. Report that at the start (`max` of [`Self::flows`] is 0).
    pub fn from_nofile(nofile: u64, reserve: u64) -> Self {
        let usable = nofile.saturating_sub(reserve);
        let pipes = (usable / Self::PIPE_SHARE / DESCRIPTORS_PER_PIPE).min(Self::MAX_PIPES);
        let flows = (usable - pipes * DESCRIPTORS_PER_PIPE) / DESCRIPTORS_PER_FLOW;
        Self {
            flows: Pool::new(flows.min(Self::MAX_FLOWS)),
            pipes,
            beside: 0,
            singles: 0,
            shared: 0,
            most: u64::MAX,
        }
    }

    /// Returns the same budget with at most `flows` flows, including those without descriptors.
    #[must_use]
    pub fn at_most(self, flows: u64) -> Self {
        Self { flows: Pool::new(self.flows.0.max.min(flows)), most: flows, ..self }
    }

    /// Whether one more flow may start. If so, it is counted, and must be released once.
    #[must_use]
    pub fn admit(&mut self) -> bool {
        if self.flows.0.live + self.beside + self.singles >= self.most {
            self.flows.0.shed = self.flows.0.shed.saturating_add(1);
            return false;
        }
        self.flows.admit(self.singles + self.shared)
    }

    /// Whether one more flow with one descriptor may start: a UDP association. If so, it is counted, and must be released
    /// once with [`Budget::release_single`]. These flows get at most half of the descriptors, so that they leave the other
    /// half to connections.
    #[must_use]
    pub fn admit_single(&mut self) -> bool {
        let usage = &mut self.flows.0;
        let descriptors = usage.live * DESCRIPTORS_PER_FLOW + self.singles + self.shared + 1;
        let is_full = self.singles + self.shared >= usage.max
            || descriptors > usage.max * DESCRIPTORS_PER_FLOW
            || usage.live + self.beside + self.singles >= self.most;
        if is_full {
            usage.shed = usage.shed.saturating_add(1);
            return false;
        }
        self.singles += 1;
        usage.admitted = usage.admitted.saturating_add(1);
        true
    }

    /// Notes that a flow with one descriptor has ended.
    pub fn release_single(&mut self) {
        debug_assert!(self.singles > 0, "released more than was admitted");
        self.singles = self.singles.saturating_sub(1);
    }

    /// Notes that other flows will share the descriptor of a flow with one. It is a flow without descriptors from now on, and its
    /// descriptor must be released by itself, with [`Budget::release_shared`].
    pub fn share_single(&mut self) {
        self.release_single();
        self.beside += 1;
        self.shared += 1;
    }

    /// As [`Budget::share_single`], for a flow with two descriptors, which are released one by one.
    pub fn share(&mut self) {
        self.release();
        self.beside += 1;
        self.shared += DESCRIPTORS_PER_FLOW;
    }

    /// Notes that a descriptor is closed that flows have shared.
    pub fn release_shared(&mut self) {
        debug_assert!(self.shared > 0, "released more than was shared");
        self.shared = self.shared.saturating_sub(1);
    }

    /// Counts one more flow although the bound is reached, since another one was told to leave for it. Must be released
    /// once. There are more flows than [`Usage::max`] until the other one has left.
    pub fn admit_for_one_that_leaves(&mut self) {
        let usage = &mut self.flows.0;
        usage.live += 1;
        usage.peak = usage.peak.max(usage.live);
        usage.admitted = usage.admitted.saturating_add(1);
        usage.shed = usage.shed.saturating_sub(1);
    }

    /// Whether one more flow without descriptors may start, such as those of the packet engine. If so, it is counted,
    /// and must be released once with [`Budget::release_beside`]. Only [`Budget::at_most`] limits these flows.
    #[must_use]
    pub fn admit_beside(&mut self) -> bool {
        let admitted = self.flows.0.live + self.beside + self.singles < self.most;
        self.beside += u64::from(admitted);
        admitted
    }

    /// Counts one more flow without descriptors although the bound is reached, since another one was told to leave for
    /// it. Must be released once. There are more flows than the bound until the other one has left.
    pub fn admit_beside_for_one_that_leaves(&mut self) {
        self.beside += 1;
    }

    /// Returns how many flows without descriptors there are.
    pub const fn beside(&self) -> u64 {
        self.beside
    }

    /// Notes that a flow without descriptors has ended.
    pub fn release_beside(&mut self) {
        debug_assert!(self.beside > 0, "released more than was admitted");
        self.beside = self.beside.saturating_sub(1);
    }

    /// Returns the most flows of both kinds, if there is such a limit.
    pub fn most(&self) -> Option<u64> {
        Some(self.most).filter(|most| *most < u64::MAX)
    }

    /// Notes that an admitted flow has ended, and that its descriptors are closed.
    pub fn release(&mut self) {
        self.flows.release();
    }

    /// Returns the use of flows.
    pub const fn flows(&self) -> Usage {
        self.flows.0
    }

    /// Returns the same budget with at most `pipes` pipes.
    #[must_use]
    pub fn pipes_at_most(self, pipes: u64) -> Self {
        Self { pipes: self.pipes.min(pipes), ..self }
    }

    /// Returns how many pipes are reserved, for all workers together.
    pub const fn pipes(&self) -> u64 {
        self.pipes
    }
}

/// Why one more flow is not allowed, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lack {
    /// There is no room. It is allowed if another flow leaves.
    Room(String),
    /// The client has its share.
    Share(String),
    /// Memory is short: no flow may begin, and none has to leave.
    Memory(String),
}

impl Lack {
    /// Returns the words.
    pub fn words(self) -> String {
        match self {
            Self::Room(words) | Self::Share(words) | Self::Memory(words) => words,
        }
    }
}

/// A token bucket: bursts of at most `burst`, and `per_second` on average. It computes with whole tokens times
/// nanoseconds, so it does not drift.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    burst: u32,
    per_second: u32,
    /// Tokens times [`NANOS`]. At most `burst * NANOS`.
    level: u64,
    updated: Instant,
    refused: u64,
}

/// Nanoseconds in a second.
const NANOS: u64 = 1_000_000_000;

impl TokenBucket {
    /// Makes a full bucket of `burst` tokens (at least 1) that gains `per_second` tokens per second. With 0 it is
    /// never refilled.
    pub fn new(burst: u32, per_second: u32, now: Instant) -> Self {
        let burst = burst.max(1);
        Self { burst, per_second, level: u64::from(burst) * NANOS, updated: now, refused: 0 }
    }

    /// Takes one token, if there is one. Returns how many requests were refused since the last token was taken.
    ///
    /// For a log: on `Some(n)`, print the message, and mention `n` if it is not 0. On `None`, print nothing.
    pub fn take(&mut self, now: Instant) -> Option<u64> {
        self.refill(now);
        if self.level < NANOS {
            self.refused = self.refused.saturating_add(1);
            return None;
        }
        self.level -= NANOS;
        Some(std::mem::take(&mut self.refused))
    }

    /// Returns when the next token is available. `None` if one is available now, or if there will never be one.
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

/// Live flows per source address, in a table of limited size.
///
/// An IPv6 source is its /64, because one host can use all its addresses.
#[derive(Clone, Debug)]
pub struct SourceLimit {
    per_source: u32,
    capacity: usize,
    live: BTreeMap<IpAddr, u32>,
    shed: u64,
}

impl SourceLimit {
    /// Allows at most `per_source` live flows of one source, and `capacity` sources at once. A flow of a further
    /// source is refused. If the table forgot a source instead, that source could start over.
    pub fn new(per_source: u32, capacity: usize) -> Self {
        Self { per_source, capacity, live: BTreeMap::new(), shed: 0 }
    }

    /// Whether one more flow from `source` may start. If so, it is counted, and must be released once.
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

    /// Notes that an admitted flow from `source` has ended.
    pub fn release(&mut self, source: IpAddr) {
        let source = source_key(source);
        match self.live.get_mut(&source) {
            Some(live) if *live > 1 => *live -= 1,
            Some(_) => drop(self.live.remove(&source)),
            None => debug_assert!(false, "released a source that was not admitted"),
        }
    }

    /// Returns the number of live flows from `source` (or its /64).
    pub fn live(&self, source: IpAddr) -> u32 {
        self.live.get(&source_key(source)).copied().unwrap_or(0)
    }

    /// Returns the number of sources with at least one live flow. Never above the capacity.
    pub fn sources(&self) -> usize {
        self.live.len()
    }

    /// Returns the number of flows refused since the start.
    pub const fn shed(&self) -> u64 {
        self.shed
    }
}

/// A limited number of slots for waiting clients. If all are taken, the client that has waited longest leaves for the
/// new one.
///
/// So an attacker that takes many slots pushes out its own clients, and a quick client is not pushed out.
#[derive(Clone, Debug)]
pub struct OldestFirst<T> {
    most: usize,
    next: u64,
    waiting: BTreeMap<u64, T>,
    left: u64,
}

impl<T> OldestFirst<T> {
    /// Makes at most `most` slots, but at least one.
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), next: 0, waiting: BTreeMap::new(), left: 0 }
    }

    /// Takes a slot. Returns its number, and the client that had to leave.
    pub fn enter(&mut self, who: T) -> (u64, Option<T>) {
        let oldest = if self.waiting.len() >= self.most { self.waiting.pop_first() } else { None };
        self.left += u64::from(oldest.is_some());
        let number = self.next;
        self.next += 1;
        self.waiting.insert(number, who);
        (number, oldest.map(|(_, who)| who))
    }

    /// Frees the slot of the client that waits longest, for a client that needs none here. None if no client waits.
    pub fn leave_oldest(&mut self) -> Option<T> {
        let (_, oldest) = self.waiting.pop_first()?;
        self.left += 1;
        Some(oldest)
    }

    /// Releases a slot. Does nothing if its client had to leave before.
    pub fn leave(&mut self, number: u64) {
        self.waiting.remove(&number);
    }

    /// Returns the number of waiting clients.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there are no waiting clients.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the number of slots.
    pub const fn most(&self) -> usize {
        self.most
    }

    /// Returns how many clients had to leave since the start.
    pub const fn left(&self) -> u64 {
        self.left
    }
}

/// Returns the key of a source: an IPv4 address, or the /64 of an IPv6 address. Never an IPv4-mapped address.
pub fn source_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}
