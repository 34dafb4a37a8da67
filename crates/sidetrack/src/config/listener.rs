//! Questions to a listener of the checked configuration.

use super::{HttpListener, Listener, ListenerKind, ReverseTarget};
use sidetrack_core::flow::{Intercept, Protocol};
use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::policy::{Capture, Traffic};
use std::net::SocketAddr;

impl Listener {
    /// The transport protocol of its flows.
    pub const fn protocol(&self) -> Option<Protocol> {
        Some(self.protocol)
    }

    /// Whether `new` is this far side of tunnels with more pinned near sides: connections can stay.
    pub fn grows_into(&self, new: &Self) -> bool {
        let (ListenerKind::Tunnel(ours), ListenerKind::Tunnel(theirs)) = (&self.kind, &new.kind) else {
            return false;
        };
        ours.grows_into(theirs) && Self { kind: self.kind.clone(), ..new.clone() } == *self
    }

    /// Trusts the near sides of `new`, which this listener [grows into](Self::grows_into).
    pub fn grow(&self, new: &Self) {
        if let (ListenerKind::Tunnel(ours), ListenerKind::Tunnel(theirs)) = (&self.kind, &new.kind) {
            ours.grow(theirs);
        }
    }

    /// Returns the traffic that the kernel could forward without us, one capture per address. Empty if bytes
    /// must be read first.
    pub fn captures(&self) -> Vec<Capture> {
        if !self.accept_proxy_protocol.is_empty() {
            return Vec::new();
        }
        let anywhere = |forwarded, src: &Option<IpSet>, dst: &Option<IpSet>, ports: &Option<PortSet>| {
            let (src, dst, ports) = (src.clone(), dst.clone(), ports.clone());
            let traffic = Traffic::Anywhere { intercept: self.kind.intercept(), forwarded, src, dst, ports };
            Capture { listener: self.name.clone(), protocol: self.protocol, traffic }
        };
        match &self.kind {
            ListenerKind::Reverse(ReverseTarget::Fixed(server)) => {
                let capture = |address: &SocketAddr| {
                    Capture::reverse(self.name.clone(), self.protocol, *address, server)
                };
                self.addresses.iter().filter_map(capture).collect()
            }
            ListenerKind::Redirect(redirect) if redirect.http.is_none() => {
                // Datagrams of this host leave as they are, and those of other hosts need more.
                let origins = match (self.protocol, redirect.local, redirect.forwarded) {
                    (Protocol::Udp, true, true) => vec![false, true],
                    (_, _, forwarded) => vec![forwarded],
                };
                let of = |forwarded| anywhere(forwarded, &redirect.src, &redirect.dst, &redirect.ports);
                origins.into_iter().map(of).collect()
            }
            ListenerKind::Tproxy(tproxy) if tproxy.http.is_none() => {
                vec![anywhere(true, &tproxy.src, &tproxy.dst, &tproxy.ports)]
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
    /// The settings for HTTP requests, if this kind serves them.
    pub const fn http(&self) -> Option<&HttpListener> {
        match self {
            Self::Http(http) => Some(http),
            Self::Redirect(redirect) => redirect.http.as_ref(),
            Self::Tproxy(tproxy) => tproxy.http.as_ref(),
            Self::Socks(_) | Self::Reverse(_) | Self::Tunnel(_) | Self::Engine(_) => None,
        }
    }

    /// The UDP address on which its cache answers HTCP, if it does.
    pub fn htcp_address(&self) -> Option<SocketAddr> {
        Some(self.http()?.cache.as_ref()?.htcp.as_ref()?.address)
    }

    /// The word in the configuration, in records and in `match.intercept`.
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

    /// The servers it stands for. `None` if the client names its destination.
    pub const fn servers(&self) -> Option<&ReverseTarget> {
        match self {
            Self::Reverse(target) => Some(target),
            Self::Engine(engine) => Some(&engine.target),
            _ => None,
        }
    }
}
