//! What travels on a paced link, all of it in datagrams: pieces of streams, acknowledgements, and the offer that opens the
//! link ([`crate::overlay::paced`]).

use super::FrameError;
use super::wire::{Put, Reader};

pub(super) const PACED: u8 = 0xA0;
pub(super) const PACED_ACK: u8 = 0xA1;
pub(super) const OFFER: u8 = 0xA2;

/// Most runs of arrived packets in one acknowledgement, the newest one not counted.
pub const RUNS_MAX: usize = 64;

const DATA: u8 = 0;
const END: u8 = 1;
const RESET: u8 = 2;
const CREDIT: u8 = 3;

/// A part of a packet: something about one stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Bytes of a stream.
    Data {
        /// The stream.
        stream: u32,
        /// The position of the first byte in the stream.
        offset: u64,
        /// 1 to 65,535 bytes.
        bytes: Vec<u8>,
    },
    /// The sender writes nothing behind this offset, and reads nothing more.
    End {
        /// The stream.
        stream: u32,
        /// The number of bytes of the stream in this direction.
        offset: u64,
    },
    /// The sender drops the stream: it writes and reads nothing more, and what is missing does not come.
    Reset {
        /// The stream.
        stream: u32,
    },
    /// The receiver may send the bytes before this offset.
    Credit {
        /// The stream.
        stream: u32,
        /// The offset.
        limit: u64,
    },
}

/// A packet of a paced link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paced {
    /// The lowest 32 bits of its number. Numbers rise by one with each packet; what is sent again has a new number.
    pub number: u32,
    /// Acknowledgements of packets more than this number of places before it are of no use.
    pub back: u16,
    /// At least one chunk.
    pub chunks: Vec<Chunk>,
}

/// A run of arrived packets, and the missing ones behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Packets that are missing between this run and the next newer one, at least 1.
    pub missing: u16,
    /// Packets that have arrived, at least 1.
    pub arrived: u16,
}

/// Says which packets of a paced link have arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacedAck {
    /// The lowest 32 bits of the number of the newest packet.
    pub newest: u32,
    /// How long ago it came, µs.
    pub age_us: u32,
    /// How many packets up to the newest one have arrived without a gap, at least 1.
    pub arrived: u16,
    /// Older runs, from newer to older: at most [`RUNS_MAX`].
    pub runs: Vec<Run>,
}

/// Says that the sender uses this link as a paced one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The rate at which it sends, bits per second.
    pub rate: u64,
    /// How many bytes the other end may send on a new stream before it has credit.
    pub credit: u32,
    /// The sender has an offer of the other end.
    pub heard: bool,
}

impl Chunk {
    /// Bytes of a [`Chunk::Data`] without its bytes.
    pub const DATA_BYTES: usize = 1 + 4 + 8 + 2;

    /// Most bytes of another chunk.
    pub const OTHER_BYTES: usize = 1 + 4 + 8;

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Data { stream, offset, bytes } => {
                out.put_u8(DATA);
                out.put_u32(*stream);
                out.put_u64(*offset);
                out.put_u16(u16::try_from(bytes.len()).unwrap_or(u16::MAX));
                out.put(bytes);
            }
            Self::End { stream, offset } => {
                out.put_u8(END);
                out.put_u32(*stream);
                out.put_u64(*offset);
            }
            Self::Reset { stream } => {
                out.put_u8(RESET);
                out.put_u32(*stream);
            }
            Self::Credit { stream, limit } => {
                out.put_u8(CREDIT);
                out.put_u32(*stream);
                out.put_u64(*limit);
            }
        }
    }

    fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let kind = reader.u8()?;
        let stream = reader.u32()?;
        Ok(match kind {
            DATA => {
                let (offset, length) = (reader.u64()?, usize::from(reader.u16()?));
                let end = offset.checked_add(length as u64).filter(|end| *end < u64::MAX);
                if end.is_none() || length == 0 {
                    return Err(FrameError::BadValue("chunk"));
                }
                Self::Data { stream, offset, bytes: reader.take(length)?.to_vec() }
            }
            END => Self::End { stream, offset: reader.u64()? },
            RESET => Self::Reset { stream },
            CREDIT => Self::Credit { stream, limit: reader.u64()? },
            _ => return Err(FrameError::BadValue("chunk")),
        })
    }
}

impl Paced {
    /// Bytes of the frame without its chunks: type, number, back.
    pub const OVERHEAD_BYTES: usize = 1 + 4 + 2;

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.number);
        out.put_u16(self.back);
        self.chunks.iter().for_each(|chunk| chunk.put(out));
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (number, back) = (reader.u32()?, reader.u16()?);
        let mut chunks = vec![Chunk::read(reader)?];
        while !reader.0.is_empty() {
            chunks.push(Chunk::read(reader)?);
        }
        Ok(Self { number, back, chunks })
    }
}

impl PacedAck {
    /// Returns the bytes of the frame.
    pub fn bytes(&self) -> usize {
        1 + 4 + 4 + 2 + 4 * self.runs.len()
    }

    pub(super) fn put(&self, out: &mut Vec<u8>) {
        out.put_u32(self.newest);
        out.put_u32(self.age_us);
        out.put_u16(self.arrived);
        for run in &self.runs {
            out.put_u16(run.missing);
            out.put_u16(run.arrived);
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (newest, age_us, arrived) = (reader.u32()?, reader.u32()?, reader.u16()?);
        let mut runs = Vec::new();
        while !reader.0.is_empty() {
            let run = Run { missing: reader.u16()?, arrived: reader.u16()? };
            if run.missing == 0 || run.arrived == 0 || runs.len() >= RUNS_MAX {
                return Err(FrameError::BadValue("run of packets"));
            }
            runs.push(run);
        }
        if arrived == 0 {
            return Err(FrameError::BadValue("run of packets"));
        }
        Ok(Self { newest, age_us, arrived, runs })
    }
}

impl Offer {
    /// Bytes of the frame.
    pub const BYTES: usize = 1 + 8 + 4 + 1;

    pub(super) fn put(self, out: &mut Vec<u8>) {
        out.put_u64(self.rate);
        out.put_u32(self.credit);
        out.put_u8(u8::from(self.heard));
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let (rate, credit) = (reader.u64()?, reader.u32()?);
        match reader.u8()? {
            heard @ (0 | 1) => Ok(Self { rate, credit, heard: heard == 1 }),
            _ => Err(FrameError::BadValue("offer")),
        }
    }
}
