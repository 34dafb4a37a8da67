//! The PROXY protocol, versions 1 and 2 (HAProxy's `doc/proxy-protocol.txt`): a header before the first byte of a
//! connection that carries the addresses of the connection it stands for.
//!
//! Never guessed: a listener expects it or it does not, and only from neighbours that are listed as allowed to, or
//! anybody could claim any address. Nothing may be sent to the neighbour, and no byte behind the header used, before
//! the header is whole and good; a bad one ends the connection.

mod crc32c;
mod tlv;
mod v1;
mod v2;

pub use tlv::{Tls, Tlv};

use std::net::{IpAddr, SocketAddr};

/// Most bytes of a version 1 header, with its CRLF.
pub const MAX_V1: usize = 107;

/// Most bytes of a version 2 header that we take. The format allows 65,551; what senders put in (names, ids, TLS
/// client certificates) fits into this.
pub const MAX_V2: usize = 16 * 1024;

/// Most bytes of a unique id (TLV 0x05).
pub const MAX_UNIQUE_ID: usize = 128;

/// What the bytes so far are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The start of a header; more bytes are needed. Never said of [`MAX_V2`] bytes or more.
    Incomplete,
    /// A whole header.
    Header {
        /// What it says.
        header: Header,
        /// Its length in bytes; the application's bytes follow.
        consumed: usize,
    },
    /// No header, or a bad one: end the connection.
    Malformed(HeaderError),
}

/// A header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The version it came in.
    pub version: Version,
    /// Whose connection this is.
    pub addresses: Addresses,
    /// Further facts, in order; unknown types included, the checksum (already checked) and padding left out. Empty
    /// in version 1.
    pub tlvs: Vec<Tlv>,
}

/// Version of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// One line of text.
    V1,
    /// Binary.
    V2,
}

/// Whose connection a header announces. IP addresses are never IPv4-mapped ones (`::ffff:a.b.c.d`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// The neighbour's own connection (a health check, say), version 2 command LOCAL: use the socket's addresses.
    Local,
    /// A relayed connection of a kind that the header cannot express, `UNKNOWN` in version 1 and family 0 in
    /// version 2: use the socket's addresses.
    Unknown,
    /// A relayed IPv4 or IPv6 connection.
    Inet {
        /// TCP or UDP.
        transport: Transport,
        /// Who opened it.
        client: SocketAddr,
        /// Where it was opened to.
        server: SocketAddr,
    },
    /// A relayed connection over unix sockets.
    Unix {
        /// Stream or datagrams.
        transport: Transport,
        /// The client's path, up to 108 bytes without the NULs behind it; empty if it has none.
        client: Vec<u8>,
        /// The server's path.
        server: Vec<u8>,
    },
}

/// How the relayed connection moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// TCP, or a unix stream socket.
    Stream,
    /// UDP, or a unix datagram socket.
    Datagram,
}

impl Addresses {
    /// A TCP connection's addresses.
    pub fn tcp(client: SocketAddr, server: SocketAddr) -> Self {
        Self::Inet { transport: Transport::Stream, client: canonical(client), server: canonical(server) }
    }
}

impl Header {
    /// Client and server address of a relayed TCP connection; `None` means the socket's own are to be used, or that
    /// it is no TCP connection.
    pub fn tcp_addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        match self.addresses {
            Addresses::Inet { transport: Transport::Stream, client, server } => Some((client, server)),
            _ => None,
        }
    }

    /// The first TLV that `pick` takes: `header.find(|tlv| match tlv { Tlv::Authority(name) => Some(name), _ => None })`.
    pub fn find<'a, T>(&'a self, pick: impl FnMut(&'a Tlv) -> Option<T>) -> Option<T> {
        self.tlvs.iter().find_map(pick)
    }
}

/// Why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The first bytes are of neither version.
    #[error("the connection does not start with a PROXY protocol header")]
    NotProxy,
    /// A version 1 line has no CRLF within [`MAX_V1`] bytes, or CR or LF alone.
    #[error("the PROXY line does not end with CR LF within {MAX_V1} bytes")]
    BadLine,
    /// A version 1 line names no protocol of TCP4, TCP6 and UNKNOWN, or not two addresses of that family and two
    /// ports, in the one spelling allowed.
    #[error("the PROXY line does not hold two addresses and ports of its protocol")]
    BadAddress,
    /// A version 2 header has another version, or a command that is neither LOCAL nor PROXY.
    #[error("the PROXY header has an unknown version or command")]
    BadCommand,
    /// A version 2 header has an unknown address family or transport.
    #[error("the PROXY header has an unknown address family or transport")]
    BadFamily,
    /// A version 2 header is too short for its addresses, or longer than [`MAX_V2`].
    #[error("the PROXY header's length does not fit its addresses, or exceeds {MAX_V2} bytes")]
    BadLength,
    /// A TLV reaches beyond the header, or its content has not the form of its type.
    #[error("the PROXY header holds a broken TLV of type {0:#04x}")]
    BadTlv(u8),
    /// The checksum is not that of the header.
    #[error("the checksum of the PROXY header is wrong")]
    BadChecksum,
}

/// Reads a header of either version from the first bytes of a connection.
pub fn parse(bytes: &[u8]) -> Parsed {
    let result = match bytes.first() {
        None => Ok(None),
        Some(b'P') => v1::parse(bytes),
        Some(_) => v2::parse(bytes),
    };
    match result {
        Ok(None) => Parsed::Incomplete,
        Ok(Some((header, consumed))) => Parsed::Header { header, consumed },
        Err(error) => Parsed::Malformed(error),
    }
}

/// Why a header cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A unix path has more than 108 bytes.
    #[error("a unix socket path in a PROXY header has at most 108 bytes")]
    PathTooLong,
    /// A TLV is longer than its type or a reader allows, or the whole exceeds [`MAX_V2`].
    #[error("the PROXY header would exceed {MAX_V2} bytes, or a unique id {MAX_UNIQUE_ID}")]
    TooLong,
}

/// Writes a version 1 header. Anything but TCP over IP becomes `UNKNOWN`, all that version 1 can say about it.
pub fn encode_v1(addresses: &Addresses) -> Vec<u8> {
    v1::encode(addresses)
}

/// Writes a version 2 header, with these TLVs in this order and, if `checksum` is set, a CRC32c behind them.
///
/// [`Addresses::Local`] and [`Addresses::Unknown`] both become LOCAL without TLVs: readers ignore what stands behind,
/// and some refuse the other way to say `Unknown`.
///
/// # Errors
/// [`EncodeError`] says what does not fit.
pub fn encode_v2(addresses: &Addresses, tlvs: &[Tlv], checksum: bool) -> Result<Vec<u8>, EncodeError> {
    v2::encode(addresses, tlvs, checksum)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Both addresses in one family, as both versions need: if they differ, the IPv4 one becomes IPv4-mapped. That
/// happens when a client came over one family and the server, by its name, is reached over the other.
fn in_one_family(client: SocketAddr, server: SocketAddr) -> (IpAddr, IpAddr) {
    match (client.ip(), server.ip()) {
        (IpAddr::V4(client), server @ IpAddr::V6(_)) => (client.to_ipv6_mapped().into(), server),
        (client @ IpAddr::V6(_), IpAddr::V4(server)) => (client, server.to_ipv6_mapped().into()),
        same => same,
    }
}
