//! From a configuration to the kernel's task: which connections it sends to which listener, and which it
//! forwards without us. No I/O here: `plan` prints the result, the keeper installs it.

use crate::config::{Config, Listener, ListenerKind, OnCrash, ReverseTarget};
use sidetrack_core::flow::{Destination, Intercept, Protocol};
use sidetrack_core::net::{IpNet, IpSet};
use sidetrack_core::policy::{
    Action, Capture, KernelAction, KernelMatch, KernelRule, Traffic, without_user_space,
};
use sidetrack_sys::nft::{
    CgroupMatch, Except, HoldQueue, InterfaceName, KernelPath, KernelRoute, Lifetime, MarkBits, Redirect,
    Selector, Steering, TProxy,
};
use sidetrack_sys::route::{IpVersion, MarkRule};
use sidetrack_sys::{cgroup, sysctl};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, OnceLock};

/// Name of our table, and prefix of all our tables.
pub const TABLE: &str = "sidetrack";

/// `SO_MARK` of the sockets that we dial with. Packets with this mark are never steered (invariant 6).
pub const OWN_MARK: MarkBits = MarkBits { value: 0x5d00_0000, mask: 0xff00_0000 };

/// The mark that sends packets for other hosts to our tproxy listeners.
pub const TPROXY_MARK: MarkBits = MarkBits { value: 0x5e00_0000, mask: 0xff00_0000 };

/// The routing table in which every address is local, and the priority of the rule that uses it.
const TPROXY_TABLE: u32 = 0x5e;
const TPROXY_PRIORITY: u32 = 5000;

/// Connection marks of the kernel path: the upper half has this bit and the number of the path.
const PATH_BIT: u32 = 0x8000;
const PATH_SHIFT: u32 = 16;
const PATH_MASK: u32 = 0xffff_0000;

/// The listener and rule of a connection on the kernel path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// The listener that would have captured it.
    pub listener: Arc<str>,
    /// The transport protocol of its flows.
    pub protocol: Protocol,
    /// How it would have been captured.
    pub intercept: Intercept,
    /// The rule. `None`: the default.
    pub rule: Option<Arc<str>>,
    /// The rule's index in the policy.
    pub index: Option<usize>,
}

/// The kernel's task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steer {
    /// The rules.
    pub steering: Steering,
    /// The number of the first path. Numbers are not reused soon, because connections outlive reloads.
    pub first_path: usize,
    /// The paths that the kernel forwards without us. A path's number is in the connection mark.
    pub paths: Vec<Path>,
    /// The policy routing for tproxy.
    pub mark_rules: Vec<MarkRule>,
    /// How long the table lives.
    pub lifetime: Lifetime,
    /// Both ends of the operator's SSH session. Connections to them are never steered.
    pub session: Vec<SocketAddr>,
}

/// Why a configuration cannot be steered on this host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("listener '{listener}': {what}")]
pub struct SteerError {
    /// The listener.
    pub listener: Arc<str>,
    /// What is wrong and what to do.
    pub what: String,
}

/// Finds a cgroup of the configuration.
pub type FindCgroup<'a> = dyn Fn(&str) -> std::io::Result<CgroupMatch> + 'a;

/// Properties of this host that steering needs.
pub struct Host<'a> {
    /// Finds cgroups.
    pub find_cgroup: &'a FindCgroup<'a>,
    /// Whether it forwards packets.
    pub forwards: Forwards,
    /// The SSH session from which the program was started: its client and its server.
    pub session: Option<[SocketAddr; 2]>,
}

/// The session of [`Host::here`].
static SESSION: OnceLock<[SocketAddr; 2]> = OnceLock::new();

/// Lets [`Host::here`] know the SSH session from which the program was started.
pub fn set_session(session: Option<[SocketAddr; 2]>) {
    if let Some(session) = session {
        // It does not change.
        let _ = SESSION.set(session);
    }
}

