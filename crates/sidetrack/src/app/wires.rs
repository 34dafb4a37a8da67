//! Flows on the wire at the start of a node.

use crate::live::Ledger;
use crate::worker::{Adopting, Shared};
use anyhow::Context;
use std::sync::Arc;

/// Goes on with the flows on the wire that an earlier process has left, and looks at those that come.
///
/// # Errors
/// The system gives no thread.
pub(super) fn adopt(shared: &Shared, ledgers: &[Arc<Ledger>]) -> anyhow::Result<()> {
    let (Some(wires), Some(ledger)) = (shared.wires(), ledgers.first()) else { return Ok(()) };
    let (config, in_force) = (shared.config.load(), shared.agreement.load());
    let adoption = wires.adopt(&Adopting { config: &config, in_force: &in_force, ledger });
    shared.numbers_begin_after(adoption.last_number);
    wires.begin().context("cannot start the thread that looks at flows on the wire")
}
