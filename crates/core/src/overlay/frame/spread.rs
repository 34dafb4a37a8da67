//! Packets that travel over a subgraph of the overlay instead of one path, and the statement of a node that it
//! understands them. Their types are from 0x80 on: an older node skips them.
//!
//! A subgraph lists its nodes and has one bit for each possible link between two of them. So the frame itself numbers
//! the links: two nodes that know different links of the network still read the same subgraph. A bit of a link that the
//! relay does not have costs only the copy on that link.

use super::wire::{Put, Reader};
use super::{Dissemination, FrameError, LinkKind, PACKET_MAX, Protocol};
use crate::overlay::group::head::Head;
use crate::overlay::{NodeId, Signature};
use std::time::Duration;

pub(super) const SPREAD: u8 = 0x80;
pub(super) const FEATURES: u8 = 0x81;

/// Most nodes of a subgraph.
pub const SUBGRAPH_NODES_MAX: usize = 32;

/// The links that a packet may use, each in one direction.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subgraph {
    /// The source, the destination, and the relays: 2 to [`SUBGRAPH_NODES_MAX`], none twice.
    nodes: Vec<NodeId>,
    /// Bit `from * nodes + to`, the highest bit of a byte first: the link from one node to another, by their indexes.
    bits: Vec<u8>,
}

impl Subgraph {
    /// Makes a subgraph of these links. `None` if it has too many nodes, or a link from a node to itself.
    pub fn new(
        source: NodeId,
        destination: NodeId,
        links: impl IntoIterator<Item = (NodeId, NodeId)>,
    ) -> Option<Self> {
        let links: Vec<_> = links.into_iter().collect();
        let mut relays: Vec<_> = links.iter().flat_map(|(from, to)| [*from, *to]).collect();
        relays.retain(|node| *node != source && *node != destination);
        relays.sort_unstable();
        relays.dedup();
        let nodes = [vec![source, destination], relays].concat();
        if source == destination || nodes.len() > SUBGRAPH_NODES_MAX {
            return None;
        }
        let bits = vec![0; (nodes.len() * nodes.len()).div_ceil(8)];
        let mut subgraph = Self { nodes, bits };
        for (from, to) in links {
            let at = subgraph.bit(from, to)?;
            subgraph.bits[at / 8] |= 0x80 >> (at % 8);
        }
        Some(subgraph)
    }

    /// Returns the node that sends the packet.
    pub fn source(&self) -> NodeId {
        self.nodes[0]
    }

    /// Returns the node that the packet is for.
    pub fn destination(&self) -> NodeId {
        self.nodes[1]
    }

    /// Returns all nodes: the source, the destination, then the relays.
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// Returns the index of the bit for a link. `None` if a node is not in the subgraph, or if both are the same.
    fn bit(&self, from: NodeId, to: NodeId) -> Option<usize> {
        let index = |node| self.nodes.iter().position(|other| *other == node);
        (from != to).then_some(index(from)? * self.nodes.len() + index(to)?)
    }

    fn is_set(&self, bit: usize) -> bool {
        self.bits.get(bit / 8).is_some_and(|byte| byte & 0x80 >> (bit % 8) != 0)
    }

    /// Whether the packet may use the link from one node to another.
    pub fn has(&self, from: NodeId, to: NodeId) -> bool {
        self.bit(from, to).is_some_and(|bit| self.is_set(bit))
    }

    /// Returns the nodes that `from` sends the packet to.
    pub fn next(&self, from: NodeId) -> impl Iterator<Item = NodeId> {
        self.nodes.iter().copied().filter(move |to| self.has(from, *to))
    }

    /// Returns all links.
    pub fn links(&self) -> impl Iterator<Item = (NodeId, NodeId)> {
        self.nodes.iter().flat_map(|from| self.next(*from).map(|to| (*from, to)))
    }

    /// Returns the subgraph for the way back.
    #[must_use]
    pub fn reversed(&self) -> Self {
        let links = self.links().map(|(from, to)| (to, from));
        Self::new(self.destination(), self.source(), links).unwrap_or_else(|| self.clone())
    }

