//! The control plane with real processes: an orchestrator, the agents of two domains, a proxy in each, and flows; and paths that
//! services ask for.

#[path = "../node/mod.rs"]
mod node;

mod etcd;
mod faults;
mod kills;
mod members;
mod outgoing;
mod plane;
mod races;
mod steps;
mod systemd;
mod user;
