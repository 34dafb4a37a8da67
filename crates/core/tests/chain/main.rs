//! Function chains: every built-in stage under every cut of the bytes, alone and in chains, with what a peer may do to it.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

mod bounds;
mod branch;
mod drive;
mod filter;
mod joined;
mod records;
mod replace;
mod toy;
