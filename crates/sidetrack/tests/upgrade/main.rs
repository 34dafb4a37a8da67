//! A running node is replaced by a new process, on real traffic: no connection is refused, no byte is lost, and a new process that
//! fails gives everything back.

#[path = "../node/mod.rs"]
mod node;
#[path = "../overlay/scene.rs"]
#[allow(dead_code, reason = "each test target uses its own part")]
mod scene;

mod confirm;
mod datagrams;
mod failures;
mod hangs;
mod killed;
mod load;
mod moved;
mod overlay;
mod replaced;
mod ssh;
mod state;
mod steering;
mod systemd;

pub(crate) use node::upgrading::{SIDETRACK, Started, Upgrade, ends, runs, stop};
