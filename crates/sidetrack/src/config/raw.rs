//! The file as it is written: the keys, nothing checked but their shape. `sidetrack schema` is made from these
//! types, and `docs/configuration.md` is tested against it.

mod engine;
pub mod function;
mod htcp;
mod outgoing;
mod overlay;
mod policy;
mod run;
mod shunt;
mod tap;
mod tunnel;

pub use engine::{Choice, Engine, EngineIo, Steering, SynCookies};
pub use function::Function;
pub use htcp::{Htcp, HtcpSibling};
pub use outgoing::Outgoing;
pub use overlay::{Deliver, Overlay, OverlayNode, Packets, PacketsAt, PacketsLink};
pub use policy::{Access, Clause, End, Policy, PolicyMode};
pub use run::{Run, RunDns};
pub use shunt::{
    FastPath, Forwarding, OnStall, OpenFlow, OpenFlowVersion, RuleShunt, Shunt, ShuntAction, ShuntPort,
};
pub use tap::Tap;
pub use tunnel::{Transport, Tunnel};

mod log;

pub use log::{Log, LogFormat};

use super::{At, List, Secret};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// A configuration of sidetrack.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "sidetrack configuration")]
pub struct File {
    /// Version of the format: 1.
    #[schemars(required, range(min = 1, max = 1))]
    pub version: Option<At<u32>>,
    /// Worker threads, 0 to 1024; 0 = one per core. Default 0.
    pub workers: Option<At<u32>>,
    /// What happens to captured traffic when sidetrack dies: "open" lets it flow as if sidetrack had never been there,
    /// "closed" keeps it blocked, but for what a rule lets the kernel carry alone (`kernel = "never"` blocks that, too); a
    /// restart or `sudo sidetrack cleanup` ends the block. A reload may change "closed" to "open", but not "open" to "closed".
    /// Default "open".
    pub on_crash: Option<At<OnCrash>>,
    /// The user that `up` becomes when root starts it. "root" keeps user id 0. A reload does not change it. Default: the user
    /// `sidetrack` if this machine has it, otherwise `nobody`.
    pub user: Option<At<String>>,
    /// What happens to a flow that no rule matches. Required as soon as there is a rule.
    pub default: Option<At<DefaultAction>>,
    /// Where the running program can be asked and told things.
    #[serde(default)]
    pub admin: Admin,
    /// Where records of flows go.
    #[serde(default)]
    pub record: Record,
    /// What Sidetrack says about itself, on standard error.
    #[serde(default)]
    pub log: Log,
    /// Time-outs and bounds.
    #[serde(default)]
    pub limits: Limits,
    /// What holds for `sidetrack run` with this configuration.
    #[serde(default)]
    pub run: Run,
    /// Named sets of networks, used as "@name" wherever networks are listed.
    #[serde(default)]
    pub set: BTreeMap<String, List<String>>,
    /// Networks or "@set"s that are not dialled for clients, whatever name leads there, unless a rule names them: its `match`
    /// holds the network in `to`, or the exact host in `host`. Loopback in it counts only for clients of other hosts. "default"
    /// stands for the default, "none" for no network. Default: this network (0.0.0.0/8, ::), loopback, link-local addresses,
    /// and those at which clouds give machines their credentials.
    pub never_dial: Option<List<String>>,
    /// The shunt: flows that the packet filter's marks move to a fast path.
    pub shunt: Option<At<Shunt>>,
    /// Which TLS is opened. Default: none.
    pub tap: Option<At<Tap>>,
    /// How functions in containers are started.
    #[serde(default)]
    pub containers: Containers,
    /// Paths that services ask for one by one. Default: they cannot.
    pub outgoing: Option<At<Outgoing>>,
    /// The data-flow agreement that rules ask. Default: none.
    pub policy: Option<At<Policy>>,
    /// Functions by name, for `chain` of rules.
    #[serde(default)]
    pub function: BTreeMap<String, At<Function>>,
    /// What catches flows.
    #[serde(default)]
    pub listen: Vec<At<Listen>>,
    /// The overlay this node is part of. Default: none.
    pub overlay: Option<At<Overlay>>,
    /// Connections held open to far sides, which rules name as carriers.
    #[serde(default)]
    pub tunnel: Vec<At<Tunnel>>,
    /// Rules; the first that matches wins.
    #[serde(default)]
    pub rule: Vec<At<Rule>>,
    /// Decision tests; a file whose tests fail is not accepted.
    #[serde(default)]
    pub test: Vec<At<Test>>,
}

