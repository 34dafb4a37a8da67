//! Packets that carry a proof of their source, so that each relay can check it, and the statement of a node under which its
//! proofs count. Their types are from 0x80 on: an older node skips them.
//!
//! The source signs a batch of packets at once: it signs the root of a hash tree over them, and each packet carries the
//! hashes that lead from it to the root ([`crate::overlay::tolerant::batch`]).

use super::wire::{Put, Reader};
use super::{FrameError, Spread};
use crate::overlay::{NodeId, Signature};

pub(super) const VOUCHED: u8 = 0xB0;
pub(super) const STANDING: u8 = 0xB1;

/// Bytes of a hash in the tree over a batch.
pub const HASH_BYTES: usize = 20;

/// A hash in the tree over a batch: the first bytes of a SHA-256.
pub type Hash = [u8; HASH_BYTES];

/// Most hashes that lead from a packet to the root of its batch. A batch has at most 2^5 packets.
pub const STEPS_MAX: usize = 5;

/// Lowest and highest priority of a packet.
pub const PRIORITIES: std::ops::RangeInclusive<u8> = 1..=10;

/// Shows that the source has made a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The index of the packet in its batch.
    pub index: u8,
    /// The hashes of the neighbouring subtrees, from the packet to the root: at most [`STEPS_MAX`].
    pub steps: Vec<Hash>,
    /// The source's signature over the root.
    pub signature: Signature,
}

/// A packet with the proof of its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vouched {
    /// In [`PRIORITIES`]. Of the packets of one source, those with a higher priority are sent first.
    pub priority: u8,
    /// The epoch of the destination, as the source knows it. A destination that has restarted drops packets that were
    /// recorded before. 0: the packet is for several nodes, and this is not checked.
    pub target: u32,
    /// The proof.
    pub proof: Proof,
    /// The packet. Only its age changes on the way.
    pub packet: Box<Spread>,
}

impl Vouched {
    /// Most bytes of the frame in a datagram, without the packet: type, priority, target, proof.
    pub const OVERHEAD_BYTES: usize = 1 + 1 + 4 + 2 + STEPS_MAX * HASH_BYTES + 64;

    /// Returns the bytes that the source vouches for: all that does not change on the way.
    pub fn vouched_bytes(&self) -> Vec<u8> {
        let mut out = b"\0sidetrack overlay 1 vouched\0".to_vec();
        out.put_u8(self.priority);
        out.put_u32(self.target);
        self.packet.put_aged(&mut out, 0);
        out
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.put_u8(self.priority);
        out.put_u32(self.target);
        out.put_u8(self.proof.index);
        out.put_u8(u8::try_from(self.proof.steps.len()).unwrap_or(u8::MAX));
        self.proof.steps.iter().for_each(|hash| out.put(hash));
        out.put(&self.proof.signature.0);
        self.packet.put(out);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (priority, target) = (reader.u8()?, reader.u32()?);
        if !PRIORITIES.contains(&priority) {
            return Err(FrameError::BadValue("priority"));
        }
        let (index, count) = (reader.u8()?, usize::from(reader.u8()?));
        // An index behind the last packet would give one proof two encodings.
        if count > STEPS_MAX || usize::from(index) >> count != 0 {
            return Err(FrameError::BadValue("proof"));
        }
        let steps = (0..count).map(|_| reader.array()).collect::<Result<_, _>>()?;
        let proof = Proof { index, steps, signature: reader.signature()? };
        Ok(Self { priority, target, proof, packet: Box::new(Spread::read(reader)?) })
    }
}

/// The statement under which the proofs of a node count: its epoch. The node draws an epoch when it starts, so packets of
/// its earlier runs do not count any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The node.
    pub origin: NodeId,
    /// The sequence of its record at that time. The statement with the highest sequence counts.
    pub sequence: u64,
    /// The epoch of its packets.
    pub epoch: u32,
    /// The number of its next packet at that time. A node that has just started drops much older ones.
    pub next: u64,
    /// The origin's signature over [`Standing::signed_bytes`].
    pub signature: Signature,
}

impl Standing {
    /// Returns the bytes that the origin signs.
    pub fn signed_bytes(&self) -> Vec<u8> {
        let mut out = b"sidetrack overlay 1 standing\0".to_vec();
        self.put_signed(&mut out);
        out
    }

    fn put_signed(&self, out: &mut Vec<u8>) {
        out.put_u64(self.origin.0);
        out.put_u64(self.sequence);
        out.put_u32(self.epoch);
        out.put_u64(self.next);
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        self.put_signed(out);
        out.put(&self.signature.0);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self {
            origin: reader.node()?,
            sequence: reader.u64()?,
            epoch: reader.u32()?,
            next: reader.u64()?,
            signature: reader.signature()?,
        })
    }
}
