//! The kernel path: connections whose verdict needs no bytes, no function and no proxy never reach user space. The kernel
//! forwards them, by DNAT if their destination changes; their record comes from conntrack's DESTROY event. So do datagrams of
//! UDP: conntrack's entry for a client and its destination stands for the connection.

use std::net::SocketAddr;

use super::except::{canonical, destination_fields, destination_kinds, destination_port};
use super::selector::{MarkBits, Origin, Selector, Versions, add};
use crate::nft::{
    DataKind, Element, ElementData, Field, LastState, MapData, RTN_LOCAL, Rule, Set, Span, Statement, Test,
    TimeoutPolicy, UDP, Value, Verdict, ct_event,
};
use sidetrack_core::flow::Protocol;

/// Connections, or datagrams, the kernel carries by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelPath {
    /// TCP connections, or datagrams of UDP.
    pub protocol: Protocol,
    /// What their connection mark becomes: it tells, in conntrack events, which rule they belong to.
    pub mark: MarkBits,
    /// Which, and where to.
    pub route: KernelRoute,
}

/// Where the kernel carries connections to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelRoute {
    /// To where they go anyway.
    Direct {
        /// Which connections of this host's own processes.
        local: Vec<Selector>,
        /// Which connections that come from other hosts.
        forwarded: Vec<Selector>,
        /// Whether the server sees an address of this host instead of the client's.
        masquerade: bool,
    },
    /// Connections to the first address go to the second. An unspecified first address (`0.0.0.0`, `::`) means every
    /// address of this host. Pairs for which [`KernelPath::check`] says no are left out.
    Dnat {
        /// Listening address and target.
        pairs: Vec<(SocketAddr, SocketAddr)>,
        /// Whether the server sees an address of this host instead of the client's; needed wherever its answers would not
        /// come back through this host.
        masquerade: bool,
    },
}

/// Why the kernel cannot carry connections from one address to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoKernelPath {
    /// The kernel does not translate between IP versions.
    #[error("the listener and its server are of different IP versions")]
    Versions,
    /// A connection to 127.0.0.1 or ::1 cannot leave this host, and one from outside cannot be sent there.
    #[error("only one of the listener and its server is a loopback address")]
    Loopback,
    /// The server has no address or port.
    #[error("the server has no address or no port")]
    Unspecified,
}

impl KernelPath {
    /// Whether the kernel can carry connections to `listener` on to `server`.
    ///
    /// # Errors
    /// Says why not; user space can carry them nevertheless.
    pub fn check(listener: SocketAddr, server: SocketAddr) -> Result<(), NoKernelPath> {
        let (from, to) = (listener.ip().to_canonical(), server.ip().to_canonical());
        if from.is_ipv6() != to.is_ipv6() {
            return Err(NoKernelPath::Versions);
        }
        if to.is_unspecified() || server.port() == 0 {
            return Err(NoKernelPath::Unspecified);
        }
        if from.is_loopback() != to.is_loopback() {
            return Err(NoKernelPath::Loopback);
        }
        Ok(())
    }

    /// The listening addresses of this protocol whose connections the kernel takes.
    pub(super) fn listeners(&self, protocol: Protocol) -> Vec<SocketAddr> {
        match &self.route {
            KernelRoute::Direct { .. } => vec![],
            KernelRoute::Dnat { .. } if self.protocol != protocol => vec![],
            KernelRoute::Dnat { pairs, .. } => {
                let usable = pairs.iter().filter(|(from, to)| Self::check(*from, *to).is_ok());
                usable.map(|(from, _)| canonical(*from)).collect()
            }
        }
    }

    /// The rules for nat chains: they mark the connection and end it, steered or left alone.
    pub(super) fn nat_rules(
        &self,
        name: &str,
        origin: Origin,
        timeout: Option<&str>,
        sets: &mut Vec<Set>,
    ) -> Vec<Rule> {
        let mut marking = vec![
            Statement::SetCtMark { value: self.mark.value, mask: self.mark.mask },
            Statement::SetCtEvents(ct_event::DESTROY),
        ];
        marking.extend(timeout.map(|name| Statement::SetCtTimeout(name.into())));
        let with = |(matches, end): (Vec<Statement>, Statement)| {
            Rule::new(matches.into_iter().chain(marking.iter().cloned()).chain([end]))
        };
        self.ends(name, origin, sets).into_iter().map(with).collect()
    }

