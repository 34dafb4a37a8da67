//! Link state: every node tells all others which links it has. Memberships of groups travel the same way
//! ([`super::group`]).
//!
//! Each node signs a record that lists its own links, and floods it to all neighbours. A node retransmits a record
//! until the neighbour has acknowledged it (after OSPF, RFC 2328 Sec. 13). Of each origin, the record with the
//! highest sequence counts.
//!
//! A malicious node can only give wrong information about its own links, at most once per
//! [`Config::accept_interval`]. A link counts only if both of its ends list it ([`super::route`]).

use super::frame::{LinkEntry, Record};
use super::{Keys, NODES_MAX, NodeId, Signature};
use crate::time::Instant;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Identity of this node, and times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// This node.
    pub own: NodeId,
    /// All nodes whose records are accepted, this node included. Only the first [`NODES_MAX`] are used.
    pub members: BTreeSet<NodeId>,
    /// Sequence of the first record. It must rise over restarts, so a good choice is the wall clock. If another node
    /// still has a higher sequence of this node, this node continues above it.
    pub first_sequence: u64,
    /// This node sends a new record after this time, even if nothing has changed. Default: 30 s.
    pub refresh: Duration,
    /// A record that was not renewed for this time expires. Must be more than twice `refresh`. Default: 100 s.
    pub max_age: Duration,
    /// A record is sent again if the neighbour has not acknowledged it after this time. Default: 200 ms.
    pub retransmit: Duration,
    /// Shortest time between two records of this node. Default: 50 ms.
    pub originate_interval: Duration,
    /// Average shortest time between two accepted records of one origin. [`ACCEPT_BURST`] are accepted at once.
    /// Default: 25 ms.
    pub accept_interval: Duration,
}

/// The number of records of one origin that are accepted at once.
pub const ACCEPT_BURST: u32 = 16;

impl Config {
    /// Makes a configuration with the default times.
    pub fn new(own: NodeId, members: BTreeSet<NodeId>, first_sequence: u64) -> Self {
        let members = members.into_iter().take(NODES_MAX).collect();
        Self {
            own,
            members,
            first_sequence,
            refresh: Duration::from_secs(30),
            max_age: Duration::from_secs(100),
            retransmit: Duration::from_millis(200),
            originate_interval: Duration::from_millis(50),
            accept_interval: Duration::from_millis(25),
        }
    }
}

/// What a node says of itself and all others shall know: a list of entries, numbered and signed by its origin.
pub trait Statement: Clone {
    /// What the list consists of. Of two statements with the same sequence, the one with the greater list counts.
    type Entry: Clone + Ord;

    /// Most entries of a statement.
    const ENTRIES_MAX: usize;

    /// Makes a statement without a signature.
    fn unsigned(origin: NodeId, sequence: u64, entries: Vec<Self::Entry>) -> Self;

    /// Returns the node that makes the statement.
    fn origin(&self) -> NodeId;

    /// Returns the number of the statement. It rises with each statement of this origin, also over restarts.
    fn sequence(&self) -> u64;

    /// Returns the list.
    fn entries(&self) -> &Vec<Self::Entry>;

    /// Returns the bytes that the origin signs.
    fn signed_bytes(&self) -> Vec<u8>;

    /// Returns the place of the signature.
    fn signature_mut(&mut self) -> &mut Signature;

    /// Returns the signature.
    fn signature(&self) -> &Signature;
}

impl Statement for Record {
    type Entry = LinkEntry;

    const ENTRIES_MAX: usize = NODES_MAX;

    fn unsigned(origin: NodeId, sequence: u64, links: Vec<LinkEntry>) -> Self {
        Self { origin, sequence, links, signature: Signature::NONE }
    }

    fn origin(&self) -> NodeId {
        self.origin
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }

    fn entries(&self) -> &Vec<LinkEntry> {
        &self.links
    }

    fn signed_bytes(&self) -> Vec<u8> {
        self.signed_bytes()
    }

    fn signature_mut(&mut self) -> &mut Signature {
        &mut self.signature
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }
}

/// An event that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input<S: Statement = Record> {
    /// The link to this neighbour came up. The neighbour gets all known records.
    NeighbourUp(NodeId),
    /// The link to this neighbour went down.
    NeighbourDown(NodeId),
    /// A record arrived.
    Record {
        /// The neighbour that sent it.
        from: NodeId,
        /// The record; its signature is not verified yet.
        record: S,
    },
    /// A neighbour has acknowledged this record, or a newer one of the same origin.
    Ack {
        /// The neighbour.
        from: NodeId,
        /// The node that made the record.
        origin: NodeId,
        /// The sequence of the record.
        sequence: u64,
    },
    /// The list of this node: its links, ordered by neighbour.
    Own(Vec<S::Entry>),
    /// This process did not run for this time, or its clock jumped. Records do not age in this time. Otherwise all
    /// routes would expire until the next refresh.
    Away(Duration),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to do or to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output<S = Record> {
    /// Send a record to a neighbour.
    Send(NodeId, Arc<S>),
    /// Acknowledge a record to a neighbour.
    Ack {
        /// The neighbour.
        to: NodeId,
        /// The node that made the record.
        origin: NodeId,
        /// The sequence of the record.
        sequence: u64,
    },
    /// The set of valid records has changed.
    Changed,
}

