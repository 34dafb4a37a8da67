//! Addresses that are not dialled, and rules that cannot see to which addresses names lead.

use super::super::problem::Problem;
use super::super::{At, List, raw};
use super::Check;
use sidetrack_core::net::{IpNet, IpSet};
use sidetrack_core::policy::{Action, Condition, Rule, never_dial};
use std::net::{IpAddr, Ipv6Addr};

/// Stands for the networks that are not dialled where the key is not written.
const DEFAULT: &str = "default";
/// Stands for no network.
const NONE: &str = "none";
/// Prefix of NAT64 (RFC 6052 Sec. 2.1), before an IPv4 address.
const NAT64: u128 = 0x0064_ff9b << 96;

impl Check<'_> {
    /// `never_dial`.
    pub(super) fn never_dial(&mut self, list: Option<&List<String>>) -> IpSet {
        let Some(list) = list else { return never_dial() };
        self.not_empty(list);
        let mut nets = Vec::new();
        for item in list.items() {
            match item.as_str() {
                DEFAULT => nets.extend_from_slice(never_dial().nets()),
                NONE if list.items().len() == 1 => {}
                NONE => {
                    self.error(item.span(), "\"none\" stands alone", "take it out, or take the networks out")
                }
                _ => nets.extend(self.network_or_set(item)),
            }
        }
        nets.into_iter().collect()
    }

    /// What `[[overlay.deliver]]` lets flows reach: networks of `never_dial` only where an entry names them.
    pub(super) fn deliverable(&self, to: &IpSet) -> IpSet {
        let translated = |net: &IpNet| match net.address() {
            IpAddr::V4(v4) => {
                let inside = Ipv6Addr::from(NAT64 | u128::from(u32::from(v4)));
                IpNet::new(inside.into(), 96 + net.prefix_len())
            }
            IpAddr::V6(_) => *net,
        };
        let never: IpSet = self.never.nets().iter().flat_map(|net| [*net, translated(net)]).collect();
        let named = to.nets().iter().copied().filter(|net| never.covers_net(*net));
        to.difference(&never).nets().iter().copied().chain(named).collect()
    }

    /// Warns of rules by network before rules that send names on: only the last hop learns their addresses.
    pub(super) fn names_that_go_on(&mut self, raw: &[At<raw::Rule>], rules: &[Option<Rule>]) {
        for (index, (raw_rule, rule)) in raw.iter().zip(rules).enumerate() {
            let Some(rule) = rule else { continue };
            let passes = matches!(&rule.action, Action::Carry(carry) if carry.passes_names_on());
            if !passes || networks(rule) {
                continue;
            }
            let before = raw.iter().zip(rules).take(index);
            let denies = before.filter_map(|(raw, rule)| Some((raw, rule.as_ref()?))).find(|(_, other)| {
                other.action == Action::Deny && networks(other) && !are_disjoint(rule, other)
            });
            let Some((raw_other, other)) = denies else { continue };
            let message = format!(
                "the rule '{}' sends names on to its last hop, which resolves them: '{}' denies none of their addresses",
                rule.name, other.name
            );
            let help = "write `resolve = \"local\"` to have addresses checked here, or deny the same networks at the last hop";
            let place = raw_rule.carrier.as_ref().map_or(raw_rule.span(), List::span);
            let problem = Problem::warning(place, message, help);
            self.problems.push(
                problem.and(raw_other.name.as_ref().map_or(raw_other.span(), At::span), "denies by network"),
            );
        }
    }
}

/// Whether a rule is for networks of destinations: it matches no name then.
fn networks(rule: &Rule) -> bool {
    rule.matcher.conditions().iter().any(|condition| matches!(condition, Condition::To(_)))
}

/// Whether no flow can meet both rules, as far as single conditions tell.
fn are_disjoint(one: &Rule, other: &Rule) -> bool {
    let others = || other.matcher.conditions().iter();
    one.matcher.conditions().iter().any(|condition| {
        others().any(|other| match (condition, other) {
            (Condition::From(one), Condition::From(other)) => !one.overlaps(other),
            (Condition::Port(one), Condition::Port(other)) => !one.overlaps(other),
            (Condition::Listener(one), Condition::Listener(other)) => {
                !one.iter().any(|name| other.contains(name))
            }
            (Condition::Intercept(one), Condition::Intercept(other)) => {
                !one.iter().any(|kind| other.contains(kind))
            }
            _ => false,
        })
    })
}
