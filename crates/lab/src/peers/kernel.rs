//! The limits: no relay, the kernel's own address translation, and the smallest XDP program.

use std::net::SocketAddr;

use super::{RELAY_PORT, Running, Start, Table, Unavailable, relay};
use crate::load::Via;
use crate::packets::{By, Least, Side};
use crate::site::{Forwarding, Site};
use crate::topology::{Link, Node};

/// The client dials the origin over the direct link.
pub(super) fn direct(site: &Site) -> Start<'_> {
    let origin = site.origin_direct();
    Ok(Running {
        services: Vec::new(),
        _tables: Vec::new(),
        _forwarding: None,
        inside: Vec::new(),
        dial: origin,
        via: Via::Plain,
        destination: origin,
    })
}

/// One prerouting rule for connections in the proxy's node, nothing else.
pub(super) fn dnat(site: &Site) -> Start<'_> {
    dnat_of(site, "tcp")
}

/// The same for datagrams.
pub(super) fn dnat_datagrams(site: &Site) -> Start<'_> {
    dnat_of(site, "udp")
}

fn dnat_of<'s>(site: &'s Site, protocol: &str) -> Start<'s> {
    let dial = site.proxy_address(RELAY_PORT);
    let body = format!(
        "chain prerouting {{ type nat hook prerouting priority -100; \
         ip daddr {} {protocol} dport {RELAY_PORT} dnat to {}; }}",
        dial.ip(),
        site.origin()
    );
    let table = Table::load(&site.proxy, "ip lab", &body)?;
    Ok(Running {
        services: Vec::new(),
        _tables: vec![table],
        _forwarding: Some(Forwarding::in_proxy(site)?),
        inside: Vec::new(),
        dial,
        via: Via::Plain,
        destination: site.origin(),
    })
}

/// An XDP program changes addresses and ports, and knows no connections.
pub(super) fn least(site: &Site) -> Start<'_> {
    let (SocketAddr::V4(front), SocketAddr::V4(server)) = (site.proxy_address(RELAY_PORT), site.origin())
    else {
        return Err(Unavailable::Absent("IPv4".into()));
    };
    let side = |node: &Node, link: &Link| -> Result<Side, Unavailable> {
        // It cannot complete checksums that a sender leaves to its card.
        node.run("ethtool", &["-K", &link.interface, "tx", "off"])?;
        let neighbour = Least::address(node, &link.interface)?;
        Ok(Side { interface: link.interface.clone(), neighbour })
    };
    let clients = side(&site.client, &site.client_proxy)?;
    let servers = side(&site.server, &site.proxy_server)?;
    let least = Least { by: By::Kernel, clients, servers, front, server };
    Ok(relay(site, least.start(&site.proxy, &site.proxy_placement(), site.directory.path())?))
}
