//! The reader of data-flow agreements: the file, and the policy engine that judges by it (Cedar). Their meaning is defined
//! in `sidetrack_core::agreement`; `docs/control.md` explains how to write one.

mod cedar;
mod check;
mod clause;
mod condition;
mod file;
mod raw;

pub use file::{load, read};
