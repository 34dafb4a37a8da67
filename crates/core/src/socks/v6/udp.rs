//! The messages of UDP ASSOCIATE in version 6.
//!
//! Header: `06` type(1) length(2) association id(8). In a datagram the address type comes **before** the port, unlike
//! in a request.

use super::super::address::{self, AddressError, NameLayout};
use super::super::reader::{Reader, Stop};
use super::{DecodeError, EncodeError, VERSION};
use crate::flow::{Destination, Host};
use std::net::{IpAddr, SocketAddr};

const INIT: u8 = 1;
const CONFIRM: u8 = 2;
const DATAGRAM: u8 = 3;
const ERROR: u8 = 4;
const HEADER_LEN: usize = 12;

/// The meaning of an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UdpError {
    /// 1: network unreachable.
    NetworkUnreachable,
    /// 2: host unreachable.
    HostUnreachable,
    /// 3: TTL expired.
    TtlExpired,
    /// 4: datagram too big (IPv6 only).
    TooBig,
    /// Any other byte.
    Other(u8),
}

impl UdpError {
    const fn from_wire(byte: u8) -> Self {
        match byte {
            1 => Self::NetworkUnreachable,
            2 => Self::HostUnreachable,
            3 => Self::TtlExpired,
            4 => Self::TooBig,
            other => Self::Other(other),
        }
    }

    const fn wire(self) -> u8 {
        match self {
            Self::NetworkUnreachable => 1,
            Self::HostUnreachable => 2,
            Self::TtlExpired => 3,
            Self::TooBig => 4,
            Self::Other(byte) => byte,
        }
    }
}

/// One message of an association.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UdpMessage {
    /// The proxy announces the association, on TCP.
    Init {
        /// The association.
        id: u64,
    },
    /// The proxy has received the first datagram, on TCP.
    Confirm {
        /// The association.
        id: u64,
    },
    /// A datagram, in either direction.
    Datagram {
        /// The association.
        id: u64,
        /// The destination or the source.
        remote: Destination,
        /// The payload.
        payload: Vec<u8>,
    },
    /// An ICMP error arrived. Sent by the proxy only, after the client has requested it.
    Error {
        /// The association.
        id: u64,
        /// The destination of the datagram.
        remote: SocketAddr,
        /// The host that reported the error.
        reporter: IpAddr,
        /// The error.
        error: UdpError,
    },
}

/// A datagram of an association, read without a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpDatagram<'a> {
    /// The association.
    pub id: u64,
    /// The destination or the source.
    pub remote: Destination,
    /// The payload. It may be empty.
    pub payload: &'a [u8],
}

impl<'a> UdpDatagram<'a> {
    /// Reads the payload of a UDP datagram. Bytes behind the message are padding. `None`: drop it silently, it is cut, malformed
    /// or another message.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let &[VERSION, DATAGRAM, high, low] = bytes.first_chunk::<4>()? else { return None };
        let mut reader = Reader::new(bytes.get(..usize::from(u16::from_be_bytes([high, low])))?);
        reader.take(4).ok()?;
        let id = reader.u64().ok()?;
        let (atyp, _) = (reader.u8().ok()?, reader.u8().ok()?);
        let port = reader.u16().ok()?;
        let host = address::read_host(&mut reader, atyp, NameLayout::Counted).ok()?;
        Some(Self { id, remote: Destination { host, port, zone: 0 }, payload: reader.rest() })
    }
}

/// Appends the header of a datagram; its payload follows. Returns where it begins, for [`end_datagram`].
pub fn begin_datagram(out: &mut Vec<u8>, id: u64, remote: &Destination) -> usize {
    let start = out.len();
    out.extend_from_slice(&[VERSION, DATAGRAM, 0, 0]);
    out.extend_from_slice(&id.to_be_bytes());
    out.extend_from_slice(&[address::atyp(&remote.host), 0]);
    out.extend_from_slice(&remote.port.to_be_bytes());
    address::put_host(out, &remote.host, NameLayout::Counted);
    start
}

/// Sets the length of the datagram that begins at `start` and ends where the bytes end. Returns false if the length field
/// cannot hold it.
pub fn end_datagram(out: &mut [u8], start: usize) -> bool {
    let Ok(length) = u16::try_from(out.len() - start) else { return false };
    let Some(place) = out.get_mut(start + 2..start + 4) else { return false };
    place.copy_from_slice(&length.to_be_bytes());
    true
}

fn put_ip(out: &mut Vec<u8>, ip: IpAddr) {
    address::put_host(out, &Host::from(ip), NameLayout::Counted);
}

