//! Flows on the wire at the start of a node, and when another process goes on with it.

use super::node::Node;
use super::upgrade::Heritage;
use crate::config::{Config, PinnedAt};
use crate::live::Ledger;
use crate::worker::{Adopting, Obstacle, Shared, Wires};
use anyhow::Context;
use sidetrack_core::flow::FlowId;
use sidetrack_sys::sync::lock;
use std::sync::Arc;

/// Opens the wire of this process, or that of the process before it. `user`: who this process becomes, user and group.
///
/// # Errors
/// The kernel has no room or programs for it.
pub(super) fn open(
    config: &Config,
    user: Option<(u32, u32)>,
    heritage: Option<&Heritage>,
) -> anyhow::Result<Option<Arc<Wires>>> {
    let Some(wire) = &config.wire else { return Ok(None) };
    let wires = match heritage.and_then(Heritage::wire) {
        Some(given) => {
            let folder = given.pins.as_ref().map(|(folder, _)| folder.as_path());
            let is_same = match &wire.pins {
                PinnedAt::None => folder.is_none(),
                PinnedAt::Default => folder.is_some(),
                PinnedAt::Folder(wanted) => folder == Some(wanted),
            };
            if !is_same {
                tracing::warn!(
                    "`pins` of [wire] has changed: that takes effect at the next start, not by an upgrade"
                );
            }
            Wires::inherit(wire, given)
        }
        None => Wires::open(wire, user),
    };
    if let Err(error) = &wires
        && wire.is_optional
    {
        tracing::warn!(%error, "large flows keep their sockets ([wire] auto): the kernel cannot take them over");
        return Ok(None);
    }
    let wires = wires.context("cannot let the kernel take flows over (shunt.fast_path = \"wire\")")?;
    Ok(Some(Arc::new(wires)))
}

/// Goes on with the flows on the wire that an earlier process has left, and looks at those that come. Does nothing if an earlier
/// process still runs.
///
/// # Errors
/// The system gives no thread.
pub(super) fn adopt(shared: &Shared, ledgers: &[Arc<Ledger>]) -> anyhow::Result<()> {
    let (Some(wires), Some(ledger)) = (shared.wires(), ledgers.first()) else { return Ok(()) };
    if wires.is_awaited() {
        return Ok(());
    }
    let (config, in_force) = (shared.config.load(), shared.agreement.load());
    let by = Adopting { config: &config, in_force: &in_force, ledger, is_crash: true };
    shared.numbers_begin_after(wires.adopt(&by).last_number);
    wires.begin().context("cannot start the thread that looks at flows on the wire")
}

impl Node {
    /// Brings a flow back from the wire into two sockets.
    ///
    /// # Errors
    /// Says why it cannot come back. It goes on as before then.
    pub(super) fn bring_back(&self, number: u64) -> anyhow::Result<()> {
        // Held until the worker has it: the fleet stops only after that.
        let fleet = lock(&self.fleet);
        let fleet = fleet.as_ref().context("sidetrack is shutting down")?;
        let wires = self.shared.wires().ok_or(Obstacle::NotThere)?;
        fleet.come_back(wires.bring_back(FlowId(number), self.mark())?);
        Ok(())
    }

    /// Goes on with the flows on the wire of the other process: it has let go of them, or was killed (`is_crash`). It keeps those in
    /// the places `kept`.
    pub(super) fn take_over_wires(&self, kept: &[u32], is_crash: bool) {
        let shared = &self.shared;
        let (Some(wires), Some(ledger)) = (shared.wires(), self.worker_ledgers().first()) else { return };
        if wires.is_ours() {
            return;
        }
        let (config, in_force) = (shared.config.load(), shared.agreement.load());
        let by = Adopting { config: &config, in_force: &in_force, ledger, is_crash };
        match wires.take_over(&by, kept) {
            Ok(adoption) => shared.numbers_begin_after(adoption.last_number),
            Err(error) => tracing::error!(%error, "flows on the wire are not looked at"),
        }
    }
}