    /// Returns the number of bytes on the wire.
    pub fn bytes(&self) -> usize {
        1 + 8 * self.nodes.len() + self.bits.len()
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.put_u8(u8::try_from(self.nodes.len()).unwrap_or(u8::MAX));
        for node in &self.nodes {
            out.put_u64(node.0);
        }
        out.put(&self.bits);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        const BAD: FrameError = FrameError::BadValue("subgraph");
        let count = usize::from(reader.u8()?);
        if !(2..=SUBGRAPH_NODES_MAX).contains(&count) {
            return Err(BAD);
        }
        let nodes: Vec<_> = (0..count).map(|_| reader.node()).collect::<Result<_, _>>()?;
        let bits = reader.take((count * count).div_ceil(8))?.to_vec();
        let subgraph = Self { nodes, bits };
        let is_once = |(index, node)| !subgraph.nodes[..index].contains(node);
        // Neither a link from a node to itself, nor a bit behind the last link.
        let is_unused = |bit: usize| bit >= count * count || bit.is_multiple_of(count + 1);
        let fits = subgraph.nodes.iter().enumerate().all(is_once)
            && !(0..subgraph.bits.len() * 8).any(|bit| is_unused(bit) && subgraph.is_set(bit));
        if fits { Ok(subgraph) } else { Err(BAD) }
    }
}

/// A packet that its source sends over a subgraph. Relays forward the first copy of it, on the links that the subgraph
/// names, and keep no state for flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    /// How each link recovers from loss.
    pub kind: LinkKind,
    /// How the source chose the subgraph; for counts.
    pub dissemination: Dissemination,
    /// What the payload is.
    pub protocol: Protocol,
    /// Drawn at random when the source started. Sequences count from 0 again in each epoch.
    pub epoch: u32,
    /// Rises with every packet of the source.
    pub sequence: u64,
    /// How long the packet has travelled, µs. Each node adds half of the round trip of the link that it came on, but
    /// not the time that it keeps the packet. So no two clocks have to agree.
    pub age_us: u32,
    /// How long it may travel, µs. 0: there is no limit.
    pub budget_us: u32,
    /// The links that it may use.
    pub subgraph: Subgraph,
    /// At most [`PACKET_MAX`] bytes.
    pub payload: Vec<u8>,
}

impl Spread {
    /// Returns the bytes of the frame in a datagram, without the payload.
    pub fn overhead(subgraph: &Subgraph) -> usize {
        4 + 4 + 8 + 4 + 4 + subgraph.bytes()
    }

    /// Whether this node delivers the packet.
    pub fn is_for(&self, node: NodeId) -> bool {
        if self.protocol != Protocol::Group {
            return self.subgraph.destination() == node;
        }
        let index = self.subgraph.nodes().iter().position(|other| *other == node);
        let head = Head::split(&self.payload);
        index.zip(head).is_some_and(|(index, (head, _))| head.deliverers.has(index))
    }

    /// Whether the packet is too late to be of use.
    pub fn is_late(&self) -> bool {
        self.budget_us != 0 && self.age_us > self.budget_us
    }

    /// Returns how long the packet may still travel. `None`: there is no limit.
    pub fn left(&self) -> Option<Duration> {
        let left = self.budget_us.saturating_sub(self.age_us);
        (self.budget_us != 0).then(|| Duration::from_micros(left.into()))
    }

    /// Adds to the age of the packet.
    pub fn grow_older(&mut self, by_us: u32) {
        self.age_us = self.age_us.saturating_add(by_us);
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        self.put_aged(out, self.age_us);
    }

