//! The `http` listener on real sockets: a node in this process, servers and clients of the test's own, and real ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod auth;
mod cache;
mod capture;
mod client;
mod completing;
mod crowd;
mod disk;
mod disk_crash;
mod faults;
mod filter;
mod h2;
mod h2_malformed;
mod htcp;
mod limit;
#[path = "../datapath/node.rs"]
#[allow(dead_code, reason = "shared with the tests of the data path, which use more of it")]
mod node;
mod origin;
mod programs;
mod proxy;
#[path = "../node/mod.rs"]
mod running;
mod secrets;
mod seed003;
mod self_signed;
mod sibling;
mod tap;
mod tapped_programs;
mod tls_origin;
mod unread;
