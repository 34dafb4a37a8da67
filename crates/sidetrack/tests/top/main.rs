//! `sidetrack top`: its screen without a terminal, and the program on one, beside a node with traffic.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../node/mod.rs"]
mod node;

mod command;
mod health;
mod screen;
mod terminal;
