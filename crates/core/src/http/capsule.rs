//! Capsules (RFC 9297 Sec. 3.2): a stream of `type(i) length(i) value`, where `(i)` is a variable-length integer of RFC 9000
//! Sec. 16.
//!
//! Only the DATAGRAM capsule (type 0) has a meaning here. Its value is the payload of CONNECT-UDP (RFC 9298 Sec. 5): a context
//! ID and, for context 0, one UDP payload. Capsules of other types and datagrams of other contexts are skipped without being
//! held, as both documents ask.
//!
//! ```text
//!              header complete                      value complete
//!   HEADER ------------------------> VALUE --------------------------> HEADER, with one payload
//!      |   DATAGRAM of good length     (held: at most VALUE_MAX bytes)
//!      |
//!      |   any other type                           last byte came
//!      +---------------------------> SKIP ---------------------------> HEADER
//!      |   DATAGRAM that is too long or has no context
//!      +---------------------------> BROKEN: for ever
//! ```

/// Most bytes of a UDP payload in a capsule (RFC 9298 Sec. 5).
pub const PAYLOAD_MAX: usize = 65_527;

/// Most bytes of the value of a DATAGRAM capsule: the longest context ID, and the longest payload.
pub const VALUE_MAX: usize = PAYLOAD_MAX + 8;

/// Most bytes before a payload that [`put_datagram`] writes: the type, the length and the context.
pub const HEADER_MAX: usize = 1 + 4 + 1;

/// The type of the DATAGRAM capsule.
const DATAGRAM: u64 = 0;

/// The context of UDP payloads.
const UDP: u64 = 0;

/// The largest value of a variable-length integer.
pub const VARINT_MAX: u64 = (1 << 62) - 1;

/// Why a stream of capsules must be aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapsuleError {
    /// A DATAGRAM capsule is longer than any UDP payload with its context.
    #[error("a datagram of {0} bytes is longer than UDP carries")]
    TooLong(u64),
    /// A DATAGRAM capsule ends in its context ID.
    #[error("a datagram ends in its context ID")]
    NoContext,
    /// The stream ended in a capsule.
    #[error("the stream ended in a capsule")]
    Cut,
}

/// Reads a variable-length integer (RFC 9000 Sec. 16) from the front. Returns it with its length in bytes; `None` if more bytes
/// are needed. Integers in more bytes than necessary are accepted, as the RFC asks.
pub fn read_varint(bytes: &[u8]) -> Option<(u64, usize)> {
    let first = *bytes.first()?;
    let length = 1 << (first >> 6);
    let (head, rest) = bytes.get(..length)?.split_first()?;
    let value = rest.iter().fold(u64::from(head & 0x3f), |value, byte| value << 8 | u64::from(*byte));
    Some((value, length))
}

/// Appends a variable-length integer in as few bytes as possible. A value beyond [`VARINT_MAX`] is written as that.
pub fn put_varint(out: &mut Vec<u8>, value: u64) {
    let value = value.min(VARINT_MAX);
    let (length, mark) = match value {
        0..0x40 => (1, 0),
        0x40..0x4000 => (2, 0x40),
        0x4000..0x4000_0000 => (4, 0x80),
        _ => (8, 0xc0),
    };
    let bytes = value.to_be_bytes();
    let at = out.len();
    out.extend_from_slice(&bytes[bytes.len() - length..]);
    out[at] |= mark;
}

/// Appends a DATAGRAM capsule with this UDP payload. Returns false, and appends nothing, if the payload is longer than
/// [`PAYLOAD_MAX`].
pub fn put_datagram(out: &mut Vec<u8>, payload: &[u8]) -> bool {
    if payload.len() > PAYLOAD_MAX {
        return false;
    }
    put_varint(out, DATAGRAM);
    put_varint(out, payload.len() as u64 + 1);
    put_varint(out, UDP);
    out.extend_from_slice(payload);
    true
}

/// Reads the UDP payloads of a stream of capsules, however its bytes are split.
///
/// Give it bytes with [`Reader::push`], then call [`Reader::payload`] until it returns `None`. It holds at most one incomplete
/// capsule besides the bytes of the last push.
#[derive(Debug, Default)]
pub struct Reader {
    held: Vec<u8>,
    /// Bytes at the front of `held` that are used.
    used: usize,
    /// Bytes of the current capsule that are still to be skipped.
    skip: u64,
    broken: Option<CapsuleError>,
    skipped: u64,
}

