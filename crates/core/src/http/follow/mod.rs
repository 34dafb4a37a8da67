//! Follows one direction of an HTTP/2 connection beside the library that serves it, and judges every header block as it
//! was sent. The library repairs or hides some malformed blocks: it cuts a fragment from `:path`, replaces a missing
//! path, forgets `:scheme` where only Host names the server, and drops pseudo-header fields of trailers. RFC 9113
//! Sec. 8.1.1 calls such messages malformed: the stream must be reset.
//!
//! The driver gives a [`Follower`] every byte before the library reads it. When the library then hands out a message,
//! the judgement is known. What the follower has not judged as well-formed counts as malformed.
//!
//! Settings of the peer do not matter here: they limit what we send. Our own settings are the defaults for frames and
//! for the table of HPACK.

#[cfg(test)]
mod tests;

use super::block::{Block, Part};
use super::h2::Malformed;
use super::hpack::{Decoder, HpackError};
use super::message::{MAX_HEAD, Sender};
use std::collections::BTreeMap;

/// The first bytes of a client (RFC 9113 Sec. 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The length of a frame header.
const HEAD_BYTES: usize = 9;
/// Most bytes of a frame's payload: the default of SETTINGS_MAX_FRAME_SIZE.
const FRAME_MAX: usize = 16_384;
/// Most CONTINUATION frames of one block. So a block has at most nine times [`FRAME_MAX`] bytes.
const CONTINUATIONS_MAX: usize = 8;
/// The size of the decoder's table: the default of SETTINGS_HEADER_TABLE_SIZE.
const TABLE_BYTES: usize = 4096;
/// A block whose fields are larger than [`MAX_HEAD`] is malformed. It is decoded all the same, up to this size, because
/// later blocks depend on it.
const LIST_MAX: usize = 4 * MAX_HEAD;
/// Most requests whose judgement the driver has not asked for.
const WAITING_MAX: usize = 1024;

const HEADERS: u8 = 0x1;
const PUSH_PROMISE: u8 = 0x5;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Why the connection cannot be followed any further. No later message on it is well-formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The client does not begin with the preface of HTTP/2.
    #[error("the connection does not begin as HTTP/2")]
    Preface,
    /// A frame is larger than we allow.
    #[error("a frame is larger than {FRAME_MAX} bytes")]
    FrameSize,
    /// A frame is on the wrong stream, or between the parts of a header block; or its padding is longer than itself.
    #[error("a frame is malformed or out of order")]
    Frame,
    /// A block has too many CONTINUATION frames.
    #[error("a header block has more than {CONTINUATIONS_MAX} continuations")]
    Continuations,
    /// A stream depends on itself. The library does not decode that block and misreads later ones.
    #[error("a stream depends on itself")]
    OwnDependency,
    /// A block cannot be decoded.
    #[error(transparent)]
    Block(#[from] HpackError),
    /// More than [`WAITING_MAX`] requests have been rejected by the library.
    #[error("more than {WAITING_MAX} requests were rejected one after the other")]
    Waiting,
}

/// Follows the frames of one sender.
#[derive(Debug)]
pub struct Follower {
    sender: Sender,
    is_proxy: bool,
    awaits: Awaits,
    /// The part of a frame header or of a payload that has arrived.
    held: Vec<u8>,
    /// The header block that is being sent.
    open: Option<Open>,
    decoder: Decoder,
    streams: BTreeMap<u32, Stream>,
    /// The highest stream that a client has opened.
    last: u32,
    broken: Option<Broken>,
}

/// What comes next.
#[derive(Clone, Copy, Debug)]
enum Awaits {
    /// The preface, from this byte on.
    Preface(usize),
    Head,
    /// The payload of a frame with a part of a header block.
    Payload(Frame),
    /// As many bytes of a payload that do not matter.
    Rest(usize),
}

