//! Data-flow agreements: the file, the policy engine that reads it (Cedar), and the agreement in force. Their
//! meaning is defined in `sidetrack_core::agreement`; `docs/control.md` explains how to write one.
//!
//! Without the feature `control` only the types remain: [`Book::read`] then refuses every file.

#[cfg(feature = "control")]
mod cedar;
#[cfg(feature = "control")]
mod check;
#[cfg(feature = "control")]
mod clause;
#[cfg(feature = "control")]
mod condition;
#[cfg(feature = "control")]
mod file;
mod judge;
#[cfg(feature = "control")]
mod raw;
#[cfg(not(feature = "control"))]
mod without;

pub use judge::{Book, InForce, Needs, needs};

/// Largest file of an agreement, bytes.
pub const FILE_MAX: u64 = 16 << 20;
