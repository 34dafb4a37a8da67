//! Proofs of the source: one signature for a batch of packets.
//!
//! The source makes a binary hash tree over the packets of a batch and signs its root. Each packet travels with the hashes
//! that lead from it to the root, so it can be checked alone. A relay checks the signature of a root once. So the cost of a
//! signature is shared by up to 32 packets when there are many, and no packet waits when there are few.
//!
//! A node cannot use keys that it shares with each relay instead. Such a packet has one code for each relay, and a relay that
//! lies could damage the codes of those behind it: the first relay that accepts its copy would drop the good one as a
//! duplicate.
//!
//! Leaves and inner nodes are hashed with different first bytes, as in RFC 6962 Sec. 2.1: no inner node passes as a packet.

use super::super::NodeId;
use super::super::frame::{HASH_BYTES, Hash, Proof, STEPS_MAX, Spread, Vouched};
use super::super::{Keys, Signature};
use super::Vouch;

/// Most packets in a batch.
pub const BATCH_MAX: usize = 1 << STEPS_MAX;

/// A packet that its source has not signed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsigned {
    /// Its priority, in [`super::super::frame::PRIORITIES`].
    pub priority: u8,
    /// The epoch of the destination; 0: several destinations.
    pub target: u32,
    /// The packet.
    pub packet: Spread,
}

/// Signs the first [`BATCH_MAX`] packets of a node at once.
pub fn sign(own: NodeId, packets: impl IntoIterator<Item = Unsigned>, keys: &impl Vouch) -> Vec<Vouched> {
    let packets = packets.into_iter().take(BATCH_MAX);
    let mut signed: Vec<_> = packets.map(Unsigned::vouched).collect();
    if signed.is_empty() {
        return signed;
    }
    let leaves: Vec<Hash> = signed.iter().map(|packet| leaf(packet, keys)).collect();
    let mut level = leaves;
    let mut at: Vec<usize> = (0..signed.len()).collect();
    while level.len() > 1 {
        if level.len() % 2 == 1 {
            level.push([0; HASH_BYTES]);
        }
        for (packet, at) in signed.iter_mut().zip(&mut at) {
            packet.proof.steps.push(level[*at ^ 1]);
            *at /= 2;
        }
        level = level.chunks(2).map(|pair| node(&pair[0], &pair[1], keys)).collect();
    }
    let signature = keys.sign(&root_bytes(own, &level[0]));
    for (index, packet) in signed.iter_mut().enumerate() {
        packet.proof.index = u8::try_from(index).unwrap_or(u8::MAX);
        packet.proof.signature = signature;
    }
    signed
}

/// Returns the root that the proof of a packet leads to.
pub fn root(packet: &Vouched, keys: &impl Vouch) -> Hash {
    let mut hash = leaf(packet, keys);
    let mut index = packet.proof.index;
    for step in &packet.proof.steps {
        hash = if index & 1 == 0 { node(&hash, step, keys) } else { node(step, &hash, keys) };
        index >>= 1;
    }
    hash
}

/// Whether a node has signed this root.
pub fn is_signed(source: NodeId, root: &Hash, signature: &Signature, keys: &impl Keys) -> bool {
    keys.verify(source, &root_bytes(source, root), signature)
}

impl Unsigned {
    fn vouched(self) -> Vouched {
        let proof = Proof { index: 0, steps: Vec::new(), signature: Signature::NONE };
        let Self { priority, target, packet } = self;
        Vouched { priority, target, proof, packet: Box::new(packet) }
    }
}

fn leaf(packet: &Vouched, keys: &impl Vouch) -> Hash {
    keys.digest(&packet.vouched_bytes())
}

fn node(left: &Hash, right: &Hash, keys: &impl Vouch) -> Hash {
    keys.digest(&[&[1][..], left, right].concat())
}

fn root_bytes(source: NodeId, root: &Hash) -> Vec<u8> {
    [&b"sidetrack overlay 1 batch\0"[..], &source.0.to_be_bytes(), root].concat()
}
