//! SOCKS version 6: draft-olteanu-intarea-socks-6-11 and -12, and the two layouts of `socksx`. Where the drafts
//! differ, both are read and -12 is sent. CONNECT, UDP ASSOCIATE and NOOP, both ends; the codec implements the whole draft.
//!
//! Where the drafts leave a point open:
//! - The length byte of a name includes its padding (-12). A length that leaves the name unaligned (-11) is read,
//!   too.
//! - A Session ID is sent in the Authentication Reply, and accepted in both replies.
//! - Unknown kinds, and options with an invalid body, are skipped as unsupported.
//! - An option with an impossible length, a duplicate, a misplaced option or a contradiction ends the connection. It
//!   would be unknown what such a message asks for, and with which protection.

mod association;
mod client;
mod dialect;
mod message;
mod metadata;
mod options;
mod server;
mod session;
mod stack;
mod udp;

pub use association::{Taken, UdpAssociation, Way};
pub use client::{Client, ClientCommand, ClientConfig, SessionUse};
pub use message::{AuthReply, Command, OperationReply, Request};
pub use metadata::{ChainError, Metadata, SocksxChain};
pub use options::{AuthData, AuthMethods, Options};
pub use server::Server;
pub use session::{
    HeldSession, SessionAction, SessionAnswer, SessionId, SessionLimits, SessionQuery, SessionReport,
    SessionTable, TokenWindow,
};
pub use stack::{Leg, Parity, StackOption};
pub use udp::{UdpDatagram, UdpError, UdpMessage, begin_datagram, end_datagram};

use super::address::AddressError;

/// The version byte.
const VERSION: u8 = 6;
/// Most bytes of options in one message (-12: 20 KiB; -11: 16 KiB).
pub const MAX_OPTIONS_LEN: usize = 20 * 1024;
/// Most bytes of initial data in a request.
pub const MAX_INITIAL_DATA_LEN: usize = 1 << 14;

/// Why bytes are not a valid message of version 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The first byte is not 06.
    #[error("version byte 0x{0:02x} instead of 06")]
    Version(u8),
    /// An address is invalid.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The options are longer than [`MAX_OPTIONS_LEN`].
    #[error("{0} bytes of options; at most 20480 are allowed")]
    OptionsTooLong(usize),
    /// An option's length is below 4, not a multiple of 4, or beyond the end of the options.
    #[error("option of kind {kind} has length {len}: less than 4, no multiple of 4, or more than there is")]
    OptionLength {
        /// The kind of the option.
        kind: u16,
        /// The length as it was sent.
        len: usize,
    },
    /// The same option twice, or two stack options that contradict each other about one leg.
    #[error("option of kind {0} is there twice")]
    Duplicate(u16),
    /// An option in a message that must not contain it.
    #[error("option of kind {0} does not belong into this message")]
    Misplaced(u16),
    /// Options that exclude each other.
    #[error("options that exclude each other: {0}")]
    Contradiction(&'static str),
    /// More initial data announced than [`MAX_INITIAL_DATA_LEN`].
    #[error("{0} bytes of initial data announced; at most 16384 are allowed")]
    InitialData(u16),
    /// The type is not one of the types of this message.
    #[error("message type {0} is unknown")]
    Type(u8),
    /// A length that is impossible for this message.
    #[error("message length {0} is impossible")]
    Length(usize),
}

/// Why a message cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The options would be longer than [`MAX_OPTIONS_LEN`].
    #[error("{0} bytes of options (metadata, mostly); SOCKS6 allows at most 20480")]
    OptionsTooLong(usize),
    /// User or password is empty or longer than 255 bytes.
    #[error("user and password must have 1 to 255 bytes each")]
    Credentials,
    /// The payload is too long for the 16-bit length of a datagram message.
    #[error("{0} bytes of payload do not fit a datagram message")]
    Payload(usize),
}
