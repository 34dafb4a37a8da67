//! The compared programs: other relays and ours, each started from a generated configuration.
//!
//! A [`Peer`] is a row of the table. Starting it gives a [`Running`], which says what the client has to dial and
//! speak. Dropping the [`Running`] ends the programs and removes their rules.

pub mod bare;
pub mod chains;
mod datagrams;
mod haproxy;
mod kernel;
mod loops;
mod nginx;
pub mod ours;
mod proxies;
mod recorded;
mod redirectors;
pub mod socksx;
mod tunnel;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;

use crate::bare::Role;
use crate::launch;
use crate::load::Via;
use crate::service::Service;
use crate::site::{self, Forwarding, Site};
use crate::topology::Node;

pub use loops::LOOPS;
pub use proxies::Proxy;
pub use recorded::RECORDED;
pub use redirectors::{Redirecting, Redirector};

/// Port of proxies that forward to a fixed server.
const RELAY_PORT: u16 = 9080;
/// Maximum number of connections, for peers that need a number: half of 20,000 descriptors, minus those of the peer
/// itself.
const FLOW_LIMIT: u32 = 9_900;

/// The group within which a peer is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// No relay, or the smallest possible one: the limit.
    Limit,
    /// One program between client and server.
    OneHop,
    /// A redirector beside the client and a proxy.
    Pair,
    /// The kernel forwards.
    Kernel,
}

/// One row: a program, or several that work together, in one role.
#[derive(Clone, Copy)]
pub struct Peer {
    /// Name in tables and for `--only`.
    pub name: &'static str,
    /// Whether it is Sidetrack.
    pub is_ours: bool,
    /// What it is compared with.
    pub class: Class,
    start: for<'s> fn(&'s Site) -> Start<'s>,
}

/// The result of starting a peer.
pub type Start<'s> = Result<Running<'s>, Unavailable>;

/// Why a peer has no figures.
#[derive(Debug)]
pub enum Unavailable {
    /// It is not installed; the text names what is missing and how to get it.
    Absent(String),
    /// It is installed and did not start.
    Failed(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Unavailable {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// The error that a program is not installed. It passes through functions that can also fail for other reasons. The
/// text names what is missing and how to get it.
#[derive(Debug)]
pub struct Absent(pub String);

impl fmt::Display for Absent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "absent: {}", self.0)
    }
}

impl std::error::Error for Absent {}

impl Unavailable {
    /// Returns it as an error; [`Absent`] can be found in it again.
    pub fn into_error(self) -> anyhow::Error {
        match self {
            Self::Absent(what) => Absent(what).into(),
            Self::Failed(error) => error,
        }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(what) => write!(formatter, "absent: {what}"),
            Self::Failed(error) => write!(formatter, "failed: {error:#}"),
        }
    }
}

/// A started peer.
#[derive(Debug)]
pub struct Running<'s> {
    services: Vec<Service>,
    /// Removes the rules when dropped.
    _tables: Vec<Table<'s>>,
    /// Stops the forwarding of packets when dropped.
    _forwarding: Option<Forwarding<'s>>,
    /// Words before the client's command: a program that runs it. Empty: it runs as it is.
    pub inside: Vec<String>,
    /// The address that the client dials.
    pub dial: SocketAddr,
    /// The protocol it uses there.
    pub via: Via,
    /// The server it requests.
    pub destination: SocketAddr,
}

impl Running<'_> {
    /// Returns the CPU time of all its programs, in nanoseconds.
    #[must_use]
    pub fn cpu_ns(&self) -> u64 {
        self.services.iter().map(Service::cpu_ns).sum()
    }

    /// Returns the resident memory of all its programs, in bytes.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.services.iter().map(Service::resident_bytes).sum()
    }

    /// Returns true if it has its own programs, so that CPU and memory are meaningful.
    #[must_use]
    pub fn has_programs(&self) -> bool {
        !self.services.is_empty()
    }

    /// Returns true if all its programs still run.
    pub fn is_running(&mut self) -> bool {
        self.services.iter_mut().all(Service::is_running)
    }

    /// Returns the logs of its programs, for error messages.
    #[must_use]
    pub fn log(&self) -> String {
        self.services.iter().map(Service::log).collect()
    }
}

impl Peer {
    /// Starts it and waits until it listens.
    ///
    /// # Errors
    /// It is absent or does not work.
    pub fn start<'s>(&self, site: &'s Site) -> Start<'s> {
        let rows = ALL
            .iter()
            .chain(EPI_ONLY)
            .chain(chains::CHAINS)
            .chain(chains::REPLICAS)
            .chain(ENGINE)
            .chain(RECORDED)
            .chain(LOOPS);
        site.use_origin_of_row(rows.map(|row| row.name).position(|name| name == self.name).unwrap_or(0));
        (self.start)(site)
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name)
    }
}

macro_rules! peers {
    ($($name:literal $class:ident $ours:literal $start:expr;)*) => {
        &[$(Peer { name: $name, class: Class::$class, is_ours: $ours, start: $start }),*]
    };
}

