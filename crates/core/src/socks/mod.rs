//! SOCKS versions 5 and 6: codecs and both ends of each handshake, without I/O.

pub mod address;
pub mod v5;
pub mod v6;
