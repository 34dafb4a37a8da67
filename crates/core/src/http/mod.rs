//! HTTP: who is asked for (Host, SNI), the client side of CONNECT, and what a proxy and its cache need: messages read
//! strictly, bodies out of their framing, heads made ready for the next hop.

pub mod auth;
pub mod basic;
pub mod cache;
pub mod connect;
pub mod fields;
pub mod forward;
pub mod framing;
pub mod h2;
pub mod head;
pub mod htcp;
mod lines;
pub mod message;
mod octets;
pub mod sibling;
pub mod sni;
pub mod tap;
pub mod uri;

use crate::flow::{Host, HostName};
use head::RequestHead;
use sni::ClientHello;
use std::net::{IpAddr, Ipv4Addr};

/// Most bytes [`sniff`] looks at: it never answers [`Sniff::NeedMore`] to as many.
pub const SNIFF_MAX: usize = if sni::MAX_BYTES > head::MAX_HEAD { sni::MAX_BYTES } else { head::MAX_HEAD };

/// What a client's first bytes say about the host it wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sniff {
    /// Nothing yet; the bytes can still become a TLS ClientHello or an HTTP/1 request head.
    NeedMore,
    /// The host's name.
    Host {
        /// The name.
        name: HostName,
        /// Where it stood.
        how: How,
    },
    /// They name no host and never will: another protocol, no name or an IP address in its place, or broken (two
    /// different Host fields, say). Let the flow go; [`sni::client_hello`] and [`head::request_head`] tell the why.
    None,
}

/// Where a host's name was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum How {
    /// The server_name extension of a TLS ClientHello.
    Sni,
    /// The Host field or the target of an HTTP/1 request.
    HttpHost,
}

impl How {
    /// The word in records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::HttpHost => "http_host",
        }
    }
}

/// Finds the host's name in the first bytes of a client.
///
/// Answers [`Sniff::NeedMore`] only while the bytes can still become one of the two protocols, so an unknown one is
/// let go at its first odd byte. The caller bounds the time: no byte at all says nothing.
pub fn sniff(first: &[u8]) -> Sniff {
    match sni::client_hello(first) {
        ClientHello::Incomplete => Sniff::NeedMore,
        ClientHello::Hello(hello) => named(hello.server_name, How::Sni),
        ClientHello::Malformed(_) => Sniff::None,
        ClientHello::NotTls => match head::request_head(first) {
            head::Head::Incomplete => Sniff::NeedMore,
            head::Head::Request(RequestHead { authority: Some(authority), .. }) => match authority.host {
                Host::Name(name) => named(Some(name), How::HttpHost),
                Host::Ip(_) => Sniff::None,
            },
            _ => Sniff::None,
        },
    }
}

fn named(name: Option<HostName>, how: How) -> Sniff {
    name.map_or(Sniff::None, |name| Sniff::Host { name, how })
}

/// Reads a host of an authority or of SNI: an IPv4 address, or a DNS name of letters, digits, `-`, `_` and `.`
/// without an empty label. Stricter than [`HostName`]: these bytes come from a peer and are matched by rules.
fn dns_name(bytes: &[u8]) -> Option<Host> {
    if bytes.first().is_some_and(u8::is_ascii_digit)
        && let Some(address) = std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<Ipv4Addr>().ok())
    {
        return Some(Host::Ip(address.into()));
    }
    let labels = bytes.strip_suffix(b".").unwrap_or(bytes);
    let good = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    if !labels.split(|byte| *byte == b'.').all(|label| !label.is_empty() && label.iter().all(good)) {
        return None;
    }
    let name = HostName::from_bytes(bytes).ok()?;
    Some(name.as_str().parse::<IpAddr>().map_or(Host::Name(name), Host::from))
}
