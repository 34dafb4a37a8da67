//! The three messages of version 6 in all layouts: Request, Authentication Reply, Operation Reply.

use super::super::address::{self, NameLayout};
use super::super::reader::{Reader, Stop};
use super::super::reply::ReplyCode;
use super::options::{Options, Place};
use super::{DecodeError, EncodeError, MAX_OPTIONS_LEN, VERSION};
use crate::carrier::Socks6Dialect;
use crate::flow::Destination;

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// 0: no operation, only replies (authentication, sessions, tokens).
    Noop,
    /// 1: a TCP connection.
    Connect,
    /// 2: a listening TCP port.
    Bind,
    /// 3: a UDP port.
    UdpAssociate,
    /// Any other byte.
    Other(u8),
}

impl Command {
    const fn from_wire(byte: u8) -> Self {
        match byte {
            0 => Self::Noop,
            1 => Self::Connect,
            2 => Self::Bind,
            3 => Self::UdpAssociate,
            other => Self::Other(other),
        }
    }

    const fn wire(self) -> u8 {
        match self {
            Self::Noop => 0,
            Self::Connect => 1,
            Self::Bind => 2,
            Self::UdpAssociate => 3,
            Self::Other(byte) => byte,
        }
    }
}

/// A request, without the initial data that may follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// CONNECT: the destination. BIND, UDP ASSOCIATE: the requested local address, where zeros mean any. NOOP: zeros.
    pub destination: Destination,
    /// Its options.
    pub options: Options,
}

/// An Authentication Reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthReply {
    /// Type 0, success. Otherwise type 1: authentication failed, or continues with the selected method.
    pub success: bool,
    /// Its options.
    pub options: Options,
}

/// An Operation Reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperationReply {
    /// The result.
    pub code: ReplyCode,
    /// The address of the proxy's connection to the destination.
    pub bound: Destination,
    /// Its options.
    pub options: Options,
}

/// The only Operation Reply that both generations of `socksx` read in the same way: both ignore the address.
const COMMON_SOCKSX_REPLY: [u8; 10] = [0x00, 0x01, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00];

/// A message and its length in bytes, or `None` if more bytes are needed.
type Decoded<T> = Result<Option<(T, usize)>, DecodeError>;

/// Why a decoder stops.
enum Halt {
    Incomplete,
    Wrong(DecodeError),
}

impl From<Stop> for Halt {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Incomplete => Self::Incomplete,
            Stop::Address(error) => Self::Wrong(error.into()),
        }
    }
}

impl From<DecodeError> for Halt {
    fn from(error: DecodeError) -> Self {
        Self::Wrong(error)
    }
}

