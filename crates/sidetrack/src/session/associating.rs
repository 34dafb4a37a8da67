//! Where a session ends and the relay of datagrams begins: a SOCKS client has asked for UDP ASSOCIATE, or a client of HTTP for
//! CONNECT-UDP, or the near side of a tunnel for a flow of UDP.

use super::{Connect, Entry};
use crate::carry::Client;
use crate::carry::tunnel::lanes::Lane;
use crate::intercept::Listening;
use crate::intercept::socks::Handshake;
use crate::worker::{FlowOfSession, Worker};
use sidetrack_core::flow::HostName;
use sidetrack_core::socks::server::Request;
use sidetrack_core::socks::v6::Metadata;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

/// A client that waits for the answer to UDP ASSOCIATE.
pub struct Asking {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The listener.
    pub listening: Arc<Listening>,
    /// The client's connection. The association lives as long as this.
    pub client: Client,
    /// The handshake that waits for the reply.
    pub handshake: Handshake,
    /// The request.
    pub request: Box<Request>,
    /// The client's address: that of the connection, or the one that a trusted peer names.
    pub peer: SocketAddr,
    /// The record of the connection. Each flow of datagrams has its own.
    pub entry: Entry,
    /// The SOCKS6 session it is part of, which stays in use until the connection ends.
    pub session: Option<FlowOfSession>,
}

/// Serves such a client until its connection ends. A stage that uses sessions provides it, so `app` hands it over.
pub type Associate = fn(Asking) -> Pin<Box<dyn Future<Output = ()>>>;

/// A client of HTTP that waits for the answer to CONNECT-UDP, or the near side of a tunnel that waits for the answer about a flow
/// of UDP.
pub struct AskingTunnel {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The listener.
    pub listening: Arc<Listening>,
    /// The client's connection, behind the head of its request. It carries the datagrams.
    pub client: Client,
    /// The request. Its destination is that of the datagrams.
    pub connect: Connect,
    /// The client's address.
    pub peer: SocketAddr,
    /// The record of the flow.
    pub entry: Entry,
    /// The client is the near side of a tunnel between two Sidetracks.
    pub near: Option<Box<NearSide>>,
}

/// What the near side of a tunnel says about a flow of UDP.
pub struct NearSide {
    /// The host name that the client has requested, if the destination is an address.
    pub host: Option<HostName>,
    /// Metadata that is passed on along the chain.
    pub metadata: Vec<Metadata>,
    /// Carries datagrams beside the stream.
    pub lane: Option<Lane>,
}

impl NearSide {
    /// What is known of a client that is none.
    pub const fn nothing() -> Self {
        Self { host: None, metadata: Vec::new(), lane: None }
    }
}

/// Serves such a client until its tunnel ends. `app` hands it to the stage that reads requests.
pub type Tunnel = fn(AskingTunnel) -> Pin<Box<dyn Future<Output = ()>>>;

/// Serve the flows of UDP that clients ask for in their connections.
#[derive(Clone, Copy)]
pub struct Relays {
    /// For clients that ask for UDP ASSOCIATE.
    pub associate: Associate,
    /// For near sides of tunnels.
    pub tunnel: Tunnel,
}