/// What happens to captured traffic when sidetrack dies.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnCrash {
    /// Traffic flows as if sidetrack had never been there.
    Open,
    /// What was captured stays blocked.
    Closed,
}

/// What happens to a flow that no rule matches.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DefaultAction {
    /// It is carried directly to where it was going.
    Direct,
    /// It is refused.
    Deny,
}

/// Where the running program can be asked and told things.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Admin {
    /// Path of the unix socket of the admin interface, or "none". Default: "/run/sidetrack/admin.sock" for root,
    /// "sidetrack/admin.sock" in $XDG_RUNTIME_DIR for others.
    pub socket: Option<At<String>>,
    /// A TCP address that serves /metrics and nothing else, such as "127.0.0.1:9465". Default: none.
    pub metrics: Option<At<String>>,
    /// Names in Host under which `metrics` is served, beside IP addresses and localhost; others are refused (421), so
    /// that no page in a browser reads them by DNS rebinding. Default: none.
    pub metrics_hosts: Option<List<String>>,
}

/// Where records of flows go.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// "stdout", "stderr", "none", or the path of a file (with a "/"). Default "stdout".
    pub to: Option<At<String>>,
    /// Number of ended flows kept in memory for `sidetrack flows`, 0 to 1000000. Default 4096.
    pub recent: Option<At<u32>>,
}

/// How functions in containers are started.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Containers {
    /// Path of the unix socket of the container engine (podman or docker). With it the process that starts containers is
    /// there from the beginning, and a reload can bring the first one. Default: the first of "/run/podman/podman.sock",
    /// "/run/docker.sock" and "/var/run/docker.sock" that answers.
    pub engine: Option<At<String>>,
}

/// Time-outs and bounds.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Most flows at a time. Default: computed from RLIMIT_NOFILE.
    pub max_flows: Option<At<u32>>,
    /// Most flows at a time of one client address; addresses of one IPv6 /64 are one client. Default: half of all flows, for
    /// clients of other hosts that do not speak the PROXY protocol; flows of the packet engine and those that the kernel carries
    /// do not count then.
    pub max_flows_per_client: Option<At<u32>>,
    /// Most connections at a time whose handshake or first request has not come; for one more, the one that waits longest is
    /// closed. Default: a quarter of all flows.
    pub max_handshakes: Option<At<u32>>,
    /// Ends a flow on which nothing moved for so long, milliseconds. Default 7440000 (RFC 5382 REQ-5).
    pub idle_timeout_ms: Option<At<u64>>,
    /// Ends a flow after so long, milliseconds. Default: never.
    pub lifetime_ms: Option<At<u64>>,
    /// Time for the connection to the server with all handshakes with hops, milliseconds. Default 10000.
    pub connect_timeout_ms: Option<At<u64>>,
    /// Time a client has for its handshake with a listener, milliseconds. Default 10000.
    pub handshake_timeout_ms: Option<At<u64>>,
    /// How long a flow may wait for its first bytes where a rule asks for the host name, milliseconds, 1 to 100.
    /// Default 30.
    pub first_bytes_ms: Option<At<u64>>,
    /// Most bytes held for one direction of a flow, 4096 to 16777216. Default 65536.
    pub buffer_bytes: Option<At<u32>>,
    /// After SIGTERM or SIGINT, how long flows may go on before they are ended, milliseconds, 0 to 86400000. A second signal
    /// ends them at once. Default 5000.
    pub drain_ms: Option<At<u64>>,
}

