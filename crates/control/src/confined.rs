//! What orchestrators and agents give up before they read a peer's byte.

use anyhow::Context;
use rustix::fs::Access;
use sidetrack_common::rights::{self, DataUser, become_or_stay, is_refused};
use sidetrack_common::systemd::passed::Passed;
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::confine::{Kind, confine_process};
use sidetrack_sys::landlock::May;
use std::net::{TcpListener, ToSocketAddrs as _};
use std::path::Path;

/// Becomes the user, binds the address as it unless a socket on it was passed, and keeps neither rights nor files that are not needed.
/// `again` are the files that are read again later. To be called while the process has one thread.
///
/// # Errors
/// The process cannot become the user, or the address is taken.
pub(super) fn confine(
    (listen, passed): (&str, &Passed),
    user: Option<&DataUser>,
    again: &[&Path],
) -> anyhow::Result<TcpListener> {
    let to_bind = if is_low(listen) { CapabilitySet::NET_BIND_SERVICE } else { CapabilitySet::empty() };
    let to_read = CapabilitySet::DAC_READ_SEARCH;
    // CAP_SETPCAP only as long as the bounding set is still to shrink.
    become_or_stay(user, to_bind | to_read | CapabilitySet::SETPCAP)?;
    let listener = match taken(listen, passed)? {
        Some(listener) => listener,
        None => TcpListener::bind(listen).with_context(|| format!("listen = \"{listen}\""))?,
    };
    listener.set_nonblocking(true)?;
    let closed = again.iter().find(|path| is_refused(path, Access::READ_OK));
    if let (Some(path), Some(user)) = (closed, user) {
        let (path, name) = (path.display(), &user.name);
        tracing::info!("CAP_DAC_READ_SEARCH is kept: {path} is closed to user '{name}'");
    }
    become_or_stay(None, if closed.is_some() { to_read } else { CapabilitySet::empty() })?;
    let mut allowed = rights::system();
    again.iter().for_each(|path| rights::allow(&mut allowed, path, May::Read));
    rights::restrict(&allowed);
    if let Err(error) = confine_process(Kind::Control) {
        tracing::warn!("system calls are not confined: {error}");
    }
    if let Some(user) = user {
        tracing::info!(user = user.name, uid = user.uid, "an unprivileged user from here on");
    }
    Ok(listener)
}

/// Takes the socket on this address that the service manager has passed, and warns of others.
fn taken(listen: &str, passed: &Passed) -> anyhow::Result<Option<TcpListener>> {
    let mut taken = None;
    // A name that cannot be resolved is reported when it is bound.
    for address in listen.to_socket_addrs().into_iter().flatten().filter(|_| !passed.is_empty()) {
        taken = taken.or(passed.listeners(address)?.into_iter().next());
    }
    for (protocol, address, name) in passed.unused() {
        let protocol = protocol.as_str();
        tracing::warn!(
            "'{name}' of systemd has {protocol} {address}, and `listen` is \"{listen}\": connections to it hang. Let both have the \
             same address"
        );
    }
    Ok(taken)
}

/// Whether an ordinary user may not bind this port.
fn is_low(listen: &str) -> bool {
    let port = listen.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    port.is_some_and(|port| (1..1024).contains(&port))
}
