//! A running node is replaced by a new process, on real traffic: no connection is refused, no byte is lost, and a new process that
//! fails gives everything back.

#[path = "../node/mod.rs"]
mod node;

mod datagrams;
mod failures;
mod load;
mod moved;
mod replaced;
mod steering;
mod systemd;

pub(crate) use node::upgrading::{SIDETRACK, Upgrade, ends, runs, stop};
