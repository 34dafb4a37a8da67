//! Finds the verdicts that the kernel can carry out alone. They must be decided by addresses and ports. They must not
//! need bytes, a process, a hop, or a change that only this program can make. The result is data for a packet filter.
//!
//! A denied flow is never left to the kernel: conntrack has no entry for a dropped packet, but every flow needs its
//! record. Datagrams of UDP are decided like connections.

use super::{Action, Carry, Condition, Dial, KernelPath, Match, Policy};
use crate::carrier::Carrier;
use crate::flow::{Destination, Intercept, Protocol};
use crate::names::NameTable;
use crate::net::{IpNet, IpSet, PortSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

/// The traffic of a listener, as the packet filter sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capture {
    /// The name of the listener.
    pub listener: Arc<str>,
    /// Connections of TCP, or datagrams of UDP.
    pub protocol: Protocol,
    /// Its traffic.
    pub traffic: Traffic,
}

/// The traffic that a listener catches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Connections to a port that represents one server.
    Reverse {
        /// The address of the listener. An unspecified address means every address of this host.
        address: SocketAddr,
        /// The server.
        server: SocketAddr,
    },
    /// Connections to any server, caught by redirect or tproxy. `None` in a field does not restrict.
    Anywhere {
        /// How they are caught.
        intercept: Intercept,
        /// Whether forwarded connections are caught, too.
        forwarded: bool,
        /// The sources that are caught.
        src: Option<IpSet>,
        /// The destinations that are caught.
        dst: Option<IpSet>,
        /// The destination ports that are caught.
        ports: Option<PortSet>,
    },
}

/// One line for the packet filter. The first line that matches a packet counts. A packet without a match goes to user
/// space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRule {
    /// The name of the policy's rule. `None` for its default.
    pub rule: Option<Arc<str>>,
    /// Its index in the policy, from 0.
    pub index: Option<usize>,
    /// The packets.
    pub matches: KernelMatch,
    /// The action.
    pub action: KernelAction,
    /// The source address is replaced by an address of this host, as if this program had dialled. Otherwise the
    /// server sees the client's address.
    pub masquerade: bool,
}

/// The packets of a line, within the traffic of the listener. `None` does not restrict.
///
/// For a reverse listener on an unspecified address, packets to loopback addresses do not match: the kernel cannot
/// send those to a server elsewhere (`route_localnet`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelMatch {
    /// Source addresses.
    pub from: Option<IpSet>,
    /// Destination addresses, before any translation.
    pub to: Option<IpSet>,
    /// Destination ports, before any translation.
    pub port: Option<PortSet>,
}

/// The action of the packet filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelAction {
    /// Hands the connection to the listener, as without a kernel path.
    UserSpace,
    /// Lets the connection go to its own destination.
    Accept,
    /// Replaces the destination.
    Dnat(SocketAddr),
}

impl KernelMatch {
    /// Whether a packet matches.
    pub fn contains(&self, from: IpAddr, to: SocketAddr) -> bool {
        self.from.as_ref().is_none_or(|set| set.contains(from))
            && self.to.as_ref().is_none_or(|set| set.contains(to.ip()))
            && self.port.as_ref().is_none_or(|set| set.contains(to.port()))
    }

    /// Returns the packets that match both. `None` if there are none.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let both = Parts::of(self).zip(&Parts::of(other), IpSet::intersection, PortSet::intersection);
        both.is_some().then(|| both.matches())
    }

    /// Returns the packets that do not match `other`, as matches that do not overlap.
    pub fn difference(&self, other: &Self) -> Vec<Self> {
        let (own, other) = (Parts::of(self), Parts::of(other));
        let common = own.zip(&other, IpSet::intersection, PortSet::intersection);
        let outside = own.zip(&other, IpSet::difference, PortSet::difference);
        // Outside in `from`; then inside in `from` but outside in `to`; then inside in both but outside in `port`.
        let parts = [
            Parts { from: outside.from, ..own.clone() },
            Parts { from: common.from.clone(), to: outside.to, ..own },
            Parts { from: common.from, to: common.to, port: outside.port },
        ];
        parts.into_iter().filter(Parts::is_some).map(|parts| parts.matches()).collect()
    }

    fn is_all(&self) -> bool {
        *self == Self::default()
    }

    fn overlaps(&self, other: &Self) -> bool {
        fn meet<T>(a: Option<&T>, b: Option<&T>, overlaps: impl Fn(&T, &T) -> bool) -> bool {
            a.zip(b).is_none_or(|(a, b)| overlaps(a, b))
        }
        meet(self.from.as_ref(), other.from.as_ref(), IpSet::overlaps)
            && meet(self.to.as_ref(), other.to.as_ref(), IpSet::overlaps)
            && meet(self.port.as_ref(), other.port.as_ref(), PortSet::overlaps)
    }
}

