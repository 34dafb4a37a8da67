//! What engines are told of the node that they are part of.

use super::flows::{Admit, Chains, NextId};
use crate::config::Config;
use crate::live::Clock;
use arc_swap::ArcSwap;
use std::fmt;
use std::sync::Arc;

/// What all workers of a node are told.
#[derive(Clone)]
pub struct Surroundings {
    /// The configuration in force.
    pub config: Arc<ArcSwap<Config>>,
    /// The clock of the node.
    pub clock: Clock,
    /// Gives flows their numbers.
    pub next_id: NextId,
    /// Makes the functions of flows.
    pub chains: Chains,
    /// Says whether there may be one more.
    pub admit: Admit,
}

impl fmt::Debug for Surroundings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Surroundings").field("clock", &self.clock).finish_non_exhaustive()
    }
}