    /// Appends the packet with another age.
    pub(super) fn put_aged(&self, out: &mut Vec<u8>, age_us: u32) {
        out.put(&[self.kind.code(), self.dissemination.code(), self.protocol.code()]);
        out.put_u32(self.epoch);
        out.put_u64(self.sequence);
        out.put_u32(age_us);
        out.put_u32(self.budget_us);
        self.subgraph.put(out);
        out.put(&self.payload);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let kind = LinkKind::read(reader)?;
        let dissemination = Dissemination::read(reader)?;
        let protocol = Protocol::read(reader)?;
        let (epoch, sequence) = (reader.u32()?, reader.u64()?);
        let (age_us, budget_us) = (reader.u32()?, reader.u32()?);
        let subgraph = Subgraph::read(reader)?;
        let payload = reader.rest();
        if payload.len() > PACKET_MAX {
            return Err(FrameError::BadValue("payload"));
        }
        let payload = payload.to_vec();
        Ok(Self { kind, dissemination, protocol, epoch, sequence, age_us, budget_us, subgraph, payload })
    }
}

/// What a node understands beyond version 1, signed by that node. A node without such a statement gets none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The node that understands them.
    pub origin: NodeId,
    /// The sequence of its record at that time. The statement holds for this record and those soon after it.
    pub sequence: u64,
    /// One bit for each feature. A node ignores bits that it does not know.
    pub bits: u32,
    /// The origin's signature over [`Features::signed_bytes`].
    pub signature: Signature,
}

impl Features {
    /// The node relays and receives [`Spread`] frames.
    pub const SPREAD: u32 = 1;

    /// The node recovers packets of [`LinkKind::RealTime`].
    pub const REAL_TIME: u32 = 2;

    /// The node knows the code of [`Dissemination::Graph`]. A node without it drops packets with that code as unreadable.
    pub const GRAPH: u32 = 4;

    /// The node knows groups: it keeps and passes on [`super::Membership`]s, and relays packets with [`Protocol::Group`].
    pub const GROUPS: u32 = 16;

    /// The node can send and receive on paced links.
    pub const PACED: u32 = 256;

    /// The node can be the far end of a session that uses several paths at a time.
    pub const PATHS: u32 = 0x1000;

    /// The node measures the legs of its links, and moves between them ([`super::super::legs`]).
    pub const LEGS: u32 = 0x2000;

    /// The node relays and receives [`super::Vouched`] frames.
    pub const TOLERANT: u32 = 0x1_0000;

    /// The node takes part in reliable flooding: it keeps messages and sends [`super::Holding`] frames.
    pub const RELIABLE_FLOODS: u32 = 0x2_0000;

    /// The node takes flows of UDP and packets to groups in [`super::Vouched`] frames.
    pub const TOLERANT_FLOWS: u32 = 0x4_0000;

    /// The features of this program.
    pub const ALL: u32 = Self::SPREAD
        | Self::REAL_TIME
        | Self::GRAPH
        | Self::GROUPS
        | Self::PACED
        | Self::PATHS
        | Self::LEGS
        | Self::TOLERANT
        | Self::RELIABLE_FLOODS
        | Self::TOLERANT_FLOWS;

    /// Each feature with its name, for people. A bit stands here once.
    pub const NAMES: &[(u32, &str)] = &[
        (Self::SPREAD, "subgraphs"),
        (Self::REAL_TIME, "real-time links"),
        (Self::GRAPH, "graphs"),
        (Self::GROUPS, "groups"),
        (Self::PATHS, "flows over several paths"),
        (Self::PACED, "paced links"),
        (Self::LEGS, "legs"),
        (Self::TOLERANT, "proofs of the source"),
        (Self::RELIABLE_FLOODS, "reliable flooding"),
        (Self::TOLERANT_FLOWS, "flows and groups with proofs of the source"),
    ];

    /// Returns the bytes that the origin signs.
    pub fn signed_bytes(&self) -> Vec<u8> {
        let mut out = b"sidetrack overlay 1 features\0".to_vec();
        self.put_signed(&mut out);
        out
    }

    fn put_signed(&self, out: &mut Vec<u8>) {
        out.put_u64(self.origin.0);
        out.put_u64(self.sequence);
        out.put_u32(self.bits);
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        self.put_signed(out);
        out.put(&self.signature.0);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self {
            origin: reader.node()?,
            sequence: reader.u64()?,
            bits: reader.u32()?,
            signature: reader.signature()?,
        })
    }
}
