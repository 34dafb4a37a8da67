//! Configuration in two stages: [`raw`] is the file as it is written, [`Config`] is what the rest of the program
//! sees: checked, resolved, immutable. Every error and warning names the exact place in the file.

mod at;
mod cache;
mod check;
mod containers;
mod engine;
mod fixed;
mod lines;
mod nfshunt;
mod outgoing;
mod overlay;
mod parse;
mod policy;
mod problem;
mod question;
pub mod raw;
mod redact;
mod run_as;
mod shape;
mod shunt;
mod surroundings;
pub mod tap;

pub use at::{At, List};
pub use cache::{CacheSettings, DiskSettings, HtcpSettings, HtcpSibling};
pub use check::tests::{DecisionTest, Expectation};
pub use engine::{Choice, EngineIo, EngineListener, Pattern};
pub use fixed::waiting_for_restart;
pub use outgoing::Outgoing;
pub use overlay::{Deliver, Overlay, OverlayNode, Packets};
pub(crate) use parse::parse;
pub use policy::{AgreementFile, PolicyMode};
pub(crate) use problem::nearest;
pub use problem::{BadConfiguration, ConfigError, Problem};
pub use question::Question;
pub use raw::RunDns;
pub use run_as::RunAs;
pub use shape::Secret;
pub use shunt::{Shunt, ShuntPath, ShuntSwitch};
pub use surroundings::{SecretFile, Surroundings, System};
pub use tap::Tap;

use crate::tls::Mutual;
use sidetrack_core::carrier::Credentials;
use sidetrack_core::flow::{Destination, HostName, Intercept};
use sidetrack_core::function::FunctionSpec;
use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::policy::{Capture, HostPattern, KernelRule, Policy, Traffic};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A checked configuration; an immutable snapshot that a reload replaces as a whole.
#[derive(Clone, Debug)]
pub struct Config {
    /// Version of the format; 1.
    pub version: u32,
    /// Worker threads; 0 = one per core.
    pub workers: usize,
    /// What happens to captured traffic when the process dies.
    pub on_crash: OnCrash,
    /// The user of the data plane.
    pub user: RunAs,
    /// Where the running program can be asked and told things.
    pub admin: Admin,
    /// Where records of flows go.
    pub record: Record,
    /// How lines of the log look; none = as the environment says.
    pub log_format: Option<LogFormat>,
    /// Time-outs and bounds.
    pub limits: Limits,
    /// Who answers questions about names under `sidetrack run`.
    pub run_dns: RunDns,
    /// The shunt, if there is to be one.
    pub shunt: Option<Shunt>,
    /// Which TLS connections are opened, where a listener asks for it.
    pub tap: Option<Arc<Tap>>,
    /// What catches flows, in the order of the file.
    pub listeners: Vec<Listener>,
    /// The functions that rules may lead flows through, by name.
    pub functions: Vec<Arc<FunctionSpec>>,
    /// The container engine's socket, where one is named.
    pub engine: Option<PathBuf>,
    /// The overlay this node is part of.
    pub overlay: Option<Overlay>,
    /// Connections held open to far sides, by name.
    pub tunnels: Vec<Arc<Tunnel>>,
    /// Paths that services ask for, if they may.
    pub outgoing: Option<Outgoing>,
    /// The data-flow agreement that rules ask.
    pub agreement: Option<AgreementFile>,
    /// The rules.
    pub policy: Arc<Policy>,
    /// Decision tests of the file; all of them hold.
    pub tests: Vec<DecisionTest>,
    /// What is allowed but hardly meant.
    pub warnings: Vec<Problem>,
    /// The files and folders that the file names.
    pub named: Vec<PathBuf>,
}

/// What happens to captured traffic when the process dies without taking its rules back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCrash {
    /// The kernel drops our table: traffic flows as if we had never been there.
    #[default]
    Open,
    /// The table stays: what we captured stays blocked until we are back, or until `sidetrack cleanup`.
    Closed,
}

/// Where the running program can be asked and told things.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admin {
    /// The unix socket of the admin interface.
    pub socket: AdminAt,
    /// An extra TCP address that serves `/metrics` and nothing else.
    pub metrics: Option<SocketAddr>,
    /// Names by which that address may be called, beside addresses and `localhost`.
    pub metrics_hosts: Vec<String>,
}

