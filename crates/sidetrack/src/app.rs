//! Puts the program together. Only this module knows all other modules.

mod agreement;
mod apply;
mod budget;
mod caches;
mod chains;
mod containers;
mod control;
mod dns;
mod handover;
mod hold;
mod kernel;
mod memory;
mod node;
mod orchestrator;
mod outgoing;
mod paths;
mod ports;
mod rights;
mod run;
mod shunt;
mod sockets;
mod systemd;
mod threads;
mod up;
mod upgrade;
mod windows;
mod wires;

pub use run::{Publish, Report, RunCommand, TapCommand, run};
pub use sockets::{Before, Bound, bind};
pub use threads::{Fleet, Serving};
pub use up::{UpOptions, take_over, up};
pub use upgrade::{Act, DRAINS, Phase, Said, Side, Step, Wish};

use std::os::fd::AsFd;

/// Runs as the keeper process, connected by standard input.
///
/// # Errors
/// The connection to the main process fails in another way than by its end.
pub fn keep() -> anyhow::Result<()> {
    crate::keeper::keep(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the process that starts what replaces the node, connected by standard input.
///
/// # Errors
/// The connection to the node fails in another way than by its end.
pub fn starter() -> anyhow::Result<()> {
    upgrade::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// The socket on which a node with this admin socket is asked for an upgrade.
pub fn upgrade_socket(admin: &std::path::Path) -> std::path::PathBuf {
    upgrade::socket_beside(admin)
}

/// Runs as the process that replaces the agreement's file, connected by standard input.
///
/// # Errors
/// The failure that ends the process.
pub fn agreement_writer() -> anyhow::Result<()> {
    agreement::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the process that starts containers, connected by standard input.
///
/// # Errors
/// The failure that ends the process.
pub fn containers() -> anyhow::Result<()> {
    crate::function::container::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the shunt's process, connected by standard input.
///
/// # Errors
/// The failure that ends the shunt.
pub fn shunt() -> anyhow::Result<()> {
    crate::shunt::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}

/// Runs as the process that uses sockets for a domain's agent, connected by standard input.
///
/// # Errors
/// The failure that ends the process.
#[cfg(feature = "control")]
pub fn domain_sockets() -> anyhow::Result<()> {
    crate::control::domain::sockets::serve(std::io::stdin().as_fd().try_clone_to_owned()?)
}
