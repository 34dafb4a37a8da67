//! The overlay (Seamless Overlays): nodes that are joined by links. Each link repairs its own losses. A session carries one
//! flow from the node that caught it to the node that delivers it.
//!
//! | part | decides or holds |
//! |---|---|
//! | [`frame`] | what travels on a link: the codec |
//! | [`datagram`] | the sealed datagrams of a link: each accepted once, cut into pieces and joined, their largest size |
//! | [`hello`] | whether a neighbour is alive, and the quality of the link to it |
//! | [`disseminate`] | which node has which links: signed records, flooded, acknowledged, expired |
//! | [`route`] | paths over the links that both of their ends announce |
//! | [`features`] | what each node understands beyond version 1: signed statements, flooded |
//! | [`group`] | groups of nodes: who is a member, and the links that packets to a group use |
//! | [`node`] | the five above as one machine |
//! | [`service`] | how packets travel: the axes that a rule chooses |
//! | [`realtime`] | the recovery of a real-time link: requests and retransmissions while a packet can still be in time |
//! | [`paced`] | the reliable link between nodes whose bandwidth is bought: paced, without congestion control |
//! | [`redundancy`] | the links that the packets of a service use |
//! | [`topology`] | the links that nodes may announce, and their lowest costs |
//! | [`tolerant`] | packets that arrive although some members lie: proofs of the source, and a share for each source |
//! | [`trouble`] | which links cost more than usual |
//! | [`spread`] | packets over such links: numbered by the source, each copy but the first dropped |
//! | [`packet`] | whole IP packets: their destination node, and which may be delivered |
//! | [`mss`] | the MSS of their TCP connections, so that a segment fits into a datagram |
//! | [`reserved`] | destinations inside the overlay that are not servers |
//! | [`key`] | the keys of nodes |
//! | [`session`] | the bytes of one flow: in order, each exactly once, over changing paths |
//!
//! The node where a path begins writes out all of its nodes, and no node may be on it twice. So there are no loops, even while
//! nodes disagree about the network. `docs/overlay-protocol.md` has the wire format.

pub mod datagram;
pub mod disseminate;
mod features;
pub mod frame;
pub mod group;
pub mod hello;
pub mod key;
pub mod legs;
pub mod mss;
pub mod node;
pub mod paced;
pub mod packet;
pub mod realtime;
mod recent;
pub mod redundancy;
pub mod reserved;
pub mod route;
pub mod service;
pub mod session;
pub mod spread;
pub mod tolerant;
pub mod topology;
pub mod trouble;

use std::fmt;

/// The name of a node: the first eight bytes of its public key. Members are pinned by their whole keys, so security does not
/// depend on how hard it is to find a key with the same eight bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Bytes of a signature (Ed25519, RFC 8032).
pub const SIGNATURE_BYTES: usize = 64;

/// An Ed25519 signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature(pub [u8; SIGNATURE_BYTES]);

impl Signature {
    /// The value of an unsigned field; no key verifies it.
    pub const NONE: Self = Self([0; SIGNATURE_BYTES]);
}

/// The node's own key and the keys of all members. The functions are pure: equal arguments give equal results.
pub trait Keys {
    /// Signs with our own key.
    fn sign(&self, bytes: &[u8]) -> Signature;
    /// Whether `node` is a member and signed these bytes.
    fn verify(&self, node: NodeId, bytes: &[u8], signature: &Signature) -> bool;
}

/// Most nodes in one overlay. It limits every table that has a row for each node.
pub const NODES_MAX: usize = 256;

/// Most nodes on a path, both ends included.
pub const PATH_MAX: usize = 16;
