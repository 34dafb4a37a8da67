//! What each node understands beyond version 1, and under which epoch its proofs count: signed statements that nodes flood to
//! each other.
//!
//! Old nodes skip the statements and do not pass them on. So the statements that a node holds are just those of nodes that
//! new nodes connect with it. A statement names a sequence of its origin's record, and holds for the next
//! [`HOLDS_FOR`] records. A node that restarts as an older version begins with a much higher sequence, so its earlier
//! statement holds no longer.
//!
//! A statement is flooded when it is new, and goes ahead of each record of its origin and of each acknowledgement of one. Records
//! are acknowledged and sent again, so a lost statement comes again with them.

use super::disseminate::{ACCEPT_BURST, Config};
use super::frame::{Features, Record, Standing};
use super::tolerant::Epoch;
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

/// A signed statement of a node about itself.
pub(super) trait Claim: Copy {
    /// Returns the node that makes it.
    fn origin(&self) -> NodeId;
    /// Returns the sequence of the origin's record at that time.
    fn sequence(&self) -> u64;
    /// Returns the bytes that the origin signs.
    fn signed(&self) -> Vec<u8>;
    /// Returns the signature.
    fn signature(&self) -> &Signature;
    /// Returns the place of the signature.
    fn signature_mut(&mut self) -> &mut Signature;
}

macro_rules! claim {
    ($name:ty) => {
        impl Claim for $name {
            fn origin(&self) -> NodeId {
                self.origin
            }

            fn sequence(&self) -> u64 {
                self.sequence
            }

            fn signed(&self) -> Vec<u8> {
                self.signed_bytes()
            }

            fn signature(&self) -> &Signature {
                &self.signature
            }

            fn signature_mut(&mut self) -> &mut Signature {
                &mut self.signature
            }
        }
    };
}

claim!(Features);
claim!(Standing);

/// A stored statement.
#[derive(Clone, Debug)]
struct Held<C> {
    claim: C,
    /// How many more statements of this origin are accepted now.
    leave: u32,
    leave_since: Instant,
}

/// The statements of all nodes.
#[derive(Clone, Debug)]
pub(super) struct Book<C> {
    own: NodeId,
    /// False: this node says nothing and listens to nothing, as version 1 did.
    speaks: bool,
    held: BTreeMap<NodeId, Held<C>>,
    neighbours: BTreeSet<NodeId>,
}

/// Statements to send, each to one neighbour.
pub(super) type Sent<C> = Vec<(NodeId, C)>;

impl<C: Claim> Book<C> {
    pub(super) fn new(own: NodeId, speaks: bool) -> Self {
        Self { own, speaks, held: BTreeMap::new(), neighbours: BTreeSet::new() }
    }

    /// The link to a neighbour is up: it gets all statements.
    pub(super) fn up(&mut self, neighbour: NodeId) -> Sent<C> {
        self.neighbours.insert(neighbour);
        self.held.values().map(|held| (neighbour, held.claim)).collect()
    }

    /// The link to a neighbour is down.
    pub(super) fn down(&mut self, neighbour: NodeId) {
        self.neighbours.remove(&neighbour);
    }

    /// The record of this node has this sequence now. Returns a new statement to send, if it is time for one; `make` makes
    /// it without its signature.
    pub(super) fn own_record(
        &mut self,
        now: Instant,
        sequence: u64,
        keys: &impl Keys,
        make: impl FnOnce() -> C,
    ) -> Sent<C> {
        let is_fresh = |held: &Held<C>| {
            let said = held.claim.sequence();
            (said..said.saturating_add(RENEWED_AFTER)).contains(&sequence)
        };
        if !self.speaks || self.held.get(&self.own).is_some_and(is_fresh) {
            return Vec::new();
        }
        let mut claim = make();
        *claim.signature_mut() = keys.sign(&claim.signed());
        self.held.insert(self.own, Held { claim, leave: 0, leave_since: now });
        self.flood(claim, None)
    }

    /// Handles a statement from a neighbour. Returns what to send, or `None` if the statement is dropped: old, forged, too
    /// fast, or not of a member.
    pub(super) fn arrived(
        &mut self,
        now: Instant,
        from: NodeId,
        claim: C,
        config: &Config,
        keys: &impl Keys,
    ) -> Option<Sent<C>> {
        let origin = claim.origin();
        // The neighbour may see the link up a little sooner than this node does, so `neighbours` is not asked.
        let is_expected = self.speaks && origin != self.own && config.members.contains(&origin);
        if !is_expected {
            return None;
        }
        let (mut leave, mut leave_since) = (ACCEPT_BURST, now);
        if let Some(held) = self.held.get(&origin) {
            if claim.sequence() <= held.claim.sequence() {
                return None;
            }
            let more = now.since(held.leave_since).as_millis() / ACCEPT_EVERY.as_millis();
            let more = u32::try_from(more).unwrap_or(u32::MAX);
            leave = held.leave.saturating_add(more).min(ACCEPT_BURST);
            leave_since = if more > 0 { now } else { held.leave_since };
        }
        // Check the rate before the signature, so that a flood of statements does not cost a verification each.
        if leave == 0 || !keys.verify(origin, &claim.signed(), claim.signature()) {
            return None;
        }
        self.held.insert(origin, Held { claim, leave: leave - 1, leave_since });
        Some(self.flood(claim, Some(from)))
    }

    fn flood(&self, claim: C, except: Option<NodeId>) -> Sent<C> {
        let to = self.neighbours.iter().filter(|neighbour| Some(**neighbour) != except);
        to.map(|neighbour| (*neighbour, claim)).collect()
    }

    /// Returns the statement of a node. It is sent ahead of each of its records and each acknowledgement of one, and so again
    /// whenever a record is.
    pub(super) fn of_origin(&self, origin: NodeId) -> Option<C> {
        self.held.get(&origin).map(|held| held.claim)
    }
}

impl Book<Features> {
    /// Returns the features of the nodes that have these records.
    pub(super) fn of<'a>(&self, records: impl Iterator<Item = &'a Record>) -> BTreeMap<NodeId, u32> {
        let features = |record: &Record| {
            let held = &self.held.get(&record.origin)?.claim;
            let holds = record.sequence <= held.sequence.saturating_add(HOLDS_FOR);
            holds.then_some((record.origin, held.bits))
        };
        records.filter_map(features).collect()
    }
}

impl Book<Standing> {
    /// Returns the epoch of each node, and the number of its next packet when it said so.
    pub(super) fn epochs(&self) -> BTreeMap<NodeId, Epoch> {
        let epoch = |held: &Held<Standing>| Epoch { number: held.claim.epoch, next: held.claim.next };
        self.held.iter().map(|(node, held)| (*node, epoch(held))).collect()
    }
}
