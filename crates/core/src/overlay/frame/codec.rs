//! Decodes frames from a byte stream that may be cut anywhere, and encodes them into one.

use super::{Frame, SessionFrame};

/// Bytes of the length field and the type.
pub const HEADER_BYTES: usize = 5;

/// Most bytes of a frame after its length field.
pub const FRAME_MAX: usize = FRAME_BYTES_MAX as usize;
const FRAME_BYTES_MAX: u32 = 65_536;

/// Why bytes are not a valid frame. The connection that they came on cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The length is 0 or above [`FRAME_MAX`].
    #[error("a frame of {0} bytes; allowed are 1 to {FRAME_MAX}")]
    BadLength(u32),
    /// The type is unknown and must not be skipped.
    #[error("unknown frame type {0:#04x}")]
    UnknownType(u8),
    /// The body ends before all fields of its type.
    #[error("a frame whose body is too short for its type")]
    Truncated,
    /// The body continues after its last field.
    #[error("a frame with {0} bytes too many")]
    TrailingBytes(usize),
    /// This field of a body has a value that is not allowed.
    #[error("a frame with a bad {0}")]
    BadValue(&'static str),
}

impl Frame {
    /// Appends the frame to `out`, as it is sent on a stream.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        self.encode_body(out);
        let length = u32::try_from(out.len() - start - 4).unwrap_or(u32::MAX);
        out[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }

    /// Encodes the frame for a datagram: type and body. The datagram gives the length.
    pub fn to_datagram(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode_body(&mut out);
        out
    }

    /// Decodes the frame of a datagram. `None` if its type is unknown but may be skipped.
    ///
    /// # Errors
    /// Fails if the frame is invalid. The datagram is dropped; other datagrams of the link stay valid.
    pub fn from_datagram(bytes: &[u8]) -> Result<Option<Self>, FrameError> {
        match u32::try_from(bytes.len()) {
            Ok(1..=FRAME_BYTES_MAX) => Self::decode_body(bytes),
            length => Err(FrameError::BadLength(length.unwrap_or(u32::MAX))),
        }
    }

    /// Encodes the frame as it is sent on a stream.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode(&mut out);
        out
    }
}

impl SessionFrame {
    /// Returns the header of a data frame. The caller writes the payload of `length` bytes right behind it.
    pub fn data_header(offset: u64, length: usize) -> [u8; HEADER_BYTES + 8] {
        let mut header = [0; HEADER_BYTES + 8];
        let body = u32::try_from(length + 9).unwrap_or(u32::MAX);
        header[..4].copy_from_slice(&body.to_be_bytes());
        header[4] = super::body::DATA;
        header[5..].copy_from_slice(&offset.to_be_bytes());
        header
    }
}

/// Splits a byte stream into frames. If each push is smaller than a frame and the caller takes all frames after it,
/// at most two frames are buffered.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    start: usize,
}

impl Decoder {
    /// Makes a decoder for the beginning of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next frame if it is complete. Skips types that may be skipped.
    ///
    /// # Errors
    /// Fails if the frame is invalid. What the decoder returns after that is meaningless.
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

    /// Returns the bytes that follow the last frame.
    pub fn into_rest(mut self) -> Vec<u8> {
        self.bytes.drain(..self.start);
        self.bytes
    }
}
