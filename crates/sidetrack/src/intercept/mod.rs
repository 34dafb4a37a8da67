//! Interceptors: the ways a flow is caught. Each turns an accepted connection into "where did it want to go".

pub mod outgoing;
pub mod proxy_header;
pub mod redirect;
pub mod reverse;
pub mod run;
pub mod socks;
pub mod tunnel;

use crate::config::ReverseTarget;
use crate::dns::Resolver;
use crate::http::Proxy;
use crate::tls::Mutual;
use sidetrack_core::flow::Intercept;
use sidetrack_core::names::NameTable;
use sidetrack_core::net::IpSet;
use sidetrack_core::socks::server::ServerConfig;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};

/// A listener at work: what every connection accepted on it shares.
#[derive(Debug)]
pub struct Listening {
    /// Its name in records and rules.
    pub name: Arc<str>,
    /// How it catches.
    pub catches: Catches,
    /// The address it is bound to, with the real port.
    pub address: SocketAddr,
    /// Neighbours whose PROXY protocol header is believed, and required.
    pub proxy_from: IpSet,
    /// Clients may speak Multipath TCP.
    pub mptcp: bool,
    /// What serves requests in connections that the kernel hands over; none = they are carried as they are.
    pub http: Option<Arc<Proxy>>,
    /// The path that a service asked for, where the listener is one.
    pub outgoing: Option<Arc<outgoing::Outgoing>>,
}

/// How a listener finds out where a connection wanted to go.
#[derive(Debug)]
pub enum Catches {
    /// One command: the original destination, with names given back for our own addresses.
    Run(RunCatch),
    /// `SO_ORIGINAL_DST`.
    Redirect,
    /// The local address of the connection.
    Tproxy,
    /// The client says so.
    Socks(Arc<ServerConfig>),
    /// The client asks by HTTP, request by request.
    Http(Arc<Proxy>),
    /// The listener stands for a server, or for several by name.
    Reverse(ReverseTarget),
    /// The near side of a tunnel says so; with who we are and whom we believe.
    Tunnel(Mutual),
}

/// What catches one command.
#[derive(Debug)]
pub struct RunCatch {
    /// The names behind the addresses that our resolver gave out.
    pub names: Arc<Mutex<NameTable>>,
    /// Our resolver's address: connections to it are questions for us.
    pub resolver: SocketAddr,
    /// What answers them.
    pub answers: Arc<Resolver>,
    /// The command has a network of its own, in which everything is redirected: nothing can come to our listener by
    /// itself.
    pub alone: bool,
}

impl Listening {
    /// The client behind a connection from `peer`. In the network of a command of its own every address is local, and the
    /// kernel takes the destination's for the source: outside it says nothing. The client is this host then.
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

    /// Whether the program behind each flow is to be known, also where no rule asks: it is what a `run` is about.
    pub const fn names_programs(&self) -> bool {
        matches!(self.catches, Catches::Run(_))
    }

    /// What serves its requests, if any are served one by one.
    pub const fn proxy(&self) -> Option<&Arc<Proxy>> {
        match &self.catches {
            Catches::Http(proxy) => Some(proxy),
            _ => self.http.as_ref(),
        }
    }

    /// Whether the client has to say something before policy can be asked.
    pub fn speaks_first(&self) -> bool {
        !self.proxy_from.is_empty()
            || matches!(
                self.catches,
                Catches::Socks(_) | Catches::Tunnel(_) | Catches::Reverse(ReverseTarget::ByName { .. })
            )
    }
}

impl Catches {
    /// The word of records and rules.
    pub const fn intercept(&self) -> Intercept {
        match self {
            Self::Run(_) => Intercept::Run,
            Self::Redirect => Intercept::Redirect,
            Self::Tproxy => Intercept::Tproxy,
            Self::Socks(_) => Intercept::Socks,
            Self::Http(_) => Intercept::Http,
            Self::Reverse(_) => Intercept::Reverse,
            Self::Tunnel(_) => Intercept::Tunnel,
        }
    }
}
