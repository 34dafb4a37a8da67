//! Configuration in two stages: [`raw`] is the file as it is written, [`Config`] is what the rest of the program
//! sees: checked, resolved, immutable. Every error and warning names the exact place in the file.

mod cache;
mod capture;
mod check;
mod containers;
mod dns;
mod early;
mod engine;
mod export;
mod fixed;
mod limits;
mod listener;
mod nfshunt;
mod outgoing;
mod overlay;
mod policy;
mod question;
#[allow(
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    reason = "these comments are texts of the reference: [name] is a table of the configuration there"
)]
pub mod raw;
mod shape;
mod shunt;
mod surroundings;
pub mod tap;
mod wire;
mod zone;

pub use cache::{CacheSettings, DiskSettings, HtcpSettings, HtcpSibling};
pub use capture::CaptureAt;
pub use check::decision_tests::{DecisionTest, Expectation};
pub use dns::{Dns, NameStanding};
pub use early::Early;
pub use engine::{Choice, EngineIo, EngineListener, Pattern};
pub use export::{Export, Ipfix, Otlp};
pub use fixed::waiting_for_restart;
pub use limits::Limits;
pub use outgoing::Outgoing;
pub use overlay::{Deliver, Group, Overlay, OverlayEdge, OverlayLink, OverlayNode, Packets, Target};
pub use policy::{AgreementFile, PolicyMode};
pub use question::Question;
pub use raw::{DnsMode, RunDns};
pub use shape::Secret;
pub use shunt::{Shunt, ShuntPath, ShuntSwitch, SwitchMember};
pub use sidetrack_common::file::{At, BadConfiguration, ConfigError, List, Problem};
pub use sidetrack_common::rights::RunAs;
pub use surroundings::{SecretFile, Surroundings, System, numbered};
pub use tap::Tap;
pub use wire::{OnWireCrash, PinnedAt, Wire};

use crate::tls::{Mutual, Own};
use sidetrack_common::file::{nearest, parse_all};
use sidetrack_core::association::Filtering;
use sidetrack_core::carrier::{Credentials, Hop};
use sidetrack_core::flow::{Destination, HostName, Protocol};
use sidetrack_core::function::FunctionSpec;
use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::policy::{Capture, HostPattern, KernelRule, Policy};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A checked configuration; an immutable snapshot that a reload replaces as a whole.
#[derive(Clone, Debug)]
pub struct Config {
    /// Version of the format; 1.
    pub version: u32,
    /// Worker threads; 0 = one per core.
    pub workers: usize,
    /// What happens to captured traffic when the process dies.
    pub on_crash: OnCrash,
    /// Whether the SSH session from which the program is started may be captured.
    pub capture_ssh: bool,
    /// The user that the process switches to after the start; it serves connections as this user.
    pub user: RunAs,
    /// The admin interface of the running program: its socket, its page and its metrics address.
    pub admin: Admin,
    /// Where records of flows go.
    pub record: Record,
    /// Where ended flows are kept for days. `None`: nowhere.
    pub history: Option<History>,
    /// Where reports of flows are sent.
    pub export: Export,
    /// Captures of packets.
    pub capture: CaptureAt,
    /// The format of log lines. `None`: the environment decides.
    pub log_format: Option<LogFormat>,
    /// Time-outs and bounds.
    pub limits: Limits,
    /// The resolver of programs under `sidetrack run`.
    pub run_dns: RunDns,
    /// The shunt, if one is configured.
    pub shunt: Option<Shunt>,
    /// Flows that the kernel takes over from our sockets. `None`: none.
    pub wire: Option<Wire>,
    /// Which TLS connections are intercepted. Applies to listeners that ask for it.
    pub tap: Option<Arc<Tap>>,
    /// The listeners, in the order of the file.
    pub listeners: Vec<Listener>,
    /// The functions that rules may send flows through, by name.
    pub functions: Vec<Arc<FunctionSpec>>,
    /// The container engine's socket, if the file names one.
    pub container_engine: Option<PathBuf>,
    /// The overlay this node is part of.
    pub overlay: Option<Overlay>,
    /// Long-lived connections to far sides that carry flows, by name.
    pub tunnels: Vec<Arc<Tunnel>>,
    /// The resolver of this node, if it is on.
    pub dns: Option<Dns>,
    /// The service that opens listening ports for services on request, if it is on.
    pub outgoing: Option<Outgoing>,
    /// The data-flow agreement that rules refer to.
    pub agreement: Option<AgreementFile>,
    /// The rules.
    pub policy: Arc<Policy>,
    /// Decision tests of the file; all of them passed.
    pub tests: Vec<DecisionTest>,
    /// Settings that are valid but probably a mistake.
    pub warnings: Vec<Problem>,
    /// The files and folders that the file names.
    pub named: Vec<PathBuf>,
}

