//! The keeper's own side of the connection.

use super::kernel::Kernel;
use super::{Ask, Told, wire};
use crate::process;
use anyhow::Context;
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::process as system;
use sidetrack_sys::scm;
use sidetrack_sys::undo::Guard;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// What the keeper and its guard need: the packet filter, routing and conntrack; the descriptors of other users' processes;
/// files with passwords that the configuration names.
const NEEDED: CapabilitySet =
    CapabilitySet::NET_ADMIN.union(CapabilitySet::SYS_PTRACE).union(CapabilitySet::DAC_READ_SEARCH);

/// What `ps` and `top` call this process.
const NAME: &std::ffi::CStr = c"sidetrack-keep";

/// Serves until the other end closes, then takes everything back.
///
/// # Errors
/// If the connection breaks in any other way, or something could not be taken back.
pub fn keep(end: OwnedFd) -> anyhow::Result<()> {
    // The end of the connection is our only end: an interrupt from a terminal must not come before it.
    system::ignore_stop_signals();
    // The program was started by way of /proc/self/exe; only `ps` misses the name.
    let _ = system::set_name(NAME);
    let held = caps::capabilities().context("capabilities")?.permitted;
    caps::keep_only(held & NEEDED).context("cannot give up capabilities")?;
    let guard = Guard::spawn(&[]).context("cannot start the guard that undoes what we do")?;
    let mut kernel = Kernel::new(guard);
    let served = serve(&end, &mut kernel);
    kernel.take_back(matches!(served, Ok(true)))?;
    served.map(drop)
}

/// Whether the end was announced.
fn serve(end: &OwnedFd, kernel: &mut Kernel) -> anyhow::Result<bool> {
    let mut orderly = false;
    loop {
        let patience = kernel.tend();
        if !scm::wait(end, patience)? {
            continue;
        }
        match wire::receive(end) {
            Ok(Some((Ask::Release, _))) => {
                orderly = true;
                wire::send(end, &Told::Released, &[])?;
            }
            Ok(Some((ask, _))) => answer(end, kernel, ask)?,
            Ok(None) => return Ok(orderly),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                wire::send(end, &Told::Failed(format!("not a request: {error}")), &[])?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn answer(end: &OwnedFd, kernel: &mut Kernel, ask: Ask) -> io::Result<()> {
    match ask {
        Ask::Steer(order) => match kernel.steer(&order) {
            Ok((warnings, events)) => {
                let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
                wire::send(end, &Told::Steered { warnings }, &fds)
            }
            Err(error) => wire::send(end, &Told::Failed(format!("{error:#}")), &[]),
        },
        Ask::Flows => match kernel.flows() {
            Ok(flows) => wire::send(end, &Told::Flows(flows), &[]),
            Err(error) => wire::send(end, &Told::Failed(error.to_string()), &[]),
        },
        Ask::Owner { local, remote } => {
            let owner = process::on_this_host(local, remote);
            let told = Told::Owner { pid: owner.pid, name: owner.name, uid: owner.uid };
            wire::send(end, &told, &[])
        }
        Ask::Release => Ok(()),
    }
}
