//! What is never steered: our own connections, connections to our own listeners, and what a person excepts.

use std::net::{IpAddr, SocketAddr};

use sidetrack_core::net::IpSet;

use super::selector::{CgroupMatch, MarkBits, add, address_set, user_match, with_cgroups};
use crate::nft::{
    Chain, DataKind, Element, Field, RTN_LOCAL, Rule, Set, Span, Statement, Test, UDP, Value, Verdict,
};
use sidetrack_core::flow::Protocol;

/// Connections that our table leaves alone, whatever else it says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Except {
    /// The SO_MARK of our own sockets: without it our connections would come back to us for ever.
    pub mark: Option<MarkBits>,
    /// Addresses we listen on; an unspecified one (`0.0.0.0`, `::`) means every address of this host.
    pub listeners: Vec<SocketAddr>,
    /// The same for the datagrams of this host's own processes.
    pub datagram_listeners: Vec<SocketAddr>,
    /// Client addresses.
    pub sources: IpSet,
    /// Destinations.
    pub destinations: IpSet,
    /// Users who own the client's socket.
    pub users: Vec<u32>,
    /// Cgroups of the client's process.
    pub cgroups: Vec<CgroupMatch>,
}

/// The chain's name.
pub(super) const CHAIN: &str = "except";

impl Except {
    /// The chain that ends, with accept, what is excepted; the sets it names are added to `sets`.
    pub(super) fn chain(&self, sets: &mut Vec<Set>) -> Chain {
        let mut matches = Vec::new();
        if let Some(mark) = self.mark {
            matches.push(vec![Statement::mark(Field::Mark, mark.value, mark.mask)]);
        }
        let (tcp, udp) = (&self.listeners, &self.datagram_listeners);
        matches.extend(listener_matches(Protocol::Tcp, tcp, sets));
        matches.extend(listener_matches(Protocol::Udp, udp, sets));
        let fields = [
            (Field::Ip4Source, &self.sources, "sources", false),
            (Field::Ip6Source, &self.sources, "sources", true),
            (Field::Ip4Destination, &self.destinations, "destinations", false),
            (Field::Ip6Destination, &self.destinations, "destinations", true),
        ];
        for (field, addresses, word, v6) in fields {
            if let Some(set) = address_set(&format!("{CHAIN}_{word}"), addresses, v6) {
                matches.push(vec![Statement::is_in(field, &*set.name)]);
                add(sets, set);
            }
        }
        matches.extend(user_match(&self.users, &format!("{CHAIN}_users"), sets).map(|one| vec![one]));
        if !self.cgroups.is_empty() {
            matches.extend(with_cgroups(&self.cgroups, &[]));
        }
        let accept = |mut statements: Vec<Statement>| {
            statements.push(Statement::Verdict(Verdict::Accept));
            Rule::new(statements)
        };
        Chain { rules: matches.into_iter().map(accept).collect(), ..Chain::regular(CHAIN) }
    }
}

/// The matches on connections, or datagrams, to these addresses of ours.
fn listener_matches(
    protocol: Protocol,
    listeners: &[SocketAddr],
    sets: &mut Vec<Set>,
) -> Vec<Vec<Statement>> {
    let port = destination_port(protocol);
    let word = if protocol == Protocol::Udp { "_udp" } else { "" };
    // A match on a port of TCP asks for TCP by itself.
    let udp = (protocol == Protocol::Udp).then(|| Statement::is(Field::L4Proto, UDP));
    let (wild, exact): (Vec<SocketAddr>, Vec<SocketAddr>) = listeners
        .iter()
        .map(|address| canonical(*address))
        .partition(|address| address.ip().is_unspecified());
    let mut matches = Vec::new();
    for v6 in [false, true] {
        let own: Vec<_> = exact.iter().copied().filter(|address| address.is_ipv6() == v6).collect();
        if let Some(set) = listener_set(&format!("own{word}_listeners"), &own, v6) {
            let fields = vec![if v6 { Field::Ip6Destination } else { Field::Ip4Destination }, port];
            let is_in = Statement::Match(fields, Test::In(set.name.clone()));
            matches.push(udp.iter().cloned().chain([is_in]).collect());
            add(sets, set);
        }
    }
    if !wild.is_empty() {
        let ports = wild.iter().map(|address| Span::one(Value::Port(address.port())));
        let set = Set::of_spans(format!("own{word}_ports"), DataKind::Port, ports);
        let local = Statement::is(Field::DestinationType, Value::AddressType(RTN_LOCAL));
        let is_in = Statement::is_in(port, &*set.name);
        matches.push([local].into_iter().chain(udp).chain([is_in]).collect());
        add(sets, set);
    }
    matches
}

/// An IPv4-mapped address as the IPv4 one.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Destination address and port, as fields. A rule for UDP has to ask for UDP before.
pub(in crate::nft) fn destination_fields(protocol: Protocol, v6: bool) -> Vec<Field> {
    vec![if v6 { Field::Ip6Destination } else { Field::Ip4Destination }, destination_port(protocol)]
}

/// The destination port, as a field.
pub(super) const fn destination_port(protocol: Protocol) -> Field {
    match protocol {
        Protocol::Tcp => Field::TcpDestination,
        Protocol::Udp => Field::UdpDestination,
    }
}

/// The kinds of an address and a port.
pub(super) fn destination_kinds(v6: bool) -> Vec<DataKind> {
    vec![if v6 { DataKind::Ipv6 } else { DataKind::Ipv4 }, DataKind::Port]
}

fn listener_set(name: &str, own: &[SocketAddr], v6: bool) -> Option<Set> {
    let mut own: Vec<(IpAddr, u16)> = own.iter().map(|address| (address.ip(), address.port())).collect();
    own.sort_unstable();
    own.dedup();
    let element =
        |(ip, port): (IpAddr, u16)| Element::set(vec![Span::one(ip.into()), Span::one(Value::Port(port))]);
    let elements: Vec<_> = own.into_iter().map(element).collect();
    let name = format!("{name}{}", if v6 { 6 } else { 4 });
    let set = Set { name, key: destination_kinds(v6), interval: false, data: None, elements };
    (!set.elements.is_empty()).then_some(set)
}
