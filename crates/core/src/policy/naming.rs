//! Decides which resolver may see a name, when only the name of a future connection is known.

use super::condition::{Condition, HostPattern};
use super::{Action, Carry, Policy, Resolve, Rule};
use crate::carrier::Carrier;
use crate::flow::{HostName, Intercept};

/// Whether a rule applies to connections to a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Applies {
    /// It applies to all of them.
    Always,
    /// It depends on unknown facts: the port, the program, the user.
    Perhaps,
    Never,
}

/// How the rules let connections to a name pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMatch {
    /// They do not.
    No,
    /// A rule writes the name out.
    Exact,
    /// A rule has a pattern for it, which writes out this number of bytes at its end.
    Wildcard {
        /// The length of that part.
        written_bytes: usize,
    },
}

impl Policy {
    /// Returns how the rules let a connection to `name` pass that `intercept` catches, at some port. A rule about networks
    /// does not count: it lets addresses pass, not names.
    pub fn lets_name_pass(&self, name: &HostName, intercept: Intercept) -> NameMatch {
        let mut found = NameMatch::No;
        let is_of_network = |rule: &&Rule| {
            rule.matcher.conditions().iter().any(|condition| matches!(condition, Condition::To(_)))
        };
        for rule in self.rules().iter().filter(|rule| !is_of_network(rule)) {
            match (rule.applies_to(name, intercept), &rule.action) {
                (Applies::Never, _) | (Applies::Perhaps, Action::Deny) => {}
                (Applies::Always, Action::Deny) => return found,
                (Applies::Always | Applies::Perhaps, Action::Carry(_)) => {
                    found = found.wider(rule.written_out(name));
                }
            }
        }
        match self.default_action() {
            Action::Deny => found,
            Action::Carry(_) => found.wider(NameMatch::Wildcard { written_bytes: 0 }),
        }
    }

    /// Whether this host resolves `name` for every connection to it that `intercept` catches and the rules let pass.
    /// If so, a query for the name can be answered here, and the host's resolver learns nothing new.
    ///
    /// False if a rule may send the name to a hop, if a rule replaces the destination, or if no rule lets a
    /// connection to it pass. Conditions that depend on a connection count as if they could hold.
    pub fn resolves_here(&self, name: &HostName, intercept: Intercept) -> bool {
        let mut passes = false;
        for rule in self.rules() {
            match (rule.applies_to(name, intercept), &rule.action) {
                (Applies::Never, _) | (Applies::Perhaps, Action::Deny) => {}
                (Applies::Always, Action::Deny) => return passes,
                (_, Action::Carry(carry)) if !carry.resolves_here() => return false,
                (Applies::Perhaps, Action::Carry(_)) => passes = true,
                (Applies::Always, Action::Carry(_)) => return true,
            }
        }
        match self.default_action() {
            Action::Deny => passes,
            Action::Carry(carry) => carry.resolves_here(),
        }
    }
}

impl NameMatch {
    /// Returns the match that writes more of the name out.
    fn wider(self, other: Self) -> Self {
        match (self, other) {
            (Self::Exact, _) | (_, Self::Exact) => Self::Exact,
            (Self::Wildcard { written_bytes: one }, Self::Wildcard { written_bytes: other }) => {
                Self::Wildcard { written_bytes: one.max(other) }
            }
            (Self::No, other) | (other, Self::No) => other,
        }
    }
}

impl Carry {
    fn resolves_here(&self) -> bool {
        let by_us = match self.carrier {
            Carrier::Direct => true,
            Carrier::Hops(_) => self.resolve == Resolve::Local,
            Carrier::Overlay(_) | Carrier::Tunnel(_) => false,
        };
        by_us && self.to.is_none()
    }
}

impl Rule {
    /// Whether it needs the host name.
    pub fn asks_host(&self) -> bool {
        let of_host = |condition: &Condition| {
            matches!(condition, Condition::Host(_) | Condition::HostFile(_) | Condition::HostContains(_))
        };
        self.matcher.conditions().iter().any(of_host)
    }

