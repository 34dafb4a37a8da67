//! `connect = "faithful"` on real traffic: a client's `connect()` ends through us as it does without us.

#[path = "../node/mod.rs"]
mod node;

mod crowds;
mod equal;
mod faults;
mod ports;
mod probe;
mod programs;
