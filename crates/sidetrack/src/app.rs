//! Wires everything; the only file that knows all modules.

mod sockets;
mod threads;
mod up;

pub use threads::{Fleet, Serving};
pub use up::{UpOptions, up};