/// What happens to captured traffic when the process dies without removing its kernel rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCrash {
    /// The kernel removes our table, and traffic flows as if Sidetrack had never run.
    #[default]
    Open,
    /// The table stays. Captured traffic is blocked until Sidetrack runs again, or until `sidetrack cleanup`.
    Closed,
}

/// The admin interface of the running program: its socket, its page and its metrics address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Admin {
    /// The unix socket of the admin interface.
    pub socket: AdminAt,
    /// An extra TCP address that serves `/metrics` only.
    pub metrics: Option<SocketAddr>,
    /// Host names that requests to that address may carry, besides addresses and `localhost`.
    pub metrics_hosts: Vec<String>,
    /// An extra TCP address that serves the page and the admin interface behind a login.
    pub page: Option<SocketAddr>,
    /// The file with the tokens of that login. `None`: beside the socket.
    pub page_tokens: Option<PathBuf>,
    /// Host names that requests to the page may carry, besides addresses and `localhost`.
    pub page_hosts: Vec<String>,
    /// The orchestrator whose applications the page shows.
    pub orchestrator: Option<OrchestratorAt>,
}

/// Where an orchestrator is, and who asks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrchestratorAt {
    /// Its addresses, each `host:port`, at least one.
    pub addresses: Vec<String>,
    /// The name in its certificate.
    pub name: String,
    /// The file with our certificate and key.
    pub identity: PathBuf,
    /// The file with the authority that signed its certificate.
    pub ca: PathBuf,
}

/// Where the admin socket is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdminAt {
    /// The default path of the user that runs Sidetrack; `sidetrack flows` looks there too.
    #[default]
    Default,
    /// This path.
    Path(PathBuf),
    /// There is no admin interface.
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

/// Where ended flows are kept for days.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// A folder.
    pub path: PathBuf,
    /// Bytes of all files together.
    pub max_bytes: u64,
    /// Time after which flows go.
    pub keep: Duration,
    /// Whether the bytes of running flows are kept for each second.
    pub counters: bool,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines of text.
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
    /// No file. `flows` and metrics still work.
    None,
    /// Appended to this file.
    File(PathBuf),
}

impl Default for Record {
    fn default() -> Self {
        Self { to: RecordTo::Stdout, recent: 4096 }
    }
}

/// A listener: one way by which flows reach Sidetrack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Its name, unique. Default: the word of its kind.
    pub name: Arc<str>,
    /// Addresses to listen on. Port 0: the kernel picks one.
    pub addresses: Vec<SocketAddr>,
    /// How it catches flows.
    pub kind: ListenerKind,
    /// Peers that must send a PROXY protocol header, which is trusted. Empty: no header is read.
    pub accept_proxy_protocol: IpSet,
    /// Whether it accepts Multipath TCP, if the kernel has it.
    pub mptcp: bool,
    /// The transport protocol of its flows.
    pub protocol: Protocol,
}

