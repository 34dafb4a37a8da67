//! Policy: ordered rules. A pure function from a flow (and its first bytes, if a rule needs them) to a verdict with
//! its reason. The first rule that matches decides.

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
pub use naming::NameMatch;
pub use url::{Url, UrlPattern};

use crate::agreement::Clause;
use crate::carrier::Carrier;
use crate::flow::{Destination, Flow, Host, Intercept};
use crate::function::{ChainSpec, FunctionKind};
use std::sync::Arc;

/// An immutable snapshot of all rules. A reload replaces it as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
    /// `rule 'x'` for each rule. Made once, so that deciding allocates no memory.
    whys: Vec<Arc<str>>,
    /// Those of rules that deny processes, for flows whose process is hidden.
    hidden_whys: Vec<Option<Arc<str>>>,
    default: Action,
    default_why: Arc<str>,
    first_bytes_ms: u64,
    asks_url: bool,
    asks_host: bool,
    /// Whether some captured addresses represent names.
    has_names: bool,
    addresses: gate::Addresses,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name, unique in the policy. Records, metrics and `explain` use it.
    pub name: Arc<str>,
    /// The flows that it applies to.
    pub matcher: Match,
    /// The action for them.
    pub action: Action,
}

/// The action for a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// The flow is refused, in the way that its interceptor provides.
    Deny,
    /// The flow is carried.
    Carry(Arc<Carry>),
}

/// How a flow is carried. Default: directly, to its own destination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carry {
    /// Directly, or through hops.
    pub carrier: Carrier,
    /// A destination that replaces the one of the client.
    pub to: Option<Destination>,
    /// Whether the address or the name of the destination is dialled.
    pub dial: Dial,
    /// Where a name is resolved if there are hops.
    pub resolve: Resolve,
    /// The server sees the client's own address (`IP_TRANSPARENT`). The routing must bring the answers back to this
    /// host.
    pub keep_client_address: bool,
    /// The PROXY protocol header that is sent to the server first, if any.
    pub proxy_protocol: Option<ProxyVersion>,
    /// Ends the flow after this time without data, ms. `None`: the limit of the configuration.
    pub idle_timeout_ms: Option<u64>,
    /// Ends the flow after this time, ms. `None`: the limit of the configuration.
    pub lifetime_ms: Option<u64>,
    /// Time limit for the connection and all handshakes with hops, ms. `None`: the limit of the configuration.
    pub connect_timeout_ms: Option<u64>,
    /// How long a SOCKS6 or TCP Fast Open hop waits for the client's first bytes, so that they are sent with the
    /// request, ms. 0: never.
    pub initial_data_wait_ms: u64,
    /// When the client's connection is accepted.
    pub connect: Connect,
    /// TCP Fast Open (RFC 7413) towards the server. Only for direct connections.
    pub tfo: bool,
    /// Multipath TCP (RFC 8684) towards the server. Only for direct connections.
    pub mptcp: bool,
    /// Whether requests reach servers of TLS by HTTP/3. Only for direct connections.
    pub http3: Http3,
    /// Connections to the server that are made in advance. Only for direct connections.
    pub warm: Option<Warm>,
    /// Whether the kernel may carry the flow alone.
    pub kernel: KernelPath,
    /// The functions that the flow passes. `None`: no function.
    pub chain: Option<Arc<ChainSpec>>,
    /// The clause that the data-flow agreement is asked about each flow. `None`: it is not asked.
    pub agreement: Option<Arc<Clause>>,
    /// When a forwarded flow that the packet filter leaves to the rules takes the fast path. `None`: never.
    pub shunt: Option<ShuntAfter>,
    /// Metadata for a SOCKS6 chain (options of kind 65000), keys and values, in order.
    pub metadata: Vec<(u16, String)>,
}

/// When the connection of a client that knows nothing of us is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connect {
    /// As [`Self::Faithful`] under `run` where that is possible, otherwise as [`Self::Early`].
    #[default]
    Auto,
    /// At once, before the server is dialled. The client's first bytes can be read, and can travel with a request.
    Early,
    /// When the far side has accepted. Otherwise the client gets the far side's answer.
    Faithful,
}

impl Connect {
    /// The word in configurations.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Early => "early",
            Self::Faithful => "faithful",
        }
    }
}

/// When a request inside TLS asks its server by HTTP/3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Http3 {
    /// Never.
    #[default]
    Never,
    /// After the server has announced it (Alt-Svc, RFC 7838).
    Announced,
    /// At once, on the UDP port of the same number, or the one that the server has announced.
    First,
}

impl Http3 {
    /// The word in configurations.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Announced => "announced",
            Self::First => "first",
        }
    }
}

