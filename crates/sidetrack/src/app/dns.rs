//! `[dns]`: the resolver of this node, on a thread of its own.

use super::node::Node;
use super::ports;
use super::upgrade::{Heritage, WindowPart};
use crate::config::{Config, Dns, DnsMode, NameStanding};
use crate::dns::{self, Gateway, Mode, Rules, SharedNames, Standing};
use crate::live::Clock;
use crate::process::Owners;
use crate::steer::OWN_MARK;
use anyhow::Context;
use arc_swap::ArcSwap;
use sidetrack_core::flow::HostName;
use sidetrack_core::limit::TokenBucket;
use sidetrack_core::names::NameTable;
use sidetrack_core::time::Instant;
use sidetrack_sys::ports::PortKind;
use sidetrack_sys::sockopt::{self, ListenOptions};
use sidetrack_sys::sync::lock;
use sidetrack_sys::udp;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long an address is kept that no client has connected to. Programs that look a name up once connect soon after.
const UNCONNECTED_AGE: Duration = Duration::from_secs(120);
/// Denied names that are logged per second. The metrics count all.
const LOGGED_PER_SECOND: u32 = 10;
/// Where a host names its name servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// The sockets of one address.
type Sockets = (UdpSocket, TcpListener);

/// Bound sockets, which answer nothing yet.
pub(super) struct Bound {
    sockets: Vec<Sockets>,
    names: SharedNames,
    hosts_servers: Arc<[SocketAddr]>,
    /// The state of a resolver that rests.
    gateway: Option<Arc<Gateway>>,
}

/// The resolver at work.
pub(super) struct Resolving {
    /// Its state.
    pub gateway: Arc<Gateway>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
    /// Copies of the sockets: another process may go on with them, or this one after a rest.
    sockets: Vec<Sockets>,
    names: SharedNames,
    hosts_servers: Arc<[SocketAddr]>,
}

/// The number of descriptors for the resolver's clients and queries.
pub(super) fn descriptors(_: &Dns) -> u64 {
    (dns::ASKED_MAX + dns::STREAMS_MAX) as u64
}

/// Makes the table of what the addresses stand for that the resolver gives to clients. `None`: there is no resolver.
pub(super) fn names(config: &Config) -> Option<SharedNames> {
    config.dns.as_ref().map(|_| Arc::new(Mutex::new(table())))
}

/// An empty table.
pub(super) fn table() -> NameTable {
    NameTable::new(NameTable::MAX_CAPACITY).with_unconnected_age(UNCONNECTED_AGE)
}

impl Bound {
    /// Binds all addresses, while the right to low ports is there, or takes the sockets of an earlier process of this node.
    /// `None`: the configuration has no resolver.
    ///
    /// # Errors
    /// Which address failed, the program that has it, and what to do.
    pub(super) fn open(
        config: &Config,
        names: Option<SharedNames>,
        heritage: Option<&Heritage>,
    ) -> anyhow::Result<Option<Self>> {
        let Some((dns, names)) = config.dns.as_ref().zip(names) else { return Ok(None) };
        let socket = |address: &SocketAddr| match heritage.and_then(|heritage| heritage.resolver(*address)) {
            Some(taken) => Ok(taken),
            None => bind(*address),
        };
        let sockets = dns.addresses.iter().map(socket).collect::<anyhow::Result<_>>()?;
        let hosts_servers = hosts_servers(&dns.addresses).into();
        Ok(Some(Self { sockets, names, hosts_servers, gateway: None }))
    }

    /// Begins to answer.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn serve(self, node: &Node, config: &Arc<ArcSwap<Config>>) -> anyhow::Result<Resolving> {
        let clock = node.shared.clock();
        let rules = NodeRules {
            config: config.clone(),
            clock,
            hosts_servers: self.hosts_servers.clone(),
            logged: Mutex::new(TokenBucket::new(LOGGED_PER_SECOND, LOGGED_PER_SECOND, clock.now())),
        };
        if rules.servers().is_empty() {
            tracing::warn!(
                "[dns] has no name server: {RESOLV_CONF} names none but ourselves. Name some by `servers`"
            );
        }
        let anew = || Arc::new(Gateway::new(self.names.clone(), Arc::new(rules), Some(OWN_MARK.value)));
        let gateway = self.gateway.unwrap_or_else(anew);
        let runtime = super::up::control_runtime()?;
        let (stop, stopped) = oneshot::channel();
        let (sockets, serving) = (copies(&self.sockets)?, gateway.clone());
        for address in sockets.iter().filter_map(|(socket, _)| socket.local_addr().ok()) {
            tracing::info!(kind = "dns", %address, "listening");
        }
        let serve = move || {
            runtime.block_on(async {
                for (datagrams, listener) in sockets {
                    let now = move || clock.now();
                    tokio::spawn(logged(dns::serve_udp(datagrams, serving.clone(), now)));
                    tokio::spawn(logged(dns::serve_streams(listener, serving.clone(), now)));
                }
                // An error means that the node is gone.
                let _ = stopped.await;
            });
        };
        let thread = std::thread::Builder::new().name("dns".into()).spawn(serve);
        Ok(Resolving {
            gateway,
            stop,
            thread: thread.context("cannot start the resolver's thread")?,
            sockets: self.sockets,
            names: self.names,
            hosts_servers: self.hosts_servers,
        })
    }
}

