//! `run`, `redirect` and `tproxy`: the kernel knows the original destination of the connection.

use super::{Catches, Listening, RunCatch};
use crate::carry::Failure;
use crate::live::Clock;
use crate::reactor::TcpStream;
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::names::NameTable;
use sidetrack_sys::sockopt;
use sidetrack_sys::sync::lock;
use std::net::{IpAddr, SocketAddr};

/// Returns the application's destination. If the application asked our resolver for a name, returns the name.
///
/// # Errors
/// Fails with `loop` if the connection was not redirected: a client connected to our listener itself.
pub fn original_destination(
    stream: &TcpStream,
    listening: &Listening,
    clock: &Clock,
) -> Result<Destination, Failure> {
    let found = match listening.catches {
        Catches::Tproxy => sockopt::local_address(stream),
        _ => sockopt::original_dst(stream),
    };
    let address =
        found.map_err(|error| Failure::new(EndReason::Internal, format!("original destination: {error}")))?;
    captured(sockopt::canonical(address), listening, clock)
}

/// The destination of a connection to this address that the kernel captured for the listener.
///
/// # Errors
/// Fails with `loop` if it is the listener's own address.
pub fn captured(address: SocketAddr, listening: &Listening, clock: &Clock) -> Result<Destination, Failure> {
    if is_own(address, listening) {
        let detail =
            format!("a connection to {address}, our own listener, was not redirected to it by a rule");
        return Err(Failure::new(EndReason::Loop, detail));
    }
    named(address, listening, clock)
}

/// Whether this destination is the listener itself: no rule has redirected what goes there.
pub fn is_own(address: SocketAddr, listening: &Listening) -> bool {
    let alone = matches!(&listening.catches, Catches::Run(run) if run.alone);
    !alone && is_listener(address, listening.address)
}

/// Whether this address is our listener's. Another host may have a server on the same port.
fn is_listener(address: SocketAddr, own: SocketAddr) -> bool {
    let same = || own.ip().to_canonical() == address.ip();
    address.port() == own.port()
        && (same() || own.ip().is_unspecified() && sockopt::is_of_this_host(address.ip()))
}

/// Returns the destination that a client has asked for. If it is an address that represents a name, returns the name.
///
/// # Errors
/// Fails with `dns` if the name is forgotten.
pub fn named_destination(
    destination: Destination,
    listening: &Listening,
    clock: &Clock,
) -> Result<Destination, Failure> {
    match destination.socket_addr().filter(|_| listening.names.is_some()) {
        Some(address) if matches!(address.ip().to_canonical(), IpAddr::V4(ip) if NameTable::contains(ip)) => {
            named(address, listening, clock)
        }
        _ => Ok(destination),
    }
}

/// Returns the destination at this address. If the application asked our resolver for a name, returns the name.
///
/// # Errors
/// Fails with `dns` if the name is forgotten.
pub fn named(address: SocketAddr, listening: &Listening, clock: &Clock) -> Result<Destination, Failure> {
    let names = match &listening.catches {
        Catches::Run(RunCatch { resolver, .. }) if address == *resolver => None,
        Catches::Run(RunCatch { names, .. }) => Some(names),
        _ => listening.names.as_ref(),
    };
    let (Some(names), IpAddr::V4(ip)) = (names, address.ip().to_canonical()) else {
        return Ok(address.into());
    };
    if !NameTable::contains(ip) {
        return Ok(address.into());
    }
    let mut names = lock(names);
    match names.name_used(ip, clock.now()) {
        Some(name) => Ok(Destination { host: Host::Name(name), port: address.port(), zone: 0 }),
        // The address was made for a name that is forgotten by now, and leads nowhere without it.
        None => {
            Err(Failure::new(EndReason::Dns, format!("{ip} stood for a name that was not used for long")))
        }
    }
}
