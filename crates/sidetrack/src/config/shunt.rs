//! `[shunt]`, checked.

use sidetrack_core::flow::Process;
use sidetrack_core::openflow::{SwitchPorts, Version};
use sidetrack_core::policy::{Action, Carry, Policy, Rule};
use sidetrack_core::shunt::{
    FastPathKind, ForwardLine, MarkActions, PortNumber, RuleSet, Transport, Tuple, WhenFull, Wish,
};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The fast path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShuntPath {
    /// tc.
    Tc,
    /// XDP in the driver.
    Xdp,
    /// XDP after the driver (generic).
    XdpGeneric,
    /// A switch.
    OpenFlow(ShuntSwitch),
    /// A flow table of nftables.
    Flowtable,
    /// None: only shows what would be shunted.
    None,
}

impl ShuntPath {
    /// Its kind.
    pub const fn kind(&self) -> FastPathKind {
        match self {
            Self::Tc => FastPathKind::Tc,
            Self::Xdp => FastPathKind::Xdp,
            Self::XdpGeneric => FastPathKind::XdpGeneric,
            Self::OpenFlow(_) => FastPathKind::OpenFlow,
            Self::Flowtable => FastPathKind::Flowtable,
            Self::None => FastPathKind::None,
        }
    }
}

/// A switch, or several, controlled by OpenFlow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShuntSwitch {
    /// The addresses of this host to which it connects.
    pub listen: Vec<SocketAddr>,
    /// Connections from other addresses are rejected. `None`: any address may connect.
    pub from: Option<IpAddr>,
    /// The allowed versions.
    pub versions: BTreeSet<Version>,
    /// Its ports, by the number in marks. With several switches, each has its own.
    pub ports: BTreeMap<PortNumber, SwitchPorts>,
    /// Whether all its entries are deleted when it first connects.
    pub clear_at_start: bool,
    /// Whether all its entries are deleted at the end.
    pub clear_at_end: bool,
    /// Whether we install the entries that connect fast and slow ports.
    pub pairs: bool,
    /// Whether we become its master.
    pub master: bool,
    /// Whether other controllers have entries there.
    pub shared: bool,
    /// The table of our entries.
    pub table: u8,
    /// The switches, if there are several.
    pub members: Vec<SwitchMember>,
}

impl ShuntSwitch {
    /// Returns the numbers of the ports of all switches.
    pub fn all_ports(&self) -> impl Iterator<Item = PortNumber> + '_ {
        let members = self.members.iter().flat_map(|member| member.ports.keys());
        self.ports.keys().chain(members).copied()
    }
}

/// One of several switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchMember {
    /// Its name.
    pub name: String,
    /// The address it connects from.
    pub address: IpAddr,
    /// Its ports, by the number in marks.
    pub ports: BTreeMap<PortNumber, SwitchPorts>,
    /// The switches beside it by their position, each with the port that leads there.
    pub links: Vec<(usize, u32)>,
}

/// The shunt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shunt {
    /// The fast paths, one of each kind. The first is for flows for which nothing names another.
    pub fast_paths: Vec<ShuntPath>,
    /// Whether the ports belong to a bridge. Otherwise the host routes between them.
    pub bridged: bool,
    /// A shunted flow is inspected again after this time without a packet, milliseconds.
    pub idle_timeout_ms: u64,
    /// If the table is full, a blocked flow without a packet for this time is replaced, milliseconds.
    pub block_idle_timeout_ms: u64,
    /// Most flows on the fast path.
    pub entries_max: usize,
    /// Most flows of one client on the fast path.
    pub entries_max_per_client: usize,
    /// What happens to a flow for which there is no entry.
    pub when_full: WhenFull,
    /// The meaning of the numbers in marks.
    pub actions: MarkActions,
    /// The interfaces, by their number in marks. With a switch, not every port has one.
    pub ports: BTreeMap<PortNumber, String>,
    /// With tc: packets to an end of a pair are moved directly to the other end in its network namespace.
    pub redirect_peer: bool,
    /// Whether entries stay in force while the shunt hangs. Otherwise the program in the kernel ignores them.
    pub keep_when_stalled: bool,
    /// The part of the rules about forwarded flows. `None` if no rule shunts or denies any.
    pub rules: Option<Arc<Policy>>,
}

impl Shunt {
    /// Whether it listens for a switch on a port that an ordinary user may not bind.
    pub fn has_low_port(&self) -> bool {
        self.fast_paths.iter().any(|path| match path {
            ShuntPath::OpenFlow(switch) => switch.listen.iter().any(|at| matches!(at.port(), 1..1024)),
            _ => false,
        })
    }

    /// Ten seconds, as in NFShunt.
    pub const IDLE_TIMEOUT_MS: u64 = 10_000;
    /// Default for flows on the fast path.
    pub const ENTRIES_MAX: usize = 65_536;

