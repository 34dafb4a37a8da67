//! `[shunt]`, checked.

use sidetrack_core::openflow::{SwitchPorts, Version};
use sidetrack_core::policy::{Action, Carry, Policy, Rule};
use sidetrack_core::shunt::{MarkActions, PortNumber, RuleSet};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Which fast path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShuntPath {
    /// tc.
    Tc,
    /// XDP in the driver.
    Xdp,
    /// XDP behind the driver.
    XdpGeneric,
    /// A switch.
    OpenFlow(ShuntSwitch),
    /// None: what would be shunted is shown.
    None,
}

/// A switch that is controlled by OpenFlow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShuntSwitch {
    /// Where it connects to.
    pub listen: Vec<SocketAddr>,
    /// Connections from other addresses are refused; none: any.
    pub from: Option<IpAddr>,
    /// Versions that may be spoken.
    pub versions: BTreeSet<Version>,
    /// Its ports, by the number in marks.
    pub ports: BTreeMap<PortNumber, SwitchPorts>,
    /// Everything that it has is deleted when it first connects.
    pub clear_at_start: bool,
    /// Everything that it has is deleted at the end.
    pub clear_at_end: bool,
    /// Entries that lead from fast to slow ports and back are ours to install.
    pub pairs: bool,
}

/// The shunt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shunt {
    /// Which fast path.
    pub fast_path: ShuntPath,
    /// The ports are those of a bridge; else the host routes between them.
    pub bridged: bool,
    /// After so long without a packet a shunted flow is inspected again, milliseconds.
    pub idle_timeout_ms: u64,
    /// The same for a blocked flow, milliseconds.
    pub block_idle_timeout_ms: u64,
    /// Most flows on the fast path.
    pub entries_max: usize,
    /// Most of them of one client.
    pub entries_max_per_client: usize,
    /// What the numbers in marks mean.
    pub actions: MarkActions,
    /// The interfaces, by their number in marks; with a switch not every port has one.
    pub ports: BTreeMap<PortNumber, String>,
    /// Entries stay in force while the shunt hangs; else the program stops believing them.
    pub keep_when_stalled: bool,
    /// The rules, as far as they are about shunting; none if none says `shunt`.
    pub rules: Option<Arc<Policy>>,
}

impl Shunt {
    /// Ten seconds, as NFShunt.
    pub const IDLE_TIMEOUT_MS: u64 = 10_000;
    /// Flows on the fast path.
    pub const ENTRIES_MAX: usize = 65_536;

    /// Does something with the rules that this shunt needs.
    pub fn with_rules<T>(&self, work: impl FnOnce(&RuleSet<'_>) -> T) -> T {
        let ports: Vec<_> = self.ports.iter().map(|(number, name)| (*number, name.as_str())).collect();
        let own_rules = self.rules.is_some();
        work(&RuleSet { ports: &ports, bridged: self.bridged, actions: self.actions, own_rules })
    }

    /// What rules say of shunting, without the rest: a change of the rest is none for the shunt. Rules behind the last that
    /// shunts say nothing.
    pub(super) fn rules_of(policy: &Policy) -> Option<Arc<Policy>> {
        let shunts = |rule: &Rule| matches!(&rule.action, Action::Carry(carry) if carry.shunt.is_some());
        let last = policy.rules().iter().rposition(shunts)?;
        let rules = policy.rules().iter().take(last + 1).map(|rule| {
            let action = match &rule.action {
                Action::Deny => Action::Deny,
                Action::Carry(carry) => {
                    Action::Carry(Arc::new(Carry { shunt: carry.shunt, ..Carry::default() }))
                }
            };
            Rule { action, ..rule.clone() }
        });
        Some(Arc::new(Policy::new(rules.collect(), Action::default())))
    }
}