const SOCKSX_S5: Proxy = Proxy::Socksx(socksx::V0_1_0, 5);
const SOCKSX_S6: Proxy = Proxy::Socksx(socksx::V0_1_0, 6);
const LATER_SOCKSX_S5: Proxy = Proxy::Socksx(socksx::V0_1_1, 5);
const LATER_SOCKSX_S6: Proxy = Proxy::Socksx(socksx::V0_1_1, 6);

const fn our_redirector(scheme: &'static str, options: &'static str) -> Redirector {
    Redirector::Ours { scheme, options, waits: true }
}

/// Returns all rows, in the order of the tables.
pub const ALL: &[Peer] = peers![
    "direct" Limit false kernel::direct;
    "nft DNAT" Kernel false kernel::dnat;
    "ours kernel path" Kernel true ours::kernel_path;
    "nginx stream" OneHop false nginx::stream;
    "HAProxy tcp" OneHop false haproxy::copy;
    "HAProxy splice" OneHop false haproxy::splice;
    "ours reverse" OneHop true ours::reverse;
    "ours reverse, MPTCP" OneHop true |site| ours::reverse_with(site, "mptcp = true\n");
    "bare reverse" Limit false bare::reverse;
    "dante S5" OneHop false |site| Proxy::Dante.row(site, Via::Socks5);
    "microsocks S5" OneHop false |site| Proxy::Microsocks.row(site, Via::Socks5);
    "socksx 0.1.0 S5" OneHop false |site| SOCKSX_S5.row(site, Via::Socks5);
    "socksx 0.1.1 S5" OneHop false |site| LATER_SOCKSX_S5.row(site, Via::Socks5);
    "ours S5" OneHop true |site| Proxy::Ours.row(site, Via::Socks5);
    "bare S5" Limit false |site| bare::socks(site, Via::Socks5);
    "socksx 0.1.0 S6" OneHop false |site| SOCKSX_S6.row(site, socksx::S6);
    "socksx 0.1.1 S6" OneHop false |site| LATER_SOCKSX_S6.row(site, socksx::S6);
    "ours S6" OneHop true |site| Proxy::Ours.row(site, Via::Socks6Draft { initial_data: false });
    "bare S6" Limit false |site| bare::socks(site, Via::Socks6Draft { initial_data: false });
    "socksx 0.1.0 S6 + data" OneHop false |site| SOCKSX_S6.row(site, socksx::S6_DATA);
    "socksx 0.1.1 S6 + data" OneHop false |site| LATER_SOCKSX_S6.row(site, socksx::S6_DATA);
    "ours S6 + data" OneHop true |site| Proxy::Ours.row(site, Via::Socks6Draft { initial_data: true });
    "ours S6 + data, socksx dialect" OneHop true |site| Proxy::Ours.row(site, socksx::S6_DATA);
    "bare S6 + data" Limit false |site| bare::socks(site, Via::Socks6Draft { initial_data: true });
    "redsocks + dante" Pair false |site| redirectors::pair(site, Redirector::Redsocks, Proxy::Dante);
    "socksx 0.1.0 pair S5" Pair false
        |site| redirectors::pair(site, Redirector::Socksx(socksx::V0_1_0, 5), SOCKSX_S5);
    "socksx 0.1.0 pair S6" Pair false
        |site| redirectors::pair(site, Redirector::Socksx(socksx::V0_1_0, 6), SOCKSX_S6);
    "ours pair S5" Pair true |site| redirectors::pair(site, our_redirector("socks5", ""), Proxy::Ours);
    "ours pair S6" Pair true |site| redirectors::pair(site, our_redirector("socks6", ""), Proxy::Ours);
    "ours pair S5, optimistic" Pair true
        |site| redirectors::pair(site, our_redirector("socks5", "?optimistic=true"), Proxy::Ours);
    "ours pair S6, TFO" Pair true
        |site| redirectors::pair(site, our_redirector("socks6", "?tfo=true"), Proxy::Ours);
    "bare pair S5" Limit false |site| bare::pair(site, Role::Redirect5);
    "bare pair S6" Limit false |site| bare::pair(site, Role::Redirect6);
];

/// Returns the rows that only the measurements of the EPI paper have.
pub const EPI_ONLY: &[Peer] = peers![
    "nginx http, close" OneHop false nginx::http_close;
    "ours pair S6, no data" Pair true |site| {
        let redirector = Redirector::Ours { scheme: "socks6", options: "", waits: false };
        redirectors::pair(site, redirector, Proxy::Ours)
    };
    "ours tunnel" Pair true |site| tunnel::pair(site, tunnel::Transport::Quic);
    "ours tunnel, TLS" Pair true |site| tunnel::pair(site, tunnel::Transport::Tls);
];

