//! From a configuration to what the kernel is to do: which connections it leads to which listener, and which it carries
//! alone. Pure; `plan` prints it, the keeper makes it real.

use crate::config::{Config, Listener, ListenerKind, OnCrash, ReverseTarget};
use sidetrack_core::flow::{Destination, Intercept};
use sidetrack_core::net::IpSet;
use sidetrack_core::policy::{
    Action, Capture, KernelAction, KernelMatch, KernelRule, Traffic, without_user_space,
};
use sidetrack_sys::nft::{
    CgroupMatch, Except, InterfaceName, KernelPath, KernelRoute, Lifetime, MarkBits, Redirect, Selector,
    Steering, TProxy,
};
use sidetrack_sys::route::{IpVersion, MarkRule};
use sidetrack_sys::{cgroup, sysctl};
use std::net::SocketAddr;
use std::sync::Arc;

/// Name of our table, and the prefix of every table of ours.
pub const TABLE: &str = "sidetrack";

/// `SO_MARK` of the sockets we dial with: packets with it are never steered (invariant 6).
pub const OWN_MARK: MarkBits = MarkBits { value: 0x5d00_0000, mask: 0xff00_0000 };

/// The mark that leads packets for foreign addresses to our tproxy listeners.
pub const TPROXY_MARK: MarkBits = MarkBits { value: 0x5e00_0000, mask: 0xff00_0000 };

/// The routing table in which every address is local, and the place of the rule that asks it.
const TPROXY_TABLE: u32 = 0x5e;
const TPROXY_PRIORITY: u32 = 5000;

/// Connection marks of the kernel path: our half of the mark, with this bit and the number of the path.
const PATH_BIT: u32 = 0x8000;
const PATH_SHIFT: u32 = 16;
const PATH_MASK: u32 = 0xffff_0000;

/// Which rule of which listener a connection of the kernel path belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// The listener that would have caught it.
    pub listener: Arc<str>,
    /// How it would have been caught.
    pub intercept: Intercept,
    /// The rule; none for the default.
    pub rule: Option<Arc<str>>,
    /// Its place in the policy.
    pub index: Option<usize>,
}

/// What the kernel is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steer {
    /// The rules.
    pub steering: Steering,
    /// The number of the first path. Numbers are not used again soon: connections outlive reloads.
    pub first_path: usize,
    /// The paths that the kernel carries alone; their number is in the connection mark.
    pub paths: Vec<Path>,
    /// Policy routing that tproxy needs.
    pub mark_rules: Vec<MarkRule>,
    /// How long the table lives.
    pub lifetime: Lifetime,
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

/// Where a cgroup of the configuration is.
pub type FindCgroup<'a> = dyn Fn(&str) -> std::io::Result<CgroupMatch> + 'a;

/// What steering has to know of this host.
pub struct Host<'a> {
    /// Finds cgroups.
    pub find_cgroup: &'a FindCgroup<'a>,
    /// What it forwards.
    pub forwards: Forwards,
}

/// What a host forwards: without that a connection cannot be led on to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forwards {
    /// IPv4.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
}

impl Host<'_> {
    /// The host we run on, in the network namespace we run in.
    pub fn here() -> Host<'static> {
        let on = |name: &str| sysctl::read(name).is_ok_and(|value| value != "0");
        let (v4, v6) = (on("net/ipv4/ip_forward"), on("net/ipv6/conf/all/forwarding"));
        Self::that(Forwards { v4, v6 })
    }

    /// The host we run on, where somebody has looked already what it forwards.
    pub fn that(forwards: Forwards) -> Host<'static> {
        Host { find_cgroup: &cgroup::find_match, forwards }
    }

    /// Whether packets for this server can leave by way of NAT.
    const fn leads_to(&self, server: SocketAddr) -> bool {
        match server {
            SocketAddr::V4(server) => self.forwards.v4 || server.ip().is_loopback(),
            SocketAddr::V6(server) => self.forwards.v6 || server.ip().is_loopback(),
        }
    }
}

impl Path {
    /// The connection marks of all paths.
    pub const ANY: MarkBits = MarkBits { value: PATH_BIT << PATH_SHIFT, mask: PATH_BIT << PATH_SHIFT };

    /// The number of a path in a connection mark, if the mark is one of ours.
    pub const fn number_in(mark: u32) -> Option<usize> {
        let ours = mark >> PATH_SHIFT;
        if ours & PATH_BIT == 0 { None } else { Some((ours & !PATH_BIT) as usize) }
    }

    /// The number as far as a mark can hold it.
    const fn number(number: usize) -> usize {
        number & (PATH_BIT as usize - 1)
    }

    /// The number of the first path as far as an order of the keeper holds it.
    pub const fn number_of_first(first: usize) -> u16 {
        Self::number(first) as u16
    }

    /// The connection mark of the path with this number.
    pub const fn mark(number: usize) -> MarkBits {
        MarkBits { value: (PATH_BIT | Self::number(number) as u32) << PATH_SHIFT, mask: PATH_MASK }
    }
}

impl Steer {
    /// Whether the kernel has nothing to do.
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

