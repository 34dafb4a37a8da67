//! Twelve nodes at wide-area distances.
//!
//! | part | measures |
//! |---|---|
//! | [`mod@routes`] | many flows while links on their path are cut, one after the other |
//! | [`mod@area`] | the wide-area evaluation of Seamless Overlays, Sec. 4.2: bulk data and voice in bad weather |
//! | [`mod@chain`] | a stream with a deadline over three hops, one of which loses bursts |

mod area;
mod bulk;
mod chain;
mod page;
mod routes;
mod stream;
mod weather;
mod world;

pub(super) use area::Area;
pub(super) use chain::Chain;
pub(super) use page::{files, pages};
pub(super) use routes::Routes;

use anyhow::Result;

use super::measure::Plan;
use crate::link::Kind;
use crate::progress::Progress;

/// Measures flows that are rerouted.
///
/// # Errors The network cannot be built, a flow breaks, or the overlay does not converge.
pub(super) fn routes(kind: Kind, seed: u64, plan: &Plan, progress: &Progress) -> Result<Routes> {
    routes::run(kind, seed, plan.cuts, plan.flows, progress)
}

/// Measures bulk data and voice across the area.
///
/// # Errors The network cannot be built, or a flow breaks.
pub(super) fn area(kind: Kind, seed: u64, plan: &Plan, progress: &Progress) -> Result<Area> {
    area::run(kind, seed, plan, progress)
}

/// Measures a stream with a deadline.
///
/// # Errors The network cannot be built, or no packet arrives.
pub(super) fn chain(kind: Kind, seed: u64, plan: &Plan, progress: &Progress) -> Result<Chain> {
    chain::run(kind, seed, plan, progress)
}
