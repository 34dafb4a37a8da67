//! The host that an HTTP/1 request is for: the authority of its target, or its Host field (RFC 9112 Sec. 3.2).
//!
//! The function depends only on the bytes received so far. HTTP/2 with prior knowledge starts with `PRI * HTTP/2.0`
//! and is not HTTP/1. Its authority is compressed, and this module does not look for it.
//!
//! This reader recognises; it does not judge. Its result decides which rules apply to bytes that pass unchanged, or that the
//! strict reader in `message` is given next. So it reads a bare LF as the end of a line, as servers do (RFC 9112 Sec. 2.2):
//! otherwise a client could hide the host from the rules with one byte. Nothing is forwarded as a message that only this
//! reader accepts. `crates/core/tests/http/readers.rs` holds the two against each other.

use super::dns_name;
use crate::flow::{Host, HostNameError};
use std::net::Ipv6Addr;

/// Most bytes of a request head that are examined. Common servers refuse longer ones.
pub const MAX_HEAD: usize = 16 * 1024;

/// Most header fields of a request head.
pub const MAX_FIELDS: usize = 128;

/// Most bytes of a method. The longest registered one has 17.
const MAX_METHOD: usize = 32;

/// What the bytes received so far are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Head {
    /// The start of a request head. More bytes are needed. Never returned for [`MAX_HEAD`] bytes or more.
    Incomplete,
    /// Not HTTP/1, whatever follows.
    NotHttp1,
    /// A complete request head.
    Request(RequestHead),
    /// HTTP/1 by its first line, but malformed.
    Malformed(HeadError),
}

/// The target of a request head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHead {
    /// The form of its target.
    pub form: TargetForm,
    /// The requested host: the target's authority in absolute and authority form, which overrides Host (RFC 9112 Sec.
    /// 3.2.2). Otherwise the Host field. `None` if there is none or it is empty.
    pub authority: Option<Authority>,
    /// Bytes of the head, including its final empty line.
    pub length: usize,
}

/// The four forms of a request target (RFC 9112 Sec. 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetForm {
    /// `/path?query`
    Origin,
    /// `http://host/path`, as sent to a proxy
    Absolute,
    /// `host:port`, CONNECT only
    Authority,
    /// `*`, OPTIONS only
    Asterisk,
}

/// A host, and its port if one was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// The host.
    pub host: Host,
    /// The TCP port, 1 to 65535. `None` means the default port of the scheme.
    pub port: Option<u16>,
}

/// How a request head is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// It exceeds [`MAX_HEAD`] bytes or [`MAX_FIELDS`] fields.
    #[error("the request head is longer than {MAX_HEAD} bytes or has more than {MAX_FIELDS} fields")]
    TooLong,
    /// A line is neither a request line nor a header field.
    #[error("a line of the request head is not a request line or header field")]
    BadLine,
    /// The target has none of the four forms, or one that its method does not allow.
    #[error("the request target has no form that its method allows")]
    BadTarget,
    /// The host or port is invalid, or user information precedes the host.
    #[error("the authority of the request is not a host and port")]
    BadAuthority,
    /// The host is a number, but not an address. Another program might read it as one (`127.1`).
    #[error(
        "the host is neither a name nor an address: write IPv4 as four decimal numbers without leading zeros (192.0.2.1)"
    )]
    BadNumber,
    /// There are two Host fields, equal or not (RFC 9112 Sec. 3.2).
    #[error("the request has more than one Host field")]
    RepeatedHost,
}

/// Reads a request head from the first bytes of a connection.
pub fn request_head(bytes: &[u8]) -> Head {
    match request_line(bytes) {
        Line::Not => return Head::NotHttp1,
        Line::Partial if bytes.len() >= MAX_HEAD => return Head::Malformed(HeadError::TooLong),
        Line::Partial => return Head::Incomplete,
        Line::Whole => {}
    }
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    let looked_at = bytes.get(..MAX_HEAD).unwrap_or(bytes);
    match request.parse(looked_at) {
        Ok(httparse::Status::Complete(length)) => match target(&request) {
            Ok((form, authority)) => Head::Request(RequestHead { form, authority, length }),
            Err(error) => Head::Malformed(error),
        },
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => Head::Incomplete,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            Head::Malformed(HeadError::TooLong)
        }
        Err(_) => Head::Malformed(HeadError::BadLine),
    }
}

enum Line {
    Not,
    Partial,
    Whole,
}

