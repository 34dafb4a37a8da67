//! What the keeper does for a node.

use crate::app::sockets::Proof;
use crate::keeper::{Begin, Keeper, Order};
use crate::steer::Steer;
use sidetrack_sys::conntrack::Events;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The parts of our work that the kernel does.
pub(in crate::app) struct Steered {
    pub keeper: Option<Arc<Keeper>>,
    /// The rights that the keeper was started with.
    pub may: Begin,
    /// Whether the keeper was asked to change the kernel: only then it has something there.
    pub used: AtomicBool,
}

impl Steered {
    /// Lets the keeper steer connections to these listeners. Without any, and without rules that an earlier configuration or process has
    /// left, it changes nothing: another node of this network may have the table.
    pub(in crate::app) fn steer(
        &self,
        steer: &Steer,
        listeners: &[Proof<'_>],
    ) -> anyhow::Result<Option<Events>> {
        let Some(keeper) = self.keeper.as_ref().filter(|_| !steer.is_empty() || self.used.load(Relaxed))
        else {
            return Ok(None);
        };
        self.used.store(true, Relaxed);
        let (addresses, proofs): (Vec<_>, Vec<_>) = listeners.iter().copied().unzip();
        let order = Order::of(steer, &addresses).map_err(anyhow::Error::msg)?;
        let (warnings, events) = keeper.steer(order, &proofs)?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        Ok(events)
    }
}
