//! One reliable flow at one node: the messages that are kept, and what each neighbour has of them.

use super::peer::Peer;
use super::{CONFIRM_EVERY, FLOW_BYTES};
use crate::overlay::NodeId;
use crate::overlay::frame::{Confirmed, FLOW_WINDOW, FlowName, Holding, Vouched};
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that each message counts beyond its payload: the frame and the datagram around it, about.
const AROUND_BYTES: usize = 300;

/// Returns the bytes that a message counts.
pub(super) fn size(message: &Vouched) -> usize {
    message.packet.payload.len() + AROUND_BYTES
}

/// One flow.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    pub name: FlowName,
    /// This node is the destination.
    is_here: bool,
    /// The latest statement of the destination.
    confirmed: Option<Confirmed>,
    /// The number of the first entry of `kept`. At the destination, all messages before it are delivered; elsewhere they are
    /// confirmed.
    base: u64,
    /// From `base` on; the last one is never `None`.
    kept: VecDeque<Option<Arc<Vouched>>>,
    count: usize,
    /// Bytes of their payloads.
    bytes: usize,
    peers: BTreeMap<NodeId, Peer>,
    /// The destination has something to confirm from then on.
    confirm_at: Option<Instant>,
    /// It has confirmed last at that time.
    confirmed_at: Option<Instant>,
}

impl Flow {
    pub(super) fn new(name: FlowName, own: NodeId) -> Self {
        Self {
            name,
            is_here: name.destination == own,
            confirmed: None,
            base: 0,
            kept: VecDeque::new(),
            count: 0,
            bytes: 0,
            peers: BTreeMap::new(),
            confirm_at: None,
            confirmed_at: None,
        }
    }

    /// Returns how many messages are kept.
    pub(super) fn kept(&self) -> usize {
        self.count
    }

