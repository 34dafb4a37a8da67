//! Packets over subgraphs: the source numbers them, and each node forwards and delivers only the first copy.
//!
//! ```text
//!            a copy comes from a neighbour
//!                        |
//!     the subgraph has no link from it to us, or the source is not a member ---> dropped: off graph
//!                        |
//!     older than its budget ---------------------------------------------------> dropped: late
//!                        |
//!     the window of its source and epoch has seen the number, or forgot it ----> dropped: duplicate
//!                        |
//!     deliver it if it is for us; forward it on the links that leave us, except back to the neighbour
//! ```
//!
//! The memory is one [`Window`] for each of the last [`EPOCHS`] epochs of each member. A source that restarts draws a new
//! epoch, so neither a wall clock nor a stored number is needed.

use super::NodeId;
use super::datagram::Window;
use super::frame::{Dissemination, Protocol, Spread, Subgraph};
use super::service::Service;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Epochs of a source that are remembered. Packets of the epoch before a restart may still be on their way.
pub const EPOCHS: usize = 2;

/// Why a copy of a packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dropped {
    /// The neighbour may not send it to this node: the subgraph has no such link, or the source is not a member.
    OffGraph,
    /// It came before, or is too old to decide that.
    Duplicate,
    /// It is older than its budget.
    Late,
}

/// What to do with the first copy of a packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// It is for this node.
    pub deliver: bool,
    /// Forward it to these nodes, if the links to them are up.
    pub next: Vec<NodeId>,
}

/// Numbers the packets of this node.
#[derive(Clone, Debug)]
pub struct Source {
    epoch: u32,
    sequence: u64,
}

impl Source {
    /// Starts an epoch, which must be random.
    pub const fn new(epoch: u32) -> Self {
        Self { epoch, sequence: 0 }
    }

    /// Returns the epoch.
    pub const fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns the number that the next packet will have.
    pub const fn next(&self) -> u64 {
        self.sequence
    }

    /// Returns the number of the next packet. 2^64 packets take longer than any machine runs.
    fn number(&mut self) -> u64 {
        let sequence = self.sequence;
        self.sequence = self.sequence.wrapping_add(1);
        sequence
    }

    /// Makes the next packet.
    pub fn packet(
        &mut self,
        service: &Service,
        subgraph: Subgraph,
        protocol: Protocol,
        payload: Vec<u8>,
    ) -> Spread {
        let sequence = self.number();
        let Service { kind, dissemination, .. } = *service;
        let (epoch, budget_us) = (self.epoch, service.budget_us());
        Spread { kind, dissemination, protocol, epoch, sequence, age_us: 0, budget_us, subgraph, payload }
    }

    /// Makes the answer to an echo request: over the same links, the other way.
    pub fn echo(&mut self, request: Spread) -> Spread {
        let sequence = self.number();
        let subgraph = request.subgraph.reversed();
        Spread {
            protocol: Protocol::EchoReply,
            epoch: self.epoch,
            sequence,
            age_us: 0,
            budget_us: 0,
            subgraph,
            ..request
        }
    }
}

/// Counts of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// First copies for this node, by [`Dissemination::ALL`].
    pub delivered: [u64; Dissemination::ALL.len()],
    /// First copies that were for other nodes.
    pub relayed: u64,
    /// Further copies.
    pub duplicates: u64,
    /// Copies that were older than their budget.
    pub late: u64,
    /// Copies on a link that their subgraph does not have, or of a source that is not a member.
    pub off_graph: u64,
}

/// The relaying part of a node.
#[derive(Clone, Debug)]
pub struct Relay {
    own: NodeId,
    members: BTreeSet<NodeId>,
    seen: BTreeMap<NodeId, VecDeque<(u32, Window)>>,
    counts: Counts,
}

impl Relay {
    /// Makes a relay that has seen nothing. Packets of other sources than `members` are dropped.
    pub fn new(own: NodeId, members: BTreeSet<NodeId>) -> Self {
        Self { own, members, seen: BTreeMap::new(), counts: Counts::default() }
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Handles a copy that came from the neighbour `from`, over a link that takes `link_us` one way.
    ///
    /// # Errors
    /// Returns why the copy is dropped.
    pub fn handle(&mut self, from: NodeId, packet: &mut Spread, link_us: u32) -> Result<Step, Dropped> {
        let result = self.decide(from, packet, link_us);
        let counts = &mut self.counts;
        match &result {
            Ok(step) if step.deliver => {
                let at = Dissemination::ALL.iter().position(|one| *one == packet.dissemination);
                counts.delivered[at.unwrap_or(0)] += 1;
            }
            Ok(_) => counts.relayed += 1,
            Err(Dropped::OffGraph) => counts.off_graph += 1,
            Err(Dropped::Duplicate) => counts.duplicates += 1,
            Err(Dropped::Late) => counts.late += 1,
        }
        result
    }

    fn decide(&mut self, from: NodeId, packet: &mut Spread, link_us: u32) -> Result<Step, Dropped> {
        let source = packet.subgraph.source();
        if source == self.own || !packet.subgraph.has(from, self.own) || !self.members.contains(&source) {
            return Err(Dropped::OffGraph);
        }
        packet.grow_older(link_us);
        if packet.is_late() {
            return Err(Dropped::Late);
        }
        let window = self.window(source, packet.epoch);
        if !window.is_new(packet.sequence) {
            return Err(Dropped::Duplicate);
        }
        window.accept(packet.sequence);
        let next = packet.subgraph.next(self.own).filter(|next| *next != from && *next != source);
        Ok(Step { deliver: packet.is_for(self.own), next: next.collect() })
    }

    /// Returns the window of this epoch. An unknown epoch replaces the one that was new for the longest time.
    fn window(&mut self, source: NodeId, epoch: u32) -> &mut Window {
        let windows = self.seen.entry(source).or_default();
        let at = windows.iter().position(|(known, _)| *known == epoch).unwrap_or_else(|| {
            windows.truncate(EPOCHS - 1);
            windows.push_front((epoch, Window::default()));
            0
        });
        &mut windows[at].1
    }
}
