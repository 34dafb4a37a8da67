//! The messages between the two ends of a tunnel. A greeting follows each new connection. Each flow has one request
//! at the beginning of its stream, and one reply at the beginning of the opposite direction. The flow's own bytes
//! follow both.
//!
//! The transport below (QUIC, or TLS 1.3 over TCP) authenticates both ends, keeps the order, and signals the end of a
//! direction. So these messages need not do that. The flow's bytes follow a request without waiting for the reply:
//! destination, metadata and first bytes leave in one flight. A SOCKS6 request on an open connection does the same
//! (EPI framework, Sec. IV).
//!
//! ```text
//!   near side                                             far side
//!      |                                                     |
//!      | <-------------------------- connection: Greeting    |  once: the near side is accepted
//!      |                                                     |
//!      |  stream of a flow:                                  |
//!      |  Request, first bytes ----------------------------> |  dials the destination
//!      | <---------------------------- Reply: connected      |
//!      | <=================== bytes of the flow ===========> |  until both directions have ended
//!      |                                                     |
//!      | <---------------------------- Reply: refused        |  or: the reason, then the stream ends
//! ```
//!
//! The stream of a UDP flow carries capsules (RFC 9297) behind request and reply. Datagrams that fit travel beside it, in
//! QUIC datagrams (RFC 9221): the context of the request as a variable-length integer, and the payload.
//!
//! A message is `kind (1) length (2) fields`, and a field is `type (1) length (2) value`. Numbers are big-endian. A
//! receiver must understand types from 128 on, and skips other types that it does not know. `docs/tunnel.md` has the
//! tables.

pub mod datagram;
pub(crate) mod field;
mod greeting;
mod reply;
mod request;

pub use greeting::Greeting;
pub use reply::Reply;
pub use request::Request;

impl MessageError {
    /// Whether the other end does not know flows of UDP, which it says in these words.
    pub fn means_no_datagrams(words: &str) -> bool {
        words.contains(&Self::Unknown(request::DATAGRAMS).to_string())
    }
}

/// The application protocol of both transports (ALPN, RFC 7301). A change that old ends cannot read gets a new name.
pub const ALPN: &[u8] = b"sidetrack-tunnel/1";

/// Most bytes of the fields of one message.
pub const BODY_MAX: usize = 32 * 1024;

/// Most bytes of the text in a refusal. Longer texts are truncated.
pub const DETAIL_MAX: usize = 1024;

/// Bytes before the fields.
pub(crate) const HEAD: usize = 3;

/// What the bytes at the beginning of a stream are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    /// The message is not complete. Try again with more bytes.
    Incomplete,
    /// A message and its length. The bytes of the flow follow.
    Message(T, usize),
    /// The bytes cannot become a message, whatever follows.
    Malformed(MessageError),
}

/// Why bytes are not a valid message, or why a message cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The message has another kind than expected.
    #[error("a message of kind {0} where another was due")]
    Kind(u8),
    /// More than [`BODY_MAX`] bytes of fields.
    #[error("the message is longer than {BODY_MAX} bytes")]
    TooLong,
    /// A field of this type ends outside the message, or its value is invalid.
    #[error("field {0} is malformed")]
    BadField(u8),
    /// A field that may occur once occurs twice.
    #[error("field {0} is there twice")]
    Twice(u8),
    /// A required field is missing.
    #[error("field {0} is missing")]
    Missing(u8),
    /// A field that must be understood is unknown.
    #[error("field {0} must be understood and is not known here: the other end is newer")]
    Unknown(u8),
}
