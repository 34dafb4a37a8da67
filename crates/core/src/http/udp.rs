//! CONNECT-UDP (RFC 9298): where a request wants its datagrams to go, and what makes it one.
//!
//! The target is in the path, by the default template of RFC 9298 Sec. 2: `/.well-known/masque/udp/{target_host}/{target_port}/`.

use super::dns_name;
use super::fields::Fields;
use super::message::{Method, Request, Version};
use crate::flow::{Destination, Host, HostName};
use std::fmt::Write;
use std::net::IpAddr;

/// The word of the protocol, for Upgrade and for `:protocol`.
pub const PROTOCOL: &str = "connect-udp";

/// The field that says that the stream consists of capsules (RFC 9297 Sec. 3.4), and its value.
pub const CAPSULES: (&str, &str) = ("Capsule-Protocol", "?1");

/// The beginning of every path.
pub const PREFIX: &str = "/.well-known/masque/udp/";

/// Most bytes of a host in a path: every byte of a name of 255 bytes as `%hh`.
const HOST_MAX: usize = 3 * 255;

/// Why a path names no target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// It is not `/.well-known/masque/udp/HOST/PORT/`.
    #[error("the path is not {PREFIX}HOST/PORT/")]
    Shape,
    /// The host is not an address or a DNS name. An IPv6 address has its colons as `%3A`, without brackets or zone.
    #[error("the host in the path is neither an address nor a DNS name")]
    Host,
    /// The port is not a number from 1 to 65535.
    #[error("the port in the path is not a number from 1 to 65535")]
    Port,
}

/// Returns the path of a request for this target. `None` if the template cannot express it: a name that is not a DNS name in
/// ASCII, an address with a zone, or port 0.
pub fn path(target: &Destination) -> Option<String> {
    if target.port == 0 || target.zone != 0 {
        return None;
    }
    let mut path = String::from(PREFIX);
    match &target.host {
        Host::Ip(ip @ IpAddr::V4(_)) => write!(path, "{ip}").ok()?,
        Host::Ip(IpAddr::V6(ip)) => path.push_str(&ip.to_string().replace(':', "%3A")),
        Host::Name(name) => path.push_str(ascii(name)?),
    }
    write!(path, "/{}/", target.port).ok()?;
    Some(path)
}

/// Returns a name that the template can express.
fn ascii(name: &HostName) -> Option<&str> {
    let text = name.as_str();
    dns_name(text.as_bytes()).is_ok().then_some(text)
}

/// Reads the target from a path.
///
/// # Errors
/// Fails if the path does not follow the template, or its values are not valid.
pub fn target(path: &[u8]) -> Result<Destination, TargetError> {
    let rest = path.strip_prefix(PREFIX.as_bytes()).ok_or(TargetError::Shape)?;
    let mut parts = rest.split(|byte| *byte == b'/');
    let (Some(host), Some(port), Some(b""), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(TargetError::Shape);
    };
    let is_decimal = !port.is_empty() && port.iter().all(u8::is_ascii_digit);
    let port = std::str::from_utf8(port).ok().filter(|_| is_decimal).and_then(|port| port.parse().ok());
    let port = port.filter(|port| *port != 0).ok_or(TargetError::Port)?;
    Ok(Destination { host: host_of(host)?, port, zone: 0 })
}

fn host_of(text: &[u8]) -> Result<Host, TargetError> {
    if text.len() > HOST_MAX {
        return Err(TargetError::Host);
    }
    let bytes = decoded(text).ok_or(TargetError::Host)?;
    if bytes.contains(&b':') {
        let ip = std::str::from_utf8(&bytes).ok().and_then(|text| text.parse::<std::net::Ipv6Addr>().ok());
        return ip.map(|ip| Host::from(IpAddr::V6(ip))).ok_or(TargetError::Host);
    }
    dns_name(&bytes).map_err(|_| TargetError::Host)
}

/// Replaces `%hh` (RFC 3986 Sec. 2.1).
fn decoded(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        (rest, bytes) = if *first == b'%' {
            let (hex, tail) = tail.split_first_chunk::<2>()?;
            let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
            bytes.push(digit(hex[0])? << 4 | digit(hex[1])?);
            (tail, bytes)
        } else {
            bytes.push(*first);
            (tail, bytes)
        };
    }
    Some(bytes)
}

/// Whether a request of HTTP/1.1 asks to switch to CONNECT-UDP (RFC 9298 Sec. 3.2). The member of Upgrade may be one of several.
pub fn is_asked(request: &Request) -> bool {
    request.method == Method::Get
        && request.version == Version::Http11
        && request.fields.has_member("connection", "upgrade")
        && request.fields.has_member("upgrade", PROTOCOL)
}

/// The fields of the answer that switches.
pub fn switching() -> Fields {
    Fields::from([("Connection", "Upgrade"), ("Upgrade", PROTOCOL), CAPSULES])
}