#[derive(Clone, Copy, Debug)]
struct Frame {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

/// A header block whose last part has not arrived.
#[derive(Debug)]
struct Open {
    stream: u32,
    ends_stream: bool,
    bytes: Vec<u8>,
    continuations: usize,
}

#[derive(Debug, Default)]
struct Stream {
    /// The header section has arrived. What follows is trailers.
    is_headed: bool,
    /// The driver has asked for it.
    is_taken: bool,
    malformed: Option<Malformed>,
}

impl Follower {
    /// Follows what this sender sends.
    pub const fn new(sender: Sender) -> Self {
        let awaits = match sender {
            Sender::Client => Awaits::Preface(0),
            Sender::Server => Awaits::Head,
        };
        Self {
            sender,
            is_proxy: false,
            awaits,
            held: Vec::new(),
            open: None,
            decoder: Decoder::new(TABLE_BYTES, LIST_MAX),
            streams: BTreeMap::new(),
            last: 0,
            broken: None,
        }
    }

    /// The receiver is a proxy: requests for resources of scheme `http` are for it too.
    #[must_use]
    pub fn for_proxy(self) -> Self {
        Self { is_proxy: true, ..self }
    }

    /// Reads the next bytes.
    ///
    /// # Errors
    /// The connection cannot be followed any further. The error stays.
    pub fn read(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let mut bytes = bytes;
        while self.broken.is_none() && !bytes.is_empty() {
            if let Err(broken) = self.step(&mut bytes) {
                self.broken = Some(broken);
                (self.held, self.open) = (Vec::new(), None);
            }
        }
        self.broken.map_or(Ok(()), Err)
    }

    /// Notes that we have sent a request on this stream: its response will be judged.
    pub fn open(&mut self, stream: u32) {
        self.streams.insert(stream, Stream { is_taken: true, ..Stream::default() });
    }

    /// Takes the judgement of a request that the library hands out. The library hands requests out in order. It has
    /// rejected those before this one that it did not hand out, so they are forgotten.
    ///
    /// # Errors
    /// How the request is malformed.
    pub fn take(&mut self, stream: u32) -> Result<(), Malformed> {
        self.streams.retain(|id, other| *id >= stream || other.is_taken);
        if let Some(taken) = self.streams.get_mut(&stream) {
            taken.is_taken = true;
        }
        self.check(stream)
    }

    /// Returns the judgement of what has arrived on a stream so far: its header section, and its trailers.
    ///
    /// # Errors
    /// How it is malformed, or [`Malformed::Unread`].
    pub fn check(&self, stream: u32) -> Result<(), Malformed> {
        match self.streams.get(&stream) {
            Some(Stream { malformed: Some(malformed), .. }) => Err(*malformed),
            Some(Stream { is_headed: true, .. }) => Ok(()),
            _ => Err(Malformed::Unread),
        }
    }

    /// Forgets a stream that has ended for us.
    pub fn forget(&mut self, stream: u32) {
        self.streams.remove(&stream);
    }

    /// Makes one step with the first bytes, and removes them.
    fn step(&mut self, bytes: &mut &[u8]) -> Result<(), Broken> {
        match self.awaits {
            Awaits::Preface(at) => {
                let expected = PREFACE.get(at..).unwrap_or_default();
                let taken = take(bytes, expected.len());
                if !expected.starts_with(taken) {
                    return Err(Broken::Preface);
                }
                let is_whole = taken.len() == expected.len();
                self.awaits = if is_whole { Awaits::Head } else { Awaits::Preface(at + taken.len()) };
            }
            Awaits::Head => {
                self.held.extend_from_slice(take(bytes, HEAD_BYTES - self.held.len()));
                if let Some(frame) = Frame::parse(&self.held) {
                    self.held.clear();
                    self.begin(frame)?;
                }
            }
            Awaits::Payload(frame) => {
                self.held.extend_from_slice(take(bytes, frame.length - self.held.len()));
                if self.held.len() == frame.length {
                    self.end(frame)?;
                }
            }
            Awaits::Rest(rest) => {
                let rest = rest - take(bytes, rest).len();
                self.awaits = if rest == 0 { Awaits::Head } else { Awaits::Rest(rest) };
            }
        }
        Ok(())
    }

