//! HTTP: finds the requested host (Host, SNI), implements the client side of CONNECT, and serves the proxy and its
//! cache. It parses messages strictly, removes the framing of bodies, and prepares heads for the next hop.

pub mod alternative;
pub mod auth;
pub mod basic;
mod block;
pub mod cache;
pub mod capsule;
pub mod connect;
pub mod fields;
pub mod follow;
pub mod forward;
pub mod framing;
pub mod h2;
pub mod h3;
pub mod head;
pub mod hpack;
pub mod htcp;
mod lines;
pub mod message;
mod octets;
pub mod sibling;
pub mod sni;
pub mod tap;
pub mod udp;
pub mod uri;

use crate::flow::{Host, HostName, HostNameError};
use head::RequestHead;
use sni::ClientHello;

/// Most bytes that [`sniff`] examines. It never answers [`Sniff::NeedMore`] for this number of bytes.
pub const SNIFF_MAX: usize = if sni::MAX_BYTES > head::MAX_HEAD { sni::MAX_BYTES } else { head::MAX_HEAD };

/// What a client's first bytes say about the requested host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sniff {
    /// Nothing yet. The bytes can still become a TLS ClientHello or an HTTP/1 request head.
    NeedMore,
    /// The host's name.
    Host {
        /// The name.
        name: HostName,
        /// Where it was found.
        how: How,
    },
    /// The bytes do not name a host, whatever follows. They are another protocol, they have no name or an IP address
    /// instead, or they are malformed (for example two Host fields). Let the flow pass. [`sni::client_hello`] and
    /// [`head::request_head`] return the reason.
    None,
}

/// Where a host name was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum How {
    /// The server_name extension of a TLS ClientHello.
    Sni,
    /// The Host field or the target of an HTTP/1 request.
    HttpHost,
}

impl How {
    /// Returns the word for records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sni => "sni",
            Self::HttpHost => "http_host",
        }
    }
}

/// Finds the host name in the first bytes of a client.
///
/// Answers [`Sniff::NeedMore`] only while the bytes can still become one of the two protocols. So a flow of another
/// protocol passes at the first byte that differs. The caller limits the time: a client that sends nothing gives no
/// answer.
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

/// Parses the host of an authority or of SNI: an IPv4 address, or a DNS name of letters, digits, `-`, `_` and `.`
/// without an empty label. It is stricter than [`HostName`], because these bytes come from a peer and rules match
/// them.
fn dns_name(bytes: &[u8]) -> Result<Host, HostNameError> {
    if bytes.iter().any(|byte| matches!(byte, b':' | b'[')) {
        return Err(HostNameError::Separator);
    }
    let host = Host::from_bytes(bytes)?;
    if let Host::Name(name) = &host {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        let labels = name.as_str().split('.');
        if !labels.into_iter().all(|label| !label.is_empty() && label.bytes().all(good)) {
            return Err(HostNameError::Separator);
        }
    }
    Ok(host)
}
