//! Headers, and splitting a byte stream into messages.

/// Bytes of a header: version, type, length, transaction id.
pub(super) const HEADER: usize = 8;

/// Longest message: the length field has 16 bits.
pub const MESSAGE_MAX: usize = 65_535;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// OpenFlow 1.0.
    V1_0,
    /// OpenFlow 1.3.
    V1_3,
}

impl Version {
    /// Both versions, the older one first.
    pub const ALL: [Self; 2] = [Self::V1_0, Self::V1_3];

    /// Returns the number in headers.
    pub const fn number(self) -> u8 {
        match self {
            Self::V1_0 => 1,
            Self::V1_3 => 4,
        }
    }

    /// Returns the version with this number.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.number() == number)
    }

    /// Returns the highest common version. If the HELLO has a bitmap (bit n stands for version n), the bitmap
    /// decides. Otherwise the lower of both numbers counts (1.3.5 Sec. 6.3.1).
    pub fn negotiate(theirs: u8, bitmap: Option<u32>) -> Option<Self> {
        match bitmap {
            Some(bits) => Self::ALL.into_iter().rev().find(|version| bits >> version.number() & 1 == 1),
            None => Self::of_number(theirs.min(Self::V1_3.number())),
        }
    }
}

/// Why bytes are not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The length is smaller than a header.
    #[error("an OpenFlow message says it has {0} bytes, fewer than its header")]
    Length(u16),
    /// The message ends in the middle of a field.
    #[error("an OpenFlow message of type {0} is cut short")]
    Short(u8),
    /// An inner length is wrong.
    #[error("an OpenFlow message of type {0} has a wrong length inside")]
    Inside(u8),
}

/// A message with its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The number of the version in its header.
    pub version: u8,
    /// Its type. The meaning depends on the version.
    pub kind: u8,
    /// Its transaction id.
    pub xid: u32,
    /// The bytes behind the header.
    pub body: Vec<u8>,
}

impl Frame {
    /// Encodes the message. A body that is too long for the length field is truncated, which never happens with
    /// messages of this program.
    pub fn to_bytes(&self) -> Vec<u8> {
        let length = (HEADER + self.body.len()).min(MESSAGE_MAX);
        let mut bytes = Vec::with_capacity(length);
        bytes.extend([self.version, self.kind]);
        bytes.extend(u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
        bytes.extend(self.xid.to_be_bytes());
        bytes.extend(self.body.iter().take(MESSAGE_MAX - HEADER));
        bytes
    }
}

/// Splits a byte stream into messages. Buffers at most one incomplete message after all complete ones were taken.
#[derive(Clone, Debug, Default)]
pub struct Decoder {
    held: Vec<u8>,
}

impl Decoder {
    /// Makes a decoder for the beginning of a stream.
    pub const fn new() -> Self {
        Self { held: Vec::new() }
    }

    /// Adds bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Returns the next complete message.
    ///
    /// # Errors
    /// Fails if a length is impossible. The rest of the stream cannot be used.
    pub fn frame(&mut self) -> Result<Option<Frame>, Malformed> {
        let Some(header) = self.held.first_chunk::<HEADER>() else { return Ok(None) };
        let [version, kind, high, low, x0, x1, x2, x3] = *header;
        let length = u16::from_be_bytes([high, low]);
        if usize::from(length) < HEADER {
            return Err(Malformed::Length(length));
        }
        let Some(body) = self.held.get(HEADER..usize::from(length)) else { return Ok(None) };
        let frame = Frame { version, kind, xid: u32::from_be_bytes([x0, x1, x2, x3]), body: body.to_vec() };
        self.held.drain(..usize::from(length));
        Ok(Some(frame))
    }

    /// Returns the number of buffered bytes that do not form a complete message yet.
    pub fn pending(&self) -> usize {
        self.held.len()
    }
}

/// Reads the fields of a body in order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    kind: u8,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) const fn new(kind: u8, bytes: &'a [u8]) -> Self {
        Self { kind, rest: bytes }
    }

    pub(super) const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) const fn inside(&self) -> Malformed {
        Malformed::Inside(self.kind)
    }

    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Malformed::Short(self.kind))?;
        self.rest = rest;
        Ok(taken)
    }

    /// Returns the next `length` bytes as a reader of their own.
    pub(super) fn part(&mut self, length: usize) -> Result<Self, Malformed> {
        Ok(Self { kind: self.kind, rest: self.take(length)? })
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let taken = self.take(N)?;
        taken.try_into().map_err(|_| Malformed::Short(self.kind))
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    pub(super) fn skip(&mut self, length: usize) -> Result<(), Malformed> {
        self.take(length).map(drop)
    }
}
