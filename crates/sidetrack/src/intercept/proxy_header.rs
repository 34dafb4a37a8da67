//! The PROXY protocol header at the start of a connection. It comes from a peer that is trusted to report the
//! client's address.

use crate::carry::{Client, Failure};
use sidetrack_core::flow::{EndReason, Flow, FlowId};
use sidetrack_core::policy::ProxyVersion;
use sidetrack_core::proxy_protocol::{self, Addresses, Parsed, Tlv};
use std::net::SocketAddr;

/// Reads the header. Returns the client's address, or `peer` if the peer itself is the client (LOCAL, UNKNOWN).
///
/// # Errors
/// Fails with `bad_request` if there is no header or if it is malformed: a listener that expects it does not
/// guess. Fails with `client_gone` if the connection ends inside it.
pub async fn read(client: &mut Client, peer: SocketAddr) -> Result<SocketAddr, Failure> {
    let bad = |what: &str| Failure::new(EndReason::BadRequest, format!("PROXY protocol from {peer}: {what}"));
    let gone =
        |what: &str| Failure::new(EndReason::ClientGone, format!("PROXY protocol from {peer}: {what}"));
    let mut bytes = client.take_held();
    loop {
        match proxy_protocol::parse(&bytes) {
            Parsed::Header { consumed, header } => {
                client.put_first(bytes.split_off(consumed));
                return Ok(header.tcp_addresses().map_or(peer, |(client, _)| client));
            }
            Parsed::Malformed(why) => return Err(bad(&why.to_string())),
            Parsed::Incomplete => {}
        }
        match client.read_more().await {
            Ok(n) if n > 0 => bytes.append(&mut client.take_held()),
            Ok(_) => return Err(gone("the connection ended inside the header")),
            Err(error) => return Err(gone(&error.to_string())),
        }
    }
}

/// Encodes the header about this flow for a server. Version 2 includes the host name and the flow's number.
pub fn write(version: ProxyVersion, flow: &Flow, server: SocketAddr, id: FlowId) -> Vec<u8> {
    let addresses = Addresses::tcp(flow.client, server);
    match version {
        ProxyVersion::V1 => proxy_protocol::encode_v1(&addresses),
        ProxyVersion::V2 => {
            let mut tlvs: Vec<_> = flow.host.iter().cloned().map(Tlv::Authority).collect();
            tlvs.push(Tlv::UniqueId(id.0.to_be_bytes().to_vec()));
            // Cannot fail: a name and a number are far below all limits. Version 1 has the addresses at least.
            proxy_protocol::encode_v2(&addresses, &tlvs, true)
                .unwrap_or_else(|_| proxy_protocol::encode_v1(&addresses))
        }
    }
}
