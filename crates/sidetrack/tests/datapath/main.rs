//! The data path under fire: real sockets on loopback, the product's own workers, and every way a flow can go.
//!
//! Every wait is bounded by [`sidetrack_testkit::LIMIT`]; nothing sleeps to synchronise. Random tests print their seed.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

mod acknowledgements;
mod binary;
mod endings;
mod functions;
mod gate;
mod half_close;
mod handshakes;
mod hello;
mod hops;
mod limits;
mod node;
mod options;
mod path;
mod peers;
mod random;
mod socks;
mod storms;
mod transfers;
mod tunnel;
mod tunnel_paths;
mod warm;
#[cfg(feature = "wasm")]
mod wasm;
