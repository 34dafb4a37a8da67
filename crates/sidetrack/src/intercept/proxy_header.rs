//! The PROXY protocol header in front of a connection from a neighbour that is trusted to tell the client's address.

use crate::carry::Failure;
use crate::session::Client;
use sidetrack_core::flow::{EndReason, Flow, FlowId};
use sidetrack_core::policy::ProxyVersion;
use sidetrack_core::proxy_protocol::{self, Addresses, Parsed, Tlv};
use std::net::SocketAddr;

/// Reads the header. Gives the client's address, or `peer` if the neighbour speaks for itself (LOCAL, UNKNOWN).
///
/// # Errors
/// `bad_request` if there is no header or a malformed one: a listener that expects it never guesses. `client_gone` if
/// the connection ends inside it.
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

/// The header that tells a server about this flow, in version 2 with the host name and the flow's number.
pub fn write(version: ProxyVersion, flow: &Flow, server: SocketAddr, id: FlowId) -> Vec<u8> {
    let addresses = Addresses::tcp(flow.client, server);
    match version {
        ProxyVersion::V1 => proxy_protocol::encode_v1(&addresses),
        ProxyVersion::V2 => {
            let mut tlvs: Vec<_> = flow.host.iter().cloned().map(Tlv::Authority).collect();
            tlvs.push(Tlv::UniqueId(id.0.to_be_bytes().to_vec()));
            // Cannot fail: a name and a number are far below every bound. The bare header says the essential.
            proxy_protocol::encode_v2(&addresses, &tlvs, true)
                .unwrap_or_else(|_| proxy_protocol::encode_v1(&addresses))
        }
    }
}