/// Which packets a host forwards. Without forwarding, a connection cannot be sent on to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forwards {
    /// IPv4.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
}

impl Forwards {
    /// Returns the part of a line that this host forwards. `None` if there is none.
    fn part_of(self, line: KernelRule) -> Option<KernelRule> {
        let nets = [(self.v4, Ipv4Addr::UNSPECIFIED.into()), (self.v6, Ipv6Addr::UNSPECIFIED.into())];
        let nets = nets.into_iter().filter(|(forwards, _)| *forwards).map(|(_, zero)| IpNet::new(zero, 0));
        let matches =
            line.matches.intersection(&KernelMatch { to: Some(nets.collect()), ..KernelMatch::default() })?;
        Some(KernelRule { matches, ..line })
    }
}

impl Host<'_> {
    /// Properties of this host and network namespace.
    pub fn here() -> Host<'static> {
        let on = |name: &str| sysctl::read(name).is_ok_and(|value| value != "0");
        let (v4, v6) = (on("net/ipv4/ip_forward"), on("net/ipv6/conf/all/forwarding"));
        Self::that(Forwards { v4, v6 })
    }

    /// Properties of this host, if it is already known what it forwards.
    pub fn that(forwards: Forwards) -> Host<'static> {
        Host { find_cgroup: &cgroup::find_match, forwards, session: SESSION.get().copied() }
    }

    /// Whether packets to this server can be sent on through NAT.
    const fn leads_to(&self, server: SocketAddr) -> bool {
        match server {
            SocketAddr::V4(server) => self.forwards.v4 || server.ip().is_loopback(),
            SocketAddr::V6(server) => self.forwards.v6 || server.ip().is_loopback(),
        }
    }
}

impl Path {
    /// A mark that matches all paths' connection marks.
    pub const ANY: MarkBits = MarkBits { value: PATH_BIT << PATH_SHIFT, mask: PATH_BIT << PATH_SHIFT };

    /// Returns the number of the path in a connection mark, if it is one of ours.
    pub const fn number_in(mark: u32) -> Option<usize> {
        let ours = mark >> PATH_SHIFT;
        if ours & PATH_BIT == 0 { None } else { Some((ours & !PATH_BIT) as usize) }
    }

    /// Reduces a number to the range that fits into a mark.
    const fn number(number: usize) -> usize {
        number & (PATH_BIT as usize - 1)
    }

    /// Reduces the number of the first path to the range of the keeper's order.
    pub const fn number_of_first(first: usize) -> u16 {
        Self::number(first) as u16
    }

    /// The connection mark of the path with this number.
    pub const fn mark(number: usize) -> MarkBits {
        MarkBits { value: (PATH_BIT | Self::number(number) as u32) << PATH_SHIFT, mask: PATH_MASK }
    }
}

impl Steer {
    /// Whether the kernel has no task.
    pub fn is_empty(&self) -> bool {
        self.steering.kernel_paths.is_empty()
            && self.steering.tproxies.is_empty()
            && self.steering.redirects.is_empty()
            && !self.steering.divert_answers
    }

    /// The paths with their numbers.
    pub fn numbered_paths(&self) -> impl Iterator<Item = (usize, &Path)> {
        self.paths.iter().enumerate().map(|(index, path)| (Path::number(self.first_path + index), path))
    }

    /// The same for connections that stand: no new one is led to a listener. What the kernel carries alone is left to it.
    ///
    /// The chains stay. Without any that translates addresses, the kernel would stop to translate those of redirected flows;
    /// without the one that looks for transparent sockets, the packets of flows caught by tproxy would be forwarded.
    #[must_use]
    pub fn without_new(mut self) -> Self {
        for redirect in &mut self.steering.redirects {
            redirect.local.clear();
            redirect.forwarded.clear();
        }
        for tproxy in &mut self.steering.tproxies {
            match tproxy.protocol {
                Protocol::Tcp => tproxy.selectors.clear(),
                // A datagram of an association looks as one that begins another. Its connection has a mark.
                Protocol::Udp => tproxy.only_known = true,
            }
        }
        self
    }