impl UdpMessage {
    /// Encodes the message.
    ///
    /// # Errors
    /// Fails if the payload is too long for the length field.
    pub fn encode(&self) -> Result<Vec<u8>, EncodeError> {
        let (kind, id, body) = match self {
            Self::Init { id } => (INIT, id, Vec::new()),
            Self::Confirm { id } => (CONFIRM, id, Vec::new()),
            Self::Datagram { id, remote, payload } => {
                let mut body = vec![address::atyp(&remote.host), 0];
                body.extend_from_slice(&remote.port.to_be_bytes());
                address::put_host(&mut body, &remote.host, NameLayout::Counted);
                body.extend_from_slice(payload);
                (DATAGRAM, id, body)
            }
            Self::Error { id, remote, reporter, error } => {
                let mut body = vec![address::atyp(&Host::from(remote.ip())), 0];
                body.extend_from_slice(&remote.port().to_be_bytes());
                put_ip(&mut body, remote.ip());
                body.extend_from_slice(&[address::atyp(&Host::from(*reporter)), error.wire(), 0, 0]);
                put_ip(&mut body, *reporter);
                (ERROR, id, body)
            }
        };
        let len = u16::try_from(HEADER_LEN + body.len()).map_err(|_| EncodeError::Payload(body.len()))?;
        let mut out = vec![VERSION, kind];
        out.extend_from_slice(&len.to_be_bytes());
        out.extend_from_slice(&id.to_be_bytes());
        out.extend_from_slice(&body);
        Ok(out)
    }

    /// Decodes a message from the beginning of a stream. Returns the message and its length, or `None` if more bytes
    /// are needed.
    ///
    /// # Errors
    /// Fails if the bytes cannot become a message, whatever follows.
    pub fn decode_stream(bytes: &[u8]) -> Result<Option<(Self, usize)>, DecodeError> {
        if let Some(&version) = bytes.first().filter(|version| **version != VERSION) {
            return Err(DecodeError::Version(version));
        }
        let Some(&[_, _, high, low]) = bytes.first_chunk::<4>() else { return Ok(None) };
        let len = usize::from(u16::from_be_bytes([high, low]));
        if len < HEADER_LEN {
            return Err(DecodeError::Length(len));
        }
        let Some(message) = bytes.get(..len) else { return Ok(None) };
        match Self::read(message) {
            Ok(message) => Ok(Some((message, len))),
            Err(Some(error)) => Err(error),
            // The message is complete according to its own length, so it contradicts itself.
            Err(None) => Err(DecodeError::Length(len)),
        }
    }

    /// Decodes the payload of a UDP or DTLS datagram. Bytes behind the message are padding. `None`: drop it silently.
    pub fn decode_datagram(bytes: &[u8]) -> Option<Self> {
        Self::decode_stream(bytes).ok().flatten().map(|(message, _)| message)
    }

    /// Decodes a message that must end where `bytes` end. `Err(None)` if it does not.
    fn read(bytes: &[u8]) -> Result<Self, Option<DecodeError>> {
        let mut reader = Reader::new(bytes);
        Self::read_body(&mut reader).map_err(|stop| match stop {
            Stop::Incomplete => None,
            Stop::Address(error) => Some(error.into()),
        })?
    }

    fn read_body(reader: &mut Reader<'_>) -> Result<Result<Self, Option<DecodeError>>, Stop> {
        reader.u8()?;
        let kind = reader.u8()?;
        reader.u16()?;
        let id = reader.u64()?;
        let message = match kind {
            INIT => Self::Init { id },
            CONFIRM => Self::Confirm { id },
            DATAGRAM => {
                let atyp = reader.u8()?;
                reader.u8()?;
                let port = reader.u16()?;
                let host = address::read_host(reader, atyp, NameLayout::Counted)?;
                let payload = reader.take(reader.rest().len())?.to_vec();
                Self::Datagram { id, remote: Destination { host, port, zone: 0 }, payload }
            }
            ERROR => {
                let atyp = reader.u8()?;
                reader.u8()?;
                let port = reader.u16()?;
                let remote = SocketAddr::new(read_ip(reader, atyp)?, port);
                let (atyp, code) = (reader.u8()?, reader.u8()?);
                reader.u16()?;
                let reporter = read_ip(reader, atyp)?;
                Self::Error { id, remote, reporter, error: UdpError::from_wire(code) }
            }
            other => return Ok(Err(Some(DecodeError::Type(other)))),
        };
        // Only a datagram has a variable length.
        Ok(if reader.is_empty() { Ok(message) } else { Err(None) })
    }
}

fn read_ip(reader: &mut Reader<'_>, atyp: u8) -> Result<IpAddr, Stop> {
    match atyp {
        address::ATYP_IPV4 => reader.ipv4(),
        address::ATYP_IPV6 => reader.ipv6(),
        other => Err(AddressError::Type(other).into()),
    }
}
