//! The listening sockets of a configuration, one for each worker and address.

use super::ports;
use super::upgrade::Heritage;
use crate::config::{Config, HttpListener, Listener, ListenerKind, SocksDatagrams};
use crate::datagram;
use crate::dns::SharedNames;
use crate::http::{self, Proxy};
use crate::intercept::{Catches, Listening, SocksCatch};
use crate::steer::OWN_MARK;
use anyhow::Context;
use sidetrack_common::systemd::passed::Passed;
use sidetrack_core::flow::Protocol;
use sidetrack_core::socks::server::{ServerConfig, ServerDialect};
use sidetrack_sys::ports::PortKind;
use sidetrack_sys::sockopt::{self, ListenOptions};
use sidetrack_sys::udp;
use sidetrack_sys::udp::answers::AnswerSockets;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Most connections that wait to be accepted, per listening socket. The kernel limits it to
/// `net.core.somaxconn`.
const BACKLOG: u32 = 4096;

/// Added to an error: why a port below 1024 may be refused.
const LOW_PORT: &str = " (the right to ports below 1024 is kept only where the configuration that sidetrack started with uses \
                        one: start it as root, or restart it)";

/// Most pending TCP Fast Open requests, per listening socket (RFC 7413 Sec. 5.1). Only used if the sysctl
/// `net.ipv4.tcp_fastopen` enables it for servers.
const FASTOPEN_QUEUE: u32 = 1024;

/// A listener's protocol and address, with a descriptor that proves that we listen there.
pub(super) type Proof<'a> = ((Protocol, SocketAddr), BorrowedFd<'a>);

/// One listener address with a socket for each worker.
#[derive(Debug)]
pub struct Bound {
    /// The state that its connections share.
    pub listening: Arc<Listening>,
    /// Handles its requests, if requests are handled one by one. `None`: its connections are carried as they are.
    pub proxy: Option<Arc<Proxy>>,
    /// A socket for each worker. Empty for a listener of UDP.
    pub sockets: Vec<TcpListener>,
    /// A UDP socket on the same port for each worker. Empty if the listener needs none.
    pub datagrams: Vec<UdpSocket>,
}

impl Bound {
    /// Its address, and a descriptor that proves that we listen on it.
    pub fn proof(&self) -> Option<Proof<'_>> {
        let Listening { address, protocol, .. } = &*self.listening;
        let socket = match protocol {
            Protocol::Udp => self.datagrams.first()?.as_fd(),
            Protocol::Tcp => self.sockets.first()?.as_fd(),
        };
        Some(((*protocol, *address), socket))
    }
}

/// Where sockets come from that are not made anew.
#[derive(Clone, Copy)]
pub struct Before<'a> {
    /// Addresses on which this process already listens, and which may be shared.
    pub own: &'a [SocketAddr],
    /// Sockets of an earlier process of this node, which are taken where they fit.
    pub heritage: Option<&'a Heritage>,
    /// Sockets from the service manager, which are taken where they fit.
    pub passed: &'a Passed,
}

/// Binds all addresses of one listener. `names`: what the addresses stand for that this node's resolver gives to clients.
///
/// # Errors
/// Says which address failed, and the system's error.
pub fn bind(
    listener: &Listener,
    config: &Config,
    (workers, names): (usize, Option<&SharedNames>),
    before: Before<'_>,
) -> anyhow::Result<Vec<Bound>> {
    let heritage = before.heritage;
    // One proxy for all addresses, so that they share its cache.
    let of_proxy = |http: &HttpListener| http::Before {
        htcp: listener.kind.htcp_address().and_then(|address| heritage?.htcp(address)),
        is_there: heritage.is_some() && http.cache.is_some(),
    };
    let proxy =
        requests(&listener.kind).map(|http| proxy(http, &listener.name, of_proxy(http))).transpose()?;
    let bind = |address: &SocketAddr| {
        let catches = catches(&listener.kind, config)?;
        Some(bind_one(listener, (*address, before), catches, proxy.clone(), (workers, names)))
    };
    listener.addresses.iter().filter_map(bind).collect()
}

/// Whether sockets on both addresses would conflict.
fn overlap(own: SocketAddr, address: SocketAddr) -> bool {
    let any = |address: SocketAddr| address.ip().is_unspecified();
    own == address
        || own.port() == address.port() && own.is_ipv4() == address.is_ipv4() && (any(own) || any(address))
}