    /// The same, with the opening segments of these listeners' connections in queues. `queue_of` gives the number for a
    /// listener, by name; `None`: its connections are not held.
    #[must_use]
    pub fn holding(
        mut self,
        bound: &[(Arc<str>, SocketAddr)],
        queue_of: impl Fn(&Arc<str>) -> Option<u16>,
    ) -> Self {
        let bypass = self.lifetime == Lifetime::Socket;
        let queue = |port: u16, v6: bool| {
            let mut names = bound.iter().filter(|(_, to)| to.port() == port && to.is_ipv6() == v6);
            let number = names.find_map(|(name, _)| queue_of(name))?;
            Some(HoldQueue { number, bypass })
        };
        for redirect in &mut self.steering.redirects {
            redirect.hold = queue(redirect.port, redirect.v6);
        }
        for tproxy in self.steering.tproxies.iter_mut().filter(|one| one.protocol == Protocol::Tcp) {
            tproxy.hold = queue(tproxy.port, tproxy.v6);
        }
        self
    }

    /// Returns the kernel's task for `config`, whose listeners are bound to these addresses. `first_path` is the
    /// number of the first path that the kernel forwards without us.
    ///
    /// # Errors
    /// Fails if traffic cannot be steered to a listener. Says which and why.
    pub fn new(
        config: &Config,
        bound: &[(Arc<str>, SocketAddr)],
        first_path: usize,
        host: &Host<'_>,
    ) -> Result<Self, SteerError> {
        let is_udp = |name: &str| {
            config.listeners.iter().any(|one| &*one.name == name && one.protocol == Protocol::Udp)
        };
        let session: Vec<_> = host.session.filter(|_| !config.capture_ssh).into_iter().flatten().collect();
        let listeners = bound.iter().filter(|(name, _)| !is_udp(name)).map(|(_, address)| *address);
        let except = Except {
            mark: Some(OWN_MARK),
            // Both directions: the kernel may take the next packet of a connection that stands for the first one of a new one.
            listeners: listeners.chain(session.iter().copied()).collect(),
            ..Except::default()
        };
        let lifetime = match config.on_crash {
            OnCrash::Open => Lifetime::Socket,
            OnCrash::Closed => Lifetime::SocketThenOrphan,
        };
        let kernel_mark = Some(Path::ANY);
        let datagram_idle_s = Some(idle_s(config.limits.udp_idle_timeout_ms));
        let steering =
            Steering { except, kernel_mark, forget_ended: true, datagram_idle_s, ..Steering::default() };
        let paths = Vec::new();
        let mut steer = Self { steering, first_path, paths, mark_rules: Vec::new(), lifetime, session };
        for listener in &config.listeners {
            let addresses: Vec<_> = bound
                .iter()
                .filter(|(name, _)| *name == listener.name)
                .map(|(_, address)| *address)
                .collect();
            steer.add(config, listener, &addresses, host)?;
        }
        if steer.steering.tproxies.iter().any(|tproxy| !tproxy.local.is_empty()) {
            let of_udp = bound.iter().filter(|(name, _)| is_udp(name));
            steer.steering.except.datagram_listeners = of_udp.map(|(_, address)| *address).collect();
        }
        steer.steering.divert_answers = keeps_client_addresses(config);
        steer.mark_rules = mark_rules(&mut steer.steering);
        Ok(steer)
    }

