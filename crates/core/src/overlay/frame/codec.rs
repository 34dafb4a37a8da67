//! Frames out of a stream of bytes, however it is cut, and into one.

use super::{Frame, SessionFrame};

/// Bytes of the length and the type.
pub const HEADER_BYTES: usize = 5;

/// Most bytes of a frame after its length field.
pub const FRAME_MAX: usize = 65_536;
const FRAME_BYTES_MAX: u32 = FRAME_MAX as u32;

/// Why bytes are no frame. The connection they came on is of no use any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The length is 0 or above [`FRAME_MAX`].
    #[error("a frame of {0} bytes; allowed are 1 to {FRAME_MAX}")]
    BadLength(u32),
    /// The type is none we know, and one that must not be skipped.
    #[error("unknown frame type {0:#04x}")]
    UnknownType(u8),
    /// The body ends too early.
    #[error("a frame whose body is too short for its type")]
    Truncated,
    /// The body goes on after its end.
    #[error("a frame with {0} bytes too many")]
    TrailingBytes(usize),
    /// This part of a body is none that may stand there.
    #[error("a frame with a bad {0}")]
    BadValue(&'static str),
}

impl Frame {
    /// Appends the frame to `out`, as it travels.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        self.encode_body(out);
        let length = u32::try_from(out.len() - start - 4).unwrap_or(u32::MAX);
        out[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    /// The frame as it stands in a datagram: type and body, whose length the datagram gives.
    pub fn to_datagram(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode_body(&mut out);
        out
    }

    /// The frame of a datagram; none: a type that may be skipped.
    ///
    /// # Errors
    /// What is wrong with it. The datagram is dropped; others on the link mean what they say.
    pub fn from_datagram(bytes: &[u8]) -> Result<Option<Self>, FrameError> {
        match u32::try_from(bytes.len()) {
            Ok(1..=FRAME_BYTES_MAX) => Self::decode_body(bytes),
            length => Err(FrameError::BadLength(length.unwrap_or(u32::MAX))),
        }
    }

    /// The frame as it travels.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode(&mut out);
        out
    }
}

impl SessionFrame {
    /// The header of a data frame whose payload of `length` bytes is written by somebody else right behind it.
    pub fn data_header(offset: u64, length: usize) -> [u8; HEADER_BYTES + 8] {
        let mut header = [0; HEADER_BYTES + 8];
        let body = u32::try_from(length + 9).unwrap_or(u32::MAX);
        header[..4].copy_from_slice(&body.to_be_bytes());
        header[4] = super::body::DATA;
        header[5..].copy_from_slice(&offset.to_be_bytes());
        header
    }
}

/// Takes bytes as they come and gives frames. Holds less than two frames at a time if drained after every push of less
/// than one.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// A decoder at the beginning of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, if all of it is there. Types that may be skipped are skipped.
    ///
    /// # Errors
    /// What is wrong with it; the decoder gives nothing more then that means anything.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        loop {
            let Some((head, rest)) = self.bytes[self.start..].split_first_chunk::<4>() else {
                return Ok(None);
            };
            let length = u32::from_be_bytes(*head);
            let size = usize::try_from(length).unwrap_or(usize::MAX);
            if !(1..=FRAME_MAX).contains(&size) {
                return Err(FrameError::BadLength(length));
            }
            let Some(body) = rest.get(..size) else { return Ok(None) };
            let decoded = Frame::decode_body(body);
            self.start += 4 + size;
            if let Some(frame) = decoded? {
                return Ok(Some(frame));
            }
        }
    }

    /// The bytes that came and are part of no frame given so far: what follows the last frame.
    pub fn into_rest(mut self) -> Vec<u8> {
        self.bytes.drain(..self.start);
        self.bytes
    }
}
