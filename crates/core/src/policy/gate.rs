//! Policy about the addresses that are dialled: those that a name resolved to, and those that are never dialled.
//!
//! Rules see names, but the kernel dials addresses. A rule `deny to = "10.0.0.0/8"` must also apply to a client that
//! sends a name which resolves to such an address. This second check ensures that.

use super::condition::{Condition, HostPattern, Truth};
use super::{Action, Carry, Policy, Rule, Seen};
use crate::carrier::Carrier;
use crate::flow::{Destination, Flow, Host, HostName};
use crate::net::{IpNet, IpSet, embedded_v4};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// Networks that are not dialled unless a rule names them: this network and host, link-local addresses, and the
/// addresses at which clouds give machines their credentials. Loopback is forbidden only for clients on other hosts.
pub const NEVER_DIAL: [&str; 12] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    // Alibaba Cloud, Azure, Oracle Cloud. Most others use 169.254.169.254.
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "::",
    "::1",
    "fe80::/10",
    // Amazon, Google, Scaleway.
    "fd00:ec2::254",
    "fd20:ce::254",
    "fd00:42::42",
];

/// Returns the networks of [`NEVER_DIAL`].
pub fn never_dial() -> IpSet {
    NEVER_DIAL.iter().filter_map(|net| net.parse().ok()).collect()
}

/// The part of policy about addresses that is prepared once for each policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    /// The networks that are not dialled unless a rule names them.
    never: IpSet,
    /// All networks that some rule denies. Other addresses need no second check of the rules.
    denied: IpSet,
    /// A rule that denies by network also needs the process.
    asks_process: bool,
}

/// An address to be dialled for a flow, and what is known of both.
#[derive(Clone, Copy, Debug)]
pub struct Dialled<'a> {
    /// The flow. Its process is set if [`Policy::asks_process_of_addresses`].
    pub flow: &'a Flow,
    /// What is known of its first bytes.
    pub seen: Seen<'a>,
    /// The `Carry` of the rule that carries the flow: the same object, because it is compared by reference.
    pub carry: &'a Carry,
    /// The address.
    pub ip: IpAddr,
    /// The name that was resolved to this address. `None` if policy has already seen the address. A name that the
    /// client claims (a Host field, SNI) does not count.
    pub name: Option<&'a HostName>,
    /// The configuration names the destination, not the client.
    pub is_configured: bool,
}

/// Why an address is not dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denied {
    /// A rule that denies matches it.
    Rule {
        /// The address.
        ip: IpAddr,
        /// The reason in words: `rule 'x'`.
        why: Arc<str>,
    },
    /// It is in this network of `never_dial`, and no rule names it.
    Never {
        /// The address.
        ip: IpAddr,
        /// The network.
        net: IpNet,
    },
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule { ip, why } => write!(f, "the address {ip}: {why}"),
            Self::Never { ip, net } => write!(
                f,
                "the address {ip} is in {net} of `never_dial`; a rule whose `match` names the network (`to`) or the exact \
                 host (`host`) allows it"
            ),
        }
    }
}

impl Addresses {
    pub(super) fn new(rules: &[Rule], never: IpSet) -> Self {
        let by_network = |rule: &&Rule| rule.action == Action::Deny && rule.networks().is_some();
        let denied = rules.iter().filter(by_network).filter_map(Rule::networks);
        let denied = denied.flat_map(|set| set.nets()).copied().collect();
        let asks_process = rules.iter().filter(by_network).any(Rule::asks_process);
        Self { never, denied, asks_process }
    }

    fn may_be_denied(&self, ip: IpAddr) -> bool {
        forms(ip).any(|ip| self.never.contains(ip) || self.denied.contains(ip))
    }
}

/// Returns the address, and the IPv4 address that a translator (NAT64) would derive from it.
fn forms(ip: IpAddr) -> impl Iterator<Item = IpAddr> {
    std::iter::once(ip).chain(embedded_v4(ip).map(IpAddr::V4))
}