    fn add(
        &mut self,
        config: &Config,
        listener: &Listener,
        addresses: &[SocketAddr],
        host: &Host<'_>,
    ) -> Result<(), SteerError> {
        match &listener.kind {
            ListenerKind::Socks(_)
            | ListenerKind::Http(_)
            | ListenerKind::Tunnel(_)
            | ListenerKind::Engine(_) => {}
            ListenerKind::Reverse(ReverseTarget::Fixed(server)) => {
                for address in addresses {
                    self.add_reverse(config, listener, *address, server, host);
                }
            }
            ListenerKind::Reverse(ReverseTarget::ByName { .. }) => {}
            ListenerKind::Redirect(redirect) => {
                return self.add_redirect(config, listener, redirect, addresses, host);
            }
            ListenerKind::Tproxy(tproxy) => {
                let selector = Selector {
                    sources: tproxy.src.clone().unwrap_or_default(),
                    destinations: tproxy.dst.clone().unwrap_or_default(),
                    ports: tproxy.ports.clone().unwrap_or_default(),
                    interfaces: interfaces(listener, &tproxy.interfaces)?,
                    ..Selector::default()
                };
                self.spare(&tproxy.except);
                self.add_direct(config, listener, (None, Some(&selector)), host.forwards);
                for address in addresses {
                    self.add_tproxy(config, listener.protocol, *address, (vec![selector.clone()], vec![]));
                }
            }
        }
        Ok(())
    }

    fn add_redirect(
        &mut self,
        config: &Config,
        listener: &Listener,
        redirect: &crate::config::Redirect,
        addresses: &[SocketAddr],
        host: &Host<'_>,
    ) -> Result<(), SteerError> {
        let selector = Selector {
            sources: redirect.src.clone().unwrap_or_default(),
            destinations: redirect.dst.clone().unwrap_or_default(),
            ports: redirect.ports.clone().unwrap_or_default(),
            users: redirect.uids.clone(),
            cgroups: cgroups(listener, redirect.cgroup.as_deref(), host.find_cgroup)?,
            // Connections within this host are captured only if the configuration names their destination.
            to_this_host: redirect.dst.is_some(),
            ..Selector::default()
        };
        self.spare(&redirect.except);
        let forwarded = Selector {
            interfaces: interfaces(listener, &redirect.interfaces)?,
            users: Vec::new(),
            cgroups: Vec::new(),
            ..selector.clone()
        };
        for address in addresses {
            let ip = address.ip();
            if redirect.forwarded && !ip.is_unspecified() {
                let what = format!(
                    "forwarded connections are redirected to the address they came in by, not to {ip}; listen on \
                     0.0.0.0 or [::]"
                );
                return Err(SteerError { listener: listener.name.clone(), what });
            }
        }
        if listener.protocol == Protocol::Udp {
            // The kernel cannot redirect datagrams and keep the address that was asked: a transparent socket gets them.
            let forwarded: Vec<_> = redirect.forwarded.then_some(forwarded).into_iter().collect();
            let local: Vec<_> = redirect.local.then_some(selector).into_iter().collect();
            // Apart: the kernel can do more for datagrams of this host.
            self.add_direct(config, listener, (local.first(), None), host.forwards);
            self.add_direct(config, listener, (None, forwarded.first()), host.forwards);
            for address in addresses {
                self.add_tproxy(config, Protocol::Udp, *address, (forwarded.clone(), local.clone()));
            }
            return Ok(());
        }
        let direct = (redirect.local.then_some(&selector), redirect.forwarded.then_some(&forwarded));
        self.add_direct(config, listener, direct, host.forwards);
        for address in addresses {
            let (v4, v6) = versions(*address);
            self.steering.redirects.push(Redirect {
                port: address.port(),
                v4,
                v6,
                local: redirect.local.then(|| selector.clone()).into_iter().collect(),
                forwarded: redirect.forwarded.then(|| forwarded.clone()).into_iter().collect(),
                hold: None,
            });
        }
        Ok(())
    }

    fn spare(&mut self, except: &IpSet) {
        let all = self.steering.except.destinations.nets().iter().chain(except.nets()).copied();
        self.steering.except.destinations = all.collect();
    }

