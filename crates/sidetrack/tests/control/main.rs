//! The control plane with real processes: an orchestrator, the agents of two domains, a proxy in each, and flows.

#[path = "../node/mod.rs"]
mod node;

mod faults;
mod plane;
mod steps;
