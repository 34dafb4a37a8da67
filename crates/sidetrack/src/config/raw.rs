//! The file as it is written: its keys, checked for shape only. `sidetrack schema` is made from these types, and
//! `docs/configuration.md` is tested against it.

mod dns;
mod engine;
mod export;
pub mod function;
mod htcp;
mod limits;
mod listen;
mod outgoing;
mod overlay;
mod policy;
mod run;
mod shunt;
mod tap;
mod tunnel;
mod wire;

pub use dns::{Dns, DnsMode};
pub use engine::{Choice, Engine, EngineIo, Steering, SynCookies};
pub use export::{Export, Ipfix, IpfixTransport, Otlp};
pub use function::Function;
pub use htcp::{Htcp, HtcpSibling};
pub use limits::Limits;
pub use listen::{Dialect, Listen, ListenKind, UdpFiltering, UdpPorts};
pub use outgoing::Outgoing;
pub use overlay::{
    Deliver, Group, Overlay, OverlayEdge, OverlayLegs, OverlayLink, OverlayNode, OverlayTrust, Packets,
    PacketsAt, PacketsDissemination, PacketsLink,
};
pub use policy::{Access, Clause, End, Policy, PolicyMode};
pub use run::{Run, RunDns};
pub use shunt::{
    Forwarding, OnStall, OpenFlow, OpenFlowVersion, Role, RuleShunt, Shunt, ShuntPort, Switch, WhenFull,
};
pub use tap::Tap;
pub use tunnel::{Transport, Tunnel};
pub use wire::{OnWireCrash, Wire};

mod admin;
mod log;
mod record;

pub use admin::{Admin, Orchestrator};
pub use log::{Log, LogFormat};
pub use record::{Capture, History, Record};

use super::{At, List, Secret};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// A configuration of Sidetrack.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "sidetrack configuration")]
pub struct File {
    /// Version of the format: 1.
    #[schemars(required, range(min = 1, max = 1))]
    pub version: Option<At<u32>>,
    /// Worker threads, 0 to 1024; 0 = one per core. Default 0.
    pub workers: Option<At<u32>>,
    /// What happens to captured traffic when sidetrack dies. "open": it flows as if sidetrack had never run. "closed": it is
    /// blocked, except flows that the kernel forwards without sidetrack; `kernel = "never"` blocks those too. A restart or
    /// `sudo sidetrack cleanup` ends the block. A reload may change "closed" to "open", but not "open" to "closed". Default
    /// "open".
    pub on_crash: Option<At<OnCrash>>,
    /// Whether `redirect` and `tproxy` listeners may capture the SSH session from which sidetrack is started. Without it,
    /// connections to the address and port of its server are left alone, and so are those to its client's. Default false.
    pub capture_ssh: Option<At<bool>>,
    /// The user that `up` and the processes beside it switch to when root starts it. "root" keeps user id 0. A reload does not
    /// change it. Default: the user `sidetrack` if this machine has it, otherwise `nobody`.
    pub user: Option<At<String>>,
    /// What happens to a flow that no rule matches. Required if there is a rule.
    pub default: Option<At<DefaultAction>>,
    /// The admin interface of the running program: its socket, its page and its metrics address.
    #[serde(default)]
    pub admin: Admin,
    /// Where records of flows go.
    #[serde(default)]
    pub record: Record,
    /// Keeps ended flows on disk, for `sidetrack flows --since`. Default: off.
    pub history: Option<At<History>>,
    /// Sends reports of flows to collectors. Default: nothing is sent.
    #[serde(default)]
    pub export: Export,
    /// Captures of packets, for `sidetrack tap`. Default: they are not allowed.
    pub capture: Option<At<Capture>>,
    /// The log that Sidetrack writes on standard error.
    #[serde(default)]
    pub log: Log,
    /// Time-outs and bounds.
    #[serde(default)]
    pub limits: Limits,
    /// Settings of `sidetrack run` with this configuration.
    #[serde(default)]
    pub run: Run,
    /// Named sets of networks, used as "@name" in any list of networks.
    #[serde(default)]
    pub set: BTreeMap<String, List<String>>,
    /// Networks or "@set"s that are not dialled for clients, even if a name resolves to them. A rule may still allow one:
    /// its `match` has the network in `to`, or the exact host in `host`. Loopback counts only for clients on other hosts.
    /// "default" means the default networks, "none" no network. Default: this network (0.0.0.0/8, ::), loopback, link-local
    /// addresses, and the addresses of cloud metadata services, which hand out credentials.
    pub never_dial: Option<List<String>>,
    /// The shunt: moves flows that the packet filter marks to a fast path.
    pub shunt: Option<At<Shunt>>,
    /// Flows of listeners that the kernel takes over. Default: as rules say.
    pub wire: Option<At<Wire>>,
    /// Which TLS connections are intercepted. Default: none.
    pub tap: Option<At<Tap>>,
    /// How containers of functions are started.
    #[serde(default)]
    pub containers: Containers,
    /// The resolver of this node. Default: none.
    pub dns: Option<At<Dns>>,
    /// Lets services ask for listening ports, each for one destination. Default: off.
    pub outgoing: Option<At<Outgoing>>,
    /// The data-flow agreement that rules refer to. Default: none.
    pub policy: Option<At<Policy>>,
    /// Functions by name, for the `chain` of rules.
    #[serde(default)]
    pub function: BTreeMap<String, At<Function>>,
    /// The listeners: each is one way by which flows reach Sidetrack.
    #[serde(default)]
    pub listen: Vec<At<Listen>>,
    /// The overlay this node is part of. Default: none.
    pub overlay: Option<At<Overlay>>,
    /// Long-lived connections to far sides, which rules name as carriers.
    #[serde(default)]
    pub tunnel: Vec<At<Tunnel>>,
    /// Rules; the first that matches wins.
    #[serde(default)]
    pub rule: Vec<At<Rule>>,
    /// Decision tests. A file whose tests fail is rejected.
    #[serde(default)]
    pub test: Vec<At<Test>>,
}

