//! Problems between listeners and rules: addresses taken twice, rules never reached, loops.

use super::super::Problem;
use super::super::{At, EngineIo, List, Listener, ListenerKind, ReverseTarget, raw};
use super::Check;
use super::reached::covered;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, Host, Protocol};
use sidetrack_core::policy::{Action, Condition, Connect, Match, Policy, Rule};
use std::net::SocketAddr;
use std::ops::Range;

/// Most warnings of one kind. Each is shown with its place, and thousands would not be read.
pub(super) const WARNINGS_MAX: usize = 100;

impl Check<'_> {
    /// Checks how listeners and rules fit together. The raw and the checked lists have the same order.
    pub(super) fn relations(
        &mut self,
        raw_listeners: &[At<raw::Listen>],
        listeners: &[Option<Listener>],
        raw_rules: &[At<raw::Rule>],
        rules: &[Option<Rule>],
    ) {
        self.addresses_taken_twice(raw_listeners, listeners);
        self.interfaces_taken_twice(raw_listeners, listeners);
        self.rules_never_reached(raw_rules, rules);
        self.loops(raw_listeners, listeners, raw_rules, rules);
        self.containers_of_engines(raw_listeners, listeners, raw_rules, rules);
        self.names_that_go_on(raw_rules, rules);
        self.datagrams(raw_rules, listeners, rules);
    }

    /// Warns of connections that are accepted early although their rule says `connect = "faithful"`: a rule before needs the
    /// host name, which stands in the first bytes unless the client asked by name.
    fn early_after_all(&mut self, file: &raw::File, policy: &Policy) {
        for (place, (raw, rule)) in file.rule.iter().zip(policy.rules()).enumerate() {
            let is_faithful =
                matches!(&rule.action, Action::Carry(carry) if carry.connect == Connect::Faithful);
            let before = policy.rules().iter().take(place + 1).find(|before| before.asks_host());
            if let (Some(at), Some(before), true) = (&raw.connect, before, is_faithful) {
                let message = format!(
                    "connections to an address are accepted early: rule '{}' needs the host name, which stands in their first \
                     bytes",
                    before.name
                );
                let help = "under `run` the name is known before; elsewhere, put rules with `host` behind this one, or match \
                            addresses";
                self.warning(at.span(), message, help);
            }
        }
    }

    /// Warns of settings that are valid but probably a mistake: a node that serves nothing, an open proxy.
    pub(super) fn hardly_meant(&mut self, file: &raw::File, listeners: &[Option<Listener>], policy: &Policy) {
        // Errors come first: a listener may be missing here only because it has an error.
        if self.problems.iter().any(Problem::is_error) {
            return;
        }
        let serves = !file.listen.is_empty()
            || file.shunt.is_some()
            || file.overlay.is_some()
            || file.outgoing.is_some()
            || file.dns.is_some();
        if !serves {
            let help = "add a [[listen]], or use the file with `sidetrack run --config`, which needs none";
            self.warning(0..0, "this node has no listener: `sidetrack up` would do nothing", help);
        }
        self.early_after_all(file, policy);
        if matches!(policy.default_action(), Action::Deny) {
            return;
        }
        for (raw, listener) in file.listen.iter().zip(listeners) {
            let Some(listener) = listener else { continue };
            let open = match &listener.kind {
                ListenerKind::Socks(socks) => socks.users.is_empty(),
                ListenerKind::Http(http) => http.users.is_empty() && http.to.is_none(),
                _ => false,
            };
            let reached = listener.addresses.iter().find(|address| !address.ip().is_loopback());
            let Some(address) = reached.filter(|_| open) else { continue };
            let message = format!(
                "the listener '{}' is an open proxy: whatever reaches {address} can use it, and rules let all else pass",
                listener.name
            );
            let help =
                "give it `users`, listen on 127.0.0.1, or write `default = \"deny\"` and rules with `from`";
            let span = raw.address.as_ref().map_or(raw.span(), List::span);
            self.warning(span, message, help);
        }
    }

    /// Rejects rules for UDP that cannot carry it, and warns of rules that refuse the datagrams of a UDP listener.
    fn datagrams(
        &mut self,
        raw_rules: &[At<raw::Rule>],
        listeners: &[Option<Listener>],
        rules: &[Option<Rule>],
    ) {
        for (index, (raw, rule)) in raw_rules.iter().zip(rules).enumerate() {
            let Some(rule) = rule else { continue };
            let Action::Carry(carry) = &rule.action else { continue };
            let Some(why) = carry.udp_obstacle() else { continue };
            let span = raw.carrier.as_ref().map_or(raw.span(), List::span);
            // With the client's address kept, only the kernel carries datagrams.
            let may_be_left = carry.keep_client_address && carry.leaves_bytes_alone();
            if rule.matcher.conditions().contains(&Condition::Protocol(Protocol::Udp)) && !may_be_left {
                let help = "write `carrier = \"direct\"` without such keys, or match TCP";
                self.error(span, format!("the rule '{}' is for UDP, but {why}", rule.name), help);
                continue;
            }
            let before: Vec<_> = rules.iter().take(index).flatten().collect();
            let needs_us = |listener: &&Listener| {
                listener.protocol == Protocol::Udp && (!may_be_left || listener.captures().is_empty())
            };
            let mut caught = listeners.iter().flatten().filter(needs_us);
            if let Some(listener) = caught.find(|listener| catches(rule, listener, &before)) {
                let message = format!(
                    "flows of '{}' that the rule '{}' matches are refused: {why}",
                    listener.name, rule.name
                );
                let help =
                    "put a rule with `match = { protocol = \"udp\" }` and `carrier = \"direct\"` before it";
                self.warning(span, message, help);
            }
        }
    }

    /// Rejects containers in chains for engine listeners. A flow passes through a container over sockets, which
    /// the packet engine does not have.
    fn containers_of_engines(
        &mut self,
        raw_listeners: &[At<raw::Listen>],
        listeners: &[Option<Listener>],
        raw_rules: &[At<raw::Rule>],
        rules: &[Option<Rule>],
    ) {
        for (index, (raw, rule)) in raw_rules.iter().zip(rules).enumerate() {
            let Some(container) = rule.as_ref().and_then(container_of) else { continue };
            let before: Vec<_> = rules.iter().take(index).flatten().collect();
            let Some(chain) = &raw.chain else { continue };
            for (listen, listener) in raw_listeners.iter().zip(listeners) {
                let Some(listener) = listener.as_ref().filter(|one| is_engine(one)) else { continue };
                if !rule.as_ref().is_some_and(|rule| catches(rule, listener, &before)) {
                    continue;
                }
                let message = format!(
                    "the function '{container}' is a container, which flows of the engine listener '{}' cannot pass",
                    listener.name
                );
                let help = "add `listener` or `intercept` to the `match` of this rule, so that it is for other listeners, or \
                            use functions inside sidetrack; a listener of kind redirect or tproxy can lead through containers";
                let problem = Problem::error(chain.span(), message, help);
                self.problems.push(problem.and(listen.span(), "its packets have no sockets"));
            }
        }
    }

    fn addresses_taken_twice(&mut self, raw: &[At<raw::Listen>], listeners: &[Option<Listener>]) {
        let mut taken: Vec<((SocketAddr, Protocol), &str, Range<usize>)> = Vec::new();
        for (raw, listener) in raw.iter().zip(listeners) {
            let Some(listener) = listener else { continue };
            let span = raw.address.as_ref().map_or(raw.span(), List::span);
            for address in &listener.addresses {
                let mut before = taken.iter();
                let same = |(other, protocol): (SocketAddr, Protocol)| {
                    protocol == listener.protocol && collide(other, *address)
                };
                if let Some(((other, _), name, first)) = before.find(|(other, ..)| same(*other)) {
                    let message = format!("{address} is taken: listener '{name}' listens on {other}");
                    let problem = Problem::error(span.clone(), message, "choose another port or address");
                    self.problems.push(problem.and(first.clone(), "the first"));
                    break;
                }
                taken.push(((*address, listener.protocol), &listener.name, span.clone()));
            }
        }
    }

    /// An interface can have one XDP program of ours, and one AF_XDP socket at each queue.
    fn interfaces_taken_twice(&mut self, raw: &[At<raw::Listen>], listeners: &[Option<Listener>]) {
        let mut taken: Vec<(&str, &str, Range<usize>)> = Vec::new();
        for (raw, listener) in raw.iter().zip(listeners) {
            let Some(listener) = listener else { continue };
            let ListenerKind::Engine(engine) = &listener.kind else { continue };
            if engine.io != EngineIo::Xdp {
                continue;
            }
            let span = raw.interfaces.as_ref().map_or(raw.span(), List::span);
            for interface in &engine.interfaces {
                let before = taken.iter().find(|(other, ..)| other == interface);
                if let Some((_, name, first)) = before.filter(|(_, name, _)| **name != *listener.name) {
                    let message =
                        format!("{interface} is taken: listener '{name}' has it with `io = \"xdp\"`, too");
                    let help = "two engines with `io = \"xdp\"` cannot share an interface: write `io = \"packet\"` for one of them, or \
                                make them one listener with both addresses";
                    let problem = Problem::error(span.clone(), message, help);
                    self.problems.push(problem.and(first.clone(), "the first"));
                    break;
                }
                taken.push((interface, &listener.name, span.clone()));
            }
        }
    }

    fn rules_never_reached(&mut self, raw: &[At<raw::Rule>], rules: &[Option<Rule>]) {
        let place = |index: usize| {
            raw.get(index).map_or(0..0, |rule| rule.name.as_ref().map_or(rule.span(), At::span))
        };
        for (index, before) in covered(rules).take(WARNINGS_MAX) {
            let (Some(Some(rule)), Some(Some(other))) = (rules.get(index), rules.get(before)) else {
                continue;
            };
            let message = format!(
                "the rule '{}' is never reached: '{}' matches all of its flows",
                rule.name, other.name
            );
            let help = format!("move '{}' above '{}', or take it out", rule.name, other.name);
            let problem = Problem::warning(place(index), message, help);
            self.problems.push(problem.and(place(before), "matches first"));
        }
    }

    /// Finds rules that would send a flow back to one of our own listeners.
    fn loops(
        &mut self,
        raw_listeners: &[At<raw::Listen>],
        listeners: &[Option<Listener>],
        raw_rules: &[At<raw::Rule>],
        rules: &[Option<Rule>],
    ) {
        for (raw, rule) in raw_rules.iter().zip(rules) {
            let Some(Action::Carry(carry)) = rule.as_ref().map(|rule| &rule.action) else { continue };
            if let (Carrier::Hops(hops), Some(texts)) = (&carry.carrier, &raw.carrier) {
                for (hop, text) in hops.iter().zip(texts.items()) {
                    self.loop_to((&hop.address, Protocol::Tcp), text.span(), listeners);
                }
            }
            if let (Some(to), Some(at)) = (&carry.to, &raw.to) {
                self.loop_to((to, Protocol::Tcp), at.span(), listeners);
            }
        }
        for (raw, listener) in raw_listeners.iter().zip(listeners) {
            let protocol = listener.as_ref().map_or(Protocol::Tcp, |listener| listener.protocol);
            match listener.as_ref().and_then(|listener| listener.kind.servers()) {
                Some(ReverseTarget::Fixed(server)) => {
                    self.loop_to((server, protocol), raw.to.as_ref().map_or(raw.span(), At::span), listeners);
                }
                Some(ReverseTarget::ByName { names, default }) => {
                    for server in names.iter().map(|(_, server)| server).chain(default) {
                        let written = raw.names.iter().flat_map(|names| names.values()).chain(&raw.default);
                        let at = written.into_iter().find(|at| at.parse().as_ref() == Ok(server));
                        self.loop_to((server, protocol), at.map_or(raw.span(), At::span), listeners);
                    }
                }
                None => {}
            }
        }
    }

    pub(super) fn loop_to(
        &mut self,
        (destination, protocol): (&Destination, Protocol),
        span: Range<usize>,
        listeners: &[Option<Listener>],
    ) {
        let own = listeners
            .iter()
            .flatten()
            .filter(|listener| listener.protocol == protocol)
            .find(|listener| listener.addresses.iter().any(|address| reaches(destination, *address)));
        if let Some(listener) = own {
            let message = format!(
                "{destination} is our own listener '{}': the flow would go in circles",
                listener.name
            );
            self.error(span, message, "give the address of the next hop or of the server");
        }
    }
}

