//! Which connections are meant, and the matches that say so.

use sidetrack_core::flow::Protocol;
use sidetrack_core::net::{IpSet, PortSet};

use super::except::destination_port;
use crate::nft::{
    DataKind, Field, InterfaceName, NFPROTO_IPV4, NFPROTO_IPV6, RTN_BROADCAST, RTN_LOCAL, RTN_MULTICAST, Set,
    Span, Statement, Value,
};

/// Some bits of a packet or connection mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkBits {
    /// The bits, none outside `mask`.
    pub value: u32,
    /// The bits that are ours; the others belong to other programs and stay as they are.
    pub mask: u32,
}

/// A cgroup of the second generation, with everything below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMatch {
    /// The inode number of its folder.
    pub id: u64,
    /// Depth below the root of the cgroup2 tree; the root's children have level 1.
    pub level: u32,
}

/// Which TCP connections, or datagrams of UDP, are meant. An empty list or set means: any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// Client addresses.
    pub sources: IpSet,
    /// Original destinations.
    pub destinations: IpSet,
    /// Original destination ports.
    pub ports: PortSet,
    /// Users who own the client's socket; local connections only.
    pub users: Vec<u32>,
    /// Cgroups of the client's process; local connections only.
    pub cgroups: Vec<CgroupMatch>,
    /// Interfaces the connection comes in by; forwarded connections only.
    pub interfaces: Vec<InterfaceName>,
    /// Whether connections to addresses of this host (loopback too) are meant as well.
    pub to_this_host: bool,
}

/// Where a connection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A process of this host: hook output.
    Local,
    /// Another host: hook prerouting.
    Forwarded,
}

/// IP versions asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Versions {
    pub(super) v4: bool,
    pub(super) v6: bool,
}

impl Versions {
    pub(super) const BOTH: Self = Self { v4: true, v6: true };

    /// The single versions asked for: whether each is IPv6.
    pub(super) fn single(self) -> impl Iterator<Item = bool> {
        [(self.v4, false), (self.v6, true)].into_iter().filter_map(|(asked, v6)| asked.then_some(v6))
    }
}

impl Selector {
    /// The matches of each rule needed for TCP, without a test for the opening segment. The sets they name, which begin with
    /// `name`, are added to `sets` unless they are there.
    pub(super) fn matches(
        &self,
        name: &str,
        origin: Origin,
        versions: Versions,
        sets: &mut Vec<Set>,
    ) -> Vec<Vec<Statement>> {
        self.matches_of(Protocol::Tcp, name, (origin, versions), sets)
    }

    /// As [`Self::matches`], for a protocol. A rule for UDP has to ask for UDP before. Datagrams to broadcast and multicast
    /// addresses are never meant: they are for the neighbours, and DHCP needs them.
    pub(super) fn matches_of(
        &self,
        protocol: Protocol,
        name: &str,
        (origin, versions): (Origin, Versions),
        sets: &mut Vec<Set>,
    ) -> Vec<Vec<Statement>> {
        let mut rules = Vec::new();
        for addresses in self.addresses(name, versions, sets) {
            let mut common = addresses;
            common.extend(self.port_match(protocol, name, sets));
            common.extend(match origin {
                Origin::Local => user_match(&self.users, &format!("{name}_users"), sets),
                Origin::Forwarded => interface_match(&self.interfaces, name, sets),
            });
            if !self.to_this_host {
                common.push(Statement::is_not(Field::DestinationType, Value::AddressType(RTN_LOCAL)));
            }
            if protocol == Protocol::Udp {
                common.extend(
                    [RTN_BROADCAST, RTN_MULTICAST]
                        .map(|kind| Statement::is_not(Field::DestinationType, Value::AddressType(kind))),
                );
            }
            rules.extend(match origin {
                Origin::Local => with_cgroups(&self.cgroups, &common),
                Origin::Forwarded => vec![common],
            });
        }
        rules
    }

    /// The address matches: one list if addresses do not matter, else one for each version that has some.
    fn addresses(&self, name: &str, versions: Versions, sets: &mut Vec<Set>) -> Vec<Vec<Statement>> {
        if self.sources.is_empty() && self.destinations.is_empty() {
            return version_only(versions);
        }
        versions.single().filter_map(|v6| self.addresses_of(name, v6, sets)).collect()
    }

