//! Which forwarded flows our own rules deny by addresses and ports alone. The packet filter can drop these from the
//! first packet on.

use crate::flow::Intercept;
use crate::net::{IpSet, PortSet};
use crate::policy::{Action, Condition, KernelMatch, Match, Policy};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// One line for the packet filter. The first matching line decides about a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardLine {
    /// The name of the rule.
    pub rule: Arc<str>,
    /// The flows that match, by the addresses of their first packet.
    pub matches: KernelMatch,
    /// If true, the flow is dropped. Otherwise later lines do not apply to it.
    pub deny: bool,
}

impl ForwardLine {
    /// Returns the lines of a policy, up to the last one that denies. Some rules have conditions that only the shunt
    /// can check (the process). Such a rule exempts its flows from later lines, and the shunt decides about them.
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

    /// Whether the lines drop this flow.
    pub fn drops(lines: &[Self], client: IpAddr, server: SocketAddr) -> bool {
        lines.iter().find(|line| line.matches.contains(client, server)).is_some_and(|line| line.deny)
    }
}

/// Returns the addresses and ports that a rule requires, and whether it requires nothing else. `None` if the rule
/// never matches a forwarded flow.
fn addresses(matcher: &Match) -> Option<(KernelMatch, bool)> {
    let mut matches = KernelMatch::default();
    let mut decided = true;
    for condition in matcher.conditions() {
        let only = match condition {
            Condition::From(set) => KernelMatch { from: Some(set.clone()), ..KernelMatch::default() },
            Condition::To(set) => KernelMatch { to: Some(set.clone()), ..KernelMatch::default() },
            Condition::Port(set) => KernelMatch { port: Some(set.clone()), ..KernelMatch::default() },
            Condition::Process(_) | Condition::Uid(_) | Condition::Protocol(_) => {
                decided = false;
                continue;
            }
            Condition::Intercept(kinds) if kinds.contains(&Intercept::Kernel) => continue,
            // No listener caught the flow, and its bytes are not visible.
            Condition::Intercept(_)
            | Condition::Listener(_)
            | Condition::SocksUser(_)
            | Condition::Host(_)
            | Condition::HostFile(_)
            | Condition::HostContains(_)
            | Condition::AskedName(_)
            | Condition::Url(_) => return None,
        };
        matches = matches.intersection(&only)?;
    }
    let is_some = matches.from.as_ref().is_none_or(|set| !IpSet::is_empty(set))
        && matches.to.as_ref().is_none_or(|set| !IpSet::is_empty(set))
        && matches.port.as_ref().is_none_or(|set| !PortSet::is_empty(set));
    is_some.then_some((matches, decided))
}
