//! The engine against model TCPs over bad links, and against scripts of single packets.

mod conformance;
mod exhaustion;
mod network;
mod peer;
mod script;
mod transfers;
mod wire;