/// Where the admin socket is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdminAt {
    /// Where `sidetrack flows` looks by itself: the place is that of the user who runs us.
    #[default]
    Default,
    /// There.
    Path(PathBuf),
    /// Nowhere: no admin interface.
    None,
}

/// Where records of flows go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where the JSON lines go.
    pub to: RecordTo,
    /// Number of ended flows kept in memory for `sidetrack flows`.
    pub recent: usize,
}

/// How lines of the log look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Where the JSON lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordTo {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// Nowhere; `flows` and metrics still work.
    None,
    /// Appended to this file.
    File(PathBuf),
}

/// Time-outs and bounds. A rule's own time-outs take precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most flows at a time; none = computed from `RLIMIT_NOFILE` at the start.
    pub max_flows: Option<u32>,
    /// Most flows at a time of one client address; none = half of all, for clients of other hosts.
    pub max_flows_per_client: Option<u32>,
    /// Most connections whose handshake or first request has not come; none = a quarter of all flows.
    pub max_handshakes: Option<u32>,
    /// Ends a flow on which nothing moved for so long, milliseconds. Default [`Limits::IDLE_TIMEOUT_MS`].
    pub idle_timeout_ms: u64,
    /// Ends a flow after so long, milliseconds; none = never.
    pub lifetime_ms: Option<u64>,
    /// Time for the connection to the server, with all handshakes with hops, milliseconds.
    pub connect_timeout_ms: u64,
    /// Time a client has for its handshake with our listener (SOCKS, PROXY protocol), milliseconds.
    pub handshake_timeout_ms: u64,
    /// How long a flow may wait for its first bytes where a rule asks for them, milliseconds, 1 to 100.
    pub first_bytes_ms: u64,
    /// Most bytes held for one direction of a flow.
    pub buffer_bytes: usize,
    /// How long flows may go on after SIGTERM, milliseconds.
    pub drain_ms: u64,
}

impl Limits {
    /// Two hours and four minutes: the least that RFC 5382 Sec. 5 (REQ-5) allows a NAT, which is what an
    /// interceptor is to a program that knows nothing about it. A shorter one cuts idle SSH sessions and database
    /// pools that live on a direct path; TCP keep-alive (two hours by default) gets through.
    pub const IDLE_TIMEOUT_MS: u64 = 7_440_000;
    /// Ten seconds: three SYN retransmissions (1 + 2 + 4 s) and a handshake.
    pub const CONNECT_TIMEOUT_MS: u64 = 10_000;
    /// Ten seconds, as long as connecting may take.
    pub const HANDSHAKE_TIMEOUT_MS: u64 = 10_000;
    /// 64 KiB for each direction.
    pub const BUFFER_BYTES: usize = 65_536;
    /// Five seconds: long enough for a request and its answer, short enough for a restart.
    pub const DRAIN_MS: u64 = 5_000;
    /// One day: the longest that stopping may take.
    pub const DRAIN_MAX_MS: u64 = 86_400_000;
    /// Longest wait for first bytes that can be set, milliseconds: a protocol in which the server speaks first pays
    /// it on every connection.
    pub const FIRST_BYTES_MAX_MS: u64 = 100;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_flows: None,
            max_flows_per_client: None,
            max_handshakes: None,
            idle_timeout_ms: Self::IDLE_TIMEOUT_MS,
            lifetime_ms: None,
            connect_timeout_ms: Self::CONNECT_TIMEOUT_MS,
            handshake_timeout_ms: Self::HANDSHAKE_TIMEOUT_MS,
            first_bytes_ms: Policy::FIRST_BYTES_MS,
            buffer_bytes: Self::BUFFER_BYTES,
            drain_ms: Self::DRAIN_MS,
        }
    }
}

impl Default for Record {
    fn default() -> Self {
        Self { to: RecordTo::Stdout, recent: 4096 }
    }
}

