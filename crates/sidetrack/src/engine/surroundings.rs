//! What the engines need from the rest of the node.

use super::flows::{Admit, Chains, NextId};
use crate::config::Config;
use crate::live::Clock;
use arc_swap::ArcSwap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The parts of the node that all workers use.
#[derive(Clone)]
pub struct Surroundings {
    /// The configuration in force.
    pub config: Arc<ArcSwap<Config>>,
    /// The clock of the node.
    pub clock: Clock,
    /// Numbers the flows.
    pub next_id: NextId,
    /// Makes the functions of flows.
    pub chains: Chains,
    /// Decides whether one more flow is allowed.
    pub admit: Admit,
    /// Errors of the engines themselves, of all workers together.
    pub internal: Arc<AtomicU64>,
}

impl fmt::Debug for Surroundings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Surroundings").field("clock", &self.clock).finish_non_exhaustive()
    }
}