/// Whether the first line is, or can become, the first line of an HTTP/1 request. Decides at the first byte that
/// rules it out, which a parser of whole heads would not do. The line needs an upper-case method (all registered ones
/// are), one space, a target, one space, `HTTP/1.` and a digit.
fn request_line(bytes: &[u8]) -> Line {
    let Some(method_end) = bytes.iter().take(MAX_METHOD + 1).position(|byte| *byte == b' ') else {
        return if bytes.len() <= MAX_METHOD && is_method(bytes) { Line::Partial } else { Line::Not };
    };
    let (method, rest) = bytes.split_at(method_end);
    let rest = rest.get(1..).unwrap_or_default();
    if method.is_empty() || !is_method(method) {
        return Line::Not;
    }
    let target_end = rest.iter().position(|byte| *byte == b' ').unwrap_or(rest.len());
    let (target, rest) = rest.split_at(target_end);
    let starts_well = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'*' | b'[' | b'_');
    if !target.first().is_none_or(starts_well) || target.iter().any(|byte| *byte < b' ' || *byte == 0x7f) {
        return Line::Not;
    }
    let Some(version) = rest.get(1..) else { return Line::Partial };
    if target.is_empty() {
        return Line::Not;
    }
    let expected = b"HTTP/1.";
    match version.iter().zip(expected).find(|(byte, wanted)| byte != wanted) {
        Some(_) => Line::Not,
        None if version.len() <= expected.len() => Line::Partial,
        None => Line::Whole,
    }
}

/// Whether the bytes are, or can become, a method: upper case, with `-` and `_` inside. A token may contain more
/// characters (RFC 9110 Sec. 5.6.2), but no method in use does. `SSH-2.0` is a token, too.
fn is_method(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(u8::is_ascii_uppercase)
        && bytes.iter().all(|byte| byte.is_ascii_uppercase() || matches!(byte, b'-' | b'_'))
}

/// Returns the form of the target and the requested host.
fn target(request: &httparse::Request<'_, '_>) -> Result<(TargetForm, Option<Authority>), HeadError> {
    let target = request.path.unwrap_or_default();
    let host = host_field(request.headers)?;
    if request.method == Some("CONNECT") {
        let authority = authority(target.as_bytes())?;
        return match authority.port {
            Some(_) => Ok((TargetForm::Authority, Some(authority))),
            None => Err(HeadError::BadTarget),
        };
    }
    if let Some((scheme, rest)) = target.split_once("://")
        && scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
    {
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let authority = authority(rest.get(..end).unwrap_or_default().as_bytes())?;
        return Ok((TargetForm::Absolute, Some(authority)));
    }
    let form = match target {
        "*" => TargetForm::Asterisk,
        _ if target.starts_with('/') => TargetForm::Origin,
        _ => return Err(HeadError::BadTarget),
    };
    let authority = match host {
        None | Some(b"") => None,
        Some(host) => Some(authority(host)?),
    };
    Ok((form, authority))
}

/// Returns the value of the only Host field, if there is one.
fn host_field<'a>(fields: &[httparse::Header<'a>]) -> Result<Option<&'a [u8]>, HeadError> {
    let mut hosts = fields.iter().filter(|field| field.name.eq_ignore_ascii_case("host"));
    let first = hosts.next();
    if hosts.next().is_some() {
        return Err(HeadError::RepeatedHost);
    }
    Ok(first.map(|field| field.value.trim_ascii()))
}

impl HeadError {
    const fn of(error: HostNameError) -> Self {
        match error {
            HostNameError::Number => Self::BadNumber,
            _ => Self::BadAuthority,
        }
    }
}

impl Authority {
    /// Reads `host`, `host:port`, `[IPv6]` or `[IPv6]:port` (RFC 3986 Sec. 3.2).
    ///
    /// # Errors
    /// [`HeadError::BadAuthority`] or [`HeadError::BadNumber`]. User information before the host is an error (RFC
    /// 9110 Sec. 4.2.4).
    pub fn parse(bytes: &[u8]) -> Result<Self, HeadError> {
        authority(bytes)
    }
}

/// Does the work of [`Authority::parse`].
fn authority(bytes: &[u8]) -> Result<Authority, HeadError> {
    let text = std::str::from_utf8(bytes).map_err(|_| HeadError::BadAuthority)?;
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']').ok_or(HeadError::BadAuthority)?;
            let address: Ipv6Addr = address.parse().map_err(|_| HeadError::BadAuthority)?;
            (Host::from(std::net::IpAddr::V6(address)), port)
        }
        None => {
            let (name, port) = text.split_at(text.find(':').unwrap_or(text.len()));
            (dns_name(name.as_bytes()).map_err(HeadError::of)?, port)
        }
    };
    Ok(Authority { host, port: self::port(port)? })
}

/// Reads an empty text, `:` or `:port`. The first two mean the default port of the scheme (RFC 3986 Sec. 3.2.3).
fn port(text: &str) -> Result<Option<u16>, HeadError> {
    let digits = match text.strip_prefix(':') {
        Some("") => return Ok(None),
        Some(digits) => digits,
        None if text.is_empty() => return Ok(None),
        None => return Err(HeadError::BadAuthority),
    };
    let port = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
    port.filter(|port| *port != 0).map(Some).ok_or(HeadError::BadAuthority)
}
