//! A running node is replaced by a new process (`sidetrack upgrade`, [ADR 38](../../../../docs/adr/0038-upgrade.md)).
//!
//! ```text
//! command ──program──> starter ──starts──> new process
//!                         │ both ends of a channel
//!                         v
//!                      old process ──sockets, keeper, numbers──> new process
//! ```
//!
//! [`starter`] is a small process that keeps the rights of the start and talks only to root and to the user that started it. The
//! states of the old process are in [`old`], those of the new one in [`new`].

mod associations;
mod channel;
mod flows;
#[cfg(test)]
mod golden;
mod heritage;
mod names;
mod new;
mod obstacles;
mod old;
mod parts;
mod records;
mod resting;
mod sessions;
mod shunted;
mod starter;
mod steps;
mod wires;

pub(super) use associations::take_associations;
pub(super) use channel::Came;
pub(super) use heritage::{Go, Heritage};
pub(super) use names::take_names;
pub(super) use new::{Heir, Verdict};
pub(super) use old::{Old, Ours, Parting};
pub use parts::{DRAINS, Said, Wish};
pub(super) use parts::{PathPart, ShuntedRow, WindowPart};
pub(super) use records::{Returning, say_counters};
pub(super) use starter::serve;
pub(super) use starter::{Starter, socket_beside};
pub(super) use steps::reached;
pub use steps::{Act, Phase, Side, Step};