/// What happens to captured traffic when sidetrack dies.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnCrash {
    /// Traffic flows as if sidetrack had never run.
    Open,
    /// Captured traffic is blocked.
    Closed,
}

/// What happens to a flow that no rule matches.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DefaultAction {
    /// It is carried directly to its destination.
    Direct,
    /// It is denied.
    Deny,
}

/// How containers of functions are started.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Containers {
    /// Path of the unix socket of the container engine (podman or docker). If it is given, the process that starts
    /// containers runs from the start, and a reload can add the first container. Default: the first of
    /// "/run/podman/podman.sock", "/run/docker.sock" and "/var/run/docker.sock" that answers.
    pub engine: Option<At<String>>,
}

/// A shared cache of HTTP responses (RFC 9111).
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Most bytes in memory, 1 MiB to 1 TiB. Default 268435456.
    pub memory_bytes: Option<At<u64>>,
    /// Most bytes of one response. Larger responses pass without being stored. Default 33554432.
    pub object_bytes: Option<At<u64>>,
    /// A folder where responses are also stored, so that they survive a restart. Each listener needs its own folder, which
    /// is created if missing. Default: memory only.
    pub disk: Option<At<String>>,
    /// Most bytes in that folder, 1 MiB to 1 PiB. Default 10737418240.
    pub disk_bytes: Option<At<u64>>,
    /// Networks whose PURGE requests remove stored responses. From other addresses, PURGE is handled like an unknown method.
    /// Default: none.
    pub purge_from: Option<List<String>>,
    /// Targeted fields (RFC 9213) that replace Cache-Control, in order. Default ["CDN-Cache-Control"].
    pub targets: Option<List<String>>,
    /// How long after it becomes stale a response is served while its server cannot be reached, if the response does not
    /// say, milliseconds. Default 86400000.
    pub stale_if_unreachable_ms: Option<At<u64>>,
    /// Longest heuristic freshness of a response that does not state its own, milliseconds. Default 604800000.
    pub heuristic_max_ms: Option<At<u64>>,
    /// Query parameters that are left out of the cache key. "utm_*" means all that begin with utm_. Default: none.
    pub ignore_parameters: Option<List<String>>,
    /// Whether the cache key ignores the order of query parameters. Default false.
    pub sort_query: Option<At<bool>>,
    /// Other caches that are asked for responses not stored here: "host:port" of their http listeners, at most 16. Default:
    /// none.
    pub siblings: Option<List<String>>,
    /// A file with more of them, one "[host:port]" per line. Default: none.
    pub siblings_file: Option<At<String>>,
    /// Caches of other vendors, which speak HTCP. Default: none is asked, and none may ask.
    pub htcp: Option<At<Htcp>>,
}

/// A number, or a text: a port, a range of ports, a user id or a user name.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(untagged)]
pub enum Number {
    /// As a number.
    Number(i64),
    /// As a text.
    Text(String),
}