/// How a listener catches flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenerKind {
    /// Clients send SOCKS requests.
    Socks(SocksListener),
    /// Clients send HTTP requests as to a proxy.
    Http(HttpListener),
    /// Connections to this port are for a configured server.
    Reverse(ReverseTarget),
    /// The kernel redirects connections to it.
    Redirect(Redirect),
    /// The kernel hands it connections whose local address is the original destination (TPROXY).
    Tproxy(Tproxy),
    /// Far side of tunnels: our identity, and the near sides it accepts.
    Tunnel(Mutual),
    /// The packet engine, with its own TCP.
    Engine(EngineListener),
}

/// A SOCKS listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocksListener {
    /// Serves SOCKS5 (RFC 1928).
    pub v5: bool,
    /// Serves SOCKS6 (draft-olteanu-intarea-socks-6).
    pub v6: bool,
    /// Users that may use it. Empty: every client may, without authentication.
    pub users: Vec<Credentials>,
    /// Which wire layouts of SOCKS6 it accepts.
    pub dialect: DialectSetting,
    /// Whether clients may have a port that waits for a connection (BIND).
    pub bind: bool,
    /// How it relays datagrams (UDP ASSOCIATE). `None`: it does not.
    pub udp: Option<SocksDatagrams>,
}

/// How a SOCKS listener relays datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocksDatagrams {
    /// The address that clients are told to send to. `None`: the one that they have connected to.
    pub advertise: Option<IpAddr>,
    /// Which servers may send to a client.
    pub filtering: Filtering,
    /// Whether all clients send to the listener's port number, instead of one port for each.
    pub shared: bool,
}

/// An HTTP listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpListener {
    /// Users that may use it. Empty: every client may, without authentication.
    pub users: Vec<Credentials>,
    /// The server for requests in origin form, which name none. `None`: such requests are rejected.
    pub to: Option<Destination>,
    /// The same server, if it is reached by TLS: its authorities, too.
    pub to_secure: Option<Hop>,
    /// Its cache, if it has one.
    pub cache: Option<CacheSettings>,
    /// Which TLS connections of its clients are intercepted. `None`: all pass unchanged.
    pub tap: Option<Arc<Tap>>,
    /// The certificate that clients of the listener itself see. `None`: they use no TLS.
    pub own: Option<Own>,
    /// Serves HTTP/3 on the same port.
    pub http3: bool,
}

/// Which wire layouts of SOCKS6 a listener accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DialectSetting {
    /// The layout is detected from the request.
    #[default]
    Auto,
    /// Only the layout of the draft.
    Draft,
    /// Only the layout of `socksx`.
    Socksx,
}

/// Where the flows of a reverse listener go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReverseTarget {
    /// All go to one server, which is the flow's `orig_dst`.
    Fixed(Destination),
    /// By the name in the first bytes (TLS SNI or HTTP Host).
    ByName {
        /// Patterns in the order in which they are tried: exact names first, then the longest pattern.
        names: Vec<(HostPattern, Destination)>,
        /// The server for flows without a known name. `None`: such flows are rejected.
        default: Option<Destination>,
    },
}

impl ReverseTarget {
    /// Returns the server for a flow whose first bytes contain `name`.
    pub fn server_for(&self, name: Option<&HostName>) -> Option<&Destination> {
        match self {
            Self::Fixed(server) => Some(server),
            Self::ByName { names, default } => name
                .and_then(|name| names.iter().find(|(pattern, _)| pattern.matches(name)))
                .map(|(_, server)| server)
                .or(default.as_ref()),
        }
    }

    /// Whether the first bytes are needed to choose the server.
    pub const fn needs_first_bytes(&self) -> bool {
        matches!(self, Self::ByName { .. })
    }
}

/// Which connections the kernel redirects to a listener. All conditions must hold; `None` and empty lists do not
/// restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redirect {
    /// Connections that programs on this host open.
    pub local: bool,
    /// Connections that this host forwards.
    pub forwarded: bool,
    /// Interfaces on which forwarded connections arrive.
    pub interfaces: Vec<String>,
    /// Source networks.
    pub src: Option<IpSet>,
    /// Destination networks.
    pub dst: Option<IpSet>,
    /// Destinations that are not redirected.
    pub except: IpSet,
    /// Destination ports.
    pub ports: Option<PortSet>,
    /// User ids of local programs.
    pub uids: Vec<u32>,
    /// Control group of local programs, relative to the cgroup2 mount.
    pub cgroup: Option<String>,
    /// Settings for HTTP requests. `None`: connections are carried without reading requests.
    pub http: Option<HttpListener>,
}

