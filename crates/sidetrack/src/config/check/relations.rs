//! What listeners and rules are to each other: addresses taken twice, rules never reached, loops.

use super::super::problem::Problem;
use super::super::{At, List, Listener, ReverseTarget, raw};
use super::Check;
use sidetrack_core::carrier::Carrier;
use sidetrack_core::flow::{Destination, Host};
use sidetrack_core::policy::{Action, Rule};
use std::net::SocketAddr;
use std::ops::Range;

impl Check<'_> {
    /// `raw_*` and the checked ones stand in the same order.
    pub(super) fn relations(
        &mut self,
        raw_listeners: &[At<raw::Listen>],
        listeners: &[Option<Listener>],
        raw_rules: &[At<raw::Rule>],
        rules: &[Option<Rule>],
    ) {
        self.addresses_taken_twice(raw_listeners, listeners);
        self.rules_never_reached(raw_rules, rules);
        self.loops(raw_listeners, listeners, raw_rules, rules);
    }

    fn addresses_taken_twice(&mut self, raw: &[At<raw::Listen>], listeners: &[Option<Listener>]) {
        let mut taken: Vec<(SocketAddr, &str, Range<usize>)> = Vec::new();
        for (raw, listener) in raw.iter().zip(listeners) {
            let Some(listener) = listener else { continue };
            let span = raw.address.as_ref().map_or(raw.span(), List::span);
            for address in &listener.addresses {
                if let Some((other, name, first)) = taken.iter().find(|(other, ..)| collide(*other, *address))
                {
                    let message = format!("{address} is taken: listener '{name}' listens on {other}");
                    let problem = Problem::error(span.clone(), message, "choose another port or address");
                    self.problems.push(problem.and(first.clone(), "the first"));
                    break;
                }
                taken.push((*address, &listener.name, span.clone()));
            }
        }
    }

    fn rules_never_reached(&mut self, raw: &[At<raw::Rule>], rules: &[Option<Rule>]) {
        let place = |index: usize| {
            raw.get(index).map_or(0..0, |rule| rule.name.as_ref().map_or(rule.span(), At::span))
        };
        for (index, rule) in rules.iter().enumerate() {
            let Some(rule) = rule else { continue };
            let earlier = rules.iter().take(index).enumerate().find_map(|(before, other)| {
                // Two of one name are an error of their own.
                let other = other.as_ref().filter(|other| other.name != rule.name)?;
                let other = Some(other).filter(|other| other.matcher.covers(&rule.matcher))?;
                Some((before, other))
            });
            if let Some((before, other)) = earlier {
                let message = format!(
                    "the rule '{}' is never reached: '{}' matches all of its flows",
                    rule.name, other.name
                );
                let help = format!("move '{}' above '{}', or take it out", rule.name, other.name);
                let problem = Problem::warning(place(index), message, help);
                self.problems.push(problem.and(place(before), "matches first"));
            }
        }
    }

    /// A flow that we would hand to ourselves.
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
                    self.loop_to(&hop.address, text.span(), listeners);
                }
            }
            if let (Some(to), Some(at)) = (&carry.to, &raw.to) {
                self.loop_to(to, at.span(), listeners);
            }
        }
        for (raw, listener) in raw_listeners.iter().zip(listeners) {
            match listener.as_ref().and_then(|listener| listener.kind.servers()) {
                Some(ReverseTarget::Fixed(server)) => {
                    self.loop_to(server, raw.to.as_ref().map_or(raw.span(), At::span), listeners);
                }
                Some(ReverseTarget::ByName { names, default }) => {
                    for server in names.iter().map(|(_, server)| server).chain(default) {
                        let written = raw.names.iter().flat_map(|names| names.values()).chain(&raw.default);
                        let at = written.into_iter().find(|at| at.parse().as_ref() == Ok(server));
                        self.loop_to(server, at.map_or(raw.span(), At::span), listeners);
                    }
                }
                None => {}
            }
        }
    }

    pub(super) fn loop_to(
        &mut self,
        destination: &Destination,
        span: Range<usize>,
        listeners: &[Option<Listener>],
    ) {
        let own = listeners
            .iter()
            .flatten()
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

/// Whether both cannot be bound at once. Port 0 is a port of the kernel's choice.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let same_family = a.is_ipv4() == b.is_ipv4();
    let same_ip = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0 && a.port() == b.port() && same_family && same_ip
}

/// Whether a connection to `destination` surely ends at a listener on `address`.
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