impl Carry {
    /// Says why connections of this rule are accepted early although it says `connect = "faithful"`. `None`: nothing stands
    /// against it.
    pub fn faithful_obstacle(&self) -> Option<&'static str> {
        if self.chain.is_some() {
            return Some(
                "the functions of `chain` may need the client's first bytes before the server is dialled",
            );
        }
        if self.agreement.is_some() {
            return Some(
                "the functions of the agreement may need the client's first bytes before the server is dialled",
            );
        }
        (self.initial_data_wait_ms > 0).then_some(
            "`initial_data_wait_ms` waits for the client's first bytes, which come after its connect",
        )
    }

    /// Says why a connection that was caught in this way is accepted before the far side has accepted. `None`: it is not.
    pub fn early_reason(&self, intercept: Intercept) -> Option<&'static str> {
        match (self.connect, intercept) {
            (Connect::Early, _) => Some("the rule says `connect = \"early\"`"),
            (Connect::Faithful, _) => self.faithful_obstacle(),
            (Connect::Auto, Intercept::Run) => self.faithful_obstacle().or_else(|| self.wants_first_bytes()),
            (Connect::Auto, _) => Some("\"early\" is the default of `connect` for this kind of listener"),
        }
    }

    /// Says why first bytes are wanted together with the request.
    fn wants_first_bytes(&self) -> Option<&'static str> {
        let hops = match &self.carrier {
            Carrier::Hops(hops) => hops.as_slice(),
            _ => &[],
        };
        (self.tfo || hops.iter().any(|hop| hop.tfo || hop.optimistic))
            .then_some("the client's first bytes travel with the request (`tfo`, `optimistic`)")
    }

    /// Whether its connections are accepted after the far side, if they were caught in this way.
    pub fn is_faithful(&self, intercept: Intercept) -> bool {
        self.early_reason(intercept).is_none()
    }

    /// Says why this way to carry flows cannot carry UDP. `None`: it can.
    pub fn udp_obstacle(&self) -> Option<&'static str> {
        if let Some(why) = self.carrier.udp_obstacle() {
            return Some(why);
        }
        let works = |kind: &FunctionKind| matches!(kind, FunctionKind::Count | FunctionKind::Limit(_));
        let functions = self.chain.iter().flat_map(|chain| &chain.functions);
        if !functions.into_iter().all(|function| works(&function.kind)) {
            return Some("functions other than `count` and `limit` work on TCP only");
        }
        if self.proxy_protocol.is_some() {
            return Some("`proxy_protocol` is for TCP only");
        }
        let kept = "`keep_client_address` is for TCP, and for datagrams that the kernel forwards alone";
        self.keep_client_address.then_some(kept)
    }

    /// Says why servers are asked by TCP although the rule names HTTP/3. `None`: they are not.
    pub fn http3_obstacle(&self) -> Option<&'static str> {
        if self.http3 == Http3::Never { None } else { self.carrier.udp_obstacle() }
    }

    /// Returns the destination of a flow, after all rewriting.
    pub fn destination(&self, flow: &Flow) -> Destination {
        match (&self.to, self.dial, &flow.host) {
            (Some(to), _, _) => to.clone(),
            (None, Dial::Name, Some(name)) => {
                Destination { host: Host::Name(name.clone()), port: flow.orig_dst.port, zone: 0 }
            }
            _ => flow.orig_dst.clone(),
        }
    }
}

/// When a flow takes the fast path (both limits must be reached), and which one: a forwarded flow one of the shunt, a flow of a
/// listener the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShuntAfter {
    /// This number of bytes has passed on the slow path, both directions together: of IP packets for the shunt, of payload for the
    /// wire.
    pub bytes: u64,
    /// The time since the shunt first saw the flow, or a listener captured it, ms.
    pub ms: u64,
    /// The fast path. `None`: the first one of the configuration.
    pub fast_path: Option<FastPathKind>,
}

/// A kind of fast path: its word is the same in the configuration, in records and in commands. A configuration has at
/// most one of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FastPathKind {
    /// A BPF program between the driver and the network stack.
    Tc,
    /// A BPF program in the driver.
    Xdp,
    /// A BPF program behind the driver, without the driver's support.
    XdpGeneric,
    /// A switch that is controlled by OpenFlow.
    #[serde(rename = "openflow")]
    OpenFlow,
    /// A flow table of the kernel (nftables), between the ports of a router.
    Flowtable,
    /// The kernel, for flows of listeners: it takes their packets over from two sockets ([`crate::wire`]).
    Wire,
    /// No fast path: the listings show which flows would be shunted.
    None,
}

impl FastPathKind {
    /// All kinds.
    pub const ALL: [Self; 7] =
        [Self::Tc, Self::Xdp, Self::XdpGeneric, Self::OpenFlow, Self::Flowtable, Self::Wire, Self::None];

    /// Whether conntrack's counters include the traffic of the fast path.
    pub const fn is_counted_by_conntrack(self) -> bool {
        matches!(self, Self::Flowtable)
    }

    /// Returns its word, which serde uses too.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tc => "tc",
            Self::Xdp => "xdp",
            Self::XdpGeneric => "xdp-generic",
            Self::OpenFlow => "openflow",
            Self::Flowtable => "flowtable",
            Self::Wire => "wire",
            Self::None => "none",
        }
    }
}

