//! The limit: the smallest program that does the work, from [`crate::bare`].

use std::net::SocketAddr;
use std::process::Command;

use super::{RELAY_PORT, Running, Start, Table, Unavailable, relay, running};
use crate::bare::{BUFFER_BYTES, Role};
use crate::load::Via;
use crate::service::Service;
use crate::site::Site;
use crate::topology::Node;

const SOCKS_PORT: u16 = 1095;
const REDIRECT_PORT: u16 = 42095;

/// A port that leads to the origin.
pub fn reverse(site: &Site) -> Start<'_> {
    reverse_by(site, BUFFER_BYTES)
}

/// As [`relay`], with reads of this many bytes.
pub fn reverse_by(site: &Site, buffer_bytes: usize) -> Start<'_> {
    let listen = site.proxy_address(RELAY_PORT);
    let mut command = command(site, &site.proxy, Role::Reverse, listen, Some(site.origin()));
    command.args(["--buffer-bytes", &buffer_bytes.to_string()]);
    Ok(relay(site, serving(site, &site.proxy, Role::Reverse, listen, command)?))
}

/// Starts only the relay, at this address of the proxy's host.
///
/// # Errors
/// It does not listen.
pub fn between(site: &Site, listen: SocketAddr, to: SocketAddr) -> Result<Service, Unavailable> {
    start(site, &site.proxy, Role::Reverse, listen, Some(to))
}

/// A UDP port that leads to the origin.
pub fn datagrams(site: &Site) -> Start<'_> {
    let listen = site.proxy_address(RELAY_PORT);
    let command = command(site, &site.proxy, Role::Datagrams, listen, Some(site.origin()));
    let mut service = Service::start("bare-datagrams", command, site.directory.path())?;
    service.wait_bound(&site.proxy, RELAY_PORT)?;
    Ok(relay(site, service))
}

/// A SOCKS server, with a client that speaks `via`.
pub fn socks(site: &Site, via: Via) -> Start<'_> {
    let dial = site.proxy_address(SOCKS_PORT);
    let services = vec![start(site, &site.proxy, Role::Socks, dial, None)?];
    Ok(running(site, services, (dial, via)))
}

/// A redirector with this `role`, and the SOCKS server.
pub fn pair(site: &Site, role: Role) -> Start<'_> {
    let gateway = site.proxy_address(SOCKS_PORT);
    let server = start(site, &site.proxy, Role::Socks, gateway, None)?;
    let listen = SocketAddr::from(([127, 0, 0, 1], REDIRECT_PORT));
    let redirector = start(site, &site.client, role, listen, Some(gateway))?;
    let tables = vec![Table::redirect(site, REDIRECT_PORT)?];
    let services = vec![redirector, server];
    Ok(Running { _tables: tables, ..running(site, services, (site.origin(), Via::Plain)) })
}

fn start(
    site: &Site,
    node: &Node,
    role: Role,
    listen: SocketAddr,
    to: Option<SocketAddr>,
) -> Result<Service, Unavailable> {
    serving(site, node, role, listen, command(site, node, role, listen, to))
}

fn command(site: &Site, node: &Node, role: Role, listen: SocketAddr, to: Option<SocketAddr>) -> Command {
    let mut command = node.command_at(&site.launcher.to_string_lossy(), &site.proxy_placement());
    command.args(["bare", role.name(), &listen.to_string()]);
    if let Some(to) = to {
        command.args(["--to", &to.to_string()]);
    }
    command
}

fn serving(
    site: &Site,
    node: &Node,
    role: Role,
    listen: SocketAddr,
    command: Command,
) -> Result<Service, Unavailable> {
    let mut service = Service::start(&format!("bare-{}", role.name()), command, site.directory.path())?;
    service.wait_listening(node, listen.port())?;
    Ok(service)
}
