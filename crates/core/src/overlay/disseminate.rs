//! Link state: every node tells all others which links it has.
//!
//! A record is signed by the node whose links it lists, flooded to every neighbour, and sent again until the neighbour has
//! acknowledged it (after OSPF, RFC 2328 Sec. 13). The newest sequence of each origin counts. A node that lies can say
//! wrong things about its own links only, no faster than [`Config::accept_interval`], and two ends must agree
//! before a link counts ([`super::route`]).

use super::frame::{LinkEntry, Record};
use super::{Keys, NODES_MAX, NodeId, Signature};
use crate::time::Instant;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Who we are and how often things happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Ourselves.
    pub own: NodeId,
    /// All nodes that may have records, ourselves included; the first [`NODES_MAX`] count.
    pub members: BTreeSet<NodeId>,
    /// Sequence of our first record. To rise over restarts: the wall clock, say. What others remember of us
    /// is outbid in any case.
    pub first_sequence: u64,
    /// Our record is sent anew after so long, changed or not.
    pub refresh: Duration,
    /// What was not renewed for so long counts no more. More than twice `refresh`.
    pub max_age: Duration,
    /// A record that a neighbour has not acknowledged is sent again after so long.
    pub retransmit: Duration,
    /// Least time between two records of ours.
    pub originate_interval: Duration,
    /// A record of one origin is accepted so often on average, [`ACCEPT_BURST`] at once.
    pub accept_interval: Duration,
}

/// Records of one origin that are accepted at once.
pub const ACCEPT_BURST: u32 = 16;

impl Config {
    /// The usual times.
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

/// What the driver tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// This neighbour is there: it gets all we know.
    NeighbourUp(NodeId),
    /// This neighbour is gone.
    NeighbourDown(NodeId),
    /// A record came.
    Record {
        /// From this neighbour.
        from: NodeId,
        /// Not verified yet.
        record: Record,
    },
    /// A neighbour knows this record, or a newer one of its origin.
    Ack {
        /// This neighbour.
        from: NodeId,
        /// Whose record.
        origin: NodeId,
        /// Which.
        sequence: u64,
    },
    /// Our own links, by neighbour, rising.
    Links(Vec<LinkEntry>),
    /// We slept for so long, or our clock leapt: what others would have renewed meanwhile is as old as it was when we were
    /// last awake. Else a leap would take all routes away until the next refresh.
    Away(Duration),
    /// The deadline may have passed.
    Tick,
}

/// What the driver is to do or know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a record to a neighbour.
    Send(NodeId, Arc<Record>),
    /// Acknowledge a record to a neighbour.
    Ack {
        /// To this one.
        to: NodeId,
        /// Whose record.
        origin: NodeId,
        /// Which.
        sequence: u64,
    },
    /// The records that count are others than before.
    Changed,
}

/// What was dropped, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// Records whose signature does not fit.
    pub forged: u64,
    /// Records of nodes that are no members.
    pub strangers: u64,
    /// Records that came too fast.
    pub too_fast: u64,
}

/// A record as it is held.
#[derive(Clone, Debug)]
struct Held {
    record: Arc<Record>,
    since: Instant,
    /// Too old: only its sequence still counts.
    expired: bool,
    /// How many more are accepted now, and since when.
    leave: u32,
    leave_since: Instant,
}

/// The records of all nodes, and what each neighbour still has to be told.
#[derive(Clone, Debug)]
pub struct Disseminator {
    config: Config,
    held: BTreeMap<NodeId, Held>,
    neighbours: BTreeSet<NodeId>,
    /// (neighbour, origin): when to send it (again).
    unacknowledged: BTreeMap<(NodeId, NodeId), Instant>,
    links: Vec<LinkEntry>,
    sequence: u64,
    originated: Option<Instant>,
    /// Our links have changed since our last record.
    stale: bool,
    drops: Drops,
    outputs: VecDeque<Output>,
}

impl Disseminator {
    /// Nothing is known, and we have no links.
    pub fn new(config: Config) -> Self {
        let sequence = config.first_sequence;
        Self {
            config,
            held: BTreeMap::new(),
            neighbours: BTreeSet::new(),
            unacknowledged: BTreeMap::new(),
            links: Vec::new(),
            sequence,
            originated: None,
            stale: false,
            drops: Drops::default(),
            outputs: VecDeque::new(),
        }
    }

    /// The records that count.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.held.values().filter(|held| !held.expired).map(|held| &*held.record)
    }

    /// What was dropped so far.
    pub fn drops(&self) -> Drops {
        self.drops
    }

    /// Tells one event.
    pub fn handle(&mut self, now: Instant, input: Input, keys: &impl Keys) {
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
            Input::Links(links) => {
                self.stale |= self.links != links;
                self.links = links;
            }
            Input::Away(time) => self.held.values_mut().for_each(|held| held.since = held.since + time),
            Input::Tick => self.tick(now),
        }
        self.originate_if_due(now, keys);
    }

    /// What to do next.
    pub fn poll(&mut self) -> Option<Output> {
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
        if self.held.get(&origin).is_some_and(|held| held.record.sequence <= sequence) {
            self.unacknowledged.remove(&(from, origin));
        }
    }

    fn record(&mut self, now: Instant, from: NodeId, record: Record, keys: &impl Keys) {
        let (origin, sequence) = (record.origin, record.sequence);
        if !self.neighbours.contains(&from) {
            return;
        }
        if !self.config.members.contains(&origin) {
            self.drops.strangers += 1;
            return;
        }
        // A node that forgot its sequences in a crash may use one twice: the greater list of links wins everywhere, and
        // the node itself outbids both.
        let known = self.held.get(&origin).map(|held| (held.record.sequence, &held.record.links));
        let order = known.map_or(Ordering::Less, |known| known.cmp(&(sequence, &record.links)));
        if order != Ordering::Less {
            self.old_record(now, from, origin, sequence, order == Ordering::Greater);
            return;
        }
        if origin != self.config.own && !self.may_accept(now, origin) {
            self.drops.too_fast += 1;
            return;
        }
        if !keys.verify(origin, &record.signed_bytes(), &record.signature) {
            self.drops.forged += 1;
            return;
        }
        self.outputs.push_back(Output::Ack { to: from, origin, sequence });
        if origin == self.config.own {
            // Of an earlier life of ours: say something newer.
            self.sequence = self.sequence.max(sequence.saturating_add(1));
            self.stale = true;
            self.originated = None;
            return;
        }
        let changed =
            self.held.get(&origin).is_none_or(|held| held.expired || held.record.links != record.links);
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

    /// A record that says nothing new; if ours is newer, its sender needs it.
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

    /// Whether one more record of this origin may be looked at now.
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
        let mut record = Record {
            origin: own,
            sequence: self.sequence,
            links: self.links.iter().take(NODES_MAX).copied().collect(),
            signature: Signature::NONE,
        };
        record.signature = keys.sign(&record.signed_bytes());
        self.sequence = self.sequence.saturating_add(1);
        (self.originated, self.stale) = (Some(now), false);
        let changed = self.held.get(&own).is_none_or(|held| held.record.links != record.links);
        let held = Held { record: Arc::new(record), since: now, expired: false, leave: 0, leave_since: now };
        self.held.insert(own, held);
        self.flood(now, own, None);
        if changed {
            self.outputs.push_back(Output::Changed);
        }
    }
}
