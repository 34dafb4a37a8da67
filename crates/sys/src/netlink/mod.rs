//! Netlink, synchronous and small: what `nft`, `route`, `conntrack` and `sockdiag` stand on.
//!
//! Why our own: the namespace of `run` is set up between fork and exec, where no runtime and no second thread may exist, and an
//! nftables `owner` table lives exactly as long as the socket that made it, so that socket must be ours to hold
//! (`docs/adr/0002-own-netlink-encoder.md`). Message layout: RFC 3549 section 2 and linux/netlink.h.
//!
//! - [`Requests`] builds messages, [`messages`] and [`attributes`] read them, [`Socket`] moves them.
//! - Whatever the kernel refuses comes back as a [`Refusal`]: what we asked for, the error and the kernel's own words.

mod decode;
mod encode;
mod error;
mod socket;

pub use decode::{Attribute, Attributes, Message, Messages, attributes, messages};
pub use encode::{AttributeWriter, Requests};
pub use error::{Error, Malformed, Refusal};
pub use socket::{Protocol, Received, Socket};

/// Message flags (`nlmsg_flags`), linux/netlink.h.
pub mod flag {
    /// A request to the kernel.
    pub const REQUEST: u16 = 0x001;
    /// The answer has several messages and ends with one of kind [`super::kind::DONE`].
    pub const MULTI: u16 = 0x002;
    /// Answer with an acknowledgement even on success.
    pub const ACK: u16 = 0x004;
    /// The dump was disturbed by a change: its content may lack or repeat entries.
    pub const DUMP_INTERRUPTED: u16 = 0x010;
    /// List everything that fits (root and match).
    pub const DUMP: u16 = 0x300;
    /// Replace what exists.
    pub const REPLACE: u16 = 0x100;
    /// Fail if it exists.
    pub const EXCLUSIVE: u16 = 0x200;
    /// Create it if it does not exist.
    pub const CREATE: u16 = 0x400;
    /// Add behind what exists.
    pub const APPEND: u16 = 0x800;
    /// In an answer: the original request is not repeated in full.
    pub const CAPPED: u16 = 0x100;
    /// In an answer: attributes of the extended acknowledgement follow.
    pub const ACK_ATTRIBUTES: u16 = 0x200;
}

/// Message kinds (`nlmsg_type`) that every protocol shares, linux/netlink.h.
pub mod kind {
    /// Nothing.
    pub const NOOP: u16 = 1;
    /// An acknowledgement (error 0) or a refusal.
    pub const ERROR: u16 = 2;
    /// The end of a multi-part answer.
    pub const DONE: u16 = 3;
}

/// Bytes of `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;

/// Rounds up to netlink's alignment of 4 bytes.
pub(crate) const fn align(length: usize) -> usize {
    length.saturating_add(3) & !3
}