/// Something that catches flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Its name, unique; its kind unless the file says otherwise.
    pub name: Arc<str>,
    /// Where it listens; port 0 = the kernel picks one.
    pub addresses: Vec<SocketAddr>,
    /// How it catches flows.
    pub kind: ListenerKind,
    /// Neighbours whose PROXY protocol header is believed, and required. Empty = none is read.
    pub accept_proxy_protocol: IpSet,
    /// It accepts Multipath TCP, where the kernel has it.
    pub mptcp: bool,
}

/// How a listener catches flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    /// Clients ask by SOCKS.
    Socks(SocksListener),
    /// Clients ask by HTTP, as of a proxy.
    Http(HttpListener),
    /// The port stands for a server.
    Reverse(ReverseTarget),
    /// The kernel redirects connections to it.
    Redirect(Redirect),
    /// The kernel hands it connections with their original destination as local address.
    Tproxy(Tproxy),
    /// It is the far side of tunnels: who we are, and whose near sides are let in.
    Tunnel(Mutual),
    /// The packet engine answers.
    Engine(EngineListener),
}

impl ListenerKind {
    /// How requests are served, where they are.
    pub const fn http(&self) -> Option<&HttpListener> {
        match self {
            Self::Http(http) => Some(http),
            Self::Redirect(redirect) => redirect.http.as_ref(),
            Self::Tproxy(tproxy) => tproxy.http.as_ref(),
            Self::Socks(_) | Self::Reverse(_) | Self::Tunnel(_) | Self::Engine(_) => None,
        }
    }

    /// Where its cache answers HTCP over UDP; none if it does not.
    pub fn htcp_address(&self) -> Option<SocketAddr> {
        Some(self.http()?.cache.as_ref()?.htcp.as_ref()?.address)
    }
}

/// A SOCKS listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocksListener {
    /// Serves SOCKS5 (RFC 1928).
    pub v5: bool,
    /// Serves SOCKS6 (draft-olteanu-intarea-socks-6).
    pub v6: bool,
    /// Who may use it; empty = everybody, without authentication.
    pub users: Vec<Credentials>,
    /// Which wire layouts of SOCKS6 it accepts.
    pub dialect: DialectSetting,
}

/// An HTTP listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpListener {
    /// Who may use it; empty = everybody, without authentication.
    pub users: Vec<Credentials>,
    /// The server of requests that name none (origin form): the listener stands for it. None = they are refused.
    pub to: Option<Destination>,
    /// Its cache, if it has one.
    pub cache: Option<CacheSettings>,
    /// Which TLS connections of its clients are opened; none = all pass untouched.
    pub tap: Option<Arc<Tap>>,
}

/// Which wire layouts of SOCKS6 a listener accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DialectSetting {
    /// Told apart by the request.
    #[default]
    Auto,
    /// The draft's only.
    Draft,
    /// That of `socksx` only.
    Socksx,
}

/// Where the flows of a reverse listener go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReverseTarget {
    /// All to one server. The flow's `orig_dst` is this server.
    Fixed(Destination),
    /// By the name in the first bytes (TLS SNI or HTTP Host).
    ByName {
        /// Patterns in the order in which they are tried: names first, then the longest pattern.
        names: Vec<(HostPattern, Destination)>,
        /// Where a flow goes whose name is unknown or in no pattern; none = it is refused.
        default: Option<Destination>,
    },
}

impl ReverseTarget {
    /// The server for a flow whose first bytes hold `name`.
    pub fn server_for(&self, name: Option<&HostName>) -> Option<&Destination> {
        match self {
            Self::Fixed(server) => Some(server),
            Self::ByName { names, default } => name
                .and_then(|name| names.iter().find(|(pattern, _)| pattern.matches(name)))
                .map(|(_, server)| server)
                .or(default.as_ref()),
        }
    }

    /// Whether the first bytes have to be read to know the server.
    pub const fn needs_first_bytes(&self) -> bool {
        matches!(self, Self::ByName { .. })
    }
}

