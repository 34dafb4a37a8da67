//! A flow described by a decision test or on the command line.

use super::Listener;
use sidetrack_core::flow::{Destination, Flow, HostName, Intercept, Process, Protocol};
use std::net::SocketAddr;

/// A description of a flow. A field that is `None` is not known, or follows from the others.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The listener that caught it.
    pub listener: Option<&'a Listener>,
    /// How it was captured, if no listener says so. Default: redirect.
    pub intercept: Option<Intercept>,
    /// Its transport protocol, if no listener says so. Default: TCP.
    pub protocol: Option<Protocol>,
    /// The client's address.
    pub client: SocketAddr,
    /// Its destination. Default for a reverse listener: its server.
    pub orig_dst: Option<Destination>,
    /// The host name in its first bytes.
    pub host: Option<HostName>,
    /// The client's process.
    pub process: Process,
    /// The user who authenticated with the socks listener.
    pub socks_user: Option<String>,
}

impl Question<'_> {
    /// The flow as the policy sees it. `None` if its destination is not known.
    pub fn flow(&self) -> Option<Flow> {
        let server = self.listener.and_then(|listener| listener.kind.servers());
        let server = server.and_then(|target| target.server_for(self.host.as_ref()));
        let kind = self.listener.map(|listener| listener.kind.intercept()).or(self.intercept);
        let protocol = self.listener.and_then(Listener::protocol).or(self.protocol);
        Some(Flow {
            protocol: protocol.unwrap_or_default(),
            intercept: kind.unwrap_or(Intercept::Redirect),
            listener: match (self.listener, kind) {
                (Some(listener), _) => listener.name.clone(),
                (None, Some(Intercept::Run)) => "run".into(),
                (None, _) => "none".into(),
            },
            client: self.client,
            orig_dst: self.orig_dst.clone().or_else(|| server.cloned())?,
            host: None,
            process: Some(self.process.clone()),
            user: self.socks_user.clone(),
        })
    }
}
