//! The control plane with real processes: an orchestrator, the agents of two domains, a proxy in each, and flows; and paths that
//! services ask for.

#[path = "../node/mod.rs"]
mod node;

mod faults;
mod members;
mod outgoing;
mod plane;
mod races;
mod steps;
mod user;
