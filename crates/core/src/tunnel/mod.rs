//! What the two ends of a tunnel say to each other: a greeting when a connection stands, then for each flow one
//! request at the head of its stream, one reply at the head of the way back, and the flow's own bytes behind both.
//!
//! The transport below (QUIC, or TLS 1.3 over TCP) authenticates both ends, keeps order and tells the end of a
//! direction, so nothing here does. Requests need no answer before the flow's bytes follow: destination, metadata and
//! first bytes leave in one flight, as a SOCKS6 request does on a connection that stands already (EPI framework, Sec. IV).
//!
//! ```text
//!   near side                                             far side
//!      |                                                     |
//!      | <-------------------------- connection: Greeting    |  once: the near side is let in
//!      |                                                     |
//!      |  stream of a flow:                                  |
//!      |  Request, first bytes ----------------------------> |  dials the destination
//!      | <---------------------------- Reply: connected      |
//!      | <=================== bytes of the flow ===========> |  until both directions have ended
//!      |                                                     |
//!      | <---------------------------- Reply: refused        |  or: the reason, then the stream ends
//! ```
//!
//! A message is `kind (1) length (2) fields`, a field is `type (1) length (2) value`; numbers are big-endian. Types
//! from 128 on must be understood, others are skipped by who does not know them. `docs/tunnel.md` has the tables.

mod field;
mod greeting;
mod reply;
mod request;

pub use greeting::Greeting;
pub use reply::Reply;
pub use request::Request;

/// Application protocol of both transports (ALPN, RFC 7301): a change of the messages that old ends cannot read gets
/// another one.
pub const ALPN: &[u8] = b"sidetrack-tunnel/1";

/// Most bytes of the fields of one message.
pub const BODY_MAX: usize = 32 * 1024;

/// Most bytes of the words in a refusal; longer ones are cut.
pub const DETAIL_MAX: usize = 1024;

/// Bytes before the fields.
pub(crate) const HEAD: usize = 3;

/// What bytes at the head of a stream are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    /// The message does not end here: try again with more.
    Incomplete,
    /// A message, and how many bytes it had; what follows is the flow's own.
    Message(T, usize),
    /// No further bytes can make a message of these.
    Malformed(MessageError),
}

/// Why bytes are no message, or a message cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Another kind than the one that is due here.
    #[error("a message of kind {0} where another was due")]
    Kind(u8),
    /// More than [`BODY_MAX`] bytes of fields.
    #[error("the message is longer than {BODY_MAX} bytes")]
    TooLong,
    /// A field of this type ends outside the message, or its value makes no sense.
    #[error("field {0} is malformed")]
    BadField(u8),
    /// A field that may be there once is there twice.
    #[error("field {0} is there twice")]
    Twice(u8),
    /// A field that must be there is not.
    #[error("field {0} is missing")]
    Missing(u8),
    /// A field that must be understood is not known here.
    #[error("field {0} must be understood and is not known here: the other end is newer")]
    Unknown(u8),
}
