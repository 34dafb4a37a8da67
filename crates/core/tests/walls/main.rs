//! The walls of the house, held by tests: what core may depend on, where `unsafe` may stand, which stage may know
//! which, how long a function may be, and that the documents tell the truth about files and commands.
//!
//! These tests read sources and documents; they start nothing but `cargo tree`. They live in core's tests because
//! core builds in seconds and everything here is about text.
// Reading files and starting `cargo tree` is what these tests do; core itself may not (its clippy.toml says so).
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the walls read files; the product's core may not"
)]

mod clocks;
mod documents;
mod figures;
mod layering;
mod markdown;
mod promises;
mod prose;
mod purity;
mod secrets;
mod shape;
mod source;
mod unsafety;
