//! `[dns]`, checked.

use super::Config;
use super::raw::DnsMode;
use sidetrack_core::flow::{HostName, Intercept};
use sidetrack_core::net::IpSet;
use sidetrack_core::policy::NameMatch;
use std::net::SocketAddr;

/// The resolver of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// Where it answers, over UDP and TCP; at least one.
    pub addresses: Vec<SocketAddr>,
    /// How it answers.
    pub mode: DnsMode,
    /// Who may ask.
    pub from: IpSet,
    /// The name servers. Empty: those of the host.
    pub servers: Vec<SocketAddr>,
    /// Most queries over UDP of one client that are answered per second.
    pub max_queries_per_s: u32,
}

/// What the rules say of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameStanding {
    /// No flow to it passes.
    Denied,
    /// This host resolves it for every flow that passes.
    ResolvedHere,
    /// A hop or another node resolves it for some flows.
    ResolvedElsewhere,
}

impl Config {
    /// Returns what the rules say of a name, for the flows that the listeners take.
    pub fn standing(&self, name: &HostName) -> NameStanding {
        let taken = [Intercept::Redirect, Intercept::Tproxy, Intercept::Socks, Intercept::Http];
        let kinds = self.listeners.iter().map(|listener| listener.kind.intercept());
        let mut kinds: Vec<_> = kinds.filter(|kind| taken.contains(kind)).collect();
        if kinds.is_empty() {
            kinds.push(Intercept::Redirect);
        }
        kinds.retain(|kind| self.policy.lets_name_pass(name, *kind) != NameMatch::No);
        if kinds.is_empty() {
            NameStanding::Denied
        } else if kinds.iter().all(|kind| self.policy.resolves_here(name, *kind)) {
            NameStanding::ResolvedHere
        } else {
            NameStanding::ResolvedElsewhere
        }
    }
}