    /// The rules that keep these connections from tproxy and from being held, for a chain that runs before nat.
    pub(super) fn pass_rules(&self, name: &str, origin: Origin, sets: &mut Vec<Set>) -> Vec<Rule> {
        let pass = |(matches, _): (Vec<Statement>, Statement)| {
            Rule::new(matches.into_iter().chain([Statement::Verdict(Verdict::Accept)]))
        };
        self.ends(name, origin, sets).into_iter().map(pass).collect()
    }

    /// The rule for the chain at postrouting, if sources are to be rewritten.
    pub(super) fn masquerade_rule(&self) -> Option<Rule> {
        let (KernelRoute::Dnat { masquerade, .. } | KernelRoute::Direct { masquerade, .. }) = &self.route;
        if !masquerade {
            return None;
        }
        let ours = Statement::mark(Field::CtMark, self.mark.value, self.mark.mask);
        Some(Rule::new([ours, Statement::Masquerade]))
    }

    /// For each rule its matches and its last statement.
    fn ends(&self, name: &str, origin: Origin, sets: &mut Vec<Set>) -> Vec<(Vec<Statement>, Statement)> {
        match &self.route {
            KernelRoute::Direct { local, forwarded, .. } => {
                let (selectors, word) = match origin {
                    Origin::Local => (local, "local"),
                    Origin::Forwarded => (forwarded, "forwarded"),
                };
                let begins = match self.protocol {
                    Protocol::Tcp => vec![Statement::opens_connection()],
                    // Datagrams of an association that has begun in user space stay there: its connection has a mark.
                    Protocol::Udp => {
                        let unmarked = Statement::mark(Field::CtMark, 0, self.mark.mask);
                        vec![Statement::is(Field::L4Proto, UDP), unmarked]
                    }
                };
                let end = |matches: Vec<Statement>| {
                    let matches = begins.iter().cloned().chain(matches).collect();
                    (matches, Statement::Verdict(Verdict::Accept))
                };
                let matches = |(place, selector): (usize, &Selector)| {
                    let (name, way) = (format!("{name}_{word}{place}"), (origin, Versions::BOTH));
                    selector.matches_of(self.protocol, &name, way, sets)
                };
                (1..).zip(selectors).flat_map(matches).map(end).collect()
            }
            KernelRoute::Dnat { pairs, .. } => {
                [false, true].into_iter().flat_map(|v6| dnat(self.protocol, name, pairs, v6, sets)).collect()
            }
        }
    }
}

/// The names of the time-outs: those of TCP, and those of UDP.
pub(super) const ENDED: &str = "ended";
pub(super) const DATAGRAMS: &str = "datagrams";

/// Time-outs of connections that have ended. A FIN or an acknowledgement that was lost is sent again within a second or two
/// and starts the time anew, so that these are long enough; the kernel's own (30, 120 and 10 s) only keep the record waiting.
/// Half-closed connections keep the kernel's: there is a side that may still speak.
pub(super) fn ended() -> TimeoutPolicy {
    let seconds = vec![(LastState::LastAck, 10), (LastState::TimeWait, 3), (LastState::Close, 2)];
    TimeoutPolicy { name: ENDED.into(), protocol: Protocol::Tcp, seconds }
}

/// The time after which conntrack forgets a client and a destination without datagrams.
pub(super) fn idle(idle_s: u32) -> TimeoutPolicy {
    let seconds = vec![(LastState::Unreplied, idle_s), (LastState::Replied, idle_s)];
    TimeoutPolicy { name: DATAGRAMS.into(), protocol: Protocol::Udp, seconds }
}

