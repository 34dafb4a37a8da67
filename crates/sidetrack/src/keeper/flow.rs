//! A connection that the kernel forwards without us.

use serde::{Deserialize, Serialize};
use sidetrack_core::flow::Protocol;
use sidetrack_sys::conntrack::Entry;
use std::net::SocketAddr;

/// The part of a conntrack entry that records need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelFlow {
    /// Conntrack's number of the connection; `None` on kernels before 2.6.22.
    pub id: Option<u32>,
    /// Its connection mark, which identifies its path.
    pub mark: u32,
    /// Its transport protocol.
    pub protocol: Protocol,
    /// The client.
    pub client: SocketAddr,
    /// The destination that the client chose.
    pub destination: SocketAddr,
    /// The server that answers.
    pub server: SocketAddr,
    /// Bytes of packets from the client, headers included.
    pub bytes_up: u64,
    /// Bytes of packets from the server, headers included.
    pub bytes_down: u64,
    /// Packets from the client.
    pub packets_up: u64,
    /// Packets from the server.
    pub packets_down: u64,
    /// When it began, in nanoseconds since 1970.
    pub start_ns: Option<u64>,
    /// When it ended, in nanoseconds since 1970.
    pub stop_ns: Option<u64>,
    /// The kernel translates its addresses. That ends with the last table that contains a translation.
    pub translated: bool,
    /// Both sides have closed it, or one side has reset it.
    pub closed: bool,
}

/// Distinguishes a connection from earlier ones with the same addresses.
pub type KernelFlowKey = (SocketAddr, SocketAddr, Option<u32>, Option<u64>);

impl KernelFlow {
    /// The key of this connection.
    pub const fn key(&self) -> KernelFlowKey {
        (self.client, self.destination, self.id, self.start_ns)
    }
}

impl From<&Entry> for KernelFlow {
    fn from(entry: &Entry) -> Self {
        /// `TCP_CONNTRACK_TIME_WAIT` and `TCP_CONNTRACK_CLOSE` (linux/netfilter/nf_conntrack_tcp.h).
        const TIME_WAIT: u8 = 7;
        const CLOSE: u8 = 8;
        let up = entry.client_to_server.unwrap_or_default();
        let down = entry.server_to_client.unwrap_or_default();
        Self {
            id: entry.id,
            mark: entry.mark,
            protocol: Protocol::of_number(entry.original.protocol).unwrap_or_default(),
            client: entry.original.source,
            destination: entry.original.destination,
            server: entry.reply.source,
            bytes_up: up.bytes,
            bytes_down: down.bytes,
            packets_up: up.packets,
            packets_down: down.packets,
            start_ns: entry.start_ns,
            stop_ns: entry.stop_ns,
            translated: entry.reply.source != entry.original.destination
                || entry.reply.destination != entry.original.source,
            closed: matches!(entry.tcp_state, Some(TIME_WAIT | CLOSE)),
        }
    }
}