/// What the kernel redirects to a listener. Everything given must hold; `None` and empty lists do not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redirect {
    /// Connections that programs of this host open.
    pub local: bool,
    /// Connections that this host forwards.
    pub forwarded: bool,
    /// Interfaces by which forwarded connections come in.
    pub interfaces: Vec<String>,
    /// Sources.
    pub src: Option<IpSet>,
    /// Destinations.
    pub dst: Option<IpSet>,
    /// Destinations that are left alone.
    pub except: IpSet,
    /// Destination ports.
    pub ports: Option<PortSet>,
    /// User ids of local programs.
    pub uids: Vec<u32>,
    /// Control group of local programs, relative to the cgroup2 mount.
    pub cgroup: Option<String>,
    /// How requests are served; none = connections are carried as they are.
    pub http: Option<HttpListener>,
}

/// What the kernel hands to a tproxy listener: forwarded connections. `None` and empty lists do not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tproxy {
    /// Interfaces by which the connections come in.
    pub interfaces: Vec<String>,
    /// Sources.
    pub src: Option<IpSet>,
    /// Destinations.
    pub dst: Option<IpSet>,
    /// Destinations that are left alone.
    pub except: IpSet,
    /// Destination ports.
    pub ports: Option<PortSet>,
    /// How requests are served; none = connections are carried as they are.
    pub http: Option<HttpListener>,
}

/// A connection held open to a far side, which carries flows on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Its name, unique; rules say `carrier = "tunnel:<name>"`.
    pub name: Arc<str>,
    /// Addresses of the far side, the preferred one first; never empty.
    pub paths: Vec<Destination>,
    /// The far side's name in its certificate, where it is not the host of the path.
    pub server_name: Option<HostName>,
    /// Who we are, and whom we believe.
    pub mutual: Mutual,
    /// What carries it.
    pub transport: Transport,
    /// Time between two signs of life, milliseconds.
    pub keepalive_ms: u64,
    /// A path without a sign of life for so long is lost, milliseconds.
    pub lost_after_ms: u64,
}

/// What carries a tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// QUIC; TLS over TCP where UDP does not get through.
    #[default]
    Auto,
    /// QUIC only.
    Quic,
    /// TLS over TCP only.
    Tls,
}

impl Tunnel {
    /// Default of [`Tunnel::keepalive_ms`].
    pub const KEEPALIVE_MS: u64 = 2000;
    /// Default of [`Tunnel::lost_after_ms`].
    pub const LOST_AFTER_MS: u64 = 6000;

    /// The name that the certificate of the far side at this path has to have.
    pub fn server_name(&self, path: &Destination) -> String {
        self.server_name.as_ref().map_or_else(|| path.host.to_string(), HostName::to_string)
    }
}

impl Listener {
    /// What the kernel could carry alone of what this listener catches, one capture for each address it listens on;
    /// none where bytes have to be read first.
    pub fn captures(&self) -> Vec<Capture> {
        if !self.accept_proxy_protocol.is_empty() {
            return Vec::new();
        }
        let anywhere = |forwarded, src: &Option<IpSet>, dst: &Option<IpSet>, ports: &Option<PortSet>| {
            let (src, dst, ports) = (src.clone(), dst.clone(), ports.clone());
            let traffic = Traffic::Anywhere { intercept: self.kind.intercept(), forwarded, src, dst, ports };
            vec![Capture { listener: self.name.clone(), traffic }]
        };
        match &self.kind {
            ListenerKind::Reverse(ReverseTarget::Fixed(server)) => {
                let capture = |address: &SocketAddr| Capture::reverse(self.name.clone(), *address, server);
                self.addresses.iter().filter_map(capture).collect()
            }
            ListenerKind::Redirect(redirect) if redirect.http.is_none() => {
                anywhere(redirect.forwarded, &redirect.src, &redirect.dst, &redirect.ports)
            }
            ListenerKind::Tproxy(tproxy) if tproxy.http.is_none() => {
                anywhere(true, &tproxy.src, &tproxy.dst, &tproxy.ports)
            }
            ListenerKind::Socks(_)
            | ListenerKind::Http(_)
            | ListenerKind::Redirect(_)
            | ListenerKind::Tproxy(_)
            | ListenerKind::Tunnel(_)
            | ListenerKind::Engine(_)
            | ListenerKind::Reverse(ReverseTarget::ByName { .. }) => Vec::new(),
        }
    }
}