    /// Returns the bytes of their payloads.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first number that the destination has not confirmed.
    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed.map_or(0, |confirmed| confirmed.next)
    }

    /// Returns the number behind the last message that is kept.
    pub(super) fn end(&self) -> u64 {
        self.base.saturating_add(u64::try_from(self.kept.len()).unwrap_or(u64::MAX))
    }

    /// Whether a message with this number may be kept, if the payloads grow by `bytes`.
    pub(super) fn has_room(&self, sequence: u64, bytes: usize) -> bool {
        let is_inside = sequence.checked_sub(self.base).is_some_and(|after| after < FLOW_WINDOW);
        is_inside && sequence < u64::MAX && self.bytes.saturating_add(bytes) <= FLOW_BYTES
    }

    /// Returns how many further messages of this size may be kept behind the last one.
    pub(super) fn room(&self, bytes: usize) -> usize {
        let window = usize::try_from(FLOW_WINDOW).unwrap_or(0);
        let of_bytes = FLOW_BYTES.saturating_sub(self.bytes) / bytes.max(1);
        window.saturating_sub(self.kept.len()).min(of_bytes)
    }

    /// Whether this node has a message, or had it.
    pub(super) fn has(&self, sequence: u64) -> bool {
        let Some(at) = sequence.checked_sub(self.base) else { return true };
        let at = usize::try_from(at).ok();
        at.and_then(|at| self.kept.get(at)).is_some_and(Option::is_some)
    }

    /// Keeps a message for which there is room and that is not here yet. `from`: the neighbour that has sent it.
    pub(super) fn keep(&mut self, now: Instant, from: Option<NodeId>, message: Arc<Vouched>) {
        let sequence = message.packet.sequence;
        let Some(at) = sequence.checked_sub(self.base).and_then(|at| usize::try_from(at).ok()) else {
            return;
        };
        if self.kept.len() <= at {
            self.kept.resize(at + 1, None);
        }
        self.bytes += message.packet.payload.len();
        self.count += 1;
        self.kept[at] = Some(message);
        for (neighbour, peer) in &mut self.peers {
            peer.offer(sequence);
            if Some(*neighbour) == from {
                peer.showed(sequence);
            }
            // A source does not tell what it has: neighbours get each message from it anyway.
            if from.is_some() {
                peer.tell_soon(now);
            }
        }
    }

    /// A neighbour has sent a message that this node has already.
    pub(super) fn came_again(&mut self, now: Instant, from: NodeId, sequence: u64) {
        let is_kept = sequence >= self.base;
        if let Some(peer) = self.peers.get_mut(&from) {
            if is_kept {
                peer.showed(sequence);
            }
            peer.tell_soon(now);
        }
    }

    /// Takes the messages that are in order: at the destination.
    pub(super) fn deliver(&mut self, now: Instant) -> Vec<Arc<Vouched>> {
        let mut ready = Vec::new();
        while self.kept.front().is_some_and(Option::is_some) {
            ready.extend(self.drop_first());
        }
        if !ready.is_empty() {
            let earliest = self.confirmed_at.map_or(now, |at| (at + CONFIRM_EVERY).max(now));
            self.confirm_at.get_or_insert(earliest);
        }
        ready
    }

    /// Removes the first entry.
    fn drop_first(&mut self) -> Option<Arc<Vouched>> {
        let first = self.kept.pop_front()?;
        self.base = self.base.saturating_add(1);
        if let Some(message) = &first {
            self.count -= 1;
            self.bytes -= message.packet.payload.len();
        }
        first
    }

    /// Returns what the destination has to confirm, if it is time for it.
    pub(super) fn take_due_confirmation(&mut self, now: Instant) -> Option<u64> {
        self.confirm_at.take_if(|at| *at <= now)?;
        self.confirmed_at = Some(now);
        Some(self.base)
    }

    /// The destination has confirmed more than before.
    pub(super) fn confirm(&mut self, now: Instant, confirmed: Confirmed) {
        self.confirmed = Some(confirmed);
        while self.base < confirmed.next && !self.kept.is_empty() {
            self.drop_first();
        }
        self.base = self.base.max(confirmed.next);
        for peer in self.peers.values_mut() {
            peer.confirmed(self.base);
            peer.tell_now(now);
        }
    }

    /// A neighbour is there: it is told what this node has.
    pub(super) fn meet(&mut self, neighbour: NodeId, now: Instant) {
        let mut peer = Peer::new(self.base);
        if self.confirmed.is_some() || self.count > 0 {
            peer.tell_soon(now);
        }
        self.peers.insert(neighbour, peer);
    }

    /// A neighbour is not there any more.
    pub(super) fn forget(&mut self, neighbour: NodeId) {
        self.peers.remove(&neighbour);
    }

    /// A neighbour has said what it has. Its word counts for itself only.
    pub(super) fn heard(&mut self, now: Instant, from: NodeId, holding: &Holding, round_trip: Duration) {
        let confirmed = self.confirmed();
        if let Some(peer) = self.peers.get_mut(&from) {
            peer.heard(now, holding, (self.base, confirmed), round_trip);
        }
    }

    /// Returns what neighbours are to be told now.
    pub(super) fn take_due_words(&mut self, now: Instant) -> Vec<(NodeId, Holding)> {
        let confirmed = self.confirmed();
        if !self.peers.values().any(|peer| peer.is_due(now)) {
            return Vec::new();
        }
        let holding = self.said();
        let due = self.peers.iter_mut().filter(|(_, peer)| peer.is_due(now));
        due.map(|(neighbour, peer)| {
            let asks = peer.told(now, confirmed);
            (*neighbour, Holding { asks, ..holding.clone() })
        })
        .collect()
    }

    fn said(&self) -> Holding {
        let run = self.kept.iter().take_while(|message| message.is_some()).count();
        let next = self.base.saturating_add(u64::try_from(run).unwrap_or(0));
        let (flow, confirmed) = (self.name, self.confirmed);
        let mut holding = Holding { flow, asks: false, confirmed, next, beyond: Vec::new() };
        holding.set_beyond(self.kept.iter().skip(run).flatten().map(|message| message.packet.sequence));
        holding
    }

    /// Returns the number of the next message for a neighbour. Messages that it has not acknowledged in time are due again.
    pub(super) fn next_for(&mut self, neighbour: NodeId, now: Instant, timeout: Duration) -> Option<u64> {
        // The source has all messages, and no node behind the destination needs one.
        if self.count == 0 || self.is_here || neighbour == self.name.source {
            return None;
        }
        let (base, end) = (self.base, self.end());
        let peer = self.peers.get_mut(&neighbour)?;
        peer.expire(now, base, timeout);
        let kept = &self.kept;
        let is_kept = |sequence: u64| {
            let at = usize::try_from(sequence - base).ok();
            at.and_then(|at| kept.get(at)).is_some_and(Option::is_some)
        };
        peer.next(base, end, is_kept)
    }

    /// Returns when this neighbour was served last from this flow, as a number that rises.
    pub(super) fn turn(&self, neighbour: NodeId) -> u64 {
        self.peers.get(&neighbour).map_or(0, |peer| peer.turn)
    }

    /// Takes the next message for a neighbour, and whether it was sent to it before. `turn` rises with each message.
    pub(super) fn take_for(
        &mut self,
        neighbour: NodeId,
        now: Instant,
        timeout: Duration,
        turn: u64,
    ) -> Option<(Arc<Vouched>, bool)> {
        let sequence = self.next_for(neighbour, now, timeout)?;
        let at = usize::try_from(sequence.checked_sub(self.base)?).ok()?;
        let message = self.kept.get(at)?.clone()?;
        let peer = self.peers.get_mut(&neighbour)?;
        peer.turn = turn;
        let is_again = peer.sent(now, sequence, timeout);
        Some((message, is_again))
    }

    /// Returns when something is due without any event.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let peers = self.peers.values().filter_map(Peer::deadline);
        peers.chain(self.confirm_at).min()
    }
}
