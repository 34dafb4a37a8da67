//! SOCKS versions 5 and 6: encoding and decoding, and both ends of each handshake, without I/O.
//!
//! [`server::Server`] accepts both versions on one port: the first byte gives the version. [`client::Client`] is a
//! client of either version for one hop. Supported are RFC 1928 and 1929, draft-olteanu-intarea-socks-6-11 and -12,
//! and the two layouts of `socksx`.

pub mod address;
pub mod client;
mod command;
mod handshake;
pub(crate) mod password;
pub(crate) mod reader;
pub mod reply;
pub mod server;
pub mod v5;
pub mod v6;

pub use client::Client;
pub use command::Command;
pub use reply::ReplyCode;
pub use server::Server;