impl ListenerKind {
    /// The word of configuration, records and `match.intercept`.
    pub const fn intercept(&self) -> Intercept {
        match self {
            Self::Socks(_) => Intercept::Socks,
            Self::Http(_) => Intercept::Http,
            Self::Reverse(_) => Intercept::Reverse,
            Self::Redirect(_) => Intercept::Redirect,
            Self::Tproxy(_) => Intercept::Tproxy,
            Self::Tunnel(_) => Intercept::Tunnel,
            Self::Engine(_) => Intercept::Engine,
        }
    }

    /// The servers it stands for; none where the client says where it wants to go.
    pub const fn servers(&self) -> Option<&ReverseTarget> {
        match self {
            Self::Reverse(target) => Some(target),
            Self::Engine(engine) => Some(&engine.target),
            _ => None,
        }
    }
}

impl Config {
    /// The files that are looked for where none is named, in this order.
    pub const PATHS: [&str; 2] = ["sidetrack.toml", "/etc/sidetrack/sidetrack.toml"];

    /// The file that is read where none is named: the first of [`Self::PATHS`] that is there.
    pub fn default_path() -> PathBuf {
        let [here, of_host] = Self::PATHS.map(PathBuf::from);
        if !here.exists() && of_host.exists() { of_host } else { here }
    }

    /// A listener by name.
    pub fn listener(&self, name: &str) -> Option<&Listener> {
        self.listeners.iter().find(|listener| *listener.name == *name)
    }

    /// What of a listener's traffic the kernel can carry alone: each capture with its lines for the packet filter.
    pub fn kernel_paths(&self, listener: &Listener) -> Vec<(Capture, Vec<KernelRule>)> {
        if self.limits.max_flows_per_client.is_some() {
            // Only user space counts the flows of a client.
            return Vec::new();
        }
        let lines = |capture: Capture| {
            let lines = self.policy.kernel_path(&capture);
            (capture, lines)
        };
        listener.captures().into_iter().map(lines).filter(|(_, lines)| !lines.is_empty()).collect()
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// Says all that is wrong with it, each with its place; or why it cannot be read.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::unreadable(path, &error))?;
        Self::from_text(&path.display().to_string(), &text)
    }

    /// Checks a text; `name` is that of the file in messages, and relative paths in it are relative to its folder.
    ///
    /// # Errors
    /// Says all that is wrong with it, each with its place.
    pub fn from_text(name: &str, text: &str) -> Result<Self, ConfigError> {
        let folder = Path::new(name).parent().unwrap_or(Path::new(""));
        Self::from_text_in(name, text, &System::new(folder))
    }

    /// As [`Config::from_text`], with users and other files looked up in `surroundings`.
    ///
    /// # Errors
    /// Says all that is wrong with it, each with its place.
    pub fn from_text_in(
        name: &str,
        text: &str,
        surroundings: &dyn Surroundings,
    ) -> Result<Self, ConfigError> {
        if nfshunt::is_nfshunt(text) {
            let ours =
                nfshunt::translated(text).map_err(|problems| ConfigError::new(name, text, problems))?;
            return Self::from_text_in(&format!("{name} (as TOML)"), &ours, surroundings);
        }
        let mut parsed = parse::parse_all::<raw::File>(text, "`sidetrack schema`");
        let shape = std::mem::take(&mut parsed.problems);
        let mut problems = shape.clone();
        let noting = surroundings::Noting::new(surroundings);
        let config = parsed.file.as_ref().and_then(|raw| check::check(raw, &noting, &mut problems));
        if !shape.is_empty() {
            // What is left of the file may look wrong, or strange, only because something was taken out of it.
            let of_values = problems.split_off(shape.len());
            problems.extend(of_values.into_iter().filter(|one| one.is_error() && !parsed.explains(one)));
        }
        let (errors, warnings): (Vec<_>, Vec<_>) = problems.into_iter().partition(Problem::is_error);
        match config {
            Some(config) if errors.is_empty() => Ok(Self { warnings, named: noting.named(), ..config }),
            _ => Err(ConfigError::new(name, text, errors.into_iter().chain(warnings).collect())),
        }
    }
}
