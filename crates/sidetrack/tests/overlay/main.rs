//! The overlay by the real binary on real traffic: an application at node `a`, a server at node `c`, relays between.

#[path = "../node/mod.rs"]
mod node;

mod endings;
mod scene;
mod transfers;
