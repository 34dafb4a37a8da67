//! The tables and figures of the five documents (docs/seeds.md), one module each.

pub mod chain;
pub mod crash;
mod echo;
pub mod engine;
pub mod epi;
pub mod faults;
pub mod flights;
mod held;
pub mod http;
pub mod idle;
pub mod links;
pub mod overlay;
pub mod relay;
pub mod shunt;
pub mod soak;
pub mod udp;
pub mod wire;

use anyhow::{Context, Result};

/// Returns true if a part is requested; without a request all are.
fn is_wanted(asked: &[String], part: &str) -> bool {
    asked.is_empty() || asked.iter().any(|wanted| wanted == part)
}

/// Returns true if a requested word is a part of the row's name; without a request all rows are.
fn is_named(asked: &[String], name: &str) -> bool {
    asked.is_empty() || asked.iter().any(|piece| name.contains(piece.as_str()))
}

/// Moves this thread, and what it starts, into a mount namespace of its own: mounts of other programs are not counted.
fn own_mounts() -> Result<()> {
    use rustix::mount::{MountPropagationFlags, mount_change};
    #[expect(deprecated, reason = "the new form is unsafe because of CLONE_FILES, which is not used here")]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS)
        .context("no mount namespace; the lab needs root")?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .context("mounts cannot be made private")
}
