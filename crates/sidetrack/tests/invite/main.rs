//! Invitations between real nodes: `tunnel invite` and `tunnel join`, and what can go wrong in between.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

mod broken;
mod command;
#[path = "../node/mod.rs"]
mod node;
mod overlay;
mod tunnel;
