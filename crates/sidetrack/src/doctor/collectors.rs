//! Whether the collectors of `[export]` can be reached from here.

use super::{Check, Facts};
use crate::config::Config;
use sidetrack_core::flow::{Destination, Protocol};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// How long connecting to one address may take.
const CONNECT: Duration = Duration::from_secs(2);
/// Most addresses of a name that are tried.
const ADDRESSES_MAX: usize = 4;

/// A collector, and what was found of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorUse {
    /// The name of its table.
    pub table: &'static str,
    /// Where it is.
    pub collector: String,
    /// The transport protocol. Over UDP only the route is known.
    pub transport: Protocol,
    /// The address that can be reached, or why there is none.
    pub reached: Result<SocketAddr, String>,
}

/// Tries the collectors of a configuration. No report is sent.
pub(super) fn look(config: &Config) -> Vec<CollectorUse> {
    let ipfix = config.export.ipfix.as_ref().map(|one| ("export.ipfix", &one.collector, one.transport));
    let otlp = config.export.otlp.as_ref().map(|one| ("export.otlp", &one.collector, Protocol::Tcp));
    let look = |(table, collector, transport): (_, &Destination, _)| CollectorUse {
        table,
        collector: collector.to_string(),
        transport,
        reached: reach(collector, transport).map_err(|error| error.to_string()),
    };
    ipfix.into_iter().chain(otlp).map(look).collect()
}

fn reach(collector: &Destination, transport: Protocol) -> io::Result<SocketAddr> {
    let addresses: Vec<_> = match collector.socket_addr() {
        Some(address) => vec![address],
        None => (collector.host.to_string(), collector.port).to_socket_addrs()?.collect(),
    };
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses.into_iter().take(ADDRESSES_MAX) {
        let tried = match transport {
            Protocol::Tcp => TcpStream::connect_timeout(&address, CONNECT).map(|_| ()),
            Protocol::Udp => sidetrack_sys::udp::route_mtu(address).map(|_| ()),
        };
        match tried {
            Ok(()) => return Ok(address),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

pub(super) fn examine(facts: &Facts) -> Vec<Check> {
    let check = |one: &CollectorUse| {
        let CollectorUse { collector, transport, .. } = one;
        let check = match (&one.reached, transport) {
            (Ok(address), Protocol::Tcp) => {
                Check::ok("collector", format!("{collector} accepts connections ({address})"))
            }
            (Ok(address), Protocol::Udp) => Check::ok(
                "collector",
                format!("there is a route to {collector} ({address}); UDP shows no more"),
            ),
            (Err(why), _) => Check::fail("collector", format!("{collector} cannot be reached: {why}"))
                .fix("start the collector, or correct its address and what filters packets on the way"),
        };
        check.needed_for(format!("[{}]: reports of flows", one.table))
    };
    facts.collectors.iter().map(check).collect()
}
