//! The engine against model TCPs over bad links, and against scripts of single packets.

#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

mod conformance;
mod exhaustion;
mod network;
mod peer;
mod script;
mod transfers;
mod wire;