    /// Calls `work` with the packet filter rules that this shunt needs.
    pub fn with_rules<T>(&self, work: impl FnOnce(&RuleSet<'_>) -> T) -> T {
        let ports: Vec<_> = self.ports.iter().map(|(number, name)| (*number, name.as_str())).collect();
        let lines = self.rules.as_ref().map(|rules| ForwardLine::of(rules)).unwrap_or_default();
        let own_rules = self.rules.is_some();
        let (bridged, actions) = (self.bridged, self.actions);
        work(&RuleSet { ports: &ports, bridged, actions, own_rules, lines: &lines })
    }

    /// Returns the part of the rules about forwarded flows: which are shunted, and which are denied. `None` if
    /// all are left alone. Other changes in the rules do not affect the shunt.
    pub(super) fn rules_of(policy: &Policy) -> Option<Arc<Policy>> {
        let part = |action: &Action| match action {
            Action::Deny => Action::Deny,
            Action::Carry(carry) => {
                // The wire is for flows of listeners.
                let shunt = carry.shunt.filter(|after| after.fast_path != Some(FastPathKind::Wire));
                Action::Carry(Arc::new(Carry { shunt, ..Carry::default() }))
            }
        };
        let rules = policy.rules().iter();
        let rules: Vec<_> = rules.map(|rule| Rule { action: part(&rule.action), ..rule.clone() }).collect();
        let default = part(policy.default_action());
        let says = |action: &Action| *action != Action::default();
        let any = rules.iter().any(|rule| says(&rule.action)) || says(&default);
        any.then(|| Arc::new(Policy::new(rules, default)))
    }

    /// What the rules decide about a forwarded flow. `None` if no mark leaves flows to the rules.
    pub fn forwarded(&self, tuple: &Tuple, process: &Process) -> Option<Wish> {
        let rules = self.rules.as_ref().filter(|_| self.actions.rules_number().is_some())?;
        let known = match tuple.transport {
            Transport::Tcp => process.clone(),
            Transport::Udp => Process::default(),
        };
        Wish::of(rules, tuple, Some(&known))
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use sidetrack_core::policy::Action;
    use sidetrack_core::shunt::FastPathKind;

    fn read(shunt: &str, rule: &str) -> Result<super::Shunt, String> {
        let text = format!(
            "version = 1\ndefault = \"deny\"\n[shunt]\nforwarding = \"bridged\"\n{shunt}\n[[shunt.port]]\nnumber = 1\ninterface = \"a\"\n\
             [[shunt.port]]\nnumber = 2\ninterface = \"b\"\n[[rule]]\nname = \"r\"\ncarrier = \"direct\"\n\
             match = {{ port = 22 }}\nshunt = {{ {rule} }}\n"
        );
        let config = Config::from_text("test", &text).map_err(|error| error.render(false))?;
        Ok(config.shunt.expect("a shunt"))
    }

    #[test]
    fn several_fast_paths_stand_side_by_side_and_rules_and_marks_name_one() {
        let shunt = read(
            "fast_path = [\"tc\", \"xdp\", \"none\"]\nactions = { 1 = \"shunt\", 3 = \"rules\", 4 = \"xdp\", 5 = \"none\" }",
            "fast_path = \"none\"",
        )
        .unwrap();
        let kinds: Vec<_> = shunt.fast_paths.iter().map(super::ShuntPath::kind).collect();
        assert_eq!(kinds, [FastPathKind::Tc, FastPathKind::Xdp, FastPathKind::None]);
        assert_eq!((shunt.actions.path(4), shunt.actions.path(1)), (Some(FastPathKind::Xdp), None));
        let rules = shunt.rules.clone().unwrap();
        let Action::Carry(carry) = &rules.rules()[0].action else { panic!("it carries") };
        assert_eq!(carry.shunt.and_then(|after| after.fast_path), Some(FastPathKind::None));
        let text = shunt.with_rules(|rules| rules.nft());
        assert!(text.contains("tcp dport 5004") && text.contains("comment \"by xdp\""), "{text}");
        let text = shunt.with_rules(|rules| rules.iptables());
        assert!(text.contains("--dport 5004") && text.contains("--comment \"by xdp\""), "{text}");
    }

    #[test]
    fn one_is_enough_and_none_is_tc() {
        let kinds = |shunt: &str| {
            let shunt = read(shunt, "").unwrap();
            shunt.fast_paths.iter().map(super::ShuntPath::kind).collect::<Vec<_>>()
        };
        assert_eq!(kinds(""), [FastPathKind::Tc]);
        assert_eq!(kinds("fast_path = \"xdp\""), [FastPathKind::Xdp]);
        assert!(
            read("", "").unwrap().redirect_peer && !read("redirect_peer = false", "").unwrap().redirect_peer
        );
    }

    #[test]
    fn fast_paths_that_are_not_there_or_exclude_each_other_are_said() {
        for (shunt, rule, word) in [
            ("", "fast_path = \"xdp\"", "write `fast_path = [\"tc\", \"xdp\"]`"),
            ("actions = { 3 = \"rules\", 4 = \"none\" }", "", "the shunt has no fast path \"none\""),
            ("fast_path = [\"tc\", \"tc\"]", "", "named twice"),
            ("fast_path = [\"xdp\", \"xdp-generic\"]", "", "in its driver or behind it, not both"),
            ("fast_path = []", "", "no fast path in this list"),
            ("fast_path = \"flowtable\"", "", "it does not pass frames of a bridge"),
            ("fast_path = [\"tc\", \"openflow\"]", "", "where the switch connects to"),
            (
                "fast_path = \"openflow\"\nopenflow = { listen = [\"192.0.2.1:1\"], versions = [\"1.0\"], role = \"master\" }",
                "",
                "has no roles",
            ),
        ] {
            let error = read(shunt, rule).expect_err(word);
            assert!(error.contains(word), "{error}");
        }
    }
}
