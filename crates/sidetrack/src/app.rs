//! Wires everything; the only file that knows all modules.

mod agreement;
mod apply;
mod caches;
mod chains;
mod containers;
mod control;
mod handover;
mod kernel;
mod node;
mod outgoing;
mod paths;
mod ports;
mod rights;
mod run;
mod shunt;
mod sockets;
mod threads;
mod up;

pub use run::{RunCommand, TapCommand, run};
pub use sockets::{Bound, bind};
pub use threads::{Fleet, Serving};
pub use up::{UpOptions, up};

use std::os::fd::AsFd;

/// Runs as the keeper, over standard input.
///
/// # Errors
/// If the connection to the main process breaks in any way but its end.
pub fn keep() -> anyhow::Result<()> {
    crate::keeper::keep(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the process that replaces the file of the agreement, over standard input.
///
/// # Errors
/// What breaks it.
pub fn agreement_writer() -> anyhow::Result<()> {
    agreement::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the process that starts containers, over standard input.
///
/// # Errors
/// What breaks it.
pub fn containers() -> anyhow::Result<()> {
    crate::function::container::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the shunt's process, over standard input.
///
/// # Errors
/// What breaks the shunt.
pub fn shunt() -> anyhow::Result<()> {
    crate::shunt::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the process that uses sockets for a domain's agent, over standard input.
///
/// # Errors
/// What breaks it.
pub fn domain_sockets() -> anyhow::Result<()> {
    crate::control::domain::sockets::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}
