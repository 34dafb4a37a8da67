//! Compiles lists to policy rules.
//!
//! The order of the rules is the order of decisions:
//!
//! | rules | flow by address | flow by name |
//! |---|---|---|
//! | `deny ENTRY` | matches a network | matches a name |
//! | `allow ENTRY` of networks inside the closed ones | matches | - |
//! | [`CLOSED_RULE`]: the closed networks | refused | the gate refuses an address that it resolves to |
//! | all other `allow ENTRY` | matches a network | matches a name |
//! | the default | refused | refused |
//!
//! Names count only if the command asked for them. So a connection to an address is never let through because its first bytes
//! claim a name, and no rule waits for first bytes.

use super::Lists;
use super::entry::{Entry, Target};
use crate::net::{IpSet, PortSet};
use crate::policy::{Action, Carry, Condition, HostPattern, Match, Policy, Rule, never_dial};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// The name of the rule that refuses the closed networks.
pub const CLOSED_RULE: &str = "closed: this host, link-local and metadata addresses";

/// Most rules of a jail and a configuration together.
pub const RULES_MAX: usize = 20_000;

/// A jail and a configuration have more than [`RULES_MAX`] rules together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the lists and the configuration have more than {RULES_MAX} rules together (each entry of `allow` times each rule)"
)]
pub struct TooManyRules;

/// Begins the name of each rule that carries what would be refused without `--audit`.
pub const WOULD_REFUSE: &str = "would refuse: ";

/// How a command is confined.
#[derive(Clone, Debug, Default)]
pub struct Jail {
    /// What is allowed and what is not.
    pub lists: Lists,
    /// Whether all that no list names is refused. Otherwise it is carried.
    pub closed: bool,
    /// Carry what would be refused, under a rule whose name begins with [`WOULD_REFUSE`].
    pub audit: bool,
    /// How allowed flows are carried.
    pub carry: Carry,
}

/// Returns the networks that are closed unless an entry names them: the loopback of this host, link-local addresses, and
/// those where clouds give machines their credentials.
pub fn closed_networks() -> IpSet {
    never_dial()
}

impl Jail {
    /// Returns the rules as a policy.
    pub fn policy(&self) -> Policy {
        let mut rules = Vec::new();
        let mut seen = BTreeSet::new();
        // Networks first: they are decided at once, and names may need the first bytes.
        let (by_address, by_name): (Vec<_>, Vec<_>) =
            self.lists.deny.iter().partition(|entry| networks(&entry.target).is_some());
        for entry in by_address.into_iter().chain(by_name) {
            let named: fn(_) -> _ = if self.closed { Condition::AskedName } else { Condition::Host };
            let refused = (self.refuse(), conditions(entry, named));
            self.add(&mut rules, &mut seen, format!("deny {entry}"), refused);
        }
        if self.closed {
            let closed = closed_networks();
            let is_inside = |entry: &&Entry| networks(&entry.target).is_some_and(|set| closed.covers(&set));
            let (inside, others): (Vec<_>, Vec<_>) = self.lists.allow.iter().partition(is_inside);
            for entry in inside {
                self.allow(&mut rules, &mut seen, entry);
            }
            let refused = (self.refuse(), vec![Condition::To(closed)]);
            self.add(&mut rules, &mut seen, CLOSED_RULE.to_owned(), refused);
            for entry in others {
                self.allow(&mut rules, &mut seen, entry);
            }
        }
        if self.closed && self.audit {
            self.add(&mut rules, &mut seen, "not allowed".to_owned(), (self.refuse(), Vec::new()));
        }
        let default = if self.closed && !self.audit { Action::Deny } else { self.carried() };
        let policy = Policy::new(rules, default);
        if self.audit { policy.with_never_dial(IpSet::default()) } else { policy }
    }