fn is_engine(listener: &Listener) -> bool {
    matches!(listener.kind, ListenerKind::Engine(_))
}

/// Returns the first container of a rule's chain.
fn container_of(rule: &Rule) -> Option<&str> {
    let Action::Carry(carry) = &rule.action else { return None };
    let mut functions = carry.chain.iter().flat_map(|chain| &chain.functions);
    let container = functions.find(|function| function.kind.is_container());
    container.map(|function| &*function.name)
}

/// Whether flows of this listener may match this rule: its conditions do not exclude them, and no earlier rule
/// takes all of them.
fn catches(rule: &Rule, listener: &Listener, before: &[&Rule]) -> bool {
    let excludes = |condition: &Condition| match condition {
        Condition::Listener(names) => !names.contains(&listener.name),
        Condition::Intercept(kinds) => !kinds.contains(&listener.kind.intercept()),
        Condition::Protocol(protocol) => listener.protocol().is_some_and(|own| own != *protocol),
        _ => false,
    };
    let own = [
        Condition::Listener(vec![listener.name.clone()]),
        Condition::Intercept(vec![listener.kind.intercept()]),
    ];
    let protocol = listener.protocol().map(Condition::Protocol);
    let own = Match::new(own.into_iter().chain(protocol).collect());
    !rule.matcher.conditions().iter().any(excludes) && !before.iter().any(|other| other.matcher.covers(&own))
}

/// Whether both addresses cannot be bound at the same time. For port 0 the kernel picks a free port.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let same_family = a.is_ipv4() == b.is_ipv4();
    let same_ip = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    // The same link-local address may be there on several interfaces (RFC 4007 Sec. 6).
    let zones = [a, b].map(|address| if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 });
    let same_zone = zones[0] == zones[1] || zones.contains(&0);
    a.port() != 0 && a.port() == b.port() && same_family && same_ip && same_zone
}

/// Whether a connection to `destination` certainly ends at a listener on `address`.
fn reaches(destination: &Destination, address: SocketAddr) -> bool {
    if destination.port != address.port() {
        return false;
    }
    match &destination.host {
        Host::Ip(ip) if *ip == address.ip() => true,
        Host::Ip(ip) => {
            address.ip().is_unspecified()
                && (ip.is_loopback() || ip.is_unspecified())
                && ip.is_ipv4() == address.is_ipv4()
        }
        Host::Name(name) => {
            name.as_str() == "localhost" && (address.ip().is_loopback() || address.ip().is_unspecified())
        }
    }
}