/// Something that catches flows. `kind` says how, and which of the other keys apply.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Listen {
    /// Name in rules and records. Default: the kind.
    pub name: Option<At<String>>,
    /// How it catches flows.
    #[schemars(required)]
    pub kind: Option<At<ListenKind>>,
    /// Where it listens: "127.0.0.1:1080", "[::1]:1080", "*:1080" for every address, or a list. Required for socks, http,
    /// reverse, tunnel and engine. Default for redirect and tproxy: a port that the kernel picks.
    pub address: Option<List<String>>,
    /// Neighbours (networks or "@set") that send a PROXY protocol header, which is then required and believed. Default:
    /// none.
    pub accept_proxy_protocol: Option<List<String>>,
    /// socks, http and reverse: accept Multipath TCP, where the kernel has it. Other clients are served over plain TCP. Default false.
    pub mptcp: Option<At<bool>>,
    /// socks: versions served, of 5 and 6. Default [5, 6].
    pub versions: Option<List<u8>>,
    /// socks and http: who may use it; for redirect: users (names or ids) whose programs are caught. Default: everybody.
    pub users: Option<List<UserEntry>>,
    /// socks: wire layouts of SOCKS6 accepted. Default "auto".
    pub dialect: Option<At<Dialect>>,
    /// reverse and engine: the server, "host:port", for engine with an address. http: the server of requests that name none, for which the listener then
    /// stands; without it they are refused.
    pub to: Option<At<String>>,
    /// reverse and engine: servers by the name in the first bytes (TLS SNI or HTTP Host); "*.example" stands for all names below.
    pub names: Option<At<BTreeMap<String, At<String>>>>,
    /// reverse and engine with names: the server of flows with another name or none. Default: they are refused.
    pub default: Option<At<String>>,
    /// redirect: catch connections that programs of this host open. Default true.
    pub local: Option<At<bool>>,
    /// redirect: catch connections that this host forwards. Default false.
    pub forwarded: Option<At<bool>>,
    /// redirect and tproxy: only forwarded connections that come in by these interfaces. Default: all. engine: the
    /// interfaces whose packets it takes, those of clients and those of servers; required.
    pub interfaces: Option<List<String>>,
    /// redirect and tproxy: only from these networks or "@set"s. Default: all.
    pub src: Option<List<String>>,
    /// redirect and tproxy: only to these networks or "@set"s. Default: all, where another key narrows the capture.
    pub dst: Option<List<String>>,
    /// redirect and tproxy: not to these networks or "@set"s. Default: none.
    pub except: Option<List<String>>,
    /// redirect and tproxy: only to these ports, numbers or "first-last". Default: all.
    pub ports: Option<List<Number>>,
    /// tunnel: a file with this host's certificate chain and its private key, in PEM (`sidetrack tunnel key`).
    pub identity: Option<At<String>>,
    /// tunnel: a file with the certificates of the authorities whose near sides are let in, in PEM. Either this or
    /// `pins`.
    pub ca: Option<At<String>>,
    /// tunnel: the keys of the near sides that are let in, "sha256//BASE64" each.
    pub pins: Option<List<String>>,
    /// redirect: only programs in this control group, relative to the cgroup2 mount. Default: all.
    pub cgroup: Option<At<String>>,
    /// http, redirect and tproxy: a shared cache for what passes. At redirect and tproxy, requests to port 80 are then
    /// served one by one, as by a listener of kind http. Default: none.
    pub cache: Option<At<Cache>>,
    /// http, redirect and tproxy: TLS connections are opened as [tap] says. At redirect and tproxy, requests to port 80
    /// are served one by one, too. Default false.
    pub tap: Option<At<bool>>,
    /// engine: how it gets at packets, and where its connections to servers come from. Default: each key's own.
    pub engine: Option<At<Engine>>,
}

/// A shared cache of HTTP responses (RFC 9111).
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cache {
    /// Most bytes in memory, 1 MiB to 1 TiB. Default 268435456.
    pub memory_bytes: Option<At<u64>>,
    /// Most bytes of one response; larger ones pass and are not kept. Default 33554432.
    pub object_bytes: Option<At<u64>>,
    /// A folder where responses are kept, too, so that they survive a restart; only this listener's, made if there is
    /// none. Default: memory only.
    pub disk: Option<At<String>>,
    /// Most bytes in that folder, 1 MiB to 1 PiB. Default 10737418240.
    pub disk_bytes: Option<At<u64>>,
    /// Networks whose PURGE requests remove what is stored; from others it is a method as any. Default: none.
    pub purge_from: Option<List<String>>,
    /// Targeted fields (RFC 9213) that take the place of Cache-Control, in order. Default ["CDN-Cache-Control"].
    pub targets: Option<List<String>>,
    /// How long past its freshness a response is served while its server cannot be reached and the response does not say,
    /// milliseconds. Default 86400000.
    pub stale_if_unreachable_ms: Option<At<u64>>,
    /// Longest freshness that is guessed where a response does not say, milliseconds. Default 604800000.
    pub heuristic_max_ms: Option<At<u64>>,
    /// Query parameters that make no other resource; "utm_*" stands for all that begin so. Default: none.
    pub ignore_parameters: Option<List<String>>,
    /// Whether the order of query parameters makes no other resource. Default false.
    pub sort_query: Option<At<bool>>,
    /// Other caches that are asked for what is not stored here, "host:port" of their http listeners, at most 16. Default:
    /// none.
    pub siblings: Option<List<String>>,
    /// A file with more of them, "[host:port]" a line. Default: none.
    pub siblings_file: Option<At<String>>,
    /// Caches of other makers, which speak HTCP. Default: none is asked, and none may ask.
    pub htcp: Option<At<Htcp>>,
}