/// A match in which every set is explicit.
#[derive(Clone)]
struct Parts {
    from: IpSet,
    to: IpSet,
    port: PortSet,
}

impl Parts {
    fn of(matches: &KernelMatch) -> Self {
        Self {
            from: matches.from.clone().unwrap_or_else(IpSet::all),
            to: matches.to.clone().unwrap_or_else(IpSet::all),
            port: matches.port.clone().unwrap_or_else(PortSet::all),
        }
    }

    fn zip(
        &self,
        other: &Self,
        ips: impl Fn(&IpSet, &IpSet) -> IpSet,
        ports: impl Fn(&PortSet, &PortSet) -> PortSet,
    ) -> Self {
        Self {
            from: ips(&self.from, &other.from),
            to: ips(&self.to, &other.to),
            port: ports(&self.port, &other.port),
        }
    }

    /// Whether any packet matches.
    fn is_some(&self) -> bool {
        !self.from.is_empty() && !self.to.is_empty() && self.port.ranges().next().is_some()
    }

    fn matches(self) -> KernelMatch {
        let ips = |set: IpSet| (!set.covers(&IpSet::all())).then_some(set);
        let port = (!self.port.covers(&PortSet::all())).then_some(self.port);
        KernelMatch { from: ips(self.from), to: ips(self.to), port }
    }
}

/// The conditions of a rule as addresses and ports.
struct Terms {
    matches: KernelMatch,
    /// Addresses alone cannot decide whether it matches.
    undecided: bool,
}

impl Traffic {
    /// Returns the conditions of a rule for this traffic. `None` if the rule can never match it.
    fn terms(&self, of: &Capture, matcher: &Match) -> Option<Terms> {
        let mut terms = Terms { matches: KernelMatch::default(), undecided: false };
        for condition in matcher.conditions() {
            match condition {
                Condition::Listener(names) if !names.contains(&of.listener) => return None,
                Condition::Intercept(kinds) if !kinds.contains(&self.intercept()) => return None,
                Condition::Protocol(protocol) if *protocol != of.protocol => return None,
                Condition::Listener(_) | Condition::Intercept(_) | Condition::Protocol(_) => {}
                // Only SOCKS flows have users.
                Condition::SocksUser(_) => return None,
                Condition::Process(_)
                | Condition::Uid(_)
                | Condition::Host(_)
                | Condition::AskedName(_)
                | Condition::HostFile(_)
                | Condition::HostContains(_)
                | Condition::Url(_) => terms.undecided = true,
                Condition::From(set) => terms.restrict_from(set),
                Condition::To(set) => match self.server() {
                    Some(server) if !set.contains(server.ip()) => return None,
                    Some(_) => {}
                    None => terms.restrict_to(set),
                },
                Condition::Port(set) => match self.server() {
                    Some(server) if !set.contains(server.port()) => return None,
                    Some(_) => {}
                    None => terms.restrict_port(set),
                },
            }
        }
        self.catches(&terms.matches).then_some(terms)
    }

    const fn intercept(&self) -> Intercept {
        match self {
            Self::Reverse { .. } => Intercept::Reverse,
            Self::Anywhere { intercept, .. } => *intercept,
        }
    }

    /// Returns the destination of all flows, if there is only one.
    const fn server(&self) -> Option<SocketAddr> {
        match self {
            Self::Reverse { server, .. } => Some(*server),
            Self::Anywhere { .. } => None,
        }
    }