/// A user: of a socks listener with a password, of a redirect listener by name or id.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(untagged)]
pub enum UserEntry {
    /// redirect: a user id.
    Id(i64),
    /// redirect: a user name.
    Name(String),
    /// socks: a user with a password.
    Login(Login),
}

/// A user of a socks listener.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Login {
    /// User name, 1 to 255 bytes.
    #[schemars(required)]
    pub user: Option<String>,
    /// Password, 1 to 255 bytes.
    pub password: Option<Secret>,
    /// A file whose first line is the password, instead of `password`.
    pub password_file: Option<String>,
}

/// The paths of the overlay that the bytes of a flow use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FlowDissemination {
    /// The cheapest path.
    Shortest,
    /// Each byte on one of several paths.
    Stripe,
    /// Each byte, or each datagram, on all of several paths.
    Duplicate,
    /// Datagrams: all links on ways with a limited number of hops.
    Flood,
    /// Datagrams: two disjoint paths, and more links around a source or destination in trouble.
    Graph,
}

/// One rule: which flows it matches, and what happens to them.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Its name, unique. It appears in records, metrics and `explain`.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// Which flows it matches; all given keys must hold. Default: every flow.
    #[serde(default, rename = "match")]
    pub matcher: Match,
    /// "deny" denies the flow. Either this or `carrier`.
    pub action: Option<At<RuleAction>>,
    /// "direct", "tunnel:<name>", a hop such as "socks6://gw:1080", or a list of hops, each reached through the one before.
    /// Schemes: socks5, socks6, socks6+socksx, socks6+socksx010, http, https, h3.
    pub carrier: Option<List<String>>,
    /// The paths that the bytes of a flow use. "shortest": the cheapest path. "stripe": `paths` paths that share no relay, each
    /// byte on one of them. "duplicate": all bytes on each of these paths; the first copy counts. Datagrams may also take
    /// "flood", all links on ways with at most `hops` links, and "graph", two such paths and more links around the source or
    /// the destination while links there are in trouble; both need `protocol = "udp"` in `match`. Only with carrier
    /// "overlay:<node>". Default "shortest".
    pub dissemination: Option<At<FlowDissemination>>,
    /// The number of paths with `dissemination = "stripe"` or "duplicate", 2 to 5. If the network has fewer, flows use those.
    /// Default 2.
    pub paths: Option<At<u8>>,
    /// The kind of links for datagrams: "best-effort", "reliable" or "real-time", as in [[overlay.packets]]. Only for rules with
    /// `protocol = "udp"` and carrier "overlay:<node>". Default "best-effort".
    pub link: Option<At<PacketsLink>>,
    /// Most links on the way of a datagram with `dissemination = "flood"`, 1 to 15. Default 4.
    pub hops: Option<At<u8>>,
    /// Which nodes a datagram relies on. "members": each node trusts its neighbours. "intrusion-tolerant": each node checks a
    /// proof of the source, as in [[overlay.packets]], and no relay can refuse the flow; needs `link = "best-effort"`, or
    /// `link = "reliable"` with `dissemination = "flood"`. Only for rules with `protocol = "udp"` and carrier
    /// "overlay:<node>". Default: `trust` of [overlay].
    pub trust: Option<At<OverlayTrust>>,
    /// With `trust = "intrusion-tolerant"` and `link = "best-effort"`: which datagrams of this node are sent first where they
    /// wait, 1 to 10; 10 is sent first. Default 5.
    pub priority: Option<At<u8>>,
    /// How long a datagram may travel over the overlay, 1 to 10000 milliseconds; later it is dropped. Required with
    /// `link = "real-time"`. With "best-effort" it needs another `dissemination` than "shortest". Default: there is no limit.
    pub deadline_ms: Option<At<u32>>,
    /// A file with one line "user:password" for each hop of `carrier`, in order; "-" for a hop without.
    pub credentials_file: Option<At<String>>,
    /// A destination "host:port" instead of the client's. A link-local address needs its interface: "[fe80::1%eth0]:80".
    /// Default: the client's.
    pub to: Option<At<String>>,
    /// Which is dialled if both are known: "original" (the client's destination address) or "name". Default "original".
    pub dial: Option<At<Dial>>,
    /// Where names are resolved if there are hops: "proxy" or "local". Default "proxy".
    pub resolve: Option<At<Resolve>>,
    /// Connect to the server from the client's own address. Only with carrier "direct". Default false.
    pub keep_client_address: Option<At<bool>>,
    /// Version of the PROXY protocol header that is sent to the server: 1 or 2. Default: none is sent.
    pub proxy_protocol: Option<At<u8>>,
    /// As in [limits], for this rule, milliseconds.
    pub idle_timeout_ms: Option<At<u64>>,
    /// As in [limits], for this rule, milliseconds.
    pub lifetime_ms: Option<At<u64>>,
    /// As in [limits], for this rule, milliseconds.
    pub connect_timeout_ms: Option<At<u64>>,
    /// How long a SOCKS6 or TCP Fast Open hop may wait for the client's first bytes, to send them with the request,
    /// milliseconds, 0 to 100. Default 0.
    pub initial_data_wait_ms: Option<At<u64>>,
    /// When a connection caught by run, redirect or tproxy is accepted: "early" (at once) or "faithful" (when the far side has
    /// accepted; otherwise the client gets the far side's answer, such as "connection refused"). See docs/connect.md. Default:
    /// "faithful" under run where it is possible, otherwise "early".
    pub connect: Option<At<RuleConnect>>,
    /// TCP Fast Open towards the server. Only with carrier "direct", and only if a replay does no harm. Default false.
    pub tfo: Option<At<bool>>,
    /// Multipath TCP towards the server. Only with carrier "direct". Default false.
    pub mptcp: Option<At<bool>>,
    /// When requests inside TLS ask their server by HTTP/3, at listeners with `tap` or with `to = "https://…"`: "never",
    /// "announced" (after the server has said so by Alt-Svc) or "first" (at once, on the UDP port of the same number). If that
    /// fails, TCP is used. Default "never".
    pub http3: Option<At<RuleHttp3>>,
    /// How many idle connections to a destination each worker keeps ready, 0 to 64. A new flow takes one and waits for no
    /// handshake. Only with carrier "direct". Default 0.
    pub warm: Option<At<u16>>,
    /// Closes and replaces a connection of `warm` after this time without a flow, milliseconds, 100 to 600000. Must be less
    /// than the server's own idle time-out. Default 10000.
    pub warm_idle_ms: Option<At<u64>>,
    /// Whether the kernel may forward flows of this rule without sidetrack: "auto" or "never". Default "auto".
    pub kernel: Option<At<Kernel>>,
    /// Names of the functions that the flows of this rule pass through, from the client to the server. Default: none.
    pub chain: Option<List<String>>,
    /// What happens to running flows when a reload changes the chain of their rule: "keep" or "cut". Default "keep".
    pub on_chain_change: Option<At<OnChainChange>>,
    /// What happens to new flows while a container of the chain is down: "deny" denies them, "skip" leaves the container
    /// out. Default: none; required if the chain has a container.
    pub on_function_down: Option<At<OnFunctionDown>>,
    /// The question to the agreement of [policy] about each flow, such as { purpose = "research" }. The agreement decides,
    /// and its functions come after those of `chain`. Default: it is not asked.
    pub agreement: Option<At<Clause>>,
    /// When a forwarded flow moves to the fast path of [shunt], if the packet filter leaves it to the rules: { after_bytes =
    /// 1048576 }. The rule may match addresses, ports, and the process or user of a TCP connection from this host's
    /// containers and network namespaces. Nothing else is known about forwarded packets. With { fast_path = "wire" }: when a
    /// flow of a listener goes to the wire (docs/wire.md); such a rule may match anything. Default: never.
    pub shunt: Option<At<RuleShunt>>,
    /// Metadata sent along a chain of SOCKS6 hops or tunnels: { 1000 = "text" }, keys 0 to 65535. Default: none.
    pub metadata: Option<At<BTreeMap<String, At<String>>>>,
}