/// How a listener catches flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ListenKind {
    /// Clients ask by SOCKS5 or SOCKS6, told apart on one port.
    Socks,
    /// Clients ask by HTTP, as of a proxy.
    Http,
    /// The port stands for one server, or for several by name.
    Reverse,
    /// The kernel redirects connections of this host, or forwarded ones, to it.
    Redirect,
    /// The kernel hands it forwarded connections with their original destination.
    Tproxy,
    /// It is the far side of tunnels, over QUIC and over TLS on the same port.
    Tunnel,
    /// The packet engine stands for one server, or for several by name, without a socket.
    Engine,
}

/// Which wire layouts of SOCKS6 are accepted.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// Told apart by the request.
    Auto,
    /// draft-olteanu-intarea-socks-6 only.
    Draft,
    /// That of the `socksx` crate only.
    Socksx,
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
    /// socks: who may use the listener.
    Login(Login),
}

/// Who may use a socks listener.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Login {
    /// User name, 1 to 255 bytes.
    #[schemars(required)]
    pub user: Option<String>,
    /// Password, 1 to 255 bytes.
    pub password: Option<Secret>,
    /// A file whose first line is the password, in place of `password`.
    pub password_file: Option<String>,
}

/// One rule: whom it is for, and what happens to them.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Its name, unique; in records, metrics and `explain`.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// Which flows it is for; all keys given must hold. Default: every flow.
    #[serde(default, rename = "match")]
    pub matcher: Match,
    /// "deny" refuses the flow. Either this or `carrier`.
    pub action: Option<At<RuleAction>>,
    /// "direct", "tunnel:<name>", a hop such as "socks6://gw:1080", or a list of hops, each reached through the one
    /// before. Schemes: socks5, socks6, socks6+socksx, socks6+socksx010, http.
    pub carrier: Option<List<String>>,
    /// A file with one line "user:password" for each hop of `carrier`, in order; "-" for a hop without.
    pub credentials_file: Option<At<String>>,
    /// A destination "host:port" in place of the client's. Default: the client's.
    pub to: Option<At<String>>,
    /// What is dialled when both are known: "original" (the address the client meant) or "name". Default "original".
    pub dial: Option<At<Dial>>,
    /// Who resolves names when there are hops: "proxy" or "local". Default "proxy".
    pub resolve: Option<At<Resolve>>,
    /// The server sees the client's own address. Only with carrier "direct". Default false.
    pub keep_client_address: Option<At<bool>>,
    /// Version of the PROXY protocol header sent to the server: 1 or 2. Default: none is sent.
    pub proxy_protocol: Option<At<u8>>,
    /// As in [limits], for this rule, milliseconds.
    pub idle_timeout_ms: Option<At<u64>>,
    /// As in [limits], for this rule, milliseconds.
    pub lifetime_ms: Option<At<u64>>,
    /// As in [limits], for this rule, milliseconds.
    pub connect_timeout_ms: Option<At<u64>>,
    /// How long a SOCKS6 or TCP Fast Open hop may wait for the client's first bytes so that they travel with the request,
    /// milliseconds, 0 to 100. Default 0.
    pub initial_data_wait_ms: Option<At<u64>>,
    /// TCP Fast Open towards the server. Only with carrier "direct", and only where a replay is harmless. Default
    /// false.
    pub tfo: Option<At<bool>>,
    /// Multipath TCP towards the server. Only with carrier "direct". Default false.
    pub mptcp: Option<At<bool>>,
    /// How many idle connections to a destination each worker holds ready, so that a new flow takes one and waits for no
    /// handshake, 0 to 64. Only with carrier "direct". Default 0.
    pub warm: Option<At<u16>>,
    /// A connection of `warm` that no flow has taken for so long is closed and made anew, milliseconds, 100 to 600000.
    /// Less than the server's own idle time-out. Default 10000.
    pub warm_idle_ms: Option<At<u64>>,
    /// Whether the kernel may carry flows of this rule alone: "auto" or "never". Default "auto".
    pub kernel: Option<At<Kernel>>,
    /// Names of the functions that the rule's flows pass, in order from the client to the server. Default: none.
    pub chain: Option<List<String>>,
    /// What happens to running flows when a reload changes the chain of their rule: "keep" or "cut". Default "keep".
    pub on_chain_change: Option<At<OnChainChange>>,
    /// What happens to new flows while a container of the chain is down: "deny" refuses them, "skip" leads them past it.
    /// Default: none, it has to be written where there is a container in the chain.
    pub on_function_down: Option<At<OnFunctionDown>>,
    /// What the agreement of [policy] is asked about each flow: { purpose = "research" }. It decides, and its functions go
    /// behind those of `chain`. Default: it is not asked.
    pub agreement: Option<At<Clause>>,
    /// When a forwarded flow that the packet filter leaves to the rules takes the fast path of [shunt]: { after_bytes =
    /// 1048576 }. Goes with matches of addresses, ports, and the process or user behind a TCP connection of this host's
    /// containers and network namespaces: of other conditions nothing is known for packets that are passed on. Default:
    /// never.
    pub shunt: Option<At<RuleShunt>>,
    /// Metadata sent along a chain of SOCKS6 hops or tunnels: { 1000 = "text" }, keys 0 to 65535. Default: none.
    pub metadata: Option<At<BTreeMap<String, At<String>>>>,
}

