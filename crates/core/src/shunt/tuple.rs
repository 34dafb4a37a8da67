//! The addresses of a connection in 40 bytes. A shunt keeps them twice for each of 100,000 flows.

use crate::flow::Protocol as Transport;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Set in [`Tuple::kinds`] if the client's address is IPv6.
const CLIENT_V6: u8 = 1;
/// Set in [`Tuple::kinds`] if the server's address is IPv6.
const SERVER_V6: u8 = 2;

/// Identifies a connection at one moment: the addresses of its first packet. Conntrack knows neither the scope nor the
/// flow label of an IPv6 address, so neither is kept.
///
/// The order is that of the address families, then of the client, then of the server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    kinds: u8,
    client: [u8; 16],
    client_port: u16,
    server: [u8; 16],
    server_port: u16,
    /// The protocol.
    pub transport: Transport,
    /// The conntrack zone.
    pub zone: u16,
}

impl Tuple {
    /// Returns the tuple of a connection from the sender of its first packet to that packet's destination.
    pub const fn new(client: SocketAddr, server: SocketAddr, transport: Transport, zone: u16) -> Self {
        let client_kind = if client.is_ipv6() { CLIENT_V6 } else { 0 };
        let server_kind = if server.is_ipv6() { SERVER_V6 } else { 0 };
        Self {
            kinds: client_kind | server_kind,
            client: octets(client.ip()),
            client_port: client.port(),
            server: octets(server.ip()),
            server_port: server.port(),
            transport,
            zone,
        }
    }

    /// Returns the sender of the first packet.
    pub const fn client(&self) -> SocketAddr {
        SocketAddr::new(ip(self.client, self.kinds & CLIENT_V6 != 0), self.client_port)
    }

    /// Returns the destination of the first packet.
    pub const fn server(&self) -> SocketAddr {
        SocketAddr::new(ip(self.server, self.kinds & SERVER_V6 != 0), self.server_port)
    }
}

/// Returns an address as 16 bytes: an IPv4 address in the first four.
const fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

const fn ip(octets: [u8; 16], is_v6: bool) -> IpAddr {
    if is_v6 {
        return IpAddr::V6(Ipv6Addr::from_octets(octets));
    }
    let [a, b, c, d, ..] = octets;
    IpAddr::V4(Ipv4Addr::new(a, b, c, d))
}

impl fmt::Display for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} -> {}", self.transport.as_str(), self.client(), self.server())
    }
}

impl fmt::Debug for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} zone {}", self.zone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_went_in_and_keep_their_order() {
        let of = |client: &str, server: &str| {
            let (client, server) = (client.parse().unwrap(), server.parse().unwrap());
            let tuple = Tuple::new(client, server, Transport::Tcp, 7);
            assert_eq!((tuple.client(), tuple.server(), tuple.zone), (client, server, 7));
            tuple
        };
        let ordered = [
            of("192.0.2.1:9", "198.51.100.1:80"),
            of("192.0.2.1:10", "198.51.100.1:80"),
            of("192.0.2.2:1", "198.51.100.1:80"),
            of("192.0.2.2:1", "198.51.100.1:81"),
            of("[c000:201::]:9", "198.51.100.1:80"),
            of("[::]:9", "[2001:db8::1]:80"),
            of("[2001:db8::1]:9", "[2001:db8::2]:80"),
        ];
        assert!(ordered.is_sorted() && ordered.windows(2).all(|pair| pair[0] != pair[1]), "{ordered:?}");
        assert_eq!(format!("{:?}", ordered[0]), "tcp 192.0.2.1:9 -> 198.51.100.1:80 zone 7");
    }
}