    /// Begins a frame.
    fn begin(&mut self, frame: Frame) -> Result<(), Broken> {
        if frame.length > FRAME_MAX {
            return Err(Broken::FrameSize);
        }
        let is_of_client = frame.stream % 2 == 1;
        let fits = match (frame.kind, &self.open) {
            (CONTINUATION, Some(open)) => open.stream == frame.stream,
            // Only clients open streams, as we allow no push.
            (HEADERS, None) => is_of_client,
            (CONTINUATION | PUSH_PROMISE, None) | (_, Some(_)) => false,
            _ => true,
        };
        let has_block = matches!(frame.kind, HEADERS | CONTINUATION);
        match frame.length {
            _ if !fits => return Err(Broken::Frame),
            0 if has_block => return self.end(frame),
            0 => self.awaits = Awaits::Head,
            _ if has_block => self.awaits = Awaits::Payload(frame),
            length => self.awaits = Awaits::Rest(length),
        }
        Ok(())
    }

    /// Ends a frame with a part of a header block, whose payload is held.
    fn end(&mut self, frame: Frame) -> Result<(), Broken> {
        self.awaits = Awaits::Head;
        let open = match self.open.take() {
            None => {
                let bytes = frame.fragment(&self.held)?.to_vec();
                let ends_stream = frame.flags & END_STREAM != 0;
                Open { stream: frame.stream, ends_stream, bytes, continuations: 0 }
            }
            Some(mut open) => {
                open.continuations += 1;
                if open.continuations > CONTINUATIONS_MAX {
                    return Err(Broken::Continuations);
                }
                open.bytes.extend_from_slice(&self.held);
                open
            }
        };
        self.held.clear();
        if frame.flags & END_HEADERS == 0 {
            self.open = Some(open);
            return Ok(());
        }
        self.judge(&open)
    }

    /// Judges a whole block.
    fn judge(&mut self, open: &Open) -> Result<(), Broken> {
        let is_new = self.sender == Sender::Client && open.stream > self.last;
        if is_new {
            self.last = open.stream;
            if self.streams.values().filter(|stream| !stream.is_taken).count() >= WAITING_MAX {
                return Err(Broken::Waiting);
            }
            self.streams.insert(open.stream, Stream::default());
        }
        let stream = self.streams.get_mut(&open.stream);
        let part = match (self.sender, stream.as_ref().is_some_and(|stream| stream.is_headed)) {
            (_, true) => Part::Trailers,
            (Sender::Client, false) => Part::Request,
            (Sender::Server, false) => Part::Response,
        };
        let block = Block::new(part, self.sender);
        let mut block = if self.is_proxy { block.for_proxy() } else { block };
        let size = self.decoder.decode(&open.bytes, |name, value| block.field(name, value))?;
        // A block of a stream that we have forgotten only changes the decoder's table.
        let Some(stream) = stream else { return Ok(()) };
        let judged = if size > MAX_HEAD { Err(Malformed::TooLong) } else { block.end(open.ends_stream) };
        match judged {
            Ok(is_final) => stream.is_headed |= is_final,
            Err(malformed) => stream.malformed = stream.malformed.or(Some(malformed)),
        }
        Ok(())
    }
}

impl Frame {
    /// Reads a whole frame header.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let [high, middle, low, kind, flags, stream @ ..] = *bytes.as_array::<HEAD_BYTES>()?;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        // The highest bit is reserved and ignored.
        let stream = u32::from_be_bytes(stream) & (u32::MAX >> 1);
        Some(Self { length, kind, flags, stream })
    }

    /// Returns the part of a block in the payload of a HEADERS frame: without padding and priority.
    fn fragment(self, payload: &[u8]) -> Result<&[u8], Broken> {
        let (mut rest, mut padding) = (payload, 0);
        if self.flags & PADDED != 0 {
            let (length, behind) = rest.split_first().ok_or(Broken::Frame)?;
            (rest, padding) = (behind, usize::from(*length));
        }
        if self.flags & PRIORITY != 0 {
            let (priority, behind) = rest.split_first_chunk::<5>().ok_or(Broken::Frame)?;
            let [on @ .., _] = *priority;
            if u32::from_be_bytes(on) & (u32::MAX >> 1) == self.stream {
                return Err(Broken::OwnDependency);
            }
            rest = behind;
        }
        let length = rest.len().checked_sub(padding).ok_or(Broken::Frame)?;
        Ok(rest.get(..length).unwrap_or_default())
    }
}

/// Removes at most `count` bytes from the front and returns them.
fn take<'a>(bytes: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at(count.min(bytes.len()));
    *bytes = rest;
    taken
}
