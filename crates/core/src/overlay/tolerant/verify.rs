//! Accepts each packet of each source once, if its proof is right.
//!
//! The cheap checks come first. A signature is checked once for each batch, and the work that liars cause is bounded:
//!
//! | who | has |
//! |---|---|
//! | a source | [`BATCHES`] new batches per second, which an honest source does not exceed |
//! | a neighbour | [`FAULTS`] wrong proofs per second. An honest neighbour sends none, because it checks before it forwards |
//!
//! What comes beyond that is dropped unchecked. The memory is one window and [`ROOTS`] roots for each member.
//!
//! A copy recorded earlier is refused: by the window; after a restart of its source, by the epoch; after a restart of its
//! destination, by the epoch of the destination, which the source vouches for. A relay that has restarted takes the number in the
//! statement of the source as the newest so far.

use super::super::NodeId;
use super::super::datagram::Window;
use super::super::frame::{Hash, Vouched};
use super::{Epoch, Vouch, batch};
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// New batches per second that a source may send. [`BATCH_BURST`] may come at once.
pub const BATCHES: u32 = 1000;

/// New batches of a source that may come at once.
pub const BATCH_BURST: u32 = 200;

/// Wrong proofs per second of a neighbour that are checked. [`FAULT_BURST`] may come at once.
pub const FAULTS: u32 = 20;

/// Wrong proofs of a neighbour that may come at once.
pub const FAULT_BURST: u32 = 40;

/// The latest roots of each source that are remembered.
pub const ROOTS: usize = 64;

/// Why a copy is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refused {
    /// The neighbour may not send it to this node: the subgraph has no such link, or the source is not a member.
    OffGraph,
    /// It is older than its budget.
    Late,
    /// The epoch of its source is not known yet.
    Unknown,
    /// It belongs to another epoch of its source, or was made for another epoch of this node.
    Replayed,
    /// It came before, or is too old to decide that.
    Duplicate,
    /// Its source or the neighbour has used up its checks.
    Unchecked,
    /// Its proof is wrong.
    Forged,
}

/// Allows a number of events per second, and some at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    left: u32,
    since: Instant,
}

impl Allowance {
    /// Returns what a neighbour may cost: wrong signatures.
    pub(super) const fn of_neighbour(now: Instant) -> Self {
        Self { left: FAULT_BURST, since: now }
    }

    /// Whether a neighbour may cost another check of a signature.
    pub(super) fn may_fail(&mut self, now: Instant) -> bool {
        self.left(now, NEIGHBOUR) > 0
    }

    /// Returns what is left now.
    fn left(&mut self, now: Instant, (per_second, burst): (u32, u32)) -> u32 {
        let every = Duration::from_secs(1) / per_second.max(1);
        let more = now.since(self.since).as_nanos() / every.as_nanos().max(1);
        if more > 0 {
            self.left = self.left.saturating_add(u32::try_from(more).unwrap_or(u32::MAX)).min(burst);
            self.since = now;
        }
        self.left
    }

    pub(super) fn spend(&mut self) {
        self.left = self.left.saturating_sub(1);
    }
}

const SOURCE: (u32, u32) = (BATCHES, BATCH_BURST);
const NEIGHBOUR: (u32, u32) = (FAULTS, FAULT_BURST);

/// The batches of one source whose signatures were right.
#[derive(Clone, Debug)]
pub(super) struct Batches {
    roots: VecDeque<Hash>,
    more: Allowance,
}

impl Batches {
    pub(super) const fn new(now: Instant) -> Self {
        Self { roots: VecDeque::new(), more: Allowance { left: BATCH_BURST, since: now } }
    }

    /// Checks the proof of a packet. `faults` are those of the neighbour that it came from.
    ///
    /// # Errors
    /// Returns [`Refused::Forged`] or [`Refused::Unchecked`].
    pub(super) fn check(
        &mut self,
        now: Instant,
        faults: &mut Allowance,
        packet: &Vouched,
        keys: &impl Vouch,
    ) -> Result<(), Refused> {
        let root = batch::root(packet, keys);
        if self.roots.contains(&root) {
            return Ok(());
        }
        if !faults.may_fail(now) || self.more.left(now, SOURCE) == 0 {
            return Err(Refused::Unchecked);
        }
        if !batch::is_signed(packet.packet.subgraph.source(), &root, &packet.proof.signature, keys) {
            // The source did not make this: only the neighbour pays for the check.
            faults.spend();
            return Err(Refused::Forged);
        }
        self.more.spend();
        self.roots.truncate(ROOTS - 1);
        self.roots.push_front(root);
        Ok(())
    }
}

/// What is known of a source.
#[derive(Clone, Debug)]
struct Known {
    epoch: u32,
    window: Window,
    batches: Batches,
}

/// Checks the packets of all sources.
#[derive(Clone, Debug)]
pub struct Verifier {
    own: NodeId,
    epoch: u32,
    members: BTreeSet<NodeId>,
    sources: BTreeMap<NodeId, Known>,
    faults: BTreeMap<NodeId, Allowance>,
}

impl Verifier {
    /// Makes a verifier of this node, whose epoch this is. Packets of other sources than `members` are refused.
    pub fn new(own: NodeId, epoch: u32, members: BTreeSet<NodeId>) -> Self {
        Self { own, epoch, members, sources: BTreeMap::new(), faults: BTreeMap::new() }
    }

    /// Sets the epochs of all nodes. A source with a new epoch begins again.
    pub fn set_epochs(&mut self, epochs: BTreeMap<NodeId, Epoch>, now: Instant) {
        for (node, Epoch { number, next }) in epochs {
            let is_source = node != self.own && self.members.contains(&node);
            if !is_source || self.sources.get(&node).is_some_and(|known| known.epoch == number) {
                continue;
            }
            let mut window = Window::default();
            if let Some(newest) = next.checked_sub(1) {
                window.accept(newest);
            }
            self.sources.insert(node, Known { epoch: number, window, batches: Batches::new(now) });
        }
    }

    /// Checks a copy that came from a neighbour, and notes that it came.
    ///
    /// # Errors
    /// Returns why the copy is refused.
    pub fn check(
        &mut self,
        now: Instant,
        from: NodeId,
        packet: &Vouched,
        keys: &impl Vouch,
    ) -> Result<(), Refused> {
        let spread = &packet.packet;
        let source = spread.subgraph.source();
        if source == self.own || !spread.subgraph.has(from, self.own) || !self.members.contains(&source) {
            return Err(Refused::OffGraph);
        }
        if spread.is_late() {
            return Err(Refused::Late);
        }
        let known = self.sources.get_mut(&source).ok_or(Refused::Unknown)?;
        let is_ours = spread.subgraph.destination() == self.own && packet.target != 0;
        if known.epoch != spread.epoch || (is_ours && packet.target != self.epoch) {
            return Err(Refused::Replayed);
        }
        if !known.window.is_new(spread.sequence) {
            return Err(Refused::Duplicate);
        }
        let faults = self.faults.entry(from).or_insert(Allowance::of_neighbour(now));
        known.batches.check(now, faults, packet, keys)?;
        // Only now: a forged copy must not take the number of the real packet.
        known.window.accept(spread.sequence);
        Ok(())
    }
}
