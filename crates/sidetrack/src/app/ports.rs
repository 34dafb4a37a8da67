//! Checks for addresses that another program uses: two nodes on one address would split its connections between
//! two policies.

use super::sockets::has_datagrams;
use crate::config::{Config, Listener, ListenerKind};
use sidetrack_common::systemd::passed::Passed;
use sidetrack_core::flow::Protocol;
use sidetrack_sys::ports::{PortKind, holder};
use sidetrack_sys::{sockopt, udp};
use std::io::{Error, ErrorKind};
use std::net::SocketAddr;

/// Adds to a bind error which program has the address, if that is the cause.
pub(super) fn explain(error: Error, kind: PortKind, address: SocketAddr) -> anyhow::Error {
    if error.kind() != ErrorKind::AddrInUse {
        return error.into();
    }
    let by = match holder(kind, address) {
        Some(holder) => format!("{}, pid {}", holder.name, holder.pid),
        None => "another program (`ss -lntup` as root shows which)".to_owned(),
    };
    let protocol = match kind {
        PortKind::Tcp => "",
        PortKind::Udp => " (UDP)",
    };
    anyhow::anyhow!("address {address}{protocol} is in use by {by}: stop it, or choose another address")
}

/// The transport protocol of a port.
pub(super) const fn protocol(kind: PortKind) -> Protocol {
    match kind {
        PortKind::Tcp => Protocol::Tcp,
        PortKind::Udp => Protocol::Udp,
    }
}

/// Fails if another program has an address that the configuration listens on, unless its socket was passed to us. Must be called before
/// the user changes: the later user may not be allowed to see the program in /proc.
pub(super) fn refuse_taken(config: &Config, passed: &Passed) -> anyhow::Result<()> {
    let wanted = wanted(config).into_iter();
    for (place, kind, address) in wanted.filter(|(_, kind, address)| !passed.has(protocol(*kind), *address)) {
        let error = match kind {
            PortKind::Tcp => sockopt::try_address(address).err(),
            PortKind::Udp => udp::bind_first(address).err(),
        };
        // Other errors are reported when the address is really bound.
        if let Some(error) = error.filter(|error| error.kind() == ErrorKind::AddrInUse) {
            return Err(explain(error, kind, address).context(place));
        }
    }
    Ok(())
}

/// Returns the addresses to listen on, each with its place in the file.
pub(super) fn wanted(config: &Config) -> Vec<(String, PortKind, SocketAddr)> {
    let mut wanted: Vec<_> = config.listeners.iter().flat_map(of_listener).collect();
    if let Some(overlay) = &config.overlay {
        let listen = overlay.listen.iter();
        wanted.extend(listen.map(|address| ("[overlay] listen".to_owned(), PortKind::Tcp, *address)));
    }
    let metrics = config.admin.metrics.iter();
    wanted.extend(metrics.map(|address| ("[admin] metrics".to_owned(), PortKind::Tcp, *address)));
    let page = config.admin.page.iter();
    wanted.extend(page.map(|address| ("[admin] page".to_owned(), PortKind::Tcp, *address)));
    let outgoing = config.outgoing.iter();
    wanted.extend(outgoing.map(|outgoing| ("[outgoing] listen".to_owned(), PortKind::Tcp, outgoing.listen)));
    wanted.retain(|(_, _, address)| address.port() != 0);
    wanted
}

fn of_listener(listener: &Listener) -> Vec<(String, PortKind, SocketAddr)> {
    let place = format!("listener '{}'", listener.name);
    let kinds: &[PortKind] = match &listener.kind {
        ListenerKind::Engine(_) => &[],
        _ if listener.protocol == Protocol::Udp => &[PortKind::Udp],
        kind if has_datagrams(kind) => &[PortKind::Tcp, PortKind::Udp],
        _ => &[PortKind::Tcp],
    };
    let addresses = listener.addresses.iter();
    let mut wanted: Vec<_> =
        addresses.flat_map(|address| kinds.iter().map(|kind| (place.clone(), *kind, *address))).collect();
    let htcp = listener.kind.htcp_address();
    wanted.extend(htcp.map(|address| (format!("{place}, htcp"), PortKind::Udp, address)));
    wanted
}