    /// What `config` asks of the kernel, its listeners being bound to these addresses. `first_path` is the number of the
    /// first connection that the kernel carries alone.
    ///
    /// # Errors
    /// Which listener cannot be led to, and why.
    pub fn new(
        config: &Config,
        bound: &[(Arc<str>, SocketAddr)],
        first_path: usize,
        host: &Host<'_>,
    ) -> Result<Self, SteerError> {
        let except = Except {
            mark: Some(OWN_MARK),
            listeners: bound.iter().map(|(_, address)| *address).collect(),
            ..Except::default()
        };
        let lifetime = match config.on_crash {
            OnCrash::Open => Lifetime::Socket,
            OnCrash::Closed => Lifetime::SocketThenOrphan,
        };
        let kernel_mark = Some(Path::ANY);
        let steering = Steering { except, kernel_mark, forget_ended: true, ..Steering::default() };
        let paths = Vec::new();
        let mut steer = Self { steering, first_path, paths, mark_rules: Vec::new(), lifetime };
        for listener in &config.listeners {
            let addresses: Vec<_> = bound
                .iter()
                .filter(|(name, _)| *name == listener.name)
                .map(|(_, address)| *address)
                .collect();
            steer.add(config, listener, &addresses, host)?;
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
                self.add_direct(config, listener, (None, Some(&selector)));
                for address in addresses {
                    self.add_tproxy(config, *address, &selector);
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
            // Connections within this host only where somebody names them.
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
        let direct = (redirect.local.then_some(&selector), redirect.forwarded.then_some(&forwarded));
        self.add_direct(config, listener, direct);
        for address in addresses {
            if redirect.forwarded && !address.ip().is_unspecified() {
                return Err(SteerError {
                    listener: listener.name.clone(),
                    what: format!(
                        "forwarded connections are redirected to the address they came in by, not to {}; \
                         listen on 0.0.0.0 or [::]",
                        address.ip()
                    ),
                });
            }
            let (v4, v6) = versions(*address);
            self.steering.redirects.push(Redirect {
                port: address.port(),
                v4,
                v6,
                local: redirect.local.then(|| selector.clone()).into_iter().collect(),
                forwarded: redirect.forwarded.then(|| forwarded.clone()).into_iter().collect(),
            });
        }
        Ok(())
    }

    fn spare(&mut self, except: &IpSet) {
        let all = self.steering.except.destinations.nets().iter().chain(except.nets()).copied();
        self.steering.except.destinations = all.collect();
    }

    fn add_tproxy(&mut self, config: &Config, address: SocketAddr, selector: &Selector) {
        let (v4, v6) = versions(address);
        self.steering.tproxies.push(TProxy {
            port: address.port(),
            v4,
            v6,
            selectors: vec![selector.clone()],
            drop_without_listener: config.on_crash == OnCrash::Closed,
        });
    }

    /// The kernel path of a port that stands for one server: only where one line says all.
    fn add_reverse(
        &mut self,
        config: &Config,
        listener: &Listener,
        address: SocketAddr,
        server: &Destination,
        host: &Host<'_>,
    ) {
        let Some(server) = server.socket_addr().filter(|_| may_be_left_to_the_kernel(config, listener))
        else {
            return;
        };
        let traffic = Traffic::Reverse { address, server };
        let lines = config.policy.kernel_path(&Capture { listener: listener.name.clone(), traffic });
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

    /// The kernel path of traffic that would be caught (local, forwarded): what no line keeps in user space.
    fn add_direct(
        &mut self,
        config: &Config,
        listener: &Listener,
        (local, forwarded): (Option<&Selector>, Option<&Selector>),
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
        let mut lines = config.policy.kernel_path(&Capture { listener: listener.name.clone(), traffic });
        for line in lines.iter_mut().filter(|line| line.action != KernelAction::Accept) {
            // Another destination for some of what is caught is left to user space.
            line.action = KernelAction::UserSpace;
        }
        let lines = without_user_space(lines);
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
        self.steering
            .kernel_paths
            .push(KernelPath { mark: Path::mark(self.first_path + self.paths.len()), route });
        self.paths.push(Path {
            listener: listener.name.clone(),
            intercept: listener.kind.intercept(),
            rule: line.rule.clone(),
            index: line.index,
        });
    }
}

/// Gives the steering the mark of tproxy where it needs one, and returns the policy routing that goes with it: packets with
/// that mark are ours wherever they go to.
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

/// Whether some flows are carried on from their clients' addresses: the answers come to an address that is not ours.
fn keeps_client_addresses(config: &Config) -> bool {
    let mut actions = config.policy.rules().iter().map(|rule| &rule.action);
    actions.any(|action| matches!(action, Action::Carry(carry) if carry.keep_client_address))
}

/// Who speaks the PROXY protocol to us has to be read, and only user space counts the flows of a client.
fn may_be_left_to_the_kernel(config: &Config, listener: &Listener) -> bool {
    listener.accept_proxy_protocol.is_empty() && config.limits.max_flows_per_client.is_none()
}

/// What is caught and matched by a line; `None` if nothing is. In a selector an empty set stands for everything.
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

/// Which versions of IP a socket bound to this address takes connections of.
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
