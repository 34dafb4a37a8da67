//! Version 2: signature, version and command, family and transport, length, addresses, TLVs (Sec. 2.2 of the
//! document).

use super::tlv::{self, Tlv};
use super::{
    Addresses, EncodeError, Header, HeaderError, MAX_V2, Transport, Version, canonical, crc32c, in_one_family,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// signature(12) version and command(1) family and transport(1) length(2)
const FIXED: usize = 16;

const LOCAL: u8 = 0x20;
const PROXY: u8 = 0x21;

/// The family is the high half of the byte, the transport the low half. Other combinations do not exist.
const UNSPECIFIED: u8 = 0x00;
const INET: u8 = 0x10;
const INET6: u8 = 0x20;
const UNIX: u8 = 0x30;
const STREAM: u8 = 1;
const DATAGRAM: u8 = 2;

/// Length of a path in a unix address.
const PATH: usize = 108;

/// Parses the header and returns its length. `None` if bytes are missing.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<(Header, usize)>, HeaderError> {
    if bytes.iter().zip(SIGNATURE).any(|(byte, wanted)| byte != wanted) {
        return Err(HeaderError::NotProxy);
    }
    let command = bytes.get(12).copied();
    if command.is_some_and(|command| !matches!(command, LOCAL | PROXY)) {
        return Err(HeaderError::BadCommand);
    }
    let local = command == Some(LOCAL);
    // The family of a LOCAL header has no meaning, but must still exist.
    if bytes.get(13).is_some_and(|family| address_length(*family).is_none()) {
        return Err(HeaderError::BadFamily);
    }
    let Some(fixed) = bytes.first_chunk::<FIXED>() else { return Ok(None) };
    let [.., family, high, low] = *fixed;
    let consumed = FIXED + usize::from(u16::from_be_bytes([high, low]));
    if consumed > MAX_V2 {
        return Err(HeaderError::BadLength);
    }
    let Some(whole) = bytes.get(..consumed) else { return Ok(None) };
    let block = whole.get(FIXED..).unwrap_or_default();
    if local || family == UNSPECIFIED {
        // The document requires to ignore the whole block, whatever it contains.
        let addresses = if local { Addresses::Local } else { Addresses::Unknown };
        return Ok(Some((Header { version: Version::V2, addresses, tlvs: Vec::new() }, consumed)));
    }
    let length = address_length(family).ok_or(HeaderError::BadFamily)?;
    let (fields, rest) = block.split_at_checked(length).ok_or(HeaderError::BadLength)?;
    let addresses = addresses(family, fields).ok_or(HeaderError::BadLength)?;
    let tlvs = tlv::parse(rest, whole)?;
    Ok(Some((Header { version: Version::V2, addresses, tlvs }, consumed)))
}

/// Returns the length of the addresses of a family and transport. `None` if the combination does not exist.
fn address_length(family: u8) -> Option<usize> {
    match (family & 0xf0, family & 0x0f) {
        (UNSPECIFIED, 0) => Some(0),
        (INET, STREAM | DATAGRAM) => Some(2 * (4 + 2)),
        (INET6, STREAM | DATAGRAM) => Some(2 * (16 + 2)),
        (UNIX, STREAM | DATAGRAM) => Some(2 * PATH),
        _ => None,
    }
}

/// Parses addresses of exactly the family's length.
fn addresses(family: u8, fields: &[u8]) -> Option<Addresses> {
    let transport = if family & 0x0f == STREAM { Transport::Stream } else { Transport::Datagram };
    match family & 0xf0 {
        INET => {
            let (client, rest) = fields.split_first_chunk::<4>()?;
            let (server, ports) = rest.split_first_chunk::<4>()?;
            inet(transport, Ipv4Addr::from(*client).into(), Ipv4Addr::from(*server).into(), ports)
        }
        INET6 => {
            let (client, rest) = fields.split_first_chunk::<16>()?;
            let (server, ports) = rest.split_first_chunk::<16>()?;
            inet(transport, Ipv6Addr::from(*client).into(), Ipv6Addr::from(*server).into(), ports)
        }
        _ => {
            let (client, server) = fields.split_at_checked(PATH)?;
            Some(Addresses::Unix { transport, client: path(client), server: path(server) })
        }
    }
}

fn inet(transport: Transport, client: IpAddr, server: IpAddr, ports: &[u8]) -> Option<Addresses> {
    let &[a, b, c, d] = ports else { return None };
    let client = canonical(SocketAddr::new(client, u16::from_be_bytes([a, b])));
    let server = canonical(SocketAddr::new(server, u16::from_be_bytes([c, d])));
    Some(Addresses::Inet { transport, client, server })
}

/// Returns a path without the NULs at its end. An abstract path starts with a NUL and keeps it.
fn path(field: &[u8]) -> Vec<u8> {
    let end = field.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    field.get(..end).unwrap_or_default().to_vec()
}

pub(super) fn encode(addresses: &Addresses, tlvs: &[Tlv], checksum: bool) -> Result<Vec<u8>, EncodeError> {
    let mut header = SIGNATURE.to_vec();
    // Family 0 with command PROXY is allowed, but HAProxy 2.6 ends such a connection. LOCAL has the same effect.
    let local = matches!(addresses, Addresses::Local | Addresses::Unknown);
    header.extend_from_slice(&[if local { LOCAL } else { PROXY }, UNSPECIFIED, 0, 0]);
    match addresses {
        // A reader ignores what follows these, so send no TLVs.
        Addresses::Local | Addresses::Unknown => return Ok(header),
        Addresses::Inet { transport, client, server } => {
            let (from, to) = in_one_family(*client, *server);
            put_ip(&mut header, from);
            put_ip(&mut header, to);
            header.extend_from_slice(&client.port().to_be_bytes());
            header.extend_from_slice(&server.port().to_be_bytes());
            set_family(&mut header, if from.is_ipv4() { INET } else { INET6 }, *transport);
        }
        Addresses::Unix { transport, client, server } => {
            for path in [client, server] {
                let padding = PATH.checked_sub(path.len()).ok_or(EncodeError::PathTooLong)?;
                header.extend_from_slice(path);
                header.extend(std::iter::repeat_n(0, padding));
            }
            set_family(&mut header, UNIX, *transport);
        }
    }
    for tlv in tlvs {
        tlv.put(&mut header)?;
    }
    if checksum {
        tlv::put(&mut header, tlv::CRC32C, &[0; 4])?;
    }
    set_length(&mut header)?;
    if checksum {
        // It covers the header with its own field, the last one, still zero.
        let sum = crc32c::checksum(&header).to_be_bytes();
        header.truncate(header.len() - sum.len());
        header.extend_from_slice(&sum);
    }
    Ok(header)
}

fn put_ip(header: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => header.extend_from_slice(&ip.octets()),
        IpAddr::V6(ip) => header.extend_from_slice(&ip.octets()),
    }
}

fn set_family(header: &mut [u8], family: u8, transport: Transport) {
    let transport = if transport == Transport::Stream { STREAM } else { DATAGRAM };
    if let Some(byte) = header.get_mut(13) {
        *byte = family | transport;
    }
}

fn set_length(header: &mut [u8]) -> Result<(), EncodeError> {
    let length = header.len() - FIXED;
    if header.len() > MAX_V2 {
        return Err(EncodeError::TooLong);
    }
    let length = u16::try_from(length).map_err(|_| EncodeError::TooLong)?;
    if let Some(field) = header.get_mut(14..FIXED) {
        field.copy_from_slice(&length.to_be_bytes());
    }
    Ok(())
}
