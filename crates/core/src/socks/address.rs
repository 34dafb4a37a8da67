//! The address forms of SOCKS: type 1 IPv4, 3 name, 4 IPv6 (RFC 1928 Sec. 5; the same numbers in version 6).
//!
//! An IPv4-mapped IPv6 address (`::ffff:a.b.c.d`) is read as IPv4 and never sent.

use super::reader::{Reader, Stop};
use crate::flow::{Destination, Host, HostNameError};
use std::net::{IpAddr, Ipv4Addr};

/// Address type of an IPv4 address.
pub const ATYP_IPV4: u8 = 1;
/// Address type of a domain name.
pub const ATYP_NAME: u8 = 3;
/// Address type of an IPv6 address.
pub const ATYP_IPV6: u8 = 4;

/// Why bytes are no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The type is none of 1, 3 and 4; where the address ends is unknown.
    #[error("address type {0} is unknown: 1 is IPv4, 3 a name, 4 IPv6")]
    Type(u8),
    /// The name breaks the rules of [`crate::flow::HostName`].
    #[error("the name of the destination is wrong: {0}")]
    Name(HostNameError),
}

/// `0.0.0.0:0`: what is sent where an address means nothing.
pub const UNSPECIFIED: Destination =
    Destination { host: Host::Ip(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), port: 0 };

/// Is this one of the address types?
pub(crate) const fn is_atyp(byte: u8) -> bool {
    matches!(byte, ATYP_IPV4 | ATYP_NAME | ATYP_IPV6)
}

/// The address type of a host.
pub(crate) fn atyp(host: &Host) -> u8 {
    match host {
        Host::Ip(ip) if ip.to_canonical().is_ipv4() => ATYP_IPV4,
        Host::Ip(_) => ATYP_IPV6,
        Host::Name(_) => ATYP_NAME,
    }
}

/// How a name is laid out after its length byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameLayout {
    /// As long as its length byte says (SOCKS5, `socksx`).
    Bare,
    /// Padded with NUL until length byte and name fill a multiple of 4 bytes (SOCKS6). Written as -12 has it, the
    /// padding counted in the length byte; read as -11 or -12 has it.
    Padded,
    /// Padded as in -12 when written; when read, the length byte alone says where it ends. For datagrams, whose
    /// names -11 does not pad and whose payload follows directly.
    Counted,
}

/// Writes the host without its type.
pub(crate) fn put_host(out: &mut Vec<u8>, host: &Host, layout: NameLayout) {
    match host {
        Host::Ip(ip) => match ip.to_canonical() {
            IpAddr::V4(ip) => out.extend_from_slice(&ip.octets()),
            IpAddr::V6(ip) => out.extend_from_slice(&ip.octets()),
        },
        Host::Name(name) => {
            let name = name.as_str().as_bytes();
            let padding = match layout {
                NameLayout::Bare => 0,
                // 255 + 1 is a multiple of 4, so a padded name fits the length byte too.
                NameLayout::Padded | NameLayout::Counted => {
                    (1 + name.len()).next_multiple_of(4) - 1 - name.len()
                }
            };
            // A HostName has at most 255 bytes.
            out.push(u8::try_from(name.len() + padding).unwrap_or(u8::MAX));
            out.extend_from_slice(name);
            out.resize(out.len() + padding, 0);
        }
    }
}

fn read_name<'a>(reader: &mut Reader<'a>, layout: NameLayout) -> Result<&'a [u8], Stop> {
    let len = usize::from(reader.u8()?);
    let mut name = reader.take(len)?;
    if layout == NameLayout::Padded {
        reader.take((1 + len).next_multiple_of(4) - 1 - len)?;
    }
    if layout != NameLayout::Bare {
        while let Some(shorter) = name.strip_suffix(&[0]) {
            name = shorter;
        }
    }
    Ok(name)
}

/// Reads a host of the given type.
pub(crate) fn read_host(reader: &mut Reader<'_>, atyp: u8, layout: NameLayout) -> Result<Host, Stop> {
    match atyp {
        ATYP_IPV4 => reader.ipv4().map(Host::from),
        ATYP_IPV6 => reader.ipv6().map(Host::from),
        ATYP_NAME => {
            let name = read_name(reader, layout)?;
            // Clients send addresses as names, too: a rule about networks has to see the address.
            Ok(Host::from_bytes(name).map_err(AddressError::Name)?)
        }
        other => Err(AddressError::Type(other).into()),
    }
}

/// Reads a bound address. It is for information only, so a name that is none (servers send empty ones) is read as
/// `0.0.0.0` instead of failing a connection that was made.
pub(crate) fn read_bound(reader: &mut Reader<'_>, atyp: u8, layout: NameLayout) -> Result<Host, Stop> {
    match read_host(reader, atyp, layout) {
        Err(Stop::Address(AddressError::Name(_))) => Ok(UNSPECIFIED.host),
        other => other,
    }
}