    fn add_tproxy(
        &mut self,
        config: &Config,
        protocol: Protocol,
        address: SocketAddr,
        (forwarded, local): (Vec<Selector>, Vec<Selector>),
    ) {
        let (v4, v6) = versions(address);
        self.steering.tproxies.push(TProxy {
            protocol,
            port: address.port(),
            v4,
            v6,
            selectors: forwarded,
            local,
            only_known: false,
            drop_without_listener: config.on_crash == OnCrash::Closed,
            hold: None,
        });
    }

    /// Adds the kernel path of a port for one server, if one rule of the packet filter covers all its traffic.
    fn add_reverse(
        &mut self,
        config: &Config,
        listener: &Listener,
        address: SocketAddr,
        server: &Destination,
        host: &Host<'_>,
    ) {
        let Some(server) = server.unzoned_addr().filter(|_| may_be_left_to_the_kernel(config, listener))
        else {
            return;
        };
        let traffic = Traffic::Reverse { address, server };
        let capture = Capture { listener: listener.name.clone(), protocol: listener.protocol, traffic };
        let lines = config.policy.kernel_path(&capture);
        let Some(line) = lines.first().filter(|line| line.matches == KernelMatch::default()) else { return };
        if let KernelAction::Dnat(to) = line.action
            && KernelPath::check(address, to).is_ok()
            && host.leads_to(to)
        {
            let pairs = vec![(address, to)];
            let route = KernelRoute::Dnat { pairs, masquerade: line.masquerade };
            self.add_path(listener, line, route);
        }
    }

    /// Adds the kernel path of captured traffic (local, forwarded), as far as nothing needs user space.
    fn add_direct(
        &mut self,
        config: &Config,
        listener: &Listener,
        (local, forwarded): (Option<&Selector>, Option<&Selector>),
        forwards: Forwards,
    ) {
        let Some(caught) = local.or(forwarded).filter(|_| may_be_left_to_the_kernel(config, listener)) else {
            return;
        };
        let some = |set: &IpSet| (!set.is_empty()).then(|| set.clone());
        let traffic = Traffic::Anywhere {
            intercept: listener.kind.intercept(),
            forwarded: forwarded.is_some(),
            src: some(&caught.sources),
            dst: some(&caught.destinations),
            ports: (!caught.ports.is_empty()).then(|| caught.ports.clone()),
        };
        let capture = Capture { listener: listener.name.clone(), protocol: listener.protocol, traffic };
        let mut lines = config.policy.kernel_path(&capture);
        for line in lines.iter_mut().filter(|line| line.action != KernelAction::Accept) {
            // If a rule changes the destination of some of the traffic, that part is left to user space.
            line.action = KernelAction::UserSpace;
        }
        let mut lines = without_user_space(lines);
        if listener.protocol == Protocol::Udp && forwarded.is_some() {
            lines = lines.into_iter().filter_map(|line| forwards.part_of(line)).collect();
        }
        for pieces in lines.chunk_by(|a, b| a.index == b.index && a.masquerade == b.masquerade) {
            let Some(line) = pieces.first() else { continue };
            let part = |caught: Option<&Selector>| -> Vec<Selector> {
                let narrow = |caught| pieces.iter().filter_map(move |line| narrowed(caught, &line.matches));
                caught.into_iter().flat_map(narrow).collect()
            };
            let (local, forwarded, masquerade) = (part(local), part(forwarded), line.masquerade);
            if !local.is_empty() || !forwarded.is_empty() {
                self.add_path(listener, line, KernelRoute::Direct { local, forwarded, masquerade });
            }
        }
    }

    fn add_path(&mut self, listener: &Listener, line: &KernelRule, route: KernelRoute) {
        self.steering.kernel_paths.push(KernelPath {
            protocol: listener.protocol,
            mark: Path::mark(self.first_path + self.paths.len()),
            route,
        });
        self.paths.push(Path {
            listener: listener.name.clone(),
            protocol: listener.protocol,
            intercept: listener.kind.intercept(),
            rule: line.rule.clone(),
            index: line.index,
        });
    }
}