/// How many records were dropped, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Records with an invalid signature.
    pub forged: u64,
    /// Records of nodes that are not members.
    pub strangers: u64,
    /// Records that arrived too fast.
    pub too_fast: u64,
}

/// A stored record.
#[derive(Clone, Debug)]
struct Held<S> {
    record: Arc<S>,
    since: Instant,
    /// The record has expired. It is kept for its sequence only.
    expired: bool,
    /// How many more records of this origin are accepted now.
    leave: u32,
    leave_since: Instant,
}

/// The records of all nodes, and which neighbours have not acknowledged which records yet.
#[derive(Clone, Debug)]
pub struct Disseminator<S: Statement = Record> {
    config: Config,
    held: BTreeMap<NodeId, Held<S>>,
    neighbours: BTreeSet<NodeId>,
    /// (neighbour, origin): when to send the record of that origin (again).
    unacknowledged: BTreeMap<(NodeId, NodeId), Instant>,
    /// The list of this node.
    entries: Vec<S::Entry>,
    sequence: u64,
    originated: Option<Instant>,
    /// The list has changed since the last record of this node.
    stale: bool,
    drops: Drops,
    outputs: VecDeque<Output<S>>,
}

impl<S: Statement> Disseminator<S> {
    /// Makes a disseminator without records and with an empty list.
    pub fn new(config: Config) -> Self {
        let sequence = config.first_sequence;
        Self {
            config,
            held: BTreeMap::new(),
            neighbours: BTreeSet::new(),
            unacknowledged: BTreeMap::new(),
            entries: Vec::new(),
            sequence,
            originated: None,
            stale: false,
            drops: Drops::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Returns the records that have not expired.
    pub fn records(&self) -> impl Iterator<Item = &S> {
        self.held.values().filter(|held| !held.expired).map(|held| &*held.record)
    }

    /// Returns the sequence of this node's latest record.
    pub fn own_sequence(&self) -> Option<u64> {
        self.held.get(&self.config.own).map(|held| held.record.sequence())
    }

    /// Returns how many records were dropped so far.
    pub fn drops(&self) -> Drops {
        self.drops
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input<S>, keys: &impl Keys) {
        match input {
            Input::NeighbourUp(neighbour) => {
                self.neighbours.insert(neighbour);
                let known: Vec<_> =
                    self.held.iter().filter(|(_, held)| !held.expired).map(|(origin, _)| *origin).collect();
                for origin in known {
                    self.send(now, neighbour, origin);
                }
            }
            Input::NeighbourDown(neighbour) => {
                self.neighbours.remove(&neighbour);
                self.unacknowledged.retain(|(to, _), _| *to != neighbour);
            }
            Input::Record { from, record } => self.record(now, from, record, keys),
            Input::Ack { from, origin, sequence } => self.acknowledged(from, origin, sequence),
            Input::Own(entries) => {
                self.stale |= self.entries != entries;
                self.entries = entries;
            }
            Input::Away(time) => self.held.values_mut().for_each(|held| held.since = held.since + time),
            Input::Tick => self.tick(now),
        }
        self.originate_if_due(now, keys);
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output<S>> {
        self.outputs.pop_front()
    }

    /// When to call `handle(now, Input::Tick)`.
    pub fn deadline(&self) -> Option<Instant> {
        let again = self.unacknowledged.values().min().copied();
        let own = self
            .originated
            .map(|at| at + if self.stale { self.config.originate_interval } else { self.config.refresh });
        let others = self.held.iter().filter(|(origin, held)| !held.expired && **origin != self.config.own);
        let expiry = others.map(|(_, held)| held.since + self.config.max_age).min();
        [again, own, expiry].into_iter().flatten().min()
    }

    fn send(&mut self, now: Instant, to: NodeId, origin: NodeId) {
        if let Some(held) = self.held.get(&origin) {
            self.outputs.push_back(Output::Send(to, held.record.clone()));
            self.unacknowledged.insert((to, origin), now + self.config.retransmit);
        }
    }

    fn flood(&mut self, now: Instant, origin: NodeId, except: Option<NodeId>) {
        let to: Vec<_> = self.neighbours.iter().copied().filter(|to| Some(*to) != except).collect();
        for to in to {
            self.send(now, to, origin);
        }
    }

    fn acknowledged(&mut self, from: NodeId, origin: NodeId, sequence: u64) {
        if self.held.get(&origin).is_some_and(|held| held.record.sequence() <= sequence) {
            self.unacknowledged.remove(&(from, origin));
        }
    }

    fn record(&mut self, now: Instant, from: NodeId, record: S, keys: &impl Keys) {
        let (origin, sequence) = (record.origin(), record.sequence());
        if !self.neighbours.contains(&from) {
            return;
        }
        if !self.config.members.contains(&origin) {
            self.drops.strangers += 1;
            return;
        }
        // A node that lost its sequence in a crash may use one twice. Every node then prefers the record with the
        // greater list, so all agree. The origin itself soon sends a higher sequence.
        let known = self.held.get(&origin).map(|held| (held.record.sequence(), held.record.entries()));
        let order = known.map_or(Ordering::Less, |known| known.cmp(&(sequence, record.entries())));
        if order != Ordering::Less {
            self.old_record(now, from, origin, sequence, order == Ordering::Greater);
            return;
        }
        // Check the rate before the signature, so that a flood of records does not cost a verification each.
        if origin != self.config.own && !self.may_accept(now, origin) {
            self.drops.too_fast += 1;
            return;
        }
        if !keys.verify(origin, &record.signed_bytes(), record.signature()) {
            self.drops.forged += 1;
            return;
        }
        // The record is new and its signature is valid: acknowledge it before the cases below.
        self.outputs.push_back(Output::Ack { to: from, origin, sequence });
        if origin == self.config.own {
            // This is a record of this node from before a restart: continue with a higher sequence.
            self.sequence = self.sequence.max(sequence.saturating_add(1));
            self.stale = true;
            self.originated = None;
            return;
        }
        let is_new = |held: &Held<S>| held.expired || held.record.entries() != record.entries();
        let changed = self.held.get(&origin).is_none_or(is_new);
        let (leave, leave_since) =
            self.held.get(&origin).map_or((ACCEPT_BURST, now), |held| (held.leave, held.leave_since));
        let held = Held {
            record: Arc::new(record),
            since: now,
            expired: false,
            leave: leave.saturating_sub(1),
            leave_since,
        };
        self.held.insert(origin, held);
        self.unacknowledged.remove(&(from, origin));
        self.flood(now, origin, Some(from));
        if changed {
            self.outputs.push_back(Output::Changed);
        }
    }

    /// Handles a record that is not newer than the stored one. If the stored one is newer, the sender needs it.
    fn old_record(&mut self, now: Instant, from: NodeId, origin: NodeId, sequence: u64, ours_is_newer: bool) {
        if !ours_is_newer {
            self.acknowledged(from, origin, sequence);
        }
        self.outputs.push_back(Output::Ack { to: from, origin, sequence });
        let expired = self.held.get(&origin).is_some_and(|held| held.expired);
        if ours_is_newer && !expired && !self.unacknowledged.contains_key(&(from, origin)) {
            self.send(now, from, origin);
        }
    }

    /// Whether the rate limit allows one more record of this origin now.
    fn may_accept(&mut self, now: Instant, origin: NodeId) -> bool {
        let interval = self.config.accept_interval.max(Duration::from_millis(1));
        let Some(held) = self.held.get_mut(&origin) else { return true };
        let more = now.since(held.leave_since).as_nanos() / interval.as_nanos();
        if more > 0 {
            let more = u32::try_from(more).unwrap_or(u32::MAX);
            held.leave = held.leave.saturating_add(more).min(ACCEPT_BURST);
            held.leave_since = now;
        }
        held.leave > 0
    }

    fn tick(&mut self, now: Instant) {
        let due: Vec<_> =
            self.unacknowledged.iter().filter(|(_, at)| **at <= now).map(|(key, _)| *key).collect();
        for (to, origin) in due {
            self.send(now, to, origin);
        }
        let mut changed = false;
        for (origin, held) in &mut self.held {
            if *origin != self.config.own && !held.expired && held.since + self.config.max_age <= now {
                held.expired = true;
                changed = true;
            }
        }
        if changed {
            let held = &self.held;
            self.unacknowledged.retain(|(_, origin), _| held.get(origin).is_some_and(|held| !held.expired));
            self.outputs.push_back(Output::Changed);
        }
    }

    fn originate_if_due(&mut self, now: Instant, keys: &impl Keys) {
        let due = match self.originated {
            None => true,
            Some(at) if self.stale => at + self.config.originate_interval <= now,
            Some(at) => at + self.config.refresh <= now,
        };
        if !due {
            return;
        }
        let own = self.config.own;
        let entries = self.entries.iter().take(S::ENTRIES_MAX).cloned().collect();
        let mut record = S::unsigned(own, self.sequence, entries);
        *record.signature_mut() = keys.sign(&record.signed_bytes());
        self.sequence = self.sequence.saturating_add(1);
        (self.originated, self.stale) = (Some(now), false);
        let changed = self.held.get(&own).is_none_or(|held| held.record.entries() != record.entries());
        let held = Held { record: Arc::new(record), since: now, expired: false, leave: 0, leave_since: now };
        self.held.insert(own, held);
        self.flood(now, own, None);
        if changed {
            self.outputs.push_back(Output::Changed);
        }
    }
}
