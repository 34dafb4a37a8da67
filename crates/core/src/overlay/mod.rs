//! The overlay: nodes joined by links, each hop recovering by itself, and sessions that carry one flow each from the
//! node that caught it to the node that delivers it (Seamless overlays).
//!
//! | part | thinks about |
//! |---|---|
//! | [`frame`] | what travels on a link: the codec |
//! | [`datagram`] | what travels beside the streams: sealed, each once, cut and joined, how large |
//! | [`hello`] | whether a neighbour is there, and how good the link to it is |
//! | [`disseminate`] | who has which links: signed records, flooded, acknowledged, aged |
//! | [`route`] | paths over the links that both ends vouch for |
//! | [`node`] | the three above as one machine |
//! | [`packet`] | IP packets carried whole: whom they are for, which may be delivered |
//! | [`mss`] | their segments, small enough for a datagram |
//! | [`reserved`] | what sessions lead to in the place of servers |
//! | [`key`] | what nodes are known by |
//! | [`session`] | the bytes of one flow: once, in order, over whatever path stands |
//!
//! A path is written out by the node where it begins, and no node may be on it twice: there are no loops, not even
//! while nodes disagree about the network. `docs/overlay-protocol.md` has the wire format.

pub mod datagram;
pub mod disseminate;
pub mod frame;
pub mod hello;
pub mod key;
pub mod mss;
pub mod node;
pub mod packet;
pub mod reserved;
pub mod route;
pub mod session;

use std::fmt;

/// Names a node: the first eight bytes of its public key. Members are pinned by their whole keys, so
/// that nothing hangs on these bytes being hard to meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Bytes of a signature (Ed25519, RFC 8032).
pub const SIGNATURE_BYTES: usize = 64;

/// A signature over the bytes that the signed thing gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature(pub [u8; SIGNATURE_BYTES]);

impl Signature {
    /// What stands in the place of a signature until there is one; no key verifies it.
    pub const NONE: Self = Self([0; SIGNATURE_BYTES]);
}

/// The node's own key and the keys of all members. Pure functions: the same answer every time.
pub trait Keys {
    /// Signs with our own key.
    fn sign(&self, bytes: &[u8]) -> Signature;
    /// Whether `node` is a member and signed these bytes.
    fn verify(&self, node: NodeId, bytes: &[u8], signature: &Signature) -> bool;
}

/// Most nodes of one overlay; bounds every table that has a row for each.
pub const NODES_MAX: usize = 256;

/// Most nodes on a path, both ends included.
pub const PATH_MAX: usize = 16;
