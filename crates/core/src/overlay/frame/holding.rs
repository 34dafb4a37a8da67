//! What a node has of a reliable intrusion-tolerant flow ([`crate::overlay::tolerant::reliable`]). Its type is from 0x80 on: an
//! older node skips it.

use super::FrameError;
use super::wire::{Put, Reader};
use crate::overlay::{NodeId, Signature};

pub(super) const HOLDING: u8 = 0xB2;

/// Most messages of a flow that are on their way at a time: beyond the first one that the destination has not confirmed.
pub const FLOW_WINDOW: u64 = 8 * BEYOND_MAX as u64;

/// Most bytes of the list in a [`Holding`].
const BEYOND_MAX: usize = 64;

const ASKS: u8 = 1;
const IS_CONFIRMED: u8 = 2;

/// The messages of one source to one destination, since the later one of them has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowName {
    /// The node that sends the messages.
    pub source: NodeId,
    /// The node that delivers them.
    pub destination: NodeId,
    /// The epoch of the source.
    pub epoch: u32,
    /// The epoch of the destination.
    pub target: u32,
}

/// The destination's signed statement that it has delivered all messages of a flow before one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmed {
    /// The first message that is not delivered yet, at least 1.
    pub next: u64,
    /// The destination's signature over [`FlowName::confirmed_bytes`].
    pub signature: Signature,
}

/// Says to a neighbour which messages of a flow a node has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The flow.
    pub flow: FlowName,
    /// The neighbour has not shown that it knows what is confirmed, and is asked to answer.
    pub asks: bool,
    /// The latest statement of the destination. `None`: it has confirmed nothing yet.
    pub confirmed: Option<Confirmed>,
    /// The first message that the node does not have; not below what is confirmed.
    pub next: u64,
    /// One bit for each later message, from `next + 1` on, the highest bit of a byte first: set if the node has it. The
    /// last byte is not zero.
    pub beyond: Vec<u8>,
}

impl FlowName {
    /// Returns the bytes that the destination signs to confirm all messages before `next`.
    pub fn confirmed_bytes(&self, next: u64) -> Vec<u8> {
        let mut out = b"sidetrack overlay 1 confirmed\0".to_vec();
        self.put(&mut out);
        out.put_u64(next);
        out
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.put_u64(self.source.0);
        out.put_u64(self.destination.0);
        out.put_u32(self.epoch);
        out.put_u32(self.target);
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (source, destination) = (reader.node()?, reader.node()?);
        if source == destination {
            return Err(FrameError::BadValue("flow"));
        }
        Ok(Self { source, destination, epoch: reader.u32()?, target: reader.u32()? })
    }
}

impl Holding {
    /// Whether the node has this message.
    pub fn has(&self, sequence: u64) -> bool {
        let Some(after) = sequence.checked_sub(self.next) else { return true };
        let Some(bit) = after.checked_sub(1).and_then(|bit| usize::try_from(bit).ok()) else { return false };
        self.beyond.get(bit / 8).is_some_and(|byte| byte & (0x80 >> (bit % 8)) != 0)
    }

    /// Returns the message behind the last one that the node has. At most `next + FLOW_WINDOW + 1`.
    pub fn end(&self) -> u64 {
        let last = self.beyond.last().map_or(0, |byte| 8 - byte.trailing_zeros());
        let bits = self.beyond.len().saturating_sub(1) * 8 + usize::try_from(last).unwrap_or(0);
        let bits = u64::try_from(bits).unwrap_or(0);
        if bits == 0 { self.next } else { self.next.saturating_add(bits).saturating_add(1) }
    }

    /// Sets the list of later messages from their numbers. Numbers outside the list are left out.
    pub fn set_beyond(&mut self, sequences: impl Iterator<Item = u64>) {
        self.beyond.clear();
        for sequence in sequences {
            let bit = sequence.checked_sub(self.next).and_then(|after| after.checked_sub(1));
            let Some(bit) = bit.and_then(|bit| usize::try_from(bit).ok()) else { continue };
            if bit / 8 < BEYOND_MAX {
                self.beyond.resize(self.beyond.len().max(bit / 8 + 1), 0);
                self.beyond[bit / 8] |= 0x80 >> (bit % 8);
            }
        }
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        self.flow.put(out);
        let is_confirmed = if self.confirmed.is_some() { IS_CONFIRMED } else { 0 };
        out.put_u8(is_confirmed | u8::from(self.asks));
        if let Some(confirmed) = &self.confirmed {
            out.put_u64(confirmed.next);
            out.put(&confirmed.signature.0);
        }
        out.put_u64(self.next);
        out.put(&self.beyond);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        const BAD: FrameError = FrameError::BadValue("holding");
        let flow = FlowName::read(reader)?;
        let flags = reader.u8()?;
        if flags & !(ASKS | IS_CONFIRMED) != 0 {
            return Err(BAD);
        }
        let mut confirmed = None;
        if flags & IS_CONFIRMED != 0 {
            confirmed = Some(Confirmed { next: reader.u64()?, signature: reader.signature()? });
        }
        let (next, beyond) = (reader.u64()?, reader.rest().to_vec());
        let is_in_order = confirmed.is_none_or(|confirmed| (1..=next).contains(&confirmed.next));
        // A zero byte at the end would give one list several encodings.
        if !is_in_order || beyond.len() > BEYOND_MAX || beyond.last() == Some(&0) {
            return Err(BAD);
        }
        Ok(Self { flow, asks: flags & ASKS != 0, confirmed, next, beyond })
    }
}
