//! The groups of a node: a signed list that is flooded like the record of its links ([`crate::overlay::disseminate`]). Its types
//! are from 0x80 on: an older node skips them.

use super::FrameError;
use super::wire::{Put, Reader};
use crate::overlay::disseminate::Statement;
use crate::overlay::group::{GROUPS_MAX, GroupName};
use crate::overlay::{NodeId, Signature};

pub(super) const MEMBERSHIP: u8 = 0x90;
pub(super) const MEMBERSHIP_ACK: u8 = 0x91;

/// All groups that one node is a member of, as this node says. The one with the highest sequence counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The member.
    pub origin: NodeId,
    /// Rises with each membership of this origin, also over restarts.
    pub sequence: u64,
    /// Its groups in the order of their bytes, each once, at most [`GROUPS_MAX`].
    pub groups: Vec<GroupName>,
    /// The origin's signature over [`Membership::signed_bytes`].
    pub signature: Signature,
}

impl Membership {
    /// Returns the bytes that the origin signs.
    pub fn signed_bytes(&self) -> Vec<u8> {
        let mut out = b"sidetrack overlay 1 membership\0".to_vec();
        self.put_signed(&mut out);
        out
    }

    fn put_signed(&self, out: &mut Vec<u8>) {
        out.put_u64(self.origin.0);
        out.put_u64(self.sequence);
        out.put_u16(u16::try_from(self.groups.len()).unwrap_or(u16::MAX));
        for group in &self.groups {
            out.put_u8(u8::try_from(group.as_str().len()).unwrap_or(0));
            out.put(group.as_str().as_bytes());
        }
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        self.put_signed(out);
        out.put(&self.signature.0);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (origin, sequence) = (reader.node()?, reader.u64()?);
        let count = usize::from(reader.u16()?);
        if count > GROUPS_MAX {
            return Err(FrameError::BadValue("number of groups"));
        }
        let mut groups: Vec<GroupName> = Vec::with_capacity(count);
        for _ in 0..count {
            let length = usize::from(reader.u8()?);
            let name = GroupName::from_bytes(reader.take(length)?);
            // One order, so that a list has one encoding.
            let name = name.filter(|name| groups.last().is_none_or(|last| last < name));
            groups.push(name.ok_or(FrameError::BadValue("list of groups"))?);
        }
        Ok(Self { origin, sequence, groups, signature: reader.signature()? })
    }
}

impl Statement for Membership {
    type Entry = GroupName;

    const ENTRIES_MAX: usize = GROUPS_MAX;

    fn unsigned(origin: NodeId, sequence: u64, groups: Vec<GroupName>) -> Self {
        Self { origin, sequence, groups, signature: Signature::NONE }
    }

    fn origin(&self) -> NodeId {
        self.origin
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }

    fn entries(&self) -> &Vec<GroupName> {
        &self.groups
    }

    fn signed_bytes(&self) -> Vec<u8> {
        self.signed_bytes()
    }

    fn signature_mut(&mut self) -> &mut Signature {
        &mut self.signature
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }
}
