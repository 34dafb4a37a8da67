//! The overlay by the real binary on real traffic: an application at node `a`, a server at node `c`, relays between.

#[path = "../../../sys/tests/support/mod.rs"]
mod hosts;
#[path = "../node/mod.rs"]
mod node;

mod endings;
mod faults;
mod liar;
mod packets;
mod scene;
mod together;
mod tools;
mod transfers;
