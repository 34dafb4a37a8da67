//! What the real binary dials on behalf of clients of other hosts, whatever names and addresses they write.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../node/mod.rs"]
mod node;

mod addresses;
mod configuration;
mod dns;
mod names;
mod scene;