/// What happens to running flows when their chain changes.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnChainChange {
    /// They keep the chain they have.
    Keep,
    /// They are cut.
    Cut,
}

/// What happens to new flows while a container of their chain is down.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnFunctionDown {
    /// They are refused.
    Deny,
    /// They go past it.
    Skip,
}

/// What a rule does if it does not carry.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RuleAction {
    /// The flow is refused.
    Deny,
}

/// What is dialled when both an address and a name are known.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dial {
    /// The address the client meant.
    Original,
    /// The name.
    Name,
}

/// Who resolves names when there are hops.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Resolve {
    /// The last hop.
    Proxy,
    /// This host.
    Local,
}

/// Whether the kernel may carry flows alone.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kernel {
    /// Where nothing the rule asks for needs user space.
    Auto,
    /// Never.
    Never,
}

/// What a rule asks of a flow. All keys given must hold; a list holds alternatives.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Match {
    /// The client is in these networks or "@set"s.
    pub from: Option<List<String>>,
    /// The destination is in these networks or "@set"s. A destination known by name only is in none; a rule that denies is asked
    /// again with each address that the name leads to.
    pub to: Option<List<String>>,
    /// The destination's port: numbers or "first-last".
    pub port: Option<List<Number>>,
    /// The host name, or "*.example" for all names below; international names as people write them or in ASCII ("xn--…"). Looked for in the first bytes where it is not known.
    pub host: Option<List<String>>,
    /// The host name is in one of these files: one name a line, "*.name" for all below, ".name" for both; lines of hosts
    /// files ("0.0.0.0 name") and of Adblock lists ("||name^", "@@||name^"). Looked for as for `host`.
    pub host_file: Option<List<String>>,
    /// The host name holds one of these words. Looked for as for `host`.
    pub host_contains: Option<List<String>>,
    /// The URL fits one of these patterns: "*" stands for anything, "?" for one character. It is normalised first (RFC 3986 Sec.
    /// 6.2.2); in a rule that denies, the URL as it was written counts as well. Requests whose URL is seen only: those of http
    /// listeners and of connections that are opened.
    pub url: Option<List<String>>,
    /// Names of listeners.
    pub listener: Option<List<String>>,
    /// How the flow was caught.
    pub intercept: Option<List<InterceptKind>>,
    /// Base names of executables; local flows only.
    pub process: Option<List<String>>,
    /// Users (names or ids) of local flows.
    pub user: Option<List<Number>>,
    /// Users who authenticated with a socks listener; near sides of a tunnel listener, by the name in their certificate.
    pub socks_user: Option<List<String>>,
}

/// How a flow was caught.
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

/// A decision test: what the rules have to say about one flow.
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
    /// The destination, "host:port". Default with a reverse listener: its server.
    pub dst: Option<At<String>>,
    /// The listener that caught it. Default: the only one, or none.
    pub listener: Option<At<String>>,
    /// How it was caught, where no listener says so. Default "redirect".
    pub intercept: Option<At<InterceptKind>>,
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
    /// Name of the rule that decides; "default" if none does.
    pub rule: Option<At<String>>,
    /// "deny" or "carry".
    pub action: Option<At<ExpectAction>>,
    /// The carrier, as in a rule and without credentials.
    pub carrier: Option<List<String>>,
}

/// Whether a decision test expects the flow to be carried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExpectAction {
    /// Refused.
    Deny,
    /// Carried.
    Carry,
}
