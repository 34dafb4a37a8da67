//! Captures of packets: which flow a packet belongs to, and files in the format pcapng that Wireshark opens.
//!
//! Nothing here reads a socket: [`look`] reads the addresses of a packet, [`Table`] knows the connections of flows,
//! and [`pcapng`] writes and splits blocks.

mod packet;
pub mod pcapng;
mod table;

pub use packet::{Ends, Looked, hello_random, look, readdress};
pub use table::{Found, Leg, Table};