    /// Returns how much of a name that it applies to its patterns write out.
    fn written_out(&self, name: &HostName) -> NameMatch {
        let of_pattern = |pattern: &HostPattern| match pattern {
            HostPattern::Exact(_) => NameMatch::Exact,
            HostPattern::Below(suffix) => NameMatch::Wildcard { written_bytes: suffix.len() },
            HostPattern::Any => NameMatch::Wildcard { written_bytes: 0 },
        };
        let patterns = self.matcher.conditions().iter().filter_map(|condition| match condition {
            Condition::Host(patterns) | Condition::AskedName(patterns) => Some(patterns),
            _ => None,
        });
        let matching = patterns.flatten().filter(|pattern| pattern.matches(name)).map(of_pattern);
        matching.fold(NameMatch::Wildcard { written_bytes: 0 }, NameMatch::wider)
    }

    fn applies_to(&self, name: &HostName, intercept: Intercept) -> Applies {
        let mut applies = Applies::Always;
        for condition in self.matcher.conditions() {
            let holds = match condition {
                Condition::Host(_)
                | Condition::AskedName(_)
                | Condition::HostFile(_)
                | Condition::HostContains(_) => condition.names(name),
                Condition::Intercept(kinds) => kinds.contains(&intercept),
                // A name alone is not in a set of addresses, but its addresses may be.
                _ => {
                    applies = Applies::Perhaps;
                    continue;
                }
            };
            if !holds {
                return Applies::Never;
            }
        }
        applies
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::PortSet;
    use crate::policy::Match;
    use std::sync::Arc;

    fn carry(carry: Carry) -> Action {
        Action::Carry(Arc::new(carry))
    }

    fn proxy() -> Carry {
        Carry { carrier: Carrier::Hops(vec!["socks5://gw:1080".parse().unwrap()]), ..Carry::default() }
    }

    fn rule(conditions: Vec<Condition>, action: Action) -> Rule {
        Rule { name: "r".into(), matcher: Match::new(conditions), action }
    }

    fn host(pattern: &str) -> Condition {
        Condition::Host(vec![pattern.parse().unwrap()])
    }

    fn port() -> Condition {
        Condition::Port(PortSet::default())
    }

    #[test]
    fn a_name_is_asked_for_here_only_if_every_way_to_it_resolves_it_here() {
        let direct = || carry(Carry::default());
        let to = Carry { to: Some("10.0.0.1:80".parse().unwrap()), ..Carry::default() };
        let local = Carry { resolve: Resolve::Local, ..proxy() };
        let tunnel = Carry { carrier: Carrier::Tunnel("t".into()), ..Carry::default() };
        for (rules, default, expected) in [
            (vec![], direct(), true),
            (vec![], carry(proxy()), false),
            (vec![], carry(local), true),
            (vec![], carry(tunnel), false),
            (vec![], carry(to), false),
            (vec![], Action::Deny, false),
            (vec![rule(vec![host("*.example")], carry(proxy()))], direct(), false),
            (vec![rule(vec![host("*.other")], carry(proxy()))], direct(), true),
            (vec![rule(vec![host("a.example")], direct())], carry(proxy()), true),
            (vec![rule(vec![host("a.example"), port()], direct())], carry(proxy()), false),
            (vec![rule(vec![host("a.example"), port()], direct())], Action::Deny, true),
            (vec![rule(vec![port()], carry(proxy()))], direct(), false),
            (vec![rule(vec![host("a.example")], Action::Deny)], direct(), false),
            (vec![rule(vec![port()], Action::Deny)], direct(), true),
            (vec![rule(vec![Condition::Intercept(vec![Intercept::Socks])], carry(proxy()))], direct(), true),
        ] {
            let policy = Policy::new(rules.clone(), default.clone());
            let name = HostName::from_bytes(b"a.example").unwrap();
            assert_eq!(policy.resolves_here(&name, Intercept::Run), expected, "{rules:?} {default:?}");
        }
    }
}
