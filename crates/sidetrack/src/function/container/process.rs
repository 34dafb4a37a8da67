//! The containers' process. It keeps the rights to use the container engine, which are as powerful as root's, and to
//! enter the containers' networks. It reads no byte of any flow. When its connection closes, it removes all containers
//! and ends.

use super::ask::{Ask, Begun};
use super::held;
use crate::rights::{TO_BECOME, become_or_stay};
use crate::wire;
use anyhow::Context;
use sidetrack_common::containers::Engine;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::confine;
use sidetrack_sys::{process, scm};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};

/// The command line argument that starts this process.
pub const ARGUMENT: &str = "containers-process";

/// The rights to enter the networks of containers, whose processes belong to other users; to set their congestion
/// control; and to use the engine's socket, wherever it is.
const NEEDED: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::DAC_OVERRIDE);

/// The name of this process in `ps` and `top`.
const NAME: &std::ffi::CStr = c"sidetrack-cont";

/// Serves until the other end closes, then removes all containers.
///
/// # Errors
/// Fails if the connection breaks in any other way.
pub fn serve(end: OwnedFd) -> anyhow::Result<()> {
    process::ignore_stop_signals();
    // Without the name, only the output of `ps` differs.
    let _ = process::set_name(NAME);
    let held = caps::capabilities().context("capabilities")?.permitted;
    caps::keep_only(held & (NEEDED | TO_BECOME)).context("cannot give up capabilities")?;
    // This message is sent before `up` has read a byte of any peer.
    let Some((Ask::Begin { engine, user }, _)) = wire::receive::<Ask>(&end)? else { return Ok(()) };
    become_or_stay(user.as_ref(), NEEDED)?;
    if let Err(error) = confine::confine_process(confine::Kind::Containers) {
        tracing::warn!("the containers' system calls are not confined: {error}");
    }
    let engine = match begin(engine.as_deref()) {
        Ok((engine, begun)) => {
            wire::send(&end, &begun, &[])?;
            Arc::new(engine)
        }
        Err(error) => return Ok(wire::send(&end, &Begun::Failed(format!("{error:#}")), &[])?),
    };
    std::thread::scope(|threads| {
        let mut held = Vec::new();
        let served = loop {
            match wire::receive::<Ask>(&end) {
                Ok(Some((Ask::Start(order), mut fds))) => {
                    let Some(own) = fds.pop().map(Arc::new) else { continue };
                    held.retain(|one: &Weak<OwnedFd>| one.strong_count() > 0);
                    held.push(Arc::downgrade(&own));
                    let engine = engine.clone();
                    threads.spawn(move || held::hold(&engine, &order, &own));
                }
                Ok(Some((Ask::Begin { .. }, _))) => {}
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // Close the connections of all containers, in whichever process the other ends are: they must not be used any
        // more.
        for own in held.iter().filter_map(Weak::upgrade) {
            let _ = scm::close(&*own);
        }
        Ok(served?)
    })
}

fn begin(socket: Option<&Path>) -> anyhow::Result<(Engine, Begun)> {
    let engine = Engine::find(socket)?;
    let version = engine.version()?;
    let mut removed = Vec::new();
    for leftover in engine.leftovers()? {
        engine.remove(&leftover.id)?;
        removed.push(leftover.name);
    }
    let begun = Begun::Ready { engine: engine.socket().to_owned(), version, removed };
    Ok((engine, begun))
}
