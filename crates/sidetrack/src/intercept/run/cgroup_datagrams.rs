//! Datagrams of a command in the host's network: routing that leads them to sockets of ours on loopback.
//!
//! The table marks them at output, and the kernel routes what has the mark by a table in which all addresses are local. They
//! come back on `lo`, where tproxy gives them to our sockets.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;

use sidetrack_sys::netlink;
use sidetrack_sys::nft::{
    Chain, ChainKind, Field, Hook, NFPROTO_IPV4, NFPROTO_IPV6, RTN_BROADCAST, RTN_LOCAL, RTN_MULTICAST, Rule,
    Statement, UDP, Value, Verdict, priority,
};
use sidetrack_sys::route::{self, IpVersion, MarkRule, RUN_MARKS, RUN_PID_BITS};
use sidetrack_sys::udp;
use sidetrack_sys::udp::answers::AnswerSockets;
use sidetrack_sys::undo::Action;

/// The place of the routing rule: before those of `sidetrack up`.
const PRIORITY: u32 = 4999;

/// Attempts to find a port that is free on both 127.0.0.1 and ::1.
const ATTEMPTS: u8 = 100;

/// The sockets for a command's datagrams.
pub(super) struct Datagrams {
    /// One for each IP version, on one port.
    pub(super) sockets: Vec<UdpSocket>,
    /// Send the answers.
    pub(super) answers: Arc<AnswerSockets>,
}

impl Datagrams {
    pub(super) fn open() -> io::Result<Self> {
        let answers = Arc::new(AnswerSockets::open(None)?);
        for _ in 0..ATTEMPTS {
            let first = udp::bind_transparent(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), false)?;
            let second = SocketAddr::from((Ipv6Addr::LOCALHOST, first.local_addr()?.port()));
            match udp::bind_transparent(second, false) {
                Ok(second) => return Ok(Self { sockets: vec![first, second], answers }),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                // A host without IPv6.
                Err(_) => return Ok(Self { sockets: vec![first], answers }),
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    pub(super) fn port(&self) -> io::Result<u16> {
        Ok(self.sockets.first().ok_or(io::ErrorKind::NotFound)?.local_addr()?.port())
    }
}

/// The mark of this run's datagrams.
fn mark() -> u32 {
    RUN_MARKS | std::process::id() & RUN_PID_BITS
}

/// The routing rules, one for each IP version that this host has.
fn rules() -> Vec<MarkRule> {
    let versions = IpVersion::BOTH.into_iter().filter(|it| *it == IpVersion::V4 || route::has_ipv6("lo"));
    let rule =
        |version| MarkRule { version, mark: mark(), mask: u32::MAX, table: mark(), priority: PRIORITY };
    versions.map(rule).collect()
}

/// Adds the routing rules and their tables.
pub(super) fn add_routes() -> Result<(), netlink::Error> {
    rules().iter().try_for_each(|rule| {
        route::add_local_default_in("lo", rule.version, rule.table)?;
        route::add_mark_rule(rule)
    })
}

/// What takes [`add_routes`] back.
pub(super) fn undoing() -> Result<Vec<Action>, netlink::Error> {
    let interface = route::interface_index("lo")?;
    let of_rule = |rule: MarkRule| {
        let (version, table) = (rule.version, rule.table);
        [Action::RemoveLocalDefault { version, interface, table }, Action::RemoveMarkRule(rule)]
    };
    Ok(rules().into_iter().flat_map(of_rule).collect())
}

/// The chains that lead the datagrams of a command to this port. `of_command` matches its packets.
pub(super) fn chains(of_command: &Statement, port: u16) -> [Chain; 2] {
    let is_mark = || Statement::mark(Field::Mark, mark(), u32::MAX);
    let is_udp = || Statement::is(Field::L4Proto, UDP);
    let elsewhere = [RTN_LOCAL, RTN_BROADCAST, RTN_MULTICAST]
        .map(|kind| Statement::is_not(Field::DestinationType, Value::AddressType(kind)));
    let marked = [is_udp(), of_command.clone()].into_iter().chain(elsewhere);
    let marked = Rule::new(marked.chain([Statement::SetMark { value: mark(), mask: u32::MAX }]));
    let out = Chain::base("datagrams", ChainKind::Route, Hook::Output, priority::MANGLE).with(marked);
    let mut back = Chain::base("arrived", ChainKind::Filter, Hook::Prerouting, priority::MANGLE);
    for (v6, version) in [(false, NFPROTO_IPV4), (true, NFPROTO_IPV6)] {
        let version = Statement::is(Field::NfProto, Value::NfProto(version));
        back.rules.push(Rule::new([version, is_udp(), is_mark(), Statement::TProxy { v6, port }]));
    }
    [out, back]
}

/// Lets marked datagrams pass: they do not leave the host.
pub(super) fn pass() -> Rule {
    let mark = Statement::mark(Field::Mark, mark(), u32::MAX);
    Rule::new([Statement::is(Field::L4Proto, UDP), mark, Statement::Verdict(Verdict::Accept)])
}
