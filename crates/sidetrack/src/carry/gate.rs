//! The gate: every address passes it before `connect(2)`, and no other file of this crate calls that.
//!
//! Rules see names, the kernel dials addresses. Between the two anybody who runs a name server decides where a name leads, so
//! policy is asked again with the address, and exactly that address is dialled: nothing is resolved a second time.

use super::Failure;
use sidetrack_core::flow::{EndReason, Flow, HostName};
use sidetrack_core::http::uri::Resource;
use sidetrack_core::policy::{Carry, Dialled, Policy, Seen, Url};
use sidetrack_sys::sockopt;
use socket2::Socket;
use std::io;
use std::net::{IpAddr, SocketAddr};

/// An address that may be dialled; only this file makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted(SocketAddr);

impl Admitted {
    /// An address that the configuration, or what it names, leads to: a hop, a far side, a neighbour. Clients cannot choose
    /// it.
    pub const fn configured(to: SocketAddr) -> Self {
        Self(to)
    }

    /// The address.
    pub const fn address(self) -> SocketAddr {
        self.0
    }
}

/// Begins to connect; see [`sockopt::start_connect`].
///
/// # Errors
/// What connect(2) says at once.
pub fn start(socket: &Socket, to: Admitted) -> io::Result<bool> {
    sockopt::start_connect(socket, to.0)
}

/// The question about the addresses of one flow.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// The rules.
    pub policy: &'a Policy,
    /// The flow.
    pub flow: &'a Flow,
    /// What the rule that carries it says.
    pub carry: &'a Carry,
    /// What a request asks for, where there is one.
    pub resource: Option<&'a Resource>,
    /// The other end of the client's connection: the client, or a neighbour that speaks for it.
    pub peer: IpAddr,
    /// The configuration names the destination, not the client.
    pub is_configured: bool,
}

impl Gate<'_> {
    /// Whether an address may be dialled to which this name led, or which was asked for as an address.
    ///
    /// # Errors
    /// `policy_denied`, with the rule.
    pub fn admit(&self, name: Option<&HostName>, to: SocketAddr) -> Result<Admitted, Failure> {
        // What the rule itself says instead of the client's destination is as good as the rule.
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

    /// Those of the addresses of a name that may be dialled, in their order.
    ///
    /// # Errors
    /// None of them may be.
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

/// Returns those of the addresses to which a flow of another node may be delivered, in their order; none if there were none.
///
/// # Errors
/// Rules deny all of them.
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

/// Addresses for a connection that no flow asks for yet: only those that no flow could be denied.
///
/// # Errors
/// There is none.
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