/// What happens to running flows when their chain changes.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnChainChange {
    /// They keep their chain.
    Keep,
    /// They end.
    Cut,
}

/// What happens to new flows while a container of their chain is down.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFunctionDown {
    /// They are denied.
    Deny,
    /// They pass without the container.
    Skip,
}

/// The action of a rule that does not carry.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RuleAction {
    /// The flow is denied.
    Deny,
}

/// When requests ask their server by HTTP/3.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RuleHttp3 {
    /// Never.
    Never,
    /// After the server has announced it.
    Announced,
    /// At once.
    First,
}

/// When a connection is accepted.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RuleConnect {
    /// At once.
    Early,
    /// When the far side has accepted.
    Faithful,
}

/// Which is dialled if both an address and a name are known.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dial {
    /// The client's destination address.
    Original,
    /// The name.
    Name,
}

/// Where names are resolved if there are hops.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Resolve {
    /// On the last hop.
    Proxy,
    /// On this host.
    Local,
}

/// Whether the kernel may forward flows without sidetrack.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kernel {
    /// Yes, if nothing in the rule needs user space.
    Auto,
    /// Never.
    Never,
}

/// The conditions of a rule. All given keys must hold; a list holds alternatives.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Match {
    /// The client is in these networks or "@set"s.
    pub from: Option<List<String>>,
    /// The destination is in these networks or "@set"s. A destination that is known only by name is in none of them. A rule
    /// that denies is checked again with each address that the name resolves to.
    pub to: Option<List<String>>,
    /// The destination's port: numbers or "first-last".
    pub port: Option<List<Number>>,
    /// The host name, or "*.example" for all names below. International names are written as usual or in ASCII ("xn--…"). If
    /// the name is not known, it is looked for in the first bytes.
    pub host: Option<List<String>>,
    /// The host name is in one of these files: one name per line, "*.name" for all names below, ".name" for both. Lines of
    /// hosts files ("0.0.0.0 name") and of Adblock lists ("||name^", "@@||name^") work too. Looked for like `host`.
    pub host_file: Option<List<String>>,
    /// The host name contains one of these words. Looked for like `host`.
    pub host_contains: Option<List<String>>,
    /// The URL matches one of these patterns: "*" means any text, "?" one character. The URL is normalised first (RFC 3986
    /// Sec. 6.2.2); in a rule that denies, the URL as written counts too. Only for requests whose URL is seen: those of http
    /// listeners and of intercepted connections.
    pub url: Option<List<String>>,
    /// Names of listeners.
    pub listener: Option<List<String>>,
    /// How the flow was captured.
    pub intercept: Option<List<InterceptKind>>,
    /// The transport protocol. Default: both.
    pub protocol: Option<At<Protocol>>,
    /// Base names of executables. Only for flows of this host.
    pub process: Option<List<String>>,
    /// Users (names or ids) of flows of this host.
    pub user: Option<List<Number>>,
    /// Users that authenticated with a socks listener; for a tunnel listener, near sides by the name in their certificate.
    pub socks_user: Option<List<String>>,
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP connections.
    Tcp,
    /// UDP associations: the datagrams between one client endpoint and one destination.
    Udp,
}

