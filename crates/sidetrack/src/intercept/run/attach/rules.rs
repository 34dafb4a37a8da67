//! The table for programs in a network that has a way out, and what belongs to it.
//!
//! Unlike the table of `run --mode cgroup`, it leaves alone what was there before, and what answers: only segments that open a connection
//! are redirected, and datagrams that answer others go on.

use sidetrack_sys::cgroup::Leaf;
use sidetrack_sys::link;
use sidetrack_sys::netns::NetNs;
use sidetrack_sys::nft::{
    Chain, ChainKind, Family, Field, HoldQueue, Hook, RTN_LOCAL, Rule, Statement, TCP, Table, UDP, Value,
    Verdict, priority,
};
use sidetrack_sys::route;
use sidetrack_sys::sockdiag::SockDiag;
use sidetrack_sys::undo::Action;
use std::io;

use super::cgroup_datagrams::Datagrams;
use super::subject::Found;
use super::{Caught, RunError, cgroup, cgroup_datagrams, resolver};
use crate::dns;

/// Before the rules of container engines that translate questions about names.
const FIRST: i32 = priority::DSTNAT - 1;

/// Which ports of ours get what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    pub(super) connections: u16,
    pub(super) datagrams: u16,
    /// `None`: questions about names are left alone.
    pub(super) dns: Option<u16>,
}

/// What takes [`install`] back.
pub(super) fn undoing(network: &NetNs, name: &str) -> io::Result<Vec<Action>> {
    let (lo, routes) = network.run(|| {
        let lo = link::interface("lo").map_err(io::Error::other)?;
        Ok((lo, cgroup_datagrams::undoing().map_err(io::Error::other)?))
    })?;
    let lo_again = (!lo.running).then_some(Action::RestoreLoopback { mtu_bytes: lo.mtu, up: false });
    let table = Action::DeleteTable { family: Family::Inet, name: name.to_owned() };
    Ok(lo_again.into_iter().chain([table]).chain(routes).collect())
}

/// Opens the sockets, adds the routes and the table, in the network of the calling thread.
pub(super) fn install(
    found: &Found,
    leaf: Option<&Leaf>,
    name: &str,
    (hold, dns): (bool, bool),
) -> Result<Caught, RunError> {
    let host = |what| move |error: io::Error| RunError::host(what, error);
    // In some networks `lo` is still down.
    route::link_up("lo").map_err(|error| RunError::host("bring lo up", error))?;
    let listeners = cgroup::listeners().map_err(host("listen on 127.0.0.1 and ::1"))?;
    let received = Datagrams::open().map_err(host("open sockets for datagrams"))?;
    // Without queues in the kernel, nothing is held.
    let hold = hold.then(|| cgroup::open_hold().ok()).flatten();
    let dns =
        if dns { resolver().map_err(host("open sockets for questions about names"))? } else { Vec::new() };
    let port_of = |socket: &std::net::UdpSocket| socket.local_addr().map(|address| address.port());
    let ports = Ports {
        connections: cgroup::port(&listeners).map_err(host("read the listener's port"))?,
        datagrams: received.port().map_err(host("read a socket's port"))?,
        dns: dns.first().map(port_of).transpose().map_err(host("read a socket's port"))?,
    };
    cgroup_datagrams::add_routes().map_err(|error| RunError::host("route datagrams", error))?;
    let queue = hold.as_ref().and_then(|hold| hold.queues.numbers().first().copied());
    let table = table(name, leaf, found.is_ours, ports, queue);
    let owned =
        cgroup::own(&table).map_err(|error| RunError::host("put the nftables rules in force", error))?;
    Ok(Caught {
        listeners,
        datagrams: received.sockets,
        answers: received.answers,
        dns,
        hold,
        owners: SockDiag::open().ok(),
        table: Some(owned),
    })
}

/// The rules. `group`: whose traffic; `None`: all programs of the network. `is_ours`: it is our own network, whose loopback
/// addresses we reach as well as the programs; in another one they lead to other servers, and are left alone.
pub(super) fn table(
    name: &str,
    group: Option<&Leaf>,
    is_ours: bool,
    ports: Ports,
    queue: Option<u16>,
) -> Table {
    let theirs = match group {
        Some(leaf) => Statement::is(Field::SocketCgroup { level: leaf.level() }, Value::Cgroup(leaf.id())),
        // What the kernel itself sends has no user: resets, ICMP, neighbour discovery.
        None => Statement::is_not(Field::SocketUser, Value::User(u32::MAX)),
    };
    let tcp = || Statement::is(Field::L4Proto, TCP);
    let udp = || Statement::is(Field::L4Proto, UDP);
    let accept = || Statement::Verdict(Verdict::Accept);
    let outward = || Statement::is_not(Field::DestinationType, Value::AddressType(RTN_LOCAL));
    let reached = if is_ours { vec![theirs.clone()] } else { vec![theirs.clone(), outward()] };
    let answer = || {
        Rule::new([
            udp(),
            theirs.clone(),
            Statement::is(Field::CtDirection, Value::CtIsAnswer(true)),
            accept(),
        ])
    };
    let question = || [udp(), theirs.clone(), Statement::is(Field::UdpDestination, Value::Port(dns::PORT))];
    let mut connections = Chain::base("connections", ChainKind::Nat, Hook::Output, FIRST);
    if let Some(port) = ports.dns {
        connections.rules.push(Rule::new(question().into_iter().chain([Statement::Redirect { port }])));
    }
    let opening = [tcp(), Statement::opens_connection()].into_iter().chain(reached.clone());
    connections.rules.push(Rule::new(opening.chain([Statement::Redirect { port: ports.connections }])));
    let [mut out, back] = cgroup_datagrams::chains(&theirs, ports.datagrams);
    out.rules.insert(0, answer());
    if ports.dns.is_some() {
        out.rules.insert(0, Rule::new(question().into_iter().chain([accept()])));
    }
    let cut = Rule::new([
        tcp(),
        Statement::opens_connection(),
        theirs.clone(),
        outward(),
        Statement::Verdict(Verdict::Drop),
    ]);
    let drop = Rule::new([theirs.clone(), outward(), Statement::Verdict(Verdict::Drop)]);
    let rest = Chain::base("rest", ChainKind::Filter, Hook::Output, priority::FILTER)
        .with(cgroup_datagrams::pass())
        .with(cut)
        // Connections that were there before, and those of its servers.
        .with(Rule::new([tcp(), accept()]))
        .with(answer())
        .with(drop);
    let mut table = Table::new(Family::Inet, name);
    let queue = queue.map(|number| HoldQueue { number, bypass: true });
    table.chains.extend(queue.map(|queue| queue.output_chain(reached)));
    table.with_chain(out).with_chain(back).with_chain(connections).with_chain(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rules_leave_alone_what_was_there_and_what_answers() {
        let ports = Ports { connections: 1001, datagrams: 1002, dns: Some(1003) };
        let text = table("sidetrack-attach-1-net", None, false, ports, None).to_string();
        let place = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part} is missing in {text}"));
        assert!(place("ct direction reply accept") < place("meta mark set"), "{text}");
        assert!(place("redirect to :1003") < place("redirect to :1001"), "{text}");
        assert!(place("tcp flags") < place("redirect to :1001"), "{text}");
        let kept =
            table("sidetrack-attach-1-net", None, false, Ports { dns: None, ..ports }, None).to_string();
        assert!(!kept.contains("dport 53"), "{kept}");
    }
}
