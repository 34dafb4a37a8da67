//! The address types of SOCKS: 1 is IPv4, 3 a name, 4 IPv6 (RFC 1928 Sec. 5; version 6 has the same numbers).
//!
//! An IPv4-mapped IPv6 address (`::ffff:a.b.c.d`) is read as IPv4, and never sent.

use super::reader::{Reader, Stop};
use crate::flow::{Destination, Host, HostNameError};
use std::net::{IpAddr, Ipv4Addr};

/// Address type of an IPv4 address.
pub const ATYP_IPV4: u8 = 1;
/// Address type of a domain name.
pub const ATYP_NAME: u8 = 3;
/// Address type of an IPv6 address.
pub const ATYP_IPV6: u8 = 4;

/// Why bytes are not a valid address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The type is not 1, 3 or 4, so the end of the address is unknown.
    #[error("address type {0} is unknown: 1 is IPv4, 3 a name, 4 IPv6")]
    Type(u8),
    /// The name breaks the rules of [`crate::flow::HostName`].
    #[error("the name of the destination is wrong: {0}")]
    Name(HostNameError),
}

/// `0.0.0.0:0`, which is sent if an address has no meaning.
pub const UNSPECIFIED: Destination =
    Destination { host: Host::Ip(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), port: 0, zone: 0 };

/// Whether this is an address type.
pub(crate) const fn is_atyp(byte: u8) -> bool {
    matches!(byte, ATYP_IPV4 | ATYP_NAME | ATYP_IPV6)
}

/// Returns the address type of a host.
pub(crate) fn atyp(host: &Host) -> u8 {
    match host {
        Host::Ip(ip) if ip.to_canonical().is_ipv4() => ATYP_IPV4,
        Host::Ip(_) => ATYP_IPV6,
        Host::Name(_) => ATYP_NAME,
    }
}

/// How a name is encoded after its length byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameLayout {
    /// The length byte gives the length of the name (SOCKS5, `socksx`).
    Bare,
    /// Padded with NUL until length byte and name fill a multiple of 4 bytes (SOCKS6). Written as in -12, where the
    /// length byte includes the padding. Read as in -11 or -12.
    Padded,
    /// Written padded as in -12. When read, the length byte alone gives the end. For datagrams: -11 does not pad
    /// their names, and the payload follows directly.
    Counted,
}

/// Appends the host without its type.
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
                // 255 + 1 is a multiple of 4, so the length of a padded name always fits into the length byte.
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
            // Clients also send addresses as names. Parse them, so that rules about networks see the address.
            Ok(Host::from_bytes(name).map_err(AddressError::Name)?)
        }
        other => Err(AddressError::Type(other).into()),
    }
}

/// Reads a bound address. It is for information only. So an invalid name (servers send empty ones) is read as
/// `0.0.0.0`, and does not fail an established connection.
pub(crate) fn read_bound(reader: &mut Reader<'_>, atyp: u8, layout: NameLayout) -> Result<Host, Stop> {
    match read_host(reader, atyp, layout) {
        Err(Stop::Address(AddressError::Name(_))) => Ok(UNSPECIFIED.host),
        other => other,
    }
}
