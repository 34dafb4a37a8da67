//! HTTP/3 (RFC 9114): frames, streams and field sections, without QUIC.
//!
//! The caller owns the QUIC connection. It gives each machine the bytes of one stream:
//!
//! - [`message::Message`]: one direction of a request stream, that is one request or one response.
//! - [`uni::Uni`]: one unidirectional stream that the peer has opened.
//! - [`datagram`]: the payload of QUIC datagrams (RFC 9297).
//!
//! Field sections use QPACK (RFC 9204) without a dynamic table: we announce capacity 0, so no block waits for another stream,
//! and a stream is decoded by itself.

pub mod datagram;
pub mod frame;
pub mod message;
pub mod qpack;
mod table;
pub mod uni;

use std::fmt;

/// The name of HTTP/3 in ALPN (RFC 9114 Sec. 3.1).
pub const ALPN: &[u8] = b"h3";

/// A code that ends a stream or a connection (RFC 9114 Sec. 8.1, RFC 9204 Sec. 6, RFC 9297 Sec. 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u64)]
pub enum Code {
    /// A datagram is malformed.
    Datagram = 0x33,
    /// The end in order.
    NoError = 0x100,
    /// The peer has broken the protocol in a way that no other code describes.
    GeneralProtocol = 0x101,
    /// Something in this process has failed.
    Internal = 0x102,
    /// The peer has opened a stream that we do not accept.
    StreamCreation = 0x103,
    /// A stream that the connection needs was closed.
    ClosedCriticalStream = 0x104,
    /// A frame is not allowed here.
    FrameUnexpected = 0x105,
    /// A frame is malformed.
    Frame = 0x106,
    /// The peer uses too many resources.
    ExcessiveLoad = 0x107,
    /// An id is used that must not be.
    Id = 0x108,
    /// A setting is malformed.
    Settings = 0x109,
    /// The control stream does not begin with SETTINGS.
    MissingSettings = 0x10a,
    /// A request was not processed.
    RequestRejected = 0x10b,
    /// A request or its response is not wanted any more.
    RequestCancelled = 0x10c,
    /// A request ended before it was complete.
    RequestIncomplete = 0x10d,
    /// A message is malformed.
    Message = 0x10e,
    /// The connection of a CONNECT request was reset or could not be kept.
    Connect = 0x10f,
    /// The request needs HTTP/1.1.
    VersionFallback = 0x110,
    /// A field section cannot be decoded.
    QpackDecompression = 0x200,
    /// The encoder stream of QPACK is malformed.
    QpackEncoderStream = 0x201,
    /// The decoder stream of QPACK is malformed.
    QpackDecoderStream = 0x202,
}

impl Code {
    /// Returns the number on the wire.
    pub const fn value(self) -> u64 {
        self as u64
    }
}

/// Why a stream or the whole connection must be aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    /// The code for the peer.
    pub code: Code,
    /// Only the stream is aborted: the message on it is malformed, and the connection is well.
    pub is_of_stream: bool,
    /// What is wrong.
    pub why: &'static str,
}

impl Error {
    /// An error that ends the connection.
    pub const fn new(code: Code, why: &'static str) -> Self {
        Self { code, is_of_stream: false, why }
    }

    /// An error that ends the stream only.
    pub const fn of_stream(code: Code, why: &'static str) -> Self {
        Self { code, is_of_stream: true, why }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.why)
    }
}

impl std::error::Error for Error {}