/// The matches and the DNAT statements of one IP version: one for exact listening addresses, one for unspecified ones.
fn dnat(
    protocol: Protocol,
    name: &str,
    pairs: &[(SocketAddr, SocketAddr)],
    v6: bool,
    sets: &mut Vec<Set>,
) -> Vec<(Vec<Statement>, Statement)> {
    let usable = pairs.iter().filter(|(from, to)| KernelPath::check(*from, *to).is_ok());
    let of_version = usable.filter(|(from, _)| from.ip().to_canonical().is_ipv6() == v6);
    let (wild, exact): (Vec<_>, Vec<_>) =
        of_version.copied().partition(|(from, _)| from.ip().is_unspecified());
    let version = if v6 { 6 } else { 4 };
    let begins = match protocol {
        Protocol::Tcp => Statement::opens_connection(),
        Protocol::Udp => Statement::is(Field::L4Proto, UDP),
    };
    let mut ends = Vec::new();
    if !exact.is_empty() {
        let key = |from: SocketAddr| {
            vec![Span::one(from.ip().to_canonical().into()), Span::one(Value::Port(from.port()))]
        };
        let names = (format!("{name}_listeners{version}"), format!("{name}_servers{version}"));
        add_set_and_map(sets, &names, &destination_kinds(v6), &exact, v6, key);
        let fields = destination_fields(protocol, v6);
        let matches = vec![begins.clone(), Statement::Match(fields.clone(), Test::In(names.0))];
        ends.push((matches, Statement::DnatMap { fields, map: names.1, v6 }));
    }
    if !wild.is_empty() {
        let key = |from: SocketAddr| vec![Span::one(Value::Port(from.port()))];
        let names = (format!("{name}_ports{version}"), format!("{name}_port_servers{version}"));
        add_set_and_map(sets, &names, &[DataKind::Port], &wild, v6, key);
        let nfproto = if v6 { crate::nft::NFPROTO_IPV6 } else { crate::nft::NFPROTO_IPV4 };
        let matches = vec![
            Statement::is(Field::NfProto, Value::NfProto(nfproto)),
            begins,
            Statement::is(Field::DestinationType, Value::AddressType(RTN_LOCAL)),
            Statement::is_in(destination_port(protocol), names.0),
        ];
        let fields = vec![destination_port(protocol)];
        ends.push((matches, Statement::DnatMap { fields, map: names.1, v6 }));
    }
    ends
}

/// A set of the keys and a map from them to the servers. Two, because marking must come before DNAT, which ends the rule, and
/// must not happen to connections that are not in the map.
fn add_set_and_map(
    sets: &mut Vec<Set>,
    names: &(String, String),
    kinds: &[DataKind],
    pairs: &[(SocketAddr, SocketAddr)],
    v6: bool,
    key: impl Fn(SocketAddr) -> Vec<Span>,
) {
    let mut rows: Vec<_> = pairs.iter().map(|(from, to)| (key(*from), *to)).collect();
    rows.sort_by(|a, b| a.0.cmp(&b.0));
    rows.dedup_by(|later, first| later.0 == first.0);
    let keys = rows.iter().map(|(key, _)| Element::set(key.clone())).collect();
    let to = |(key, to): (Vec<Span>, SocketAddr)| {
        let values = vec![to.ip().to_canonical().into(), Value::Port(to.port())];
        Element { key, data: Some(ElementData::Values(values)) }
    };
    let elements = rows.into_iter().map(to).collect();
    let (set, map) = names.clone();
    let data = Some(MapData::Values(destination_kinds(v6)));
    add(sets, Set { name: set, key: kinds.to_vec(), interval: false, data: None, elements: keys });
    add(sets, Set { name: map, key: kinds.to_vec(), interval: false, data, elements });
}

/// An empty map of IPv4 address and port to the same, for trying whether the kernel has such maps.
pub(in crate::nft) fn empty_server_map(name: &str) -> Set {
    let (key, data) = (destination_kinds(false), Some(MapData::Values(destination_kinds(false))));
    Set { name: name.into(), key, interval: false, data, elements: vec![] }
}