/// Connections to a server that are made in advance, so that a flow need not wait for a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Warm {
    /// The number of ready connections for each destination and worker, 1 to [`Warm::READY_MAX`].
    pub ready: u16,
    /// A connection that no flow has taken for this time is closed and replaced, ms.
    pub idle_ms: u64,
}

impl Warm {
    /// Most ready connections for one destination of one worker.
    pub const READY_MAX: u16 = 64;
    /// The default idle time, ms: less than servers commonly allow to a silent client.
    pub const IDLE_MS: u64 = 10_000;
}

/// What is dialled if both the address and the name of the destination are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dial {
    /// The client's original address, or the name if there is no address.
    #[default]
    Original,
    /// The known or sniffed name: it is resolved again, or sent to the proxy.
    Name,
}

/// Where a name is resolved if there are hops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Resolve {
    /// At the last hop: names are sent as names.
    #[default]
    Proxy,
    /// At this node, before the first hop is contacted.
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

/// Whether the kernel may carry a flow (NAT); conntrack then gives its record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KernelPath {
    /// If no option of the rule needs user space.
    #[default]
    Auto,
    /// Always through user space.
    Never,
}

impl Default for Action {
    /// The default: carried directly.
    fn default() -> Self {
        Self::Carry(Arc::default())
    }
}

impl Policy {
    /// The default for how long a flow may wait for its first bytes, ms. [`Policy::with_first_bytes_ms`] changes it.
    pub const FIRST_BYTES_MS: u64 = 30;

    /// Makes a policy of ordered `rules`, and a default for flows that none matches.
    pub fn new(rules: Vec<Rule>, default: Action) -> Self {
        let whys = rules.iter().map(|rule| format!("rule '{}'", rule.name).into()).collect();
        let of_hidden = |rule: &Rule| {
            let names_it = rule.action == Action::Deny && rule.asks_process();
            names_it.then(|| format!("rule '{}' (the client's process could not be found)", rule.name).into())
        };
        let hidden_whys = rules.iter().map(of_hidden).collect();
        let default_why = match &default {
            Action::Deny => "no rule matched; default deny".into(),
            Action::Carry(carry) => format!("no rule matched; default {}", carry.carrier).into(),
        };
        let of_url = |condition: &Condition| matches!(condition, Condition::Url(_));
        let asks_url = rules.iter().any(|rule| rule.matcher.conditions().iter().any(of_url));
        let asks_host = rules.iter().any(Rule::asks_host);
        let addresses = gate::Addresses::new(&rules, never_dial());
        let first_bytes_ms = Self::FIRST_BYTES_MS;
        let has_names = false;
        Self {
            rules,
            whys,
            hidden_whys,
            default,
            default_why,
            first_bytes_ms,
            asks_url,
            asks_host,
            has_names,
            addresses,
        }
    }

    /// Sets whether this node answers names with addresses of [`crate::names::NameTable::range`]. The kernel does not know what they
    /// represent, so connections to them are never left to it.
    #[must_use]
    pub fn with_names(mut self, has_names: bool) -> Self {
        self.has_names = has_names;
        self
    }

    /// Sets how long a flow may wait for its first bytes if a rule needs the host name, ms.
    #[must_use]
    pub fn with_first_bytes_ms(mut self, wait_ms: u64) -> Self {
        self.first_bytes_ms = wait_ms;
        self
    }

    /// Returns how long a flow may wait for its first bytes if a rule needs the host name, ms.
    pub const fn first_bytes_ms(&self) -> u64 {
        self.first_bytes_ms
    }

    /// Whether a rule needs URLs. Otherwise the caller need not build them.
    pub const fn asks_url(&self) -> bool {
        self.asks_url
    }

    /// Whether a rule needs host names. Otherwise the name that a client claims does not matter.
    pub const fn asks_host(&self) -> bool {
        self.asks_host
    }

    /// Whether a rule, or the default, accepts connections that were caught in this way only when the far side has.
    pub fn asks_faithful(&self, intercept: Intercept) -> bool {
        self.carries().any(|carry| carry.is_faithful(intercept))
    }

    /// Whether a rule says `connect = "faithful"`.
    pub fn demands_faithful(&self) -> bool {
        self.carries().any(|carry| carry.connect == Connect::Faithful)
    }

    /// Whether a rule, or the default, denies flows.
    pub fn may_deny(&self) -> bool {
        let mut actions = self.rules.iter().map(|rule| &rule.action).chain([&self.default]);
        actions.any(|action| matches!(action, Action::Deny))
    }

    /// How the rules and the default carry flows.
    fn carries(&self) -> impl Iterator<Item = &Carry> {
        let actions = self.rules.iter().map(|rule| &rule.action).chain([&self.default]);
        actions.filter_map(|action| match action {
            Action::Carry(carry) => Some(&**carry),
            Action::Deny => None,
        })
    }

    /// Whether a rule needs the process behind a flow.
    pub fn asks_process(&self) -> bool {
        self.rules.iter().any(Rule::asks_process)
    }

    /// Returns the rules in order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns the action for a flow that no rule matches.
    pub const fn default_action(&self) -> &Action {
        &self.default
    }
}
