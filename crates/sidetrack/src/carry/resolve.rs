//! Resolves names with the system's own resolver, so that `/etc/hosts` and `nsswitch.conf` apply.

use super::Failure;
use sidetrack_core::flow::{Destination, EndReason, Host};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Most addresses of one name that are tried.
const ADDRESSES_MAX: usize = 16;

/// Returns the addresses of a destination in the order to try them: the address families alternate (RFC 8305
/// Sec. 4), beginning with the family of the resolver's first address.
///
/// # Errors
/// Fails with `dns` if the name has no address.
pub async fn resolve(destination: &Destination) -> Result<Vec<SocketAddr>, Failure> {
    if let Some(address) = destination.socket_addr() {
        return Ok(vec![address]);
    }
    let name = match &destination.host {
        Host::Ip(_) => return Ok(Vec::new()),
        // No DNS server is asked: it could answer with an address of another host (RFC 6761 Sec. 6.3).
        Host::Name(name) if name.is_localhost() => {
            let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            return Ok(loopback.map(|ip| SocketAddr::new(ip, destination.port)).into());
        }
        Host::Name(name) => name.as_str(),
    };
    let found = tokio::net::lookup_host((name, destination.port)).await;
    let addresses: Vec<_> = match found {
        Ok(addresses) => addresses.map(sidetrack_sys::sockopt::canonical).collect(),
        Err(error) => return Err(Failure::new(EndReason::Dns, format!("cannot resolve '{name}': {error}"))),
    };
    if addresses.is_empty() {
        return Err(Failure::new(EndReason::Dns, format!("'{name}' has no address")));
    }
    Ok(interleaved(addresses))
}

fn interleaved(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first_is_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| address.is_ipv6() == first_is_v6);
    let mut second = second.into_iter();
    let mut order = Vec::with_capacity(ADDRESSES_MAX);
    for address in first {
        order.push(address);
        order.extend(second.next());
    }
    order.extend(second);
    order.truncate(ADDRESSES_MAX);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns() {
        let parse = |list: &[&str]| list.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let order = interleaved(parse(&["[::1]:1", "[::2]:1", "[::3]:1", "1.1.1.1:1", "1.1.1.2:1"]));
        assert_eq!(order, parse(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "1.1.1.2:1", "[::3]:1"]));
        let order = interleaved(parse(&["1.1.1.1:1", "[::1]:1", "[::2]:1"]));
        assert_eq!(order, parse(&["1.1.1.1:1", "[::1]:1", "[::2]:1"]));
    }
}
