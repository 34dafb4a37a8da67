//! Addresses that are not dialled, and rules that cannot see which addresses a name resolves to.

use super::super::Problem;
use super::super::{At, List, raw};
use super::Check;
use sidetrack_core::net::{IpNet, IpSet};
use sidetrack_core::policy::{Action, Condition, Rule, never_dial};
use std::net::{IpAddr, Ipv6Addr};

/// In `never_dial`: the default networks.
const DEFAULT: &str = "default";
/// In `never_dial`: no network.
const NONE: &str = "none";
/// The NAT64 prefix 64:ff9b::/96 (RFC 6052 Sec. 2.1), in front of an IPv4 address.
const NAT64: u128 = 0x0064_ff9b << 96;

impl Check<'_> {
    /// Checks `never_dial`.
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

    /// Returns the part of `to` that `[[overlay.deliver]]` may reach. Networks of `never_dial` count only if an
    /// entry names them.
    pub(super) fn deliverable(&self, to: &IpSet) -> IpSet {
        without_unnamed(&self.never, to)
    }

    /// Warns if a rule that denies by network stands before a rule that sends names on: only the last hop learns
    /// the addresses. Gives one warning for each denying rule, at the first rule that sends names on.
    pub(super) fn names_that_go_on(&mut self, raw: &[At<raw::Rule>], rules: &[Option<Rule>]) {
        let mut denying: Vec<(&At<raw::Rule>, &Rule)> = Vec::new();
        for (raw_rule, rule) in raw.iter().zip(rules) {
            let Some(rule) = rule else { continue };
            match &rule.action {
                Action::Deny if networks(rule) => denying.push((raw_rule, rule)),
                Action::Carry(carry) if carry.passes_names_on() && !networks(rule) => {
                    let place = raw_rule.carrier.as_ref().map_or(raw_rule.span(), List::span);
                    for (raw_other, other) in denying.extract_if(.., |(_, other)| !are_disjoint(rule, other))
                    {
                        let message = format!(
                            "the rule '{}' sends names on to its last hop, which resolves them: '{}' denies none of their \
                             addresses",
                            rule.name, other.name
                        );
                        let help = "write `resolve = \"local\"` to have addresses checked here, or deny the same networks at \
                                    the last hop";
                        let problem = Problem::warning(place.clone(), message, help);
                        let first = raw_other.name.as_ref().map_or(raw_other.span(), At::span);
                        self.problems.push(problem.and(first, "denies by network"));
                    }
                }
                Action::Deny | Action::Carry(_) => {}
            }
        }
    }
}

/// Returns `to` without the networks of `never` that it does not name, and without their NAT64 forms.
fn without_unnamed(never: &IpSet, to: &IpSet) -> IpSet {
    let translated = |net: &IpNet| match net.address() {
        IpAddr::V4(v4) => {
            let inside = Ipv6Addr::from(NAT64 | u128::from(u32::from(v4)));
            IpNet::new(inside.into(), 96 + net.prefix_len())
        }
        IpAddr::V6(_) => *net,
    };
    let never: IpSet = never.nets().iter().flat_map(|net| [*net, translated(net)]).collect();
    let named = to.nets().iter().copied().filter(|net| never.covers_net(*net));
    to.difference(&never).nets().iter().copied().chain(named).collect()
}

/// Whether a rule matches by destination network. Such a rule never matches a flow whose address is not known.
fn networks(rule: &Rule) -> bool {
    rule.matcher.conditions().iter().any(|condition| matches!(condition, Condition::To(_)))
}

/// Whether no flow can match both rules, judging by single conditions.
fn are_disjoint(one: &Rule, other: &Rule) -> bool {
    let others = || other.matcher.conditions().iter();
    one.matcher.conditions().iter().any(|condition| {
        others().any(|other| match (condition, other) {
            (Condition::From(one), Condition::From(other)) => !one.overlaps(other),
            (Condition::Port(one), Condition::Port(other)) => !one.overlaps(other),
            (Condition::Protocol(one), Condition::Protocol(other)) => one != other,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> IpSet {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn deliveries_go_where_nothing_is_denied_unless_an_entry_names_it() {
        let all = without_unnamed(&never_dial(), &IpSet::all());
        for never in ["127.0.0.1", "169.254.169.254", "::1", "fe80::1", "64:ff9b::7f00:1"] {
            assert!(!all.contains(never.parse().unwrap()), "{never}");
        }
        for fine in ["192.0.2.1", "10.0.0.1", "2001:db8::1", "64:ff9b::192.0.2.1"] {
            assert!(all.contains(fine.parse().unwrap()), "{fine}");
        }
        let named = without_unnamed(&never_dial(), &nets(&["127.0.0.0/8", "10.0.0.0/8"]));
        assert_eq!(named, nets(&["127.0.0.0/8", "10.0.0.0/8"]));
    }
}