impl Rule {
    /// Returns the first condition that keeps the rule from matching.
    pub(super) fn obstacle(&self, flow: &Flow, seen: Seen<'_>) -> Option<(&Condition, Truth)> {
        self.matcher.first_obstacle(flow, seen, self.action == Action::Deny)
    }

    /// Whether the rule names processes or users of this host.
    pub(super) fn asks_process(&self) -> bool {
        let of_process =
            |condition: &Condition| matches!(condition, Condition::Process(_) | Condition::Uid(_));
        self.matcher.conditions().iter().any(of_process)
    }

    /// Returns the destination networks that the rule names, if any.
    fn networks(&self) -> Option<&IpSet> {
        self.matcher.conditions().iter().find_map(|condition| match condition {
            Condition::To(set) => Some(set),
            _ => None,
        })
    }

    /// Whether the rule names exactly this host.
    fn names_host(&self, host: &HostName) -> bool {
        let is_it = |pattern: &HostPattern| matches!(pattern, HostPattern::Exact(name) if name == host);
        self.matcher.conditions().iter().any(|condition| match condition {
            Condition::Host(patterns) => patterns.iter().any(is_it),
            _ => false,
        })
    }

    /// Whether the rule names a network inside `never` that contains the address. A rule for all addresses does not
    /// count.
    fn names_network(&self, never: &IpSet, ip: IpAddr) -> bool {
        self.networks()
            .is_some_and(|to| to.nets().iter().any(|net| net.contains(ip) && never.covers_net(*net)))
    }
}

impl Policy {
    /// Returns the same policy with other networks that are not dialled unless a rule names them. Default:
    /// [`never_dial`].
    #[must_use]
    pub fn with_never_dial(mut self, never: IpSet) -> Self {
        self.addresses = Addresses::new(&self.rules, never);
        self
    }

    /// Returns the networks that are not dialled unless a rule names them.
    pub const fn never_dial(&self) -> &IpSet {
        &self.addresses.never
    }

    /// Whether a rule that denies by network needs the process behind a flow. [`Policy::admits`] must then know it.
    pub const fn asks_process_of_addresses(&self) -> bool {
        self.addresses.asks_process
    }

    /// Whether a rule denies destinations by network.
    pub fn denies_networks(&self) -> bool {
        !self.addresses.denied.is_empty()
    }

    /// Whether [`Policy::admits`] could deny this address to any flow.
    pub fn may_be_denied(&self, ip: IpAddr) -> bool {
        self.addresses.may_be_denied(ip.to_canonical())
    }

    /// Checks whether an address may be dialled for a flow that policy has let pass. Allocates no memory for an
    /// address that is in no network of `never_dial` or of a rule that denies.
    ///
    /// Rules that deny by network are checked first, wherever they stand. Only an earlier rule that carries and names
    /// the address (by `to`) or the exact host (by `host`) overrides them. `is_local` tells whether the client is on
    /// this host. It is called for loopback addresses only.
    ///
    /// # Errors
    /// Fails if the address must not be dialled.
    pub fn admits(&self, dialled: &Dialled<'_>, is_local: impl Fn() -> bool) -> Result<(), Denied> {
        let ip = dialled.ip.to_canonical();
        if !self.addresses.may_be_denied(ip) {
            return Ok(());
        }
        for form in forms(ip) {
            self.ask_never(dialled, form, &is_local)?;
            if dialled.name.is_some() || form != ip {
                self.ask_rules(dialled.flow, dialled.seen, dialled.name, form)?;
            }
        }
        Ok(())
    }

