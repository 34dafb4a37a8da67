//! What travels on a real-time link, all of it in datagrams: packets with their numbers on this link, and what its two
//! ends tell each other to recover the lost ones ([`crate::overlay::realtime`]).

use super::wire::{Put, Reader};
use super::{FrameError, Spread};

pub(super) const TIMED: u8 = 0x82;
pub(super) const RESEND: u8 = 0x83;
pub(super) const NEWEST: u8 = 0x84;

/// Most numbers in one request ([`Resend`]).
pub const RESEND_MAX: usize = 64;

/// Which transmission on a real-time link a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Rises by one with every transmission in this direction of the link. A repetition has a number of its own, so its
    /// loss is found like any other.
    pub number: u64,
    /// The highest request that this end has answered.
    pub heard: u32,
    /// What is repeated. `None`: the packet is sent for the first time.
    pub repeats: Option<Repeats>,
}

/// The earlier transmissions of a packet that is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeats {
    /// The first transmission of the packet.
    pub first: u64,
    /// The transmission that was requested: the first one, or a lost repetition.
    pub lost: u64,
}

/// A packet on a real-time link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timed {
    /// The transmission.
    pub mark: Mark,
    /// The packet.
    pub packet: Box<Spread>,
}

/// Requests packets of a real-time link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resend {
    /// Rises by one with every request of this end, from 1 on.
    pub request: u32,
    /// The numbers of the missing transmissions: 1 to [`RESEND_MAX`], rising.
    pub numbers: Vec<u64>,
}

/// Says which transmission was the newest one, after a short silence: the loss of the last packet leaves no gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newest {
    /// The number of the newest transmission.
    pub number: u64,
    /// The highest request that this end has answered.
    pub heard: u32,
}

impl Timed {
    /// Bytes that precede the packet in the frame, without the type.
    pub const OVERHEAD_BYTES: usize = 8 + 4 + 4 + 4;

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        let Mark { number, heard, repeats } = self.mark;
        out.put_u64(number);
        out.put_u32(heard);
        // Two distances; both are 0 in a packet that repeats nothing.
        let back = |to: u64| u32::try_from(number.saturating_sub(to)).unwrap_or(u32::MAX);
        out.put_u32(repeats.map_or(0, |repeats| back(repeats.first)));
        out.put_u32(repeats.map_or(0, |repeats| back(repeats.lost)));
        self.packet.put(out);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (number, heard) = (reader.u64()?, reader.u32()?);
        let (first, lost) = (reader.u32()?, reader.u32()?);
        let repeats = match (number.checked_sub(first.into()), number.checked_sub(lost.into())) {
            _ if (first, lost) == (0, 0) => None,
            (Some(first), Some(lost)) if first <= lost && lost < number => Some(Repeats { first, lost }),
            _ => return Err(FrameError::BadValue("repetition")),
        };
        let packet = Box::new(Spread::read(reader)?);
        Ok(Self { mark: Mark { number, heard, repeats }, packet })
    }
}

impl Resend {
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.request);
        self.numbers.iter().for_each(|number| out.put_u64(*number));
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let request = reader.u32()?;
        let mut numbers: Vec<u64> = Vec::new();
        while !reader.0.is_empty() {
            let number = reader.u64()?;
            if numbers.len() >= RESEND_MAX || numbers.last().is_some_and(|last| *last >= number) {
                return Err(FrameError::BadValue("request"));
            }
            numbers.push(number);
        }
        if numbers.is_empty() { Err(FrameError::Truncated) } else { Ok(Self { request, numbers }) }
    }
}

impl Newest {
    pub(super) fn put(self, out: &mut Vec<u8>) {
        out.put_u64(self.number);
        out.put_u32(self.heard);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self { number: reader.u64()?, heard: reader.u32()? })
    }
}
