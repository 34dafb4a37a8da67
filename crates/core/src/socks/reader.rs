//! Reads big-endian fields from bytes that may be incomplete.

use super::address::AddressError;

/// Why reading stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The bytes end before the message does. Try again with more bytes.
    Incomplete,
    /// The address is invalid, whatever follows.
    Address(AddressError),
}

impl From<AddressError> for Stop {
    fn from(error: AddressError) -> Self {
        Self::Address(error)
    }
}

/// A position in a byte slice.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at >= self.bytes.len()
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Stop> {
        let taken = self.rest().get(..len).ok_or(Stop::Incomplete)?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let taken = self.rest().first_chunk::<N>().ok_or(Stop::Incomplete)?;
        self.at += N;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Stop> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Stop> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Stop> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Stop> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn ipv4(&mut self) -> Result<std::net::IpAddr, Stop> {
        self.array::<4>().map(|octets| std::net::Ipv4Addr::from(octets).into())
    }

    pub(crate) fn ipv6(&mut self) -> Result<std::net::IpAddr, Stop> {
        self.array::<16>().map(|octets| std::net::Ipv6Addr::from(octets).into())
    }
}
