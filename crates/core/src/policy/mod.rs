//! Policy: ordered rules, a pure function from a flow (and its first bytes, where a rule asks) to a verdict with
//! its reason. The first rule that matches wins.

mod condition;
mod decide;
mod gate;
mod host_list;
mod kernel;
mod naming;
mod url;

pub use condition::{Condition, HostFile, HostPattern, HostPatternError, Match};
pub use decide::{Decision, Explanation, Seen, TraceLine, TraceOutcome, Verdict};
pub use gate::{Denied, Dialled, NEVER_DIAL, never_dial};
pub use host_list::{HostList, HostListBuilder};
pub use kernel::{Capture, KernelAction, KernelMatch, KernelRule, Traffic, without_user_space};
pub use url::{Url, UrlPattern};

use crate::agreement::Clause;
use crate::carrier::Carrier;
use crate::flow::{Destination, Flow, Host};
use crate::function::ChainSpec;
use std::sync::Arc;

/// An immutable snapshot of all rules; a reload swaps it as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
    /// `rule 'x'`, one for each rule: made once so that deciding allocates nothing.
    whys: Vec<Arc<str>>,
    default: Action,
    default_why: Arc<str>,
    first_bytes_ms: u64,
    asks_url: bool,
    asks_host: bool,
    addresses: gate::Addresses,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name, unique in the policy; in records, metrics and `explain`.
    pub name: Arc<str>,
    /// Which flows it is for.
    pub matcher: Match,
    /// What happens to them.
    pub action: Action,
}

/// What happens to a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// It is refused, with the interceptor's own way of saying no.
    Deny,
    /// It is carried.
    Carry(Arc<Carry>),
}

/// How a flow is carried. The default is: directly, to where it was going.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carry {
    /// Directly, or through hops.
    pub carrier: Carrier,
    /// A destination that takes the place of the client's.
    pub to: Option<Destination>,
    /// Which of the address and the name of the destination is dialled.
    pub dial: Dial,
    /// Who resolves a name when there are hops.
    pub resolve: Resolve,
    /// The server sees the client's own address (`IP_TRANSPARENT`); needs routing that brings the answers back here.
    pub keep_client_address: bool,
    /// The PROXY protocol header the server gets first, if any.
    pub proxy_protocol: Option<ProxyVersion>,
    /// Ends the flow when nothing moved for so long, milliseconds; none = the limit of the configuration.
    pub idle_timeout_ms: Option<u64>,
    /// Ends the flow after so long, milliseconds; none = the limit of the configuration.
    pub lifetime_ms: Option<u64>,
    /// Time for the connection and all handshakes with hops, milliseconds; none = the limit of the configuration.
    pub connect_timeout_ms: Option<u64>,
    /// How long a SOCKS6 or TCP Fast Open hop may wait for the client's first bytes so that they travel with the
    /// request, milliseconds. 0 = never.
    pub initial_data_wait_ms: u64,
    /// TCP Fast Open (RFC 7413) towards the server; only when direct.
    pub tfo: bool,
    /// Multipath TCP (RFC 8684) towards the server; only when direct.
    pub mptcp: bool,
    /// Connections to the server that stand before a flow wants them; only when direct.
    pub warm: Option<Warm>,
    /// Whether the kernel may carry the flow alone.
    pub kernel: KernelPath,
    /// The functions the flow passes; none = no function.
    pub chain: Option<Arc<ChainSpec>>,
    /// What the data-flow agreement is asked about each flow; none = it is not asked.
    pub agreement: Option<Arc<Clause>>,
    /// When a forwarded flow that the packet filter leaves to the rules takes the fast path; none = never.
    pub shunt: Option<ShuntAfter>,
    /// Metadata sent along a SOCKS6 chain (options of kind 65000), key and value, in order.
    pub metadata: Vec<(u16, String)>,
}

impl Carry {
    /// Where a flow goes, after all rewriting.
    pub fn destination(&self, flow: &Flow) -> Destination {
        match (&self.to, self.dial, &flow.host) {
            (Some(to), _, _) => to.clone(),
            (None, Dial::Name, Some(name)) => {
                Destination { host: Host::Name(name.clone()), port: flow.orig_dst.port }
            }
            _ => flow.orig_dst.clone(),
        }
    }
}

/// When a forwarded flow takes the fast path (when both hold), and which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShuntAfter {
    /// So many bytes of IP packets have passed on the slow path, both directions together.
    pub bytes: u64,
    /// So long after the shunt first saw it, milliseconds.
    pub ms: u64,
    /// Which; none: the first of the configuration.
    pub fast_path: Option<FastPathKind>,
}

