//! What each node understands beyond version 1: signed statements that nodes flood to each other.
//!
//! Old nodes skip the statements and do not pass them on. So the statements that a node holds are just those of nodes that
//! new nodes connect with it. A statement names a sequence of its origin's record, and holds for the next
//! [`HOLDS_FOR`] records. A node that restarts as an older version begins with a much higher sequence, so its earlier
//! statement holds no longer.
//!
//! A statement is flooded when it is new, and goes ahead of each record of its origin and of each acknowledgement of one. Records
//! are acknowledged and sent again, so a lost statement comes again with them.

use super::disseminate::{ACCEPT_BURST, Config};
use super::frame::{Features, Record};
use super::{Keys, NodeId, Signature};
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Records of the origin that a statement holds for.
const HOLDS_FOR: u64 = 64;

/// Records of this node after which it makes a new statement.
const RENEWED_AFTER: u64 = 32;

/// Average shortest time between two accepted statements of one origin.
const ACCEPT_EVERY: Duration = Duration::from_millis(500);

/// A stored statement.
#[derive(Clone, Debug)]
struct Held {
    features: Features,
    /// How many more statements of this origin are accepted now.
    leave: u32,
    leave_since: Instant,
}

/// The statements of all nodes.
#[derive(Clone, Debug)]
pub(super) struct Book {
    own: NodeId,
    /// The features of this node. 0: it says nothing and listens to nothing, as version 1 did.
    bits: u32,
    held: BTreeMap<NodeId, Held>,
    neighbours: BTreeSet<NodeId>,
}

/// Statements to send, each to one neighbour.
pub(super) type Sent = Vec<(NodeId, Features)>;

impl Book {
    pub(super) fn new(own: NodeId, bits: u32) -> Self {
        Self { own, bits, held: BTreeMap::new(), neighbours: BTreeSet::new() }
    }

    /// The link to a neighbour is up: it gets all statements.
    pub(super) fn up(&mut self, neighbour: NodeId) -> Sent {
        self.neighbours.insert(neighbour);
        self.held.values().map(|held| (neighbour, held.features)).collect()
    }

    /// The link to a neighbour is down.
    pub(super) fn down(&mut self, neighbour: NodeId) {
        self.neighbours.remove(&neighbour);
    }

    /// The record of this node has this sequence now. Returns a new statement to send, if it is time for one.
    pub(super) fn own_record(&mut self, now: Instant, sequence: u64, keys: &impl Keys) -> Sent {
        let is_fresh = |held: &Held| {
            (held.features.sequence..held.features.sequence.saturating_add(RENEWED_AFTER)).contains(&sequence)
        };
        if self.bits == 0 || self.held.get(&self.own).is_some_and(is_fresh) {
            return Vec::new();
        }
        let mut features =
            Features { origin: self.own, sequence, bits: self.bits, signature: Signature::NONE };
        features.signature = keys.sign(&features.signed_bytes());
        self.held.insert(self.own, Held { features, leave: 0, leave_since: now });
        self.flood(features, None)
    }

    /// Handles a statement from a neighbour. Returns what to send, or `None` if the statement is dropped: old, forged, too
    /// fast, or not of a member.
    pub(super) fn arrived(
        &mut self,
        now: Instant,
        from: NodeId,
        features: Features,
        config: &Config,
        keys: &impl Keys,
    ) -> Option<Sent> {
        let origin = features.origin;
        // The neighbour may see the link up a little sooner than this node does, so `neighbours` is not asked.
        let is_expected = self.bits != 0 && origin != self.own && config.members.contains(&origin);
        if !is_expected {
            return None;
        }
        let (mut leave, mut leave_since) = (ACCEPT_BURST, now);
        if let Some(held) = self.held.get(&origin) {
            if features.sequence <= held.features.sequence {
                return None;
            }
            let more = now.since(held.leave_since).as_millis() / ACCEPT_EVERY.as_millis();
            let more = u32::try_from(more).unwrap_or(u32::MAX);
            leave = held.leave.saturating_add(more).min(ACCEPT_BURST);
            leave_since = if more > 0 { now } else { held.leave_since };
        }
        // Check the rate before the signature, so that a flood of statements does not cost a verification each.
        if leave == 0 || !keys.verify(origin, &features.signed_bytes(), &features.signature) {
            return None;
        }
        self.held.insert(origin, Held { features, leave: leave - 1, leave_since });
        Some(self.flood(features, Some(from)))
    }

    fn flood(&self, features: Features, except: Option<NodeId>) -> Sent {
        let to = self.neighbours.iter().filter(|neighbour| Some(**neighbour) != except);
        to.map(|neighbour| (*neighbour, features)).collect()
    }

    /// Returns the statement of a node. It is sent ahead of each of its records and each acknowledgement of one, and so again
    /// whenever a record is.
    pub(super) fn of_origin(&self, origin: NodeId) -> Option<Features> {
        self.held.get(&origin).map(|held| held.features)
    }

    /// Returns the features of the nodes that have these records.
    pub(super) fn of<'a>(&self, records: impl Iterator<Item = &'a Record>) -> BTreeMap<NodeId, u32> {
        let features = |record: &Record| {
            let held = &self.held.get(&record.origin)?.features;
            let holds = record.sequence <= held.sequence.saturating_add(HOLDS_FOR);
            holds.then_some((record.origin, held.bits))
        };
        records.filter_map(features).collect()
    }
}