/// How a flow was captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum InterceptKind {
    /// `sidetrack run`.
    Run,
    /// A redirect listener.
    Redirect,
    /// A tproxy listener.
    Tproxy,
    /// A socks listener.
    Socks,
    /// An http listener.
    Http,
    /// A reverse listener.
    Reverse,
    /// A tunnel listener.
    Tunnel,
    /// An engine listener.
    Engine,
}

/// A decision test: what the rules must decide about one flow.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Test {
    /// The flow.
    #[schemars(required)]
    pub flow: Option<At<TestFlow>>,
    /// What is expected.
    #[schemars(required)]
    pub expect: Option<At<Expect>>,
}

/// The flow of a decision test.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TestFlow {
    /// The client's address, with or without a port. Default "127.0.0.1".
    pub src: Option<At<String>>,
    /// The destination, "host:port". Default for a reverse listener: its server.
    pub dst: Option<At<String>>,
    /// The listener that captured it. Default: the only one, or none.
    pub listener: Option<At<String>>,
    /// How it was captured, if no listener says so. Default "redirect".
    pub intercept: Option<At<InterceptKind>>,
    /// Its transport protocol, if no listener says so. Default "tcp".
    pub protocol: Option<At<Protocol>>,
    /// The host name in its first bytes.
    pub host: Option<At<String>>,
    /// Base name of the client's executable.
    pub process: Option<At<String>>,
    /// The user (name or id) of the client's process.
    pub user: Option<At<Number>>,
    /// The user who authenticated with the socks listener.
    pub socks_user: Option<At<String>>,
}

/// What a decision test expects.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// Name of the rule that decides, or "default".
    pub rule: Option<At<String>>,
    /// "deny" or "carry".
    pub action: Option<At<ExpectAction>>,
    /// The carrier as in a rule, without credentials.
    pub carrier: Option<List<String>>,
}

/// Whether a decision test expects the flow to be carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExpectAction {
    /// Denied.
    Deny,
    /// Carried.
    Carry,
}
