//! `[shunt]`, checked.

use sidetrack_core::flow::Process;
use sidetrack_core::openflow::{SwitchPorts, Version};
use sidetrack_core::policy::{Action, Carry, Policy, Rule};
use sidetrack_core::shunt::{
    FastPathKind, ForwardLine, MarkActions, PortNumber, RuleSet, Transport, Tuple, Wish,
};
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
    /// A flow table of nftables.
    Flowtable,
    /// None: what would be shunted is shown.
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
    /// The fast paths, one of each kind; the first is for flows of which nothing says another.
    pub fast_paths: Vec<ShuntPath>,
    /// The ports are those of a bridge; else the host routes between them.
    pub bridged: bool,
    /// After so long without a packet a shunted flow is inspected again, milliseconds.
    pub idle_timeout_ms: u64,
    /// A blocked flow without a packet for this long makes room for another where the table is full, milliseconds.
    pub block_idle_timeout_ms: u64,
    /// Most flows on the fast path.
    pub entries_max: usize,
    /// Most of them of one client.
    pub entries_max_per_client: usize,
    /// What the numbers in marks mean.
    pub actions: MarkActions,
    /// The interfaces, by their number in marks; with a switch not every port has one.
    pub ports: BTreeMap<PortNumber, String>,
    /// By tc: what leaves by an end of a pair whose other end is in another network namespace is put there at once.
    pub redirect_peer: bool,
    /// Entries stay in force while the shunt hangs; else the program stops believing them.
    pub keep_when_stalled: bool,
    /// The rules, as far as they are about forwarded flows; none if they neither shunt nor deny any.
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
        let lines = self.rules.as_ref().map(|rules| ForwardLine::of(rules)).unwrap_or_default();
        let own_rules = self.rules.is_some();
        let (bridged, actions) = (self.bridged, self.actions);
        work(&RuleSet { ports: &ports, bridged, actions, own_rules, lines: &lines })
    }

    /// What rules say of forwarded flows: which are shunted, and which are denied. None if all of them are left alone. A change
    /// of anything else in the rules is none for the shunt.
    pub(super) fn rules_of(policy: &Policy) -> Option<Arc<Policy>> {
        let part = |action: &Action| match action {
            Action::Deny => Action::Deny,
            Action::Carry(carry) => Action::Carry(Arc::new(Carry { shunt: carry.shunt, ..Carry::default() })),
        };
        let rules = policy.rules().iter();
        let rules: Vec<_> = rules.map(|rule| Rule { action: part(&rule.action), ..rule.clone() }).collect();
        let default = part(policy.default_action());
        let says = |action: &Action| *action != Action::default();
        let any = rules.iter().any(|rule| says(&rule.action)) || says(&default);
        any.then(|| Arc::new(Policy::new(rules, default)))
    }

    /// What our rules say of a flow when it is forwarded, as far as they are asked: none where no mark leaves flows to them.
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
        ] {
            let error = read(shunt, rule).expect_err(word);
            assert!(error.contains(word), "{error}");
        }
    }
}
