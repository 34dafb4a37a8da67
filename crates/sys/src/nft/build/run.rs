//! The table of `sidetrack run`: inside the command's own network namespace.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::hold::{self, HoldQueue};
use super::selector::Origin;
use crate::nft::{
    Chain, ChainKind, Family, Field, Hook, NFPROTO_IPV4, NFPROTO_IPV6, RTN_LOCAL, Rule, Statement, TCP,
    Table, Test, UDP, Value, Verdict, priority,
};

/// `NF_IP_PRI_NAT_DST`.
const DSTNAT: i32 = crate::nft::priority::DSTNAT;

/// The mark of our answers to datagrams in this namespace. The command has no right to set one.
pub const ANSWERS_MARK: u32 = 1;

/// Port of DNS.
const DNS: u16 = 53;

/// Sends every TCP connection that starts in this namespace, IPv4 and IPv6, to `port` of the namespace itself.
///
/// It needs a route for every address ([`crate::route::add_local_default`]). UDP is left alone on purpose: REDIRECT in OUTPUT
/// rewrites the destination of a query to 127.0.0.1, and the answer's source then does not fit. See
/// [`run_namespace_with_datagrams`].
///
/// Connections from one port to two servers lead to one address here. As long as conntrack knows the first, it gives the second another
/// port, which the program's socket does not have. The tables below do not change addresses.
pub fn run_namespace(port: u16) -> Table {
    run_namespace_held(port, None)
}

/// As [`run_namespace`]; with `hold`, the opening segment of each connection waits in that queue first.
pub fn run_namespace_held(port: u16, hold: Option<HoldQueue>) -> Table {
    let everything = Rule::new([Statement::is(Field::L4Proto, TCP), Statement::Redirect { port }]);
    let output = Chain::base("output", ChainKind::Nat, Hook::Output, DSTNAT).with(everything);
    let mut table = Table::new(Family::Inet, "sidetrack");
    table.chains.extend(hold.map(|hold| hold.output_chain([])));
    table.with_chain(output)
}

/// As [`run_namespace`], but a connection to a loopback address reaches the socket of this namespace that listens there,
/// if there is one. All others go to `port`: a listener with IP_TRANSPARENT.
///
/// Only at prerouting, where the packet comes out of `lo`, does `socket` look for a listener; at output it would find
/// the client's own socket. So tproxy hands packets over there, with their addresses as they are.
///
/// Needs `socket` and `tproxy` of nftables (Linux 5.12).
pub fn run_namespace_with_servers(port: u16) -> Table {
    run_namespace_with_servers_held(port, None)
}

/// As [`run_namespace_with_servers`]; with `hold`, the opening segment of each connection waits in that queue first.
pub fn run_namespace_with_servers_held(port: u16, hold: Option<HoldQueue>) -> Table {
    let mut servers = Chain::base("servers", ChainKind::Filter, Hook::Prerouting, priority::MANGLE);
    // A segment to a loopback address is held where it comes out of `lo`, if no socket of the namespace is for it.
    let mut held_output = hold::chain(Origin::Local);
    let mut held = hold::chain(Origin::Forwarded);
    for v6 in [false, true] {
        held_output.rules.push(rule_for_loopback(TCP, v6, &[Statement::Verdict(Verdict::Accept)]));
        // The socket is bound to one address, or to all: it is there in both cases.
        for wildcard in [false, true] {
            let bound = Statement::is(Field::SocketWildcard, Value::Boolean(wildcard));
            let theirs = rule_for_loopback(TCP, v6, &[bound, Statement::Verdict(Verdict::Accept)]);
            held.rules.push(theirs.clone());
            servers.rules.push(theirs);
        }
        held.rules.extend(hold.map(|hold| rule_for_loopback(TCP, v6, &hold.end())));
        servers.rules.push(Rule::new([
            version(v6),
            Statement::is(Field::L4Proto, TCP),
            Statement::TProxy { v6, port },
        ]));
    }
    let mut table = Table::new(Family::Inet, "sidetrack");
    if let Some(hold) = hold {
        held_output.rules.extend(hold.output_chain([]).rules);
        table = table.with_chain(held_output).with_chain(held);
    }
    table.with_chain(servers)
}

/// As [`run_namespace_with_servers`], and datagrams go to a UDP socket with IP_TRANSPARENT at `port` of each IP version. It
/// answers by [`crate::udp::answers`] with [`ANSWERS_MARK`].
///
/// Left alone are datagrams to port 53, where the resolver listens, to broadcast and multicast addresses, and to sockets of
/// this namespace at a loopback address. All addresses are local, so that tproxy needs no routing rule.
///
/// Needs `fib` of nftables, too.
pub fn run_namespace_with_datagrams(port: u16) -> Table {
    run_namespace_with_datagrams_held(port, None)
}

/// As [`run_namespace_with_datagrams`]; with `hold`, the opening segment of each connection waits in that queue first.
pub fn run_namespace_with_datagrams_held(port: u16, hold: Option<HoldQueue>) -> Table {
    let mut chain = Chain::base("datagrams", ChainKind::Filter, Hook::Prerouting, priority::MANGLE);
    let accept = || Statement::Verdict(Verdict::Accept);
    let udp = || Statement::is(Field::L4Proto, UDP);
    let is_answer = Statement::is(Field::Mark, Value::Mark(ANSWERS_MARK));
    chain.rules.push(Rule::new([udp(), is_answer, accept()]));
    chain.rules.push(Rule::new([udp(), Statement::is(Field::UdpDestination, Value::Port(DNS)), accept()]));
    for v6 in [false, true] {
        for wildcard in [false, true] {
            let bound = Statement::is(Field::SocketWildcard, Value::Boolean(wildcard));
            chain.rules.push(rule_for_loopback(UDP, v6, &[bound, accept()]));
        }
    }
    for v6 in [false, true] {
        let one_host = Statement::is(Field::DestinationType, Value::AddressType(RTN_LOCAL));
        chain.rules.push(Rule::new([version(v6), udp(), one_host, Statement::TProxy { v6, port }]));
    }
    run_namespace_with_servers_held(port, hold).with_chain(chain)
}

/// The same table, but connections of sockets with [`ANSWERS_MARK`] are left alone: ours, to servers of the command.
pub fn leaving_ours(mut table: Table) -> Table {
    for chain in &mut table.chains {
        let ours = [
            Statement::is(Field::L4Proto, TCP),
            Statement::is(Field::Mark, Value::Mark(ANSWERS_MARK)),
            Statement::Verdict(Verdict::Accept),
        ];
        chain.rules.insert(0, Rule::new(ours));
    }
    table
}

/// Matches packets of this IP version.
fn version(v6: bool) -> Statement {
    Statement::is(Field::NfProto, Value::NfProto(if v6 { NFPROTO_IPV6 } else { NFPROTO_IPV4 }))
}

/// A rule for packets of this protocol to 127.0.0.0/8, or to ::1.
fn rule_for_loopback(protocol: Value, v6: bool, then: &[Statement]) -> Rule {
    let address = if v6 {
        Statement::is(Field::Ip6Destination, Value::Ipv6(Ipv6Addr::LOCALHOST))
    } else {
        let (mask, value) = (Ipv4Addr::new(255, 0, 0, 0), Ipv4Addr::new(127, 0, 0, 0));
        let test = Test::Masked { mask: Value::Ipv4(mask), value: Value::Ipv4(value) };
        Statement::Match(vec![Field::Ip4Destination], test)
    };
    let of_loopback = [version(v6), Statement::is(Field::L4Proto, protocol), address];
    Rule::new(of_loopback.into_iter().chain(then.iter().cloned()))
}