/// Which forwarded connections the kernel hands to a tproxy listener. `None` and empty lists do not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tproxy {
    /// Interfaces on which the connections arrive.
    pub interfaces: Vec<String>,
    /// Source networks.
    pub src: Option<IpSet>,
    /// Destination networks.
    pub dst: Option<IpSet>,
    /// Destinations that are not captured.
    pub except: IpSet,
    /// Destination ports.
    pub ports: Option<PortSet>,
    /// Settings for HTTP requests. `None`: connections are carried without reading requests.
    pub http: Option<HttpListener>,
}

/// A long-lived connection to a far side, which carries flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Its name, unique; rules say `carrier = "tunnel:<name>"`.
    pub name: Arc<str>,
    /// Addresses of the far side, the preferred one first. Never empty.
    pub paths: Vec<Destination>,
    /// The name in the far side's certificate, if it is not the host of the path.
    pub server_name: Option<HostName>,
    /// Our identity, and how the peer's certificate is checked.
    pub mutual: Mutual,
    /// The transport protocol.
    pub transport: Transport,
    /// Time between two keep-alive messages, milliseconds.
    pub keepalive_ms: u64,
    /// A path that is silent for this time is lost, milliseconds.
    pub lost_after_ms: u64,
}

/// The transport protocol of a tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// QUIC, or TLS over TCP if UDP does not get through.
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

    /// Returns the name that the far side's certificate must have, for this path.
    pub fn server_name(&self, path: &Destination) -> String {
        self.server_name.as_ref().map_or_else(|| path.host.to_string(), HostName::to_string)
    }
}

impl Config {
    /// Default paths of the configuration file, in the order in which they are tried.
    pub const PATHS: [&str; 2] = ["sidetrack.toml", "/etc/sidetrack/sidetrack.toml"];

    /// Returns the default file: the first of [`Self::PATHS`] that exists.
    pub fn default_path() -> PathBuf {
        let [here, of_host] = Self::PATHS.map(PathBuf::from);
        if !here.exists() && of_host.exists() { of_host } else { here }
    }

    /// Returns a listener by name.
    pub fn listener(&self, name: &str) -> Option<&Listener> {
        self.listeners.iter().find(|listener| *listener.name == *name)
    }

    /// Returns the captures of a listener that the kernel can forward without us, with their packet filter
    /// rules.
    pub fn kernel_paths(&self, listener: &Listener) -> Vec<(Capture, Vec<KernelRule>)> {
        if self.limits.max_flows_per_client.is_some() {
            // Only user space counts the flows of each client.
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
    /// Lists all errors in the file with their places, or says why the file cannot be read.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::unreadable(path, &error))?;
        Self::from_text(&path.display().to_string(), &text)
    }

    /// Checks a text. `name` is the file name for messages; relative paths start from its folder.
    ///
    /// # Errors
    /// Lists all errors in the text with their places.
    pub fn from_text(name: &str, text: &str) -> Result<Self, ConfigError> {
        let folder = Path::new(name).parent().unwrap_or(Path::new(""));
        Self::from_text_in(name, text, &System::new(folder))
    }

    /// Like [`Config::from_text`], but looks up users and other files in `surroundings`.
    ///
    /// # Errors
    /// Lists all errors in the text with their places.
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
        let mut parsed = parse_all::<raw::File>(text, "`sidetrack schema`");
        let shape = std::mem::take(&mut parsed.problems);
        let mut problems = shape.clone();
        let noting = surroundings::Noting::new(surroundings);
        let config = parsed.file.as_ref().and_then(|raw| check::check(raw, &noting, &mut problems));
        if !shape.is_empty() {
            // The keys that could not be read are missing below. A problem that may only come from that is not
            // shown.
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