    fn addresses_of(&self, name: &str, v6: bool, sets: &mut Vec<Set>) -> Option<Vec<Statement>> {
        let mut matches = Vec::new();
        let (source, destination) = if v6 {
            (Field::Ip6Source, Field::Ip6Destination)
        } else {
            (Field::Ip4Source, Field::Ip4Destination)
        };
        for (field, addresses, word) in
            [(source, &self.sources, "sources"), (destination, &self.destinations, "destinations")]
        {
            if !addresses.is_empty() {
                let set = address_set(&format!("{name}_{word}"), addresses, v6)?;
                matches.push(Statement::is_in(field, &*set.name));
                add(sets, set);
            }
        }
        Some(matches)
    }

    fn port_match(&self, protocol: Protocol, name: &str, sets: &mut Vec<Set>) -> Option<Statement> {
        let field = destination_port(protocol);
        let spans: Vec<_> = self.ports.ranges().map(|(first, last)| Span::ports(first, last)).collect();
        match spans.as_slice() {
            [] => None,
            [one] if one.first == one.last => Some(Statement::is(field, one.first)),
            _ => {
                let set = Set::of_spans(format!("{name}_ports"), DataKind::Port, spans);
                let matching = Statement::is_in(field, &*set.name);
                add(sets, set);
                Some(matching)
            }
        }
    }
}

/// A match on packets that come in by these interfaces; none if there are none.
pub(super) fn interface_match(
    interfaces: &[InterfaceName],
    name: &str,
    sets: &mut Vec<Set>,
) -> Option<Statement> {
    let values = interfaces.iter().copied().map(Value::Interface).collect();
    one_of(Field::InputInterface, values, format!("{name}_interfaces"), sets)
}

/// Nothing to match for both versions; the version itself for one.
fn version_only(versions: Versions) -> Vec<Vec<Statement>> {
    match (versions.v4, versions.v6) {
        (true, true) => vec![vec![]],
        (true, false) => vec![vec![Statement::is(Field::NfProto, Value::NfProto(NFPROTO_IPV4))]],
        (false, true) => vec![vec![Statement::is(Field::NfProto, Value::NfProto(NFPROTO_IPV6))]],
        (false, false) => vec![],
    }
}

/// The addresses of one version as a set whose name ends with that version; `None` if there are none.
pub(super) fn address_set(name: &str, addresses: &IpSet, v6: bool) -> Option<Set> {
    let spans: Vec<Span> =
        addresses.nets().iter().filter(|net| net.is_v6() == v6).map(|net| Span::from(*net)).collect();
    let (kind, version) = if v6 { (DataKind::Ipv6, 6) } else { (DataKind::Ipv4, 4) };
    (!spans.is_empty()).then(|| Set::of_spans(format!("{name}{version}"), kind, spans))
}

/// A match on these users; none if there are none.
pub(super) fn user_match(users: &[u32], name: &str, sets: &mut Vec<Set>) -> Option<Statement> {
    one_of(Field::SocketUser, users.iter().copied().map(Value::User).collect(), name.to_owned(), sets)
}

/// A comparison for one value, a set for several.
fn one_of(field: Field, mut values: Vec<Value>, name: String, sets: &mut Vec<Set>) -> Option<Statement> {
    values.sort_unstable();
    values.dedup();
    match values.as_slice() {
        [] => None,
        [one] => Some(Statement::is(field, *one)),
        _ => {
            let set = Set::of(name, field.kind(), values);
            let matching = Statement::is_in(field, &*set.name);
            add(sets, set);
            Some(matching)
        }
    }
}

/// The same matches once for each cgroup: their levels may differ, so that no set can hold them.
pub(super) fn with_cgroups(cgroups: &[CgroupMatch], common: &[Statement]) -> Vec<Vec<Statement>> {
    if cgroups.is_empty() {
        return vec![common.to_vec()];
    }
    let with = |cgroup: &CgroupMatch| {
        let matching = Statement::is(Field::SocketCgroup { level: cgroup.level }, Value::Cgroup(cgroup.id));
        common.iter().cloned().chain([matching]).collect()
    };
    cgroups.iter().map(with).collect()
}

/// Adds a set unless one of that name is there (two hooks use the same selector).
pub(super) fn add(sets: &mut Vec<Set>, set: Set) {
    if sets.iter().all(|other| other.name != set.name) {
        sets.push(set);
    }
}