/// What is at the front of the unused bytes.
enum Front {
    /// Not a whole header, or not a whole value.
    Partial,
    /// A capsule without a UDP payload: the lengths of its header and of its value.
    Foreign(usize, u64),
    /// A UDP payload, from and to here.
    Payload(usize, usize),
}

impl Reader {
    /// Takes bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.broken.is_some() {
            return;
        }
        // The bytes that are used go away first, so that `held` does not grow with the stream.
        self.held.drain(..self.used);
        self.used = 0;
        let jump = self.jump(bytes.len());
        self.held.extend_from_slice(&bytes[jump..]);
    }

    /// Takes up to `available` bytes off what is to be skipped, if nothing is held before them. Returns how many.
    fn jump(&mut self, available: usize) -> usize {
        if self.skip == 0 || !self.held.is_empty() {
            return 0;
        }
        let jump = usize::try_from(self.skip).unwrap_or(usize::MAX).min(available);
        self.skip -= jump as u64;
        jump
    }

    /// Returns the next UDP payload. `None` if more bytes are needed.
    ///
    /// # Errors
    /// Fails if the stream must be aborted; every later call fails too.
    pub fn payload(&mut self) -> Result<Option<&[u8]>, CapsuleError> {
        if let Some(error) = self.broken {
            return Err(error);
        }
        loop {
            let unused = self.held.len() - self.used;
            let jump = usize::try_from(self.skip).unwrap_or(usize::MAX).min(unused);
            self.used += jump;
            self.skip -= jump as u64;
            match front(self.held.get(self.used..).unwrap_or_default()) {
                Ok(Front::Partial) => {
                    self.release();
                    return Ok(None);
                }
                Ok(Front::Foreign(header, value)) => {
                    self.skipped += 1;
                    self.used += header;
                    self.skip = value;
                }
                Ok(Front::Payload(from, to)) => {
                    let start = self.used;
                    self.used += to;
                    return Ok(self.held.get(start + from..start + to));
                }
                Err(error) => {
                    self.broken = Some(error);
                    (self.held, self.used) = (Vec::new(), 0);
                    return Err(error);
                }
            }
        }
    }

    /// Gives memory back once everything is used: a stream that rests holds none.
    fn release(&mut self) {
        if self.used == self.held.len() {
            (self.held, self.used) = (Vec::new(), 0);
        }
    }

    /// Tells that the stream has ended.
    ///
    /// # Errors
    /// Fails if it ended in a capsule, or was broken before (RFC 9297 Sec. 3.3).
    pub fn end(&self) -> Result<(), CapsuleError> {
        match self.broken {
            Some(error) => Err(error),
            None if self.skip > 0 || self.used < self.held.len() => Err(CapsuleError::Cut),
            None => Ok(()),
        }
    }

    /// Returns how many capsules and datagrams were skipped because their type or context is unknown.
    pub const fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Returns how many bytes are held.
    pub const fn held_bytes(&self) -> usize {
        self.held.len() - self.used
    }
}

fn front(bytes: &[u8]) -> Result<Front, CapsuleError> {
    let Some((kind, at)) = read_varint(bytes) else { return Ok(Front::Partial) };
    let Some((length, more)) = bytes.get(at..).and_then(read_varint) else { return Ok(Front::Partial) };
    let header = at + more;
    if kind != DATAGRAM {
        return Ok(Front::Foreign(header, length));
    }
    let value = usize::try_from(length).ok().filter(|value| *value <= VALUE_MAX);
    let value = value.ok_or(CapsuleError::TooLong(length))?;
    let came = bytes.get(header..).unwrap_or_default();
    let came = came.get(..value).unwrap_or(came);
    let Some((context, id)) = read_varint(came) else {
        return if came.len() == value { Err(CapsuleError::NoContext) } else { Ok(Front::Partial) };
    };
    if context != UDP {
        return Ok(Front::Foreign(header, length));
    }
    if value - id > PAYLOAD_MAX {
        return Err(CapsuleError::TooLong(length));
    }
    if came.len() < value {
        return Ok(Front::Partial);
    }
    Ok(Front::Payload(header + id, header + value))
}
