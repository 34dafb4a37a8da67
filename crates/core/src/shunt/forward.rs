//! What the packet filter can say of forwarded flows by addresses and ports alone: which of our own rules deny them from the
//! first packet on.

use crate::flow::Intercept;
use crate::net::{IpSet, PortSet};
use crate::policy::{Action, Condition, KernelMatch, Match, Policy};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// One line of the packet filter. The first line that matches a flow decides about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardLine {
    /// The rule's name.
    pub rule: Arc<str>,
    /// Which flows, by the addresses of their first packet.
    pub matches: KernelMatch,
    /// The flow is dropped; else no later line is for it.
    pub deny: bool,
}

impl ForwardLine {
    /// The lines of a policy, up to the last that denies. A rule whose other conditions only the shunt can look at (the
    /// process) keeps its flows from later lines: the shunt decides about those.
    pub fn of(policy: &Policy) -> Vec<Self> {
        let line = |rule: &crate::policy::Rule| {
            let (matches, decided) = addresses(&rule.matcher)?;
            let deny = decided && rule.action == Action::Deny;
            Some(Self { rule: rule.name.clone(), matches, deny })
        };
        let mut lines: Vec<_> = policy.rules().iter().filter_map(line).collect();
        let last = lines.iter().rposition(|line| line.deny).map_or(0, |last| last + 1);
        lines.truncate(last);
        lines
    }

    /// Whether the lines drop a flow.
    pub fn drops(lines: &[Self], client: IpAddr, server: SocketAddr) -> bool {
        lines.iter().find(|line| line.matches.contains(client, server)).is_some_and(|line| line.deny)
    }
}

/// The addresses and ports that a rule asks for, and whether it asks for nothing else; `None` if it matches no forwarded flow.
fn addresses(matcher: &Match) -> Option<(KernelMatch, bool)> {
    let mut matches = KernelMatch::default();
    let mut decided = true;
    for condition in matcher.conditions() {
        let only = match condition {
            Condition::From(set) => KernelMatch { from: Some(set.clone()), ..KernelMatch::default() },
            Condition::To(set) => KernelMatch { to: Some(set.clone()), ..KernelMatch::default() },
            Condition::Port(set) => KernelMatch { port: Some(set.clone()), ..KernelMatch::default() },
            Condition::Process(_) | Condition::Uid(_) => {
                decided = false;
                continue;
            }
            Condition::Intercept(kinds) if kinds.contains(&Intercept::Kernel) => continue,
            // No listener caught it, and nothing is known of its bytes.
            Condition::Intercept(_)
            | Condition::Listener(_)
            | Condition::SocksUser(_)
            | Condition::Host(_)
            | Condition::HostFile(_)
            | Condition::HostContains(_)
            | Condition::Url(_) => return None,
        };
        matches = matches.intersection(&only)?;
    }
    let is_some = matches.from.as_ref().is_none_or(|set| !IpSet::is_empty(set))
        && matches.to.as_ref().is_none_or(|set| !IpSet::is_empty(set))
        && matches.port.as_ref().is_none_or(|set| !PortSet::is_empty(set));
    is_some.then_some((matches, decided))
}