fn decoded<T>(bytes: &[u8], decode: impl FnOnce(&mut Reader<'_>) -> Result<T, Halt>) -> Decoded<T> {
    let mut reader = Reader::new(bytes);
    match decode(&mut reader) {
        Ok(message) => Ok(Some((message, reader.position()))),
        Err(Halt::Incomplete) => Ok(None),
        Err(Halt::Wrong(error)) => Err(error),
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<(), Halt> {
    match reader.u8()? {
        VERSION => Ok(()),
        other => Err(DecodeError::Version(other).into()),
    }
}

/// Reads the length of the options. Refuses a length that is too large before it waits for the options.
fn read_options_len(reader: &mut Reader<'_>) -> Result<usize, Halt> {
    let len = usize::from(reader.u16()?);
    if len > MAX_OPTIONS_LEN { Err(DecodeError::OptionsTooLong(len).into()) } else { Ok(len) }
}

fn read_options(
    reader: &mut Reader<'_>,
    len: usize,
    place: Place,
    dialect: Socks6Dialect,
) -> Result<Options, Halt> {
    Ok(Options::decode(reader.take(len)?, place, dialect)?)
}

fn put_options_len(out: &mut Vec<u8>, options: &[u8]) {
    // Options::encode keeps to MAX_OPTIONS_LEN, which fits into 16 bits.
    out.extend_from_slice(&u16::try_from(options.len()).unwrap_or(u16::MAX).to_be_bytes());
}

/// Appends options length, port, zero, address type, address and options: the second part of requests and replies in
/// the draft.
fn put_draft_body(out: &mut Vec<u8>, address: &Destination, options: &[u8]) {
    put_options_len(out, options);
    out.extend_from_slice(&address.port.to_be_bytes());
    out.extend_from_slice(&[0, address::atyp(&address.host)]);
    address::put_host(out, &address.host, NameLayout::Padded);
    out.extend_from_slice(options);
}

impl Request {
    /// Encodes the request.
    ///
    /// # Errors
    /// Fails if the options do not fit.
    pub fn encode(&self, dialect: Socks6Dialect) -> Result<Vec<u8>, EncodeError> {
        let options = self.options.encode(dialect)?;
        let mut out = vec![VERSION, self.command.wire()];
        if dialect == Socks6Dialect::Draft {
            put_draft_body(&mut out, &self.destination, &options);
        } else {
            out.push(address::atyp(&self.destination.host));
            address::put_host(&mut out, &self.destination.host, NameLayout::Bare);
            out.extend_from_slice(&self.destination.port.to_be_bytes());
            out.push(0);
            put_options_len(&mut out, &options);
            out.extend_from_slice(&options);
        }
        Ok(out)
    }

    /// Decodes a request from the beginning of `bytes`.
    ///
    /// # Errors
    /// Fails if the bytes cannot become a request, whatever follows.
    pub fn decode(bytes: &[u8], dialect: Socks6Dialect) -> Decoded<Self> {
        decoded(bytes, |reader| {
            read_version(reader)?;
            let command = Command::from_wire(reader.u8()?);
            let (destination, options_len) = if dialect == Socks6Dialect::Draft {
                let options_len = read_options_len(reader)?;
                let port = reader.u16()?;
                reader.u8()?;
                let atyp = reader.u8()?;
                let host = address::read_host(reader, atyp, NameLayout::Padded)?;
                (Destination { host, port, zone: 0 }, options_len)
            } else {
                let atyp = reader.u8()?;
                let host = address::read_host(reader, atyp, NameLayout::Bare)?;
                let port = reader.u16()?;
                reader.u8()?;
                (Destination { host, port, zone: 0 }, read_options_len(reader)?)
            };
            let options = read_options(reader, options_len, Place::Request, dialect)?;
            Ok(Self { command, destination, options })
        })
    }
}

impl AuthReply {
    /// Encodes the reply, which is the same in all layouts.
    ///
    /// # Errors
    /// Fails if the options do not fit.
    pub fn encode(&self) -> Result<Vec<u8>, EncodeError> {
        let options = self.options.encode(Socks6Dialect::Draft)?;
        let mut out = vec![VERSION, u8::from(!self.success)];
        put_options_len(&mut out, &options);
        out.extend_from_slice(&options);
        Ok(out)
    }

    /// Decodes a reply from the beginning of `bytes`.
    ///
    /// # Errors
    /// Fails if the bytes cannot become a reply, whatever follows.
    pub fn decode(bytes: &[u8]) -> Decoded<Self> {
        decoded(bytes, |reader| {
            read_version(reader)?;
            let success = match reader.u8()? {
                0 => true,
                1 => false,
                other => return Err(DecodeError::Type(other).into()),
            };
            let len = read_options_len(reader)?;
            let options = read_options(reader, len, Place::AuthReply, Socks6Dialect::Draft)?;
            Ok(Self { success, options })
        })
    }
}

impl OperationReply {
    /// Encodes the reply. For both `socksx` layouts this is the one reply that both accept, which carries only the
    /// code.
    ///
    /// # Errors
    /// Fails if the options do not fit.
    pub fn encode(&self, dialect: Socks6Dialect) -> Result<Vec<u8>, EncodeError> {
        let mut out = vec![VERSION, self.code.v6()];
        if dialect == Socks6Dialect::Draft {
            put_draft_body(&mut out, &self.bound, &self.options.encode(dialect)?);
        } else {
            out.extend_from_slice(&COMMON_SOCKSX_REPLY);
        }
        Ok(out)
    }

    /// Decodes a reply from the beginning of `bytes`. The reply itself shows which `socksx` layout it has.
    ///
    /// # Errors
    /// Fails if the bytes cannot become a reply, whatever follows.
    pub fn decode(bytes: &[u8], dialect: Socks6Dialect) -> Decoded<Self> {
        decoded(bytes, |reader| {
            read_version(reader)?;
            let code = ReplyCode::from_wire(reader.u8()?);
            let (bound, options_len) = if dialect == Socks6Dialect::Draft {
                let options_len = read_options_len(reader)?;
                let port = reader.u16()?;
                reader.u8()?;
                let atyp = reader.u8()?;
                let host = address::read_bound(reader, atyp, NameLayout::Padded)?;
                (Destination { host, port, zone: 0 }, options_len)
            } else {
                (read_socksx_bound(reader)?, read_options_len(reader)?)
            };
            let options = read_options(reader, options_len, Place::OperationReply, dialect)?;
            Ok(Self { code, bound, options })
        })
    }
}

/// Reads the bound address: `00 atyp address port` from 0.1.1 on, `port 00 atyp address` in 0.1.0.
///
/// The reply that both generations read in the same way contains no address.
fn read_socksx_bound(reader: &mut Reader<'_>) -> Result<Destination, Halt> {
    let common = COMMON_SOCKSX_REPLY.split_last_chunk::<2>().map_or([].as_slice(), |(address, _)| address);
    if reader.rest().starts_with(common) {
        reader.take(common.len())?;
        return Ok(address::UNSPECIFIED);
    }
    let (byte_2, byte_3) = (reader.u8()?, reader.u8()?);
    if super::dialect::of_socksx_reply(byte_2, byte_3) == Socks6Dialect::Socksx {
        let host = address::read_bound(reader, byte_3, NameLayout::Bare)?;
        Ok(Destination { host, port: reader.u16()?, zone: 0 })
    } else {
        reader.u8()?;
        let atyp = reader.u8()?;
        let host = address::read_bound(reader, atyp, NameLayout::Bare)?;
        Ok(Destination { host, port: u16::from_be_bytes([byte_2, byte_3]), zone: 0 })
    }
}