/// A kind of fast path: a configuration has at most one of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FastPathKind {
    /// A BPF program between driver and stack.
    Tc,
    /// A BPF program in the driver.
    Xdp,
    /// A BPF program behind the driver, without its help.
    XdpGeneric,
    /// A switch that is controlled by OpenFlow.
    #[serde(rename = "openflow")]
    OpenFlow,
    /// A flow table of the kernel's own (nftables), between the ports of a router.
    Flowtable,
    /// None: what would be shunted is shown.
    None,
}

impl FastPathKind {
    /// Whether conntrack's counters have what passes on it, too.
    pub const fn is_counted_by_conntrack(self) -> bool {
        matches!(self, Self::Flowtable)
    }

    /// The word of configuration and listings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tc => "tc",
            Self::Xdp => "xdp",
            Self::XdpGeneric => "xdp-generic",
            Self::OpenFlow => "openflow",
            Self::Flowtable => "flowtable",
            Self::None => "none",
        }
    }
}

/// Connections to a server that are made before a flow wants them, so that it need not wait for a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Warm {
    /// How many stand ready for each destination and worker, 1 to [`Warm::READY_MAX`].
    pub ready: u16,
    /// One that no flow has taken for so long is closed and made anew, milliseconds.
    pub idle_ms: u64,
}

impl Warm {
    /// Most connections that stand ready for one destination of one worker.
    pub const READY_MAX: u16 = 64;
    /// The idle time unless a rule says otherwise, milliseconds: less than servers commonly grant a client that says
    /// nothing.
    pub const IDLE_MS: u64 = 10_000;
}

/// What is dialled when both an address and a name of the destination are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dial {
    /// The address the client meant; the name if that is all there is.
    #[default]
    Original,
    /// The known or sniffed name: resolved anew, or sent to the proxy.
    Name,
}

/// Who resolves a name when there are hops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Resolve {
    /// The last hop: names travel as names.
    #[default]
    Proxy,
    /// We do, before the first hop is asked.
    Local,
}

/// Version of the PROXY protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProxyVersion {
    /// Text.
    V1,
    /// Binary, with TLVs.
    V2,
}

/// Whether a flow may be left to the kernel (NAT), with its record from conntrack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelPath {
    /// Where nothing the rule asks for needs us.
    #[default]
    Auto,
    /// Always through user space.
    Never,
}

impl Default for Action {
    /// Carried directly.
    fn default() -> Self {
        Self::Carry(Arc::default())
    }
}

impl Policy {
    /// How long a flow may wait for its first bytes unless [`Policy::with_first_bytes_ms`] says otherwise.
    pub const FIRST_BYTES_MS: u64 = 30;

    /// A policy of `rules` in order, and what happens when none matches.
    pub fn new(rules: Vec<Rule>, default: Action) -> Self {
        let whys = rules.iter().map(|rule| format!("rule '{}'", rule.name).into()).collect();
        let default_why = match &default {
            Action::Deny => "no rule matched; default deny".into(),
            Action::Carry(carry) => format!("no rule matched; default {}", carry.carrier).into(),
        };
        let of_url = |condition: &Condition| matches!(condition, Condition::Url(_));
        let asks_url = rules.iter().any(|rule| rule.matcher.conditions().iter().any(of_url));
        let of_host = |condition: &Condition| {
            matches!(condition, Condition::Host(_) | Condition::HostFile(_) | Condition::HostContains(_))
        };
        let asks_host = rules.iter().any(|rule| rule.matcher.conditions().iter().any(of_host));
        let addresses = gate::Addresses::new(&rules, never_dial());
        let first_bytes_ms = Self::FIRST_BYTES_MS;
        Self { rules, whys, default, default_why, first_bytes_ms, asks_url, asks_host, addresses }
    }

    /// Sets how long a flow may wait for its first bytes where a rule asks for the host name, milliseconds.
    #[must_use]
    pub fn with_first_bytes_ms(mut self, wait_ms: u64) -> Self {
        self.first_bytes_ms = wait_ms;
        self
    }

    /// Whether a rule asks for URLs: else nobody need put one together.
    pub const fn asks_url(&self) -> bool {
        self.asks_url
    }

    /// Whether a rule asks for host names: else it matters to none which name a client says.
    pub const fn asks_host(&self) -> bool {
        self.asks_host
    }

    /// Whether a rule asks for the process behind a flow.
    pub fn asks_process(&self) -> bool {
        let of_process =
            |condition: &Condition| matches!(condition, Condition::Process(_) | Condition::Uid(_));
        self.rules.iter().any(|rule| rule.matcher.conditions().iter().any(of_process))
    }

    /// The rules in order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// What happens when no rule matches.
    pub const fn default_action(&self) -> &Action {
        &self.default
    }
}