    fn ask_never(
        &self,
        dialled: &Dialled<'_>,
        ip: IpAddr,
        is_local: &impl Fn() -> bool,
    ) -> Result<(), Denied> {
        let never = &self.addresses.never;
        if dialled.is_configured || !never.contains(ip) || ip.is_loopback() && is_local() {
            return Ok(());
        }
        let names = |rule: &Rule| {
            rule.names_network(never, ip) || dialled.name.is_some_and(|host| rule.names_host(host))
        };
        let at = Flow { orig_dst: at(dialled.flow, ip), ..dialled.flow.clone() };
        // Either the rule that carries the flow allows the address, or an earlier rule that matches the address.
        let is_deciding = |rule: &&Rule| matches!(&rule.action, Action::Carry(carry) if std::ptr::eq(&**carry, dialled.carry));
        let deciding = self.rules.iter().position(|rule| is_deciding(&rule));
        let before = deciding.map_or(self.rules.len(), |index| index + 1);
        let allows = self.rules.iter().take(before).any(|rule| {
            let carries = matches!(rule.action, Action::Carry(_)) && names(rule);
            carries && (is_deciding(&rule) || rule.obstacle(&at, dialled.seen).is_none())
        });
        if allows {
            return Ok(());
        }
        let net = never.nets().iter().copied().find(|net| net.contains(ip));
        Err(Denied::Never { ip, net: net.unwrap_or_else(|| ip.into()) })
    }

    /// Checks an address of a flow that another node caught and that this node is to deliver.
    ///
    /// Rules that deny by network are checked first, as in [`Policy::admits`]. Then all rules are checked in order,
    /// with the address as the destination, and the first that matches decides. A flow that no rule matches passes:
    /// the default is for flows that this node caught itself.
    ///
    /// # Errors
    /// A deny rule matches.
    pub fn delivers(&self, flow: &Flow, ip: IpAddr) -> Result<(), Denied> {
        if self.rules.is_empty() {
            return Ok(());
        }
        let name = match &flow.orig_dst.host {
            Host::Name(name) => Some(name),
            Host::Ip(_) => None,
        };
        let (ip, seen) = (ip.to_canonical(), Seen::FirstBytes(flow.host.as_ref()));
        for form in forms(ip) {
            self.ask_rules(flow, seen, name, form)?;
            let at =
                Flow { orig_dst: at(flow, form), host: flow.host.clone().or(name.cloned()), ..flow.clone() };
            let decides = |(rule, _): &(&Rule, &Arc<str>)| rule.obstacle(&at, seen).is_none();
            if let Some((Rule { action: Action::Deny, .. }, why)) =
                self.rules.iter().zip(&self.whys).find(decides)
            {
                return Err(Denied::Rule { ip: form, why: why.clone() });
            }
        }
        Ok(())
    }

    fn ask_rules(
        &self,
        flow: &Flow,
        seen: Seen<'_>,
        name: Option<&HostName>,
        ip: IpAddr,
    ) -> Result<(), Denied> {
        if !self.addresses.denied.contains(ip) {
            return Ok(());
        }
        let at = Flow { orig_dst: at(flow, ip), ..flow.clone() };
        for (rule, why) in self.rules.iter().zip(&self.whys) {
            let obstacle = rule.obstacle(&at, seen).map(|(_, truth)| truth);
            match &rule.action {
                // An unknown fact must not let the flow pass.
                Action::Deny if rule.networks().is_some() && obstacle != Some(Truth::Fails) => {
                    return Err(Denied::Rule { ip, why: why.clone() });
                }
                Action::Carry(_) if obstacle.is_none() => {
                    let by_host = || name.is_some_and(|host| rule.names_host(host));
                    if rule.networks().is_some() || by_host() {
                        return Ok(());
                    }
                }
                Action::Deny | Action::Carry(_) => {}
            }
        }
        Ok(())
    }
}

/// Returns the flow's destination with the address that its name resolved to.
fn at(flow: &Flow, ip: IpAddr) -> Destination {
    Destination { host: ip.into(), port: flow.orig_dst.port, zone: 0 }
}

impl Carry {
    /// Whether the last hop resolves the names of destinations, so that only its rules see their addresses.
    pub fn passes_names_on(&self) -> bool {
        self.carrier != Carrier::Direct && self.resolve == super::Resolve::Proxy && self.to.is_none()
    }
}