/// How the TCP sockets of a listener are made.
fn options(listener: &Listener) -> ListenOptions {
    ListenOptions {
        backlog: BACKLOG,
        // Needed with one worker too: a reload may bind an address again before the old listener is closed.
        reuse_port: true,
        transparent: matches!(listener.kind, ListenerKind::Tproxy(_)),
        fastopen_queue_len: Some(FASTOPEN_QUEUE),
        reset_if_killed: true,
        mptcp: listener.mptcp,
        ..ListenOptions::default()
    }
}

/// Takes the sockets of this address that are there already.
fn taken(
    listener: &Listener,
    address: SocketAddr,
    Before { heritage, passed, .. }: Before<'_>,
    workers: usize,
) -> anyhow::Result<(Vec<TcpListener>, Vec<UdpSocket>)> {
    if let Some(heritage) = heritage {
        return Ok(heritage.take(&listener.name, address));
    }
    let place = || format!("listener '{}': the socket on {address} from the service manager", listener.name);
    let is_udp = listener.protocol == Protocol::Udp;
    let mut accept = if is_udp { Vec::new() } else { passed.listeners(address).with_context(place)? };
    for socket in &accept {
        sockopt::adopt(socket, &options(listener)).with_context(place)?;
    }
    // The workers share what the service manager has bound: its sockets may belong to another user, who alone can add more.
    if let Some(first) = accept.first().map(TcpListener::try_clone).transpose()? {
        while accept.len() < workers {
            accept.push(first.try_clone()?);
        }
    }
    let has_datagrams = is_udp || has_datagrams(&listener.kind);
    let receive = if has_datagrams { passed.datagrams(address).with_context(place)? } else { Vec::new() };
    for socket in &receive {
        udp::adopt(socket, address, captures_datagrams(listener)).with_context(place)?;
        prepare_datagrams(listener, socket, address)?;
    }
    Ok((accept, receive))
}

