//! The PROXY protocol, versions 1 and 2 (HAProxy's `doc/proxy-protocol.txt`): a header before the first byte of a
//! connection. It contains the addresses of the original connection.
//!
//! The protocol is never guessed: a listener expects the header or it does not. It accepts the header only from
//! neighbours that are listed, because otherwise any client could claim any address. Before the header is complete
//! and valid, nothing may be sent to the neighbour, and no byte behind it may be used. An invalid header ends the
//! connection.

pub(crate) mod crc32c;
mod tlv;
mod v1;
mod v2;

pub use tlv::{Tls, Tlv};

use std::net::{IpAddr, SocketAddr};

/// Most bytes of a version 1 header, including its CRLF.
pub const MAX_V1: usize = 107;

/// Most bytes of a version 2 header that are accepted. The format allows 65,551. The usual contents (names, ids, TLS
/// client certificates) fit into this limit.
pub const MAX_V2: usize = 16 * 1024;

/// Most bytes of a unique id (TLV 0x05).
pub const MAX_UNIQUE_ID: usize = 128;

/// What the bytes received so far are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The start of a header. More bytes are needed. Never returned for [`MAX_V2`] bytes or more.
    Incomplete,
    /// A complete header.
    Header {
        /// The content of the header.
        header: Header,
        /// Its length in bytes. The application's bytes follow.
        consumed: usize,
    },
    /// Not a header, or an invalid one: end the connection.
    Malformed(HeaderError),
}

/// A header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The version of the header.
    pub version: Version,
    /// The addresses of the original connection.
    pub addresses: Addresses,
    /// Further facts, in order, including unknown types. Without the checksum, which is already checked, and without
    /// padding. Empty in version 1.
    pub tlvs: Vec<Tlv>,
}

/// The version of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// One line of text.
    V1,
    /// Binary.
    V2,
}

/// The addresses of the original connection. IP addresses are never IPv4-mapped (`::ffff:a.b.c.d`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// The neighbour's own connection (for example a health check), version 2 command LOCAL: use the addresses of the
    /// socket.
    Local,
    /// A relayed connection of a kind that the header cannot express, `UNKNOWN` in version 1 and family 0 in version
    /// 2: use the addresses of the socket.
    Unknown,
    /// A relayed IPv4 or IPv6 connection.
    Inet {
        /// TCP or UDP.
        transport: Transport,
        /// The address of the client.
        client: SocketAddr,
        /// The address that the client connected to.
        server: SocketAddr,
    },
    /// A relayed connection over unix sockets.
    Unix {
        /// Stream or datagrams.
        transport: Transport,
        /// The client's path, up to 108 bytes, without NULs at its end. Empty if it has none.
        client: Vec<u8>,
        /// The server's path.
        server: Vec<u8>,
    },
}

/// The transport of the relayed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// TCP, or a unix stream socket.
    Stream,
    /// UDP, or a unix datagram socket.
    Datagram,
}

impl Addresses {
    /// Makes the addresses of a TCP connection.
    pub fn tcp(client: SocketAddr, server: SocketAddr) -> Self {
        Self::Inet { transport: Transport::Stream, client: canonical(client), server: canonical(server) }
    }
}

impl Header {
    /// Returns the client's and the server's address of a relayed TCP connection. `None` if the addresses of the
    /// socket are to be used, or if it is not a TCP connection.
    pub fn tcp_addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        match self.addresses {
            Addresses::Inet { transport: Transport::Stream, client, server } => Some((client, server)),
            _ => None,
        }
    }

    /// Returns the first TLV that `pick` accepts: `header.find(|tlv| match tlv { Tlv::Authority(name) => Some(name),
    /// _ => None })`.
    pub fn find<'a, T>(&'a self, pick: impl FnMut(&'a Tlv) -> Option<T>) -> Option<T> {
        self.tlvs.iter().find_map(pick)
    }
}

/// Why bytes are not a valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The first bytes do not belong to either version.
    #[error("the connection does not start with a PROXY protocol header")]
    NotProxy,
    /// A version 1 line has no CRLF within [`MAX_V1`] bytes, or CR or LF alone.
    #[error("the PROXY line does not end with CR LF within {MAX_V1} bytes")]
    BadLine,
    /// The protocol of a version 1 line is not TCP4, TCP6 or UNKNOWN. Or it does not have two addresses of that
    /// family and two ports, in the only allowed spelling.
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
    /// A TLV reaches beyond the header, or its content does not have the format of its type.
    #[error("the PROXY header holds a broken TLV of type {0:#04x}")]
    BadTlv(u8),
    /// The checksum does not match the header.
    #[error("the checksum of the PROXY header is wrong")]
    BadChecksum,
}

/// Parses a header of either version from the first bytes of a connection.
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

/// Why a header cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A unix path has more than 108 bytes.
    #[error("a unix socket path in a PROXY header has at most 108 bytes")]
    PathTooLong,
    /// A TLV is longer than its type or a reader allows, or the whole header exceeds [`MAX_V2`].
    #[error("the PROXY header would exceed {MAX_V2} bytes, or a unique id {MAX_UNIQUE_ID}")]
    TooLong,
}

/// Encodes a version 1 header. Anything other than TCP over IP becomes `UNKNOWN`, because version 1 cannot express
/// it.
pub fn encode_v1(addresses: &Addresses) -> Vec<u8> {
    v1::encode(addresses)
}

/// Encodes a version 2 header with these TLVs in this order. If `checksum` is set, a CRC32c follows them.
///
/// [`Addresses::Local`] and [`Addresses::Unknown`] both become LOCAL without TLVs. Readers ignore what follows, and
/// some refuse the other encoding of `Unknown`.
///
/// # Errors
/// [`EncodeError`] tells what does not fit.
pub fn encode_v2(addresses: &Addresses, tlvs: &[Tlv], checksum: bool) -> Result<Vec<u8>, EncodeError> {
    v2::encode(addresses, tlvs, checksum)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Returns both addresses in one family, which both versions require. If the families differ, the IPv4 address
/// becomes IPv4-mapped. This happens if a client came over one family, and the server's name leads to the other.
fn in_one_family(client: SocketAddr, server: SocketAddr) -> (IpAddr, IpAddr) {
    match (client.ip(), server.ip()) {
        (IpAddr::V4(client), server @ IpAddr::V6(_)) => (client.to_ipv6_mapped().into(), server),
        (client @ IpAddr::V6(_), IpAddr::V4(server)) => (client, server.to_ipv6_mapped().into()),
        same => same,
    }
}