    fn catches(&self, matches: &KernelMatch) -> bool {
        match self {
            Self::Reverse { .. } => true,
            Self::Anywhere { src, dst, ports, .. } => {
                KernelMatch { from: src.clone(), to: dst.clone(), port: ports.clone() }.overlaps(matches)
            }
        }
    }

    /// Returns what the kernel can do for a flow that is carried in this way. `None` if it needs user space.
    fn action(&self, protocol: Protocol, carry: &Carry) -> Option<KernelAction> {
        if !carry.leaves_bytes_alone() || protocol == Protocol::Udp && self.needs_mapping(carry) {
            return None;
        }
        let to = match &carry.to {
            Some(to) => Some(to.unzoned_addr()?),
            None => None,
        };
        match self {
            Self::Reverse { address, server } => {
                let server = to.unwrap_or(*server);
                let reachable = address.is_ipv4() == server.is_ipv4()
                    && address.ip().is_loopback() == server.ip().is_loopback();
                reachable.then_some(KernelAction::Dnat(server))
            }
            Self::Anywhere { .. } => match to {
                None => Some(KernelAction::Accept),
                Some(to) => (!to.ip().is_loopback()).then_some(KernelAction::Dnat(to)),
            },
        }
    }

    /// Whether a client of UDP must keep one outside port for all its destinations (RFC 4787 REQ-1). The kernel gives it
    /// another one where two clients with the same port ask the same server.
    const fn needs_mapping(&self, carry: &Carry) -> bool {
        matches!(self, Self::Anywhere { forwarded: true, .. }) && !carry.keep_client_address
    }

    fn masquerade(&self, carry: &Carry) -> bool {
        let by_us = match self {
            // From loopback to loopback, the client's address is already one of this host.
            Self::Reverse { address, .. } => !address.ip().is_loopback(),
            Self::Anywhere { forwarded, .. } => *forwarded,
        };
        by_us && !carry.keep_client_address
    }
}

impl Carry {
    /// Whether the bytes go directly to a destination, unchanged, without a time-out or an option of the rule.
    pub fn leaves_bytes_alone(&self) -> bool {
        let Self {
            carrier,
            to: _,
            dial,
            resolve: _,
            keep_client_address: _,
            proxy_protocol,
            idle_timeout_ms,
            lifetime_ms,
            // The client itself connects then, with its own time-out.
            connect_timeout_ms,
            initial_data_wait_ms: _,
            // The far side itself answers the client then.
            connect: _,
            tfo,
            mptcp,
            // It is about requests, which the kernel does not see.
            http3: _,
            warm,
            kernel,
            chain,
            agreement,
            shunt: _,
            metadata: _,
        } = self;
        *carrier == Carrier::Direct
            && *dial == Dial::Original
            && proxy_protocol.is_none()
            && idle_timeout_ms.is_none()
            && lifetime_ms.is_none()
            && connect_timeout_ms.is_none()
            && !tfo
            && !mptcp
            && warm.is_none()
            && chain.is_none()
            && agreement.is_none()
            && *kernel == KernelPath::Auto
    }
}

impl Terms {
    // A second set of the same kind is not intersected: the line covers more than the rule, but stays in user space.
    fn restrict_from(&mut self, set: &IpSet) {
        self.undecided |= self.matches.from.is_some();
        self.matches.from.get_or_insert_with(|| set.clone());
    }

    fn restrict_to(&mut self, set: &IpSet) {
        self.undecided |= self.matches.to.is_some();
        self.matches.to.get_or_insert_with(|| set.clone());
    }

    fn restrict_port(&mut self, set: &PortSet) {
        self.undecided |= self.matches.port.is_some();
        self.matches.port.get_or_insert_with(|| set.clone());
    }
}