fn bind_one(
    listener: &Listener,
    (mut address, before): (SocketAddr, Before<'_>),
    catches: Catches,
    proxy: Option<Arc<Proxy>>,
    (workers, names): (usize, Option<&SharedNames>),
) -> anyhow::Result<Bound> {
    let own = before.own.iter().any(|own| overlap(*own, address));
    let options = options(listener);
    let is_udp = listener.protocol == Protocol::Udp;
    let (mut sockets, mut datagrams) = taken(listener, address, before, workers)?;
    // Both kinds have the same port.
    let known = sockets.first().map(TcpListener::local_addr);
    let known = known.or_else(|| datagrams.first().map(UdpSocket::local_addr)).transpose()?;
    address = known.unwrap_or(address);
    let listening = if is_udp { 0 } else { workers };
    for number in sockets.len()..listening {
        let shares = own || number > 0;
        let socket = if shares { sockopt::listen } else { sockopt::listen_first }(address, &options);
        let socket = socket.map_err(|error| {
            let low = error.kind() == ErrorKind::PermissionDenied && address.port() < 1024;
            let hint = if low { LOW_PORT } else { "" };
            let place = format!("listener '{}': cannot listen on {address}{hint}", listener.name);
            ports::explain(error, PortKind::Tcp, address).context(place)
        })?;
        if matches!(listener.kind, ListenerKind::Socks(_)) {
            // Our answer follows at once and can carry the ACK. Best effort.
            let _ = sockopt::set_tcp_ack_with_data(&socket);
        }
        // Port 0: all further sockets use the port that the first one got.
        address = socket.local_addr()?;
        sockets.push(socket);
    }
    // What the service manager has bound is enough: workers that share a socket would take datagrams of each other's connections.
    let is_passed = before.heritage.is_none() && !datagrams.is_empty();
    if (is_udp || has_datagrams(&listener.kind)) && !is_passed {
        for number in datagrams.len()..workers {
            let socket = bind_datagrams(listener, address, own || number > 0)?;
            address = socket.local_addr()?;
            datagrams.push(socket);
        }
    }
    let captures = captures_datagrams(listener);
    // Workers may use the sockets at once.
    let answers = captures.then(|| AnswerSockets::open(Some(OWN_MARK.value))).transpose();
    let answers =
        answers.with_context(|| format!("listener '{}': cannot open raw sockets", listener.name))?;
    let answers = answers.map(Arc::new);
    let listening = Listening {
        name: listener.name.clone(),
        catches,
        address,
        protocol: listener.protocol,
        has_datagrams: has_datagrams(&listener.kind),
        proxy_from: listener.accept_proxy_protocol.clone(),
        mptcp: listener.mptcp,
        outgoing: None,
        answers,
        names: names.cloned(),
    };
    Ok(Bound { listening: Arc::new(listening), proxy, sockets, datagrams })
}

/// Whether the listener accepts QUIC connections, or datagrams of SOCKS clients, beside its TCP connections.
pub(super) const fn has_datagrams(kind: &ListenerKind) -> bool {
    match kind {
        ListenerKind::Tunnel(_) => true,
        ListenerKind::Http(http) => http.http3,
        ListenerKind::Socks(socks) => matches!(socks.udp, Some(SocksDatagrams { shared: true, .. })),
        _ => false,
    }
}

/// Whether the listener gets datagrams to any destination.
const fn captures_datagrams(listener: &Listener) -> bool {
    let is_udp = matches!(listener.protocol, Protocol::Udp);
    is_udp && matches!(listener.kind, ListenerKind::Tproxy(_) | ListenerKind::Redirect(_))
}

fn bind_datagrams(listener: &Listener, address: SocketAddr, shares: bool) -> anyhow::Result<UdpSocket> {
    let is_transparent = captures_datagrams(listener);
    let socket = match (is_transparent, shares) {
        (true, _) => udp::bind_transparent(address, shares),
        (false, true) => udp::bind_shared(address),
        (false, false) => udp::bind_first(address),
    };
    let socket = socket.map_err(|error| {
        let place = format!("listener '{}': cannot receive datagrams on {address}", listener.name);
        ports::explain(error, PortKind::Udp, address).context(place)
    })?;
    prepare_datagrams(listener, &socket, address)?;
    Ok(socket)
}

fn prepare_datagrams(listener: &Listener, socket: &UdpSocket, address: SocketAddr) -> anyhow::Result<()> {
    // Our answers are not captured. Without the right to set a mark, nothing is captured.
    let _ = sockopt::set_mark(socket, OWN_MARK.value);
    if listener.protocol == Protocol::Udp || matches!(listener.kind, ListenerKind::Socks(_)) {
        if !captures_datagrams(listener) {
            udp::tell_destinations(socket, address)?;
        }
        udp::batch::receive_trains(socket);
    }
    crate::carry::tunnel::quic::enlarge_buffers(socket);
    Ok(())
}

/// Starts the proxy for a listener's requests.
pub(super) fn proxy(settings: &HttpListener, name: &str, before: http::Before) -> anyhow::Result<Arc<Proxy>> {
    Proxy::start(settings.clone(), datagram::tunnelled, before).with_context(|| format!("listener '{name}'"))
}

/// The HTTP settings of a listener: its own, or those for requests in captured connections.
fn requests(kind: &ListenerKind) -> Option<&HttpListener> {
    match kind {
        ListenerKind::Http(http) => Some(http),
        ListenerKind::Redirect(redirect) => redirect.http.as_ref(),
        ListenerKind::Tproxy(tproxy) => tproxy.http.as_ref(),
        _ => None,
    }
}

/// Returns how the listener finds destinations. `None` for the packet engine, which has no sockets.
fn catches(kind: &ListenerKind, config: &Config) -> Option<Catches> {
    Some(match kind {
        ListenerKind::Engine(_) => return None,
        ListenerKind::Redirect(_) => Catches::Redirect,
        ListenerKind::Tproxy(_) => Catches::Tproxy,
        ListenerKind::Reverse(target) => Catches::Reverse(target.clone()),
        ListenerKind::Http(_) => Catches::Http,
        ListenerKind::Tunnel(mutual) => Catches::Tunnel(mutual.clone()),
        ListenerKind::Socks(socks) => Catches::Socks(SocksCatch {
            server: Arc::new(ServerConfig {
                v5: socks.v5,
                v6: socks.v6,
                dialect: match socks.dialect {
                    crate::config::DialectSetting::Auto => ServerDialect::Auto,
                    crate::config::DialectSetting::Draft => ServerDialect::Draft,
                    crate::config::DialectSetting::Socksx => ServerDialect::Socksx,
                },
                udp: socks.udp.is_some(),
                bind: socks.bind,
                accounts: socks.users.clone(),
                handshake_timeout: Duration::from_millis(config.limits.handshake_timeout_ms),
                ..ServerConfig::default()
            }),
            udp: socks.udp,
            shared: socks.udp.filter(|udp| udp.shared).map(|_| Arc::default()),
        }),
    })
}
