//! Interceptors: the ways in which flows are captured. Each finds the original destination of an accepted
//! connection.

pub mod hold;
pub mod outgoing;
pub mod proxy_header;
pub mod redirect;
pub mod reverse;
pub mod run;
mod shared_port;
pub mod socks;
pub mod tunnel;

pub use shared_port::{Guest, Passed, SharedPort, Taken};

use crate::config::{ReverseTarget, SocksDatagrams};
use crate::dns::{Resolver, SharedNames};
use crate::tls::Mutual;
use sidetrack_core::flow::{Intercept, Protocol};
use sidetrack_core::names::NameTable;
use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::placeholder::Secrets;
use sidetrack_core::socks::server::ServerConfig;
use sidetrack_sys::udp::answers::AnswerSockets;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};

/// A listener at work: the state that all its connections share.
#[derive(Debug)]
pub struct Listening {
    /// Its name in records and rules.
    pub name: Arc<str>,
    /// How it finds the destination.
    pub catches: Catches,
    /// The address it is bound to, with its actual port.
    pub address: SocketAddr,
    /// The transport protocol of its flows.
    pub protocol: Protocol,
    /// Whether it receives datagrams beside its connections: QUIC, or those of SOCKS clients at its own port.
    pub has_datagrams: bool,
    /// Peers that must send a PROXY protocol header, which is trusted.
    pub proxy_from: IpSet,
    /// Whether clients may use Multipath TCP.
    pub mptcp: bool,
    /// The path that a service asked for, if this listener belongs to one.
    pub outgoing: Option<Arc<outgoing::Outgoing>>,
    /// Sends answers to clients whose datagrams were captured. `None`: this listener captures none.
    pub answers: Option<Arc<AnswerSockets>>,
    /// What the addresses stand for that this node's resolver gives to clients. `None`: it has none. See [`RunCatch::names`].
    pub names: Option<SharedNames>,
}

/// How a listener finds the destination of a connection.
#[derive(Debug)]
pub enum Catches {
    /// `run`, for one command: the original destination, with our own addresses mapped back to names.
    Run(RunCatch),
    /// The kernel's `SO_ORIGINAL_DST`.
    Redirect,
    /// The local address of the connection.
    Tproxy,
    /// The SOCKS request of the client.
    Socks(SocksCatch),
    /// The HTTP requests of the client, one by one.
    Http,
    /// A configured server, or several by name.
    Reverse(ReverseTarget),
    /// The request of the near side of a tunnel. Holds our identity and the accepted peers.
    Tunnel(Mutual),
}

/// How requests of SOCKS clients are served.
#[derive(Debug)]
pub struct SocksCatch {
    /// The handshakes.
    pub server: Arc<ServerConfig>,
    /// How datagrams are relayed. `None`: they are not.
    pub udp: Option<SocksDatagrams>,
    /// The associations of the listener's own UDP port. `None`: each association has a port of its own.
    pub shared: Option<Arc<SharedPort>>,
}

/// The state for capturing one command.
#[derive(Clone, Debug)]
pub struct RunCatch {
    /// The names for the addresses that our resolver has returned.
    pub names: Arc<Mutex<NameTable>>,
    /// Our resolver's address. Connections to it are DNS queries.
    pub resolver: SocketAddr,
    /// Answers DNS queries.
    pub answers: Arc<Resolver>,
    /// Whether the command has its own network, in which everything is redirected. A connection cannot reach our
    /// listener directly then.
    pub alone: bool,
    /// Ports whose datagrams are refused: those of QUIC, where TLS over TCP is to be intercepted instead.
    pub refused: PortSet,
    /// The secrets of the command: what it sends is searched for their placeholders.
    pub secrets: Option<Arc<Secrets>>,
}

impl Listening {
    /// Returns the client of a connection from `peer`. In a command's own network every address is local, and
    /// the kernel uses the destination as source address, which has no meaning outside. The client is this host
    /// then.
    pub fn client(&self, peer: SocketAddr) -> SocketAddr {
        let loopback = match peer {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        match &self.catches {
            Catches::Run(run) if run.alone => SocketAddr::new(loopback, peer.port()),
            _ => peer,
        }
    }

    /// Returns the secrets whose placeholders must not leave in flows that are not read as requests.
    pub const fn secrets(&self) -> Option<&Arc<Secrets>> {
        match &self.catches {
            Catches::Run(run) => run.secrets.as_ref(),
            _ => None,
        }
    }

    /// Whether to find the program of each flow even if no rule needs it: a `run` reports programs.
    pub const fn names_programs(&self) -> bool {
        matches!(self.catches, Catches::Run(_))
    }

    /// Whether the client must send bytes before the policy can be asked.
    pub fn speaks_first(&self) -> bool {
        !self.proxy_from.is_empty()
            || matches!(
                self.catches,
                Catches::Socks(_) | Catches::Tunnel(_) | Catches::Reverse(ReverseTarget::ByName { .. })
            )
    }
}

impl Catches {
    /// The word in records and rules.
    pub const fn intercept(&self) -> Intercept {
        match self {
            Self::Run(_) => Intercept::Run,
            Self::Redirect => Intercept::Redirect,
            Self::Tproxy => Intercept::Tproxy,
            Self::Socks(_) => Intercept::Socks,
            Self::Http => Intercept::Http,
            Self::Reverse(_) => Intercept::Reverse,
            Self::Tunnel(_) => Intercept::Tunnel,
        }
    }
}
