//! The engine against model TCPs over bad links, and against scripts of single packets.

#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

mod conformance;
mod example;
mod exhaustion;
mod handshake;
mod network;
mod offloaded;
mod oracle;
mod pcap;
mod peer;
mod replay;
mod reply;
mod script;
mod sources;
mod transfers;
mod wire;