/// Copies of sockets.
fn copies(sockets: &[Sockets]) -> std::io::Result<Vec<Sockets>> {
    sockets.iter().map(|(datagrams, listener)| Ok((datagrams.try_clone()?, listener.try_clone()?))).collect()
}

impl Resolving {
    /// Closes its sockets. Queries that are open get no answer.
    pub(super) fn stop(self) {
        drop(self.rest());
    }

    /// Answers nothing any more, and keeps the sockets: queries wait in them. Queries that are open get no answer.
    pub(super) fn rest(self) -> Bound {
        let Self { gateway, stop, thread, sockets, names, hosts_servers } = self;
        let _ = stop.send(());
        if thread.join().is_err() {
            tracing::error!("the resolver's thread ended by a panic");
        }
        Bound { sockets, names, hosts_servers, gateway: Some(gateway) }
    }

    /// Copies of its sockets, for a process that goes on with them.
    pub(super) fn offered(&self) -> std::io::Result<Vec<(WindowPart, OwnedFd)>> {
        let mut offered = Vec::new();
        for (datagrams, listener) in copies(&self.sockets)? {
            let address = listener.local_addr()?;
            let part = |datagrams| WindowPart::Resolver { address, datagrams };
            offered.extend([(part(true), datagrams.into()), (part(false), listener.into())]);
        }
        Ok(offered)
    }
}

async fn logged(serving: impl Future<Output = std::io::Result<()>>) {
    if let Err(error) = serving.await {
        tracing::error!(%error, "the resolver has stopped to answer on a socket");
    }
}

fn bind(address: SocketAddr) -> anyhow::Result<Sockets> {
    let cannot = |error: std::io::Error, kind| {
        let hint = match (error.kind(), address.port()) {
            (ErrorKind::AddrInUse, dns::PORT) => {
                ". systemd-resolved and dnsmasq use port 53: name one address that clients reach, such as that of the \
                 inner interface, or see docs/dns.md"
            }
            (ErrorKind::PermissionDenied, ..1024) => {
                " (a port below 1024 needs root or CAP_NET_BIND_SERVICE)"
            }
            _ => "",
        };
        ports::explain(error, kind, address).context(format!("[dns] cannot answer on {address}{hint}"))
    };
    let options = ListenOptions { reset_if_killed: true, ..ListenOptions::default() };
    let listener = sockopt::listen_first(address, &options).map_err(|error| cannot(error, PortKind::Tcp))?;
    // Port 0: both have the same.
    let address = listener.local_addr()?;
    let datagrams = udp::bind_first(address).map_err(|error| cannot(error, PortKind::Udp))?;
    udp::tell_destinations(&datagrams, address)?;
    // Our answers are not captured. Without the right to set a mark, nothing is captured.
    let _ = sockopt::set_mark(&datagrams, OWN_MARK.value);
    let _ = sockopt::set_mark(&listener, OWN_MARK.value);
    Ok((datagrams, listener))
}

/// Returns the name servers of this host, except ourselves.
fn hosts_servers(own: &[SocketAddr]) -> Vec<SocketAddr> {
    let is_own = |server: &SocketAddr| {
        own.iter().any(|own| {
            own.port() == server.port()
                && (own.ip() == server.ip()
                    || own.ip().is_unspecified() && sockopt::is_of_this_host(server.ip()))
        })
    };
    let listed = dns::listed_servers(&std::fs::read_to_string(RESOLV_CONF).unwrap_or_default());
    listed.into_iter().filter(|server| !is_own(server)).collect()
}

/// The configuration in force, as the resolver asks for it.
struct NodeRules {
    config: Arc<ArcSwap<Config>>,
    clock: Clock,
    hosts_servers: Arc<[SocketAddr]>,
    logged: Mutex<TokenBucket>,
}

impl NodeRules {
    fn dns<T>(&self, read: impl FnOnce(&Dns) -> T) -> Option<T> {
        self.config.load().dns.as_ref().map(read)
    }
}

impl Rules for NodeRules {
    fn mode(&self) -> Mode {
        match self.dns(|dns| dns.mode) {
            Some(DnsMode::Resolve) => Mode::Resolve,
            Some(DnsMode::Name) | None => Mode::Name,
        }
    }

    fn may_ask(&self, client: IpAddr) -> bool {
        self.dns(|dns| dns.from.contains(client)).unwrap_or(false)
    }

    fn servers(&self) -> Arc<[SocketAddr]> {
        let named = self.dns(|dns| dns.servers.clone()).filter(|servers| !servers.is_empty());
        named.map_or_else(|| self.hosts_servers.clone(), Into::into)
    }

    fn queries_per_s(&self) -> u32 {
        self.dns(|dns| dns.max_queries_per_s).unwrap_or(1)
    }

    fn standing(&self, name: &HostName) -> Standing {
        match self.config.load().standing(name) {
            NameStanding::Denied => Standing::Denied,
            NameStanding::ResolvedHere => Standing::ResolvedHere,
            NameStanding::ResolvedElsewhere => Standing::ResolvedElsewhere,
        }
    }

    fn is_ours(&self, (client, asked): dns::Asker) -> bool {
        let is_here = client.ip().is_loopback() || client.ip() == asked.ip();
        is_here && Owners::Ourselves.are_we(client, asked)
    }

    fn denied(&self, name: &HostName, client: Option<IpAddr>) {
        if lock(&self.logged).take(self.clock.now()).is_some() {
            let client = client.map(|client| client.to_string()).unwrap_or_default();
            tracing::info!(%name, client, "a name is denied: the rules let no flow to it pass");
        }
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }
}
