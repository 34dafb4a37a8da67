//! SOCKS version 5 (RFC 1928) with user name and password (RFC 1929): both ends of all commands,
//! and the header of datagrams.

mod client;
mod server;
pub mod udp;

pub use client::{Client, ClientConfig};
pub use server::Server;

use super::address::{self, NameLayout};
use crate::flow::Destination;

/// The version byte.
const VERSION: u8 = 5;

/// Writes `05 code 00 atyp address port`: a request or a reply.
fn put_message(out: &mut Vec<u8>, code: u8, address: &Destination) {
    out.extend_from_slice(&[VERSION, code, 0, address::atyp(&address.host)]);
    address::put_host(out, &address.host, NameLayout::Bare);
    out.extend_from_slice(&address.port.to_be_bytes());
}
