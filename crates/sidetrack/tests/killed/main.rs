//! The end of a node that carries flows. SIGKILL: both applications see a reset, never the orderly end of a stream that was cut.
//! SIGTERM: flows may go on for a while.

#[path = "../node/mod.rs"]
mod node;
#[allow(dead_code, reason = "the overlay's own tests use the rest")]
#[path = "../overlay/scene.rs"]
mod scene;

mod chains;
mod cut;
mod drain;
mod listeners;