impl Policy {
    /// Returns the lines of a packet filter for one listener. A rule that needs user space keeps its packets from
    /// later lines. Empty if nothing can be left to the kernel.
    pub fn kernel_path(&self, capture: &Capture) -> Vec<KernelRule> {
        let default = (None, Match::default(), &self.default);
        let rules = self.rules.iter().enumerate();
        let rules =
            rules.map(|(index, rule)| (Some((index, &rule.name)), rule.matcher.clone(), &rule.action));
        let mut lines = Vec::new();
        if self.has_names && capture.traffic.server().is_none() {
            let to = Some(IpSet::from_iter([NameTable::range()]));
            let matches = KernelMatch { to, ..KernelMatch::default() };
            let (action, masquerade) = (KernelAction::UserSpace, false);
            lines.push(KernelRule { rule: None, index: None, matches, action, masquerade });
        }
        for (rule, matcher, action) in rules.chain([default]) {
            let Some(terms) = capture.traffic.terms(capture, &matcher) else { continue };
            let all = terms.matches.is_all();
            let line = |matches: KernelMatch, action: KernelAction, masquerade: bool| KernelRule {
                rule: rule.map(|(_, name)| name.clone()),
                index: rule.map(|(index, _)| index),
                matches,
                action,
                masquerade,
            };
            let able = match action {
                Action::Carry(carry) if !terms.undecided => {
                    let able = capture.traffic.action(capture.protocol, carry);
                    able.map(|able| (able, capture.traffic.masquerade(carry)))
                }
                _ => None,
            };
            match able {
                Some((KernelAction::Dnat(to), masquerade)) if capture.traffic.server().is_none() => {
                    // Packets of the other address family cannot be sent there, so they stay in user space.
                    let family = of_family(&terms.matches, to.is_ipv6());
                    lines.push(line(family, KernelAction::Dnat(to), masquerade));
                    lines.push(line(terms.matches, KernelAction::UserSpace, false));
                }
                Some((able, masquerade)) => lines.push(line(terms.matches, able, masquerade)),
                None => lines.push(line(terms.matches, KernelAction::UserSpace, false)),
            }
            if all {
                break;
            }
        }
        without_idle_lines(lines)
    }
}

/// Most lines that one line is split into. If more are needed, its packets stay in user space.
const CUTS_MAX: usize = 64;

/// Returns the same lines without those of user space, split so that none takes a packet of user space. This is for
/// packet filters that have no rule to exempt packets.
pub fn without_user_space(lines: Vec<KernelRule>) -> Vec<KernelRule> {
    let mut ours: Vec<KernelMatch> = Vec::new();
    let mut out = Vec::new();
    for line in lines {
        if line.action == KernelAction::UserSpace {
            ours.push(line.matches);
            continue;
        }
        let mut pieces = vec![line.matches.clone()];
        for kept in &ours {
            pieces = pieces.iter().flat_map(|piece| piece.difference(kept)).collect();
        }
        if pieces.len() > CUTS_MAX {
            // Later lines must not take its packets either.
            ours.push(line.matches);
        } else {
            out.extend(pieces.into_iter().map(|matches| KernelRule { matches, ..line.clone() }));
        }
    }
    out
}

/// Returns the part of a match that belongs to one address family.
fn of_family(matches: &KernelMatch, v6: bool) -> KernelMatch {
    let zero: IpAddr = if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let any = IpSet::from_iter([IpNet::new(zero, 0)]);
    let to = matches
        .to
        .as_ref()
        .map_or(any, |set| set.nets().iter().copied().filter(|net| net.is_v6() == v6).collect());
    KernelMatch { to: Some(to), ..matches.clone() }
}

/// Removes lines that change nothing: packets go to user space anyway, unless a later line takes them.
fn without_idle_lines(lines: Vec<KernelRule>) -> Vec<KernelRule> {
    let mut kept: Vec<KernelRule> = Vec::new();
    for line in lines.into_iter().rev() {
        let user_space = line.action == KernelAction::UserSpace;
        let matters = !user_space
            || kept.iter().any(|later| {
                later.action != KernelAction::UserSpace && later.matches.overlaps(&line.matches)
            });
        let empty = line.matches.to.as_ref().is_some_and(IpSet::is_empty);
        if matters && !empty {
            kept.push(line);
        }
    }
    kept.reverse();
    kept
}

impl Capture {
    /// Returns the traffic of a reverse listener for one server, if the server's address is known.
    pub fn reverse(
        listener: Arc<str>,
        protocol: Protocol,
        address: SocketAddr,
        server: &Destination,
    ) -> Option<Self> {
        let traffic = Traffic::Reverse { address, server: server.unzoned_addr()? };
        Some(Self { listener, protocol, traffic })
    }
}