/// Returns the rows that only the measurements of the packet engine have.
pub const ENGINE: &[Peer] = peers![
    "limit: XDP" Limit false kernel::least;
    "limit: XDP, gathering" Limit false kernel::least;
    "ours engine, packet sockets" OneHop true |site| ours::engine(site, "packet", "");
    "ours engine, AF_XDP" OneHop true |site| ours::engine(site, "xdp", "");
    "ours engine, XDP, decided" OneHop true |site| ours::engine(site, "xdp", ", kernel_connections_max = 16384");
    "ours engine, packet sockets, gathering" OneHop true |site| ours::engine(site, "packet", GATHERING);
    "ours engine, AF_XDP, gathering" OneHop true |site| ours::engine(site, "xdp", GATHERING);
    "ours engine, XDP after the first flight, gathering" OneHop true |site| {
        let choose = format!("choose = [{{ prefix = \"GET \", to = \"{}\" }}]", site.origin());
        let keys = format!("{GATHERING}, offload_max = 16384, syn_cookies = \"xdp\", {choose}");
        ours::engine(site, "xdp", &keys)
    };
    "ours engine, XDP, decided, gathering" OneHop true
        |site| ours::engine(site, "xdp", &format!("{GATHERING}, kernel_connections_max = 16384"));
];

/// The rows of datagrams.
pub const DATAGRAMS: &[Peer] = peers![
    "direct" Limit false kernel::direct;
    "nft DNAT" Kernel false kernel::dnat_datagrams;
    "nginx stream" OneHop false nginx::datagrams;
    "ours reverse" OneHop true ours::datagrams;
    "bare reverse" Limit false bare::datagrams;
    "dante S5" OneHop false |site| Proxy::Dante.row(site, Via::Socks5);
    "ours S5" OneHop true |site| Proxy::Ours.row(site, Via::Socks5);
    "ours run S5" Pair true datagrams::run;
    "ours tunnel" Pair true tunnel::datagrams;
    "ours CONNECT-UDP" Pair true datagrams::connect_udp;
];

/// How long frames gather before the kernel takes them, for rows with gathering, in microseconds.
pub const GATHERING_US: u64 = 200;
/// The configuration key for the same in our engine.
const GATHERING: &str = ", coalesce_us = 200";

/// Returns the peer of this name.
#[must_use]
pub fn find(name: &str) -> Option<Peer> {
    ALL.iter().chain(EPI_ONLY).copied().find(|peer| peer.name == name)
}

/// An nft table in a node; it is deleted with the peer that needs it.
#[derive(Debug)]
struct Table<'s> {
    node: &'s Node,
    name: &'static str,
}

impl<'s> Table<'s> {
    /// Loads `table NAME { BODY }`; the name holds the family, such as `ip lab`.
    fn load(node: &'s Node, name: &'static str, body: &str) -> Result<Self> {
        node.nft(&format!("table {name} {{\n{body}\n}}\n"))?;
        Ok(Self { node, name })
    }

    /// Redirects the client's own connections to the origin to a local port, as the manuals of socksx and
    /// redsocks do.
    fn redirect(site: &'s Site, port: u16) -> Result<Self> {
        let origin = site.origin();
        let body = format!(
            "chain output {{ type nat hook output priority -100; \
             ip daddr {} tcp dport {{ {}, {} }} redirect to :{port}; }}",
            origin.ip(),
            site::SSH_PORT,
            origin.port()
        );
        Self::load(&site.client, "ip lab", &body)
    }
}

impl Drop for Table<'_> {
    fn drop(&mut self) {
        // If the table is already gone, there is nothing to do.
        let _ = self.node.delete_table(self.name);
    }
}

/// Returns the path of an installed program.
pub(crate) fn installed(program: &str) -> Result<PathBuf, Unavailable> {
    let absent = || Unavailable::Absent(format!("{program} is not installed; bench/peers.sh installs it"));
    launch::find_program(program).ok_or_else(absent)
}

/// A program in the proxy's node that takes a configuration file, started and listening.
pub(crate) fn configured(
    site: &Site,
    program: &str,
    config: &str,
    flags: &[&str],
    port: u16,
) -> Result<Service, Unavailable> {
    let mut service = started(site, program, config, flags)?;
    service.wait_listening(&site.proxy, port)?;
    Ok(service)
}

/// A program in the proxy's node that takes a configuration file, started.
fn started(site: &Site, program: &str, config: &str, flags: &[&str]) -> Result<Service, Unavailable> {
    installed(program)?;
    let name = program.rsplit('/').next().unwrap_or(program);
    let path = site.directory.path().join(format!("{name}.conf"));
    std::fs::write(&path, config)?;
    let mut command = site.proxy.command_at(program, &site.proxy_placement());
    command.args(flags).arg(&path);
    Ok(Service::start(name, command, site.directory.path())?)
}

/// A relay with a fixed server behind [`RELAY_PORT`].
fn relay<'s>(site: &'s Site, service: Service) -> Running<'s> {
    running(site, vec![service], (site.proxy_address(RELAY_PORT), Via::Plain))
}

/// These programs lead to the origin, for a client that dials this address and speaks this protocol there.
fn running<'s>(site: &'s Site, services: Vec<Service>, (dial, via): (SocketAddr, Via)) -> Running<'s> {
    Running {
        services,
        _tables: Vec::new(),
        _forwarding: None,
        inside: Vec::new(),
        dial,
        via,
        destination: site.origin(),
    }
}
