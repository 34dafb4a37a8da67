//! SOCKS versions 5 and 6: codecs and both ends of each handshake, without I/O.
//!
//! [`server::Server`] tells the versions apart on one port by the first byte; [`client::Client`] is either version
//! towards one hop. RFC 1928 and 1929; draft-olteanu-intarea-socks-6-11 and -12, and the two layouts of `socksx`.

pub mod address;
pub mod client;
mod handshake;
pub(crate) mod password;
pub(crate) mod reader;
pub mod reply;
pub mod server;
pub mod v5;
pub mod v6;

pub use client::Client;
pub use reply::ReplyCode;
pub use server::Server;
