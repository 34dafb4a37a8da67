//! The header of datagrams in UDP ASSOCIATE (RFC 1928 Sec. 7): `0000 fragment atyp address port`, then the payload.

use super::super::address::{self, AddressError, NameLayout};
use super::super::reader::{Reader, Stop};
use crate::flow::Destination;

/// Bytes of the longest header: that of a name of 255 bytes.
pub const HEADER_MAX: usize = 4 + 1 + 255 + 2;

/// A datagram without its header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// From the client: the destination. To the client: the sender.
    pub remote: Destination,
    /// The payload. It may be empty.
    pub payload: &'a [u8],
}

/// Why a datagram is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// It ends in its header.
    #[error("the datagram ends in its header")]
    Short,
    /// It is a fragment. RFC 1928 allows an implementation to drop all of them.
    #[error("the datagram is fragment {0} of several: fragments are dropped")]
    Fragment(u8),
    /// The address is invalid.
    #[error(transparent)]
    Address(AddressError),
}

impl<'a> Datagram<'a> {
    /// Reads the header of a datagram. The reserved bytes are not checked, because no version gives them a meaning.
    ///
    /// # Errors
    /// Fails if the datagram must be dropped. RFC 1928 has no answer to it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, HeaderError> {
        let mut reader = Reader::new(bytes);
        let (fragment, remote) = header(&mut reader).map_err(|stop| match stop {
            Stop::Incomplete => HeaderError::Short,
            Stop::Address(error) => HeaderError::Address(error),
        })?;
        match fragment {
            0 => Ok(Self { remote, payload: reader.rest() }),
            number => Err(HeaderError::Fragment(number)),
        }
    }
}

fn header(reader: &mut Reader<'_>) -> Result<(u8, Destination), Stop> {
    reader.u16()?;
    let fragment = reader.u8()?;
    let atyp = reader.u8()?;
    let host = address::read_host(reader, atyp, NameLayout::Bare)?;
    Ok((fragment, Destination { host, port: reader.u16()?, zone: 0 }))
}

/// Appends the header of a datagram: at most [`HEADER_MAX`] bytes.
pub fn put_header(out: &mut Vec<u8>, remote: &Destination) {
    out.extend_from_slice(&[0, 0, 0, address::atyp(&remote.host)]);
    address::put_host(out, &remote.host, NameLayout::Bare);
    out.extend_from_slice(&remote.port.to_be_bytes());
}