/// Gives the steering tproxy's mark if needed, and returns the policy routing for it. Packets with that mark are
/// delivered to us, whatever their destination.
pub fn mark_rules(steering: &mut Steering) -> Vec<MarkRule> {
    let answers = steering.divert_answers.then_some((true, true));
    let wanted = steering.tproxies.iter().map(|tproxy| (tproxy.v4, tproxy.v6)).chain(answers);
    let mut rules = Vec::new();
    for (v4, v6) in wanted {
        let versions = [(v4, IpVersion::V4), (v6, IpVersion::V6)];
        for (_, version) in versions.into_iter().filter(|(wanted, _)| *wanted) {
            let rule = MarkRule {
                version,
                mark: TPROXY_MARK.value,
                mask: TPROXY_MARK.mask,
                table: TPROXY_TABLE,
                priority: TPROXY_PRIORITY,
            };
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
    }
    steering.tproxy_mark = (!rules.is_empty()).then_some(TPROXY_MARK);
    rules
}

/// Returns a time in seconds, at least as long, as conntrack wants it.
fn idle_s(idle_ms: u64) -> u32 {
    u32::try_from(idle_ms.div_ceil(1000)).unwrap_or(u32::MAX)
}

/// Whether connections are held until the far side has accepted: a rule asks for it, and a listener can do it.
pub fn holds(config: &Config) -> bool {
    let is_held = |one: &Listener| may_hold(one) && config.policy.asks_faithful(one.kind.intercept());
    config.listeners.iter().any(is_held)
}

/// Whether connections of this listener can be held: its clients know nothing of us and send nothing first.
pub fn may_hold(listener: &Listener) -> bool {
    listener.early_reason().is_none()
}

/// Whether some flows use their clients' addresses towards servers. The servers' packets then go to addresses
/// that are not ours.
fn keeps_client_addresses(config: &Config) -> bool {
    let mut actions = config.policy.rules().iter().map(|rule| &rule.action);
    actions.any(|action| matches!(action, Action::Carry(carry) if carry.keep_client_address))
}

/// Whether the kernel may forward flows of this listener. PROXY protocol headers must be read, and only user
/// space counts the flows of each client.
fn may_be_left_to_the_kernel(config: &Config, listener: &Listener) -> bool {
    listener.accept_proxy_protocol.is_empty() && config.limits.max_flows_per_client.is_none()
}

/// Returns the captured traffic that matches a line. `None` if there is none. In a selector an empty set means
/// everything.
fn narrowed(caught: &Selector, line: &KernelMatch) -> Option<Selector> {
    let some = |set: &IpSet| (!set.is_empty()).then(|| set.clone());
    let all = KernelMatch {
        from: some(&caught.sources),
        to: some(&caught.destinations),
        port: (!caught.ports.is_empty()).then(|| caught.ports.clone()),
    };
    let both = all.intersection(line)?;
    Some(Selector {
        sources: both.from.unwrap_or_default(),
        destinations: both.to.unwrap_or_default(),
        ports: both.port.unwrap_or_default(),
        ..caught.clone()
    })
}

/// Returns which IP versions a socket bound to this address accepts.
fn versions(address: SocketAddr) -> (bool, bool) {
    (address.is_ipv4(), address.is_ipv6())
}

fn interfaces(listener: &Listener, names: &[String]) -> Result<Vec<InterfaceName>, SteerError> {
    let parsed = names
        .iter()
        .map(|name| name.parse().map_err(|what| SteerError { listener: listener.name.clone(), what }));
    parsed.collect()
}

fn cgroups(
    listener: &Listener,
    path: Option<&str>,
    find: &FindCgroup<'_>,
) -> Result<Vec<CgroupMatch>, SteerError> {
    let found = path.map(|path| {
        find(path).map_err(|error| SteerError {
            listener: listener.name.clone(),
            what: format!("cgroup '{path}': {error}"),
        })
    });
    Ok(found.transpose()?.into_iter().collect())
}