    /// Returns the rules of the jail before those of a configuration: what one of both refuses is refused, and `base` decides how the
    /// rest is carried. `carry` does not count.
    ///
    /// # Errors
    /// There are too many rules.
    pub fn policy_before(&self, base: &Policy) -> Result<Policy, TooManyRules> {
        let own = self.policy();
        let mut rules = Vec::new();
        for rule in own.rules() {
            match rule.action {
                Action::Deny => rules.push(rule.clone()),
                Action::Carry(_) => {
                    rules.extend(base.rules().iter().map(|second| both(rule, Some(second), base)))
                }
            }
            if matches!(rule.action, Action::Carry(_)) {
                rules.push(both(rule, None, base));
            }
            if rules.len() > RULES_MAX {
                return Err(TooManyRules);
            }
        }
        let default = match own.default_action() {
            Action::Deny => Action::Deny,
            Action::Carry(_) => {
                rules.extend(base.rules().iter().cloned());
                base.default_action().clone()
            }
        };
        let never = if self.closed { own.never_dial() } else { base.never_dial() }.clone();
        Ok(Policy::new(rules, default).with_first_bytes_ms(base.first_bytes_ms()).with_never_dial(never))
    }

    /// Each rule has its own `Carry`: the gate tells rules apart by it.
    fn carried(&self) -> Action {
        Action::Carry(Arc::new(self.carry.clone()))
    }

    fn refuse(&self) -> Action {
        if self.audit { self.carried() } else { Action::Deny }
    }

    fn allow(&self, rules: &mut Vec<Rule>, seen: &mut BTreeSet<String>, entry: &Entry) {
        let what = (self.carried(), conditions(entry, Condition::AskedName));
        Self::push(rules, seen, format!("allow {entry}"), what);
    }

    /// Adds a rule that refuses.
    fn add(
        &self,
        rules: &mut Vec<Rule>,
        seen: &mut BTreeSet<String>,
        name: String,
        what: (Action, Vec<Condition>),
    ) {
        let name = if self.audit { format!("{WOULD_REFUSE}{name}") } else { name };
        Self::push(rules, seen, name, what);
    }

    /// The name of a rule says all that it does: a second rule of the same name would be the same.
    fn push(
        rules: &mut Vec<Rule>,
        seen: &mut BTreeSet<String>,
        name: String,
        what: (Action, Vec<Condition>),
    ) {
        if seen.insert(name.clone()) {
            rules.push(Rule { name: name.into(), action: what.0, matcher: Match::new(what.1) });
        }
    }
}

/// The rule for flows that both rules match, with the action of the second one. `None`: what no rule of `base` matches.
fn both(first: &Rule, second: Option<&Rule>, base: &Policy) -> Rule {
    let (name, action, more) = match second {
        Some(second) => (&*second.name, &second.action, second.matcher.conditions()),
        None => ("default", base.default_action(), &[][..]),
    };
    let action = match action {
        Action::Deny => Action::Deny,
        // Each rule has its own.
        Action::Carry(carry) => Action::Carry(Arc::new((**carry).clone())),
    };
    let conditions = [first.matcher.conditions(), more].concat();
    Rule { name: format!("{}; {name}", first.name).into(), action, matcher: Match::new(conditions) }
}

/// The networks that a target means. A name below `localhost` is this host's loopback, whatever a resolver says.
fn networks(target: &Target) -> Option<IpSet> {
    match target {
        Target::Network(net) => Some([*net].into_iter().collect()),
        Target::Name(HostPattern::Exact(name)) if name.is_localhost() => {
            let both: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
            Some(both.into_iter().map(Into::into).collect())
        }
        Target::Any | Target::Name(_) => None,
    }
}

fn conditions(entry: &Entry, named: impl Fn(Vec<HostPattern>) -> Condition) -> Vec<Condition> {
    let mut all = vec![Condition::Protocol(entry.protocol)];
    all.extend(entry.ports.map(|ports| Condition::Port([ports].into_iter().collect::<PortSet>())));
    match (networks(&entry.target), &entry.target) {
        (Some(set), _) => all.push(Condition::To(set)),
        (None, Target::Name(pattern)) => all.push(named(vec![pattern.clone()])),
        (None, _) => {}
    }
    all
}
