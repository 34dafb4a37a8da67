//! The gate: each address passes it before `connect(2)`, and no other file of this crate calls that.
//!
//! Rules match names, but the kernel dials addresses. The operator of a name server decides to which address a
//! name resolves. So the policy is asked again with the address, and exactly that address is dialled: the name
//! is not resolved a second time.

use super::Failure;
use sidetrack_core::flow::{EndReason, Flow, HostName};
use sidetrack_core::http::uri::Resource;
use sidetrack_core::policy::{Carry, Dialled, Policy, Seen, Url};
use sidetrack_sys::sockopt;
use socket2::Socket;
use std::io;
use std::net::{IpAddr, SocketAddr};

/// An address that may be dialled. Only this file creates one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted(SocketAddr);

impl Admitted {
    /// An address from the configuration: a hop, a far side, an overlay neighbour, also after name resolution.
    /// Clients cannot choose it.
    pub const fn configured(to: SocketAddr) -> Self {
        Self(to)
    }

    /// The address.
    pub const fn address(self) -> SocketAddr {
        self.0
    }
}

/// Starts connecting; see [`sockopt::start_connect`].
///
/// # Errors
/// Fails if connect(2) fails at once.
pub fn start(socket: &Socket, to: Admitted) -> io::Result<bool> {
    sockopt::start_connect(socket, to.0)
}

/// Gives a UDP socket its only peer.
///
/// # Errors
/// Fails as connect(2) does, for example without a route.
pub fn start_datagrams(socket: &Socket, to: Admitted) -> io::Result<()> {
    socket.connect(&to.0.into())
}

/// The question to the policy about the addresses of one flow.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// The rules.
    pub policy: &'a Policy,
    /// The flow.
    pub flow: &'a Flow,
    /// The settings of the rule that carries the flow.
    pub carry: &'a Carry,
    /// The resource of the HTTP request, if there is one.
    pub resource: Option<&'a Resource>,
    /// The other end of the client's connection: the client, or a trusted peer that sends PROXY protocol headers
    /// for it.
    pub peer: IpAddr,
    /// Whether the configuration names the destination, and not the client.
    pub is_configured: bool,
}

impl Gate<'_> {
    /// Whether this address may be dialled. `name` resolved to it; without a name the client asked for the
    /// address.
    ///
    /// # Errors
    /// Fails with `policy_denied` and the rule.
    pub fn admit(&self, name: Option<&HostName>, to: SocketAddr) -> Result<Admitted, Failure> {
        // A rule's own `to` replaces the client's destination and counts as allowed by the rule.
        if self.carry.to.is_some() || !self.policy.may_be_denied(to.ip()) {
            return Ok(Admitted(to));
        }
        let url = self.resource.filter(|_| self.policy.asks_url()).map(Url::of);
        let host = self.flow.host.as_ref();
        let seen = match &url {
            Some(url) => Seen::Request { host, url },
            None => Seen::FirstBytes(host),
        };
        let Self { flow, carry, is_configured, .. } = *self;
        let dialled = Dialled { flow, seen, carry, ip: to.ip(), name, is_configured };
        let is_local = || is_local(self.peer) && is_local(flow.client.ip());
        let denied = self.policy.admits(&dialled, is_local);
        denied.map(|()| Admitted(to)).map_err(|denied| {
            let of = name.map(|name| format!("'{name}' leads to a denied address: ")).unwrap_or_default();
            Failure::new(EndReason::PolicyDenied, format!("{of}{denied}"))
        })
    }

    /// Returns those addresses of a name that may be dialled, in their order.
    ///
    /// # Errors
    /// Fails if none may be dialled.
    pub fn admit_all(
        &self,
        name: Option<&HostName>,
        addresses: Vec<SocketAddr>,
    ) -> Result<Vec<Admitted>, Failure> {
        let mut first = None;
        let admitted: Vec<_> = addresses
            .into_iter()
            .filter_map(|to| {
                self.admit(name, to).map_err(|failure| first.get_or_insert(failure).clone()).ok()
            })
            .collect();
        match first {
            Some(failure) if admitted.is_empty() => Err(failure),
            _ => Ok(admitted),
        }
    }
}

/// Addresses of a destination that no client chose.
pub fn configured(addresses: Vec<SocketAddr>) -> Vec<Admitted> {
    addresses.into_iter().map(Admitted).collect()
}

/// Returns the addresses to which a flow of another node may be delivered, in their order. Empty if `addresses`
/// is.
///
/// # Errors
/// Fails if rules deny all of them.
pub fn delivered(policy: &Policy, flow: &Flow, addresses: Vec<SocketAddr>) -> Result<Vec<Admitted>, Failure> {
    let mut denied = None;
    let mut admitted = Vec::with_capacity(addresses.len());
    for to in addresses {
        match policy.delivers(flow, to.ip()) {
            Ok(()) => admitted.push(Admitted(to)),
            Err(reason) => denied = denied.or(Some(reason)),
        }
    }
    match denied {
        Some(reason) if admitted.is_empty() => Err(Failure::new(EndReason::PolicyDenied, reason.to_string())),
        _ => Ok(admitted),
    }
}

/// Returns addresses for a connection that has no flow yet: only those that no rule could deny to a flow.
///
/// # Errors
/// Fails if there is none.
pub fn for_anybody(policy: &Policy, addresses: Vec<SocketAddr>) -> Result<Vec<Admitted>, Failure> {
    let free = addresses.into_iter().filter(|to| !policy.may_be_denied(to.ip()));
    let free: Vec<_> = free.map(Admitted).collect();
    if free.is_empty() {
        let why = "rules deny its addresses to some flows: each flow is asked about by itself";
        return Err(Failure::new(EndReason::PolicyDenied, why));
    }
    Ok(free)
}

/// Whether a client runs on this host.
fn is_local(ip: IpAddr) -> bool {
    ip.is_loopback() || sockopt::is_of_this_host(ip)
}
