//! A flow of UDP that the near side of a tunnel asks for.

use super::NearSide;
use super::setup::{Connect, Refusals};
use crate::carry::{Client, Failure, Stream};
use crate::intercept::tunnel;
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::socks::v6::Metadata;
use sidetrack_core::tunnel::{Reply, Request};
use std::net::SocketAddr;
use std::sync::Arc;

/// What was asked for.
pub(super) struct AskedDatagrams {
    pub connect: Connect,
    pub near: NearSide,
    /// The client's address.
    pub peer: SocketAddr,
}

/// Writes refusals for the near side.
struct ToNearSide;

impl Refusals for ToNearSide {
    fn page(&self, _: &Destination, failure: &Failure) -> Vec<u8> {
        // A refusal that [`Reply::refused`] makes is never too long.
        Reply::refused(failure.reason, &failure.detail).encode().unwrap_or_default()
    }
}

/// Takes over the request of a near side, whose address is `peer`.
///
/// # Errors
/// Fails with `bad_request` if the near side uses the context of another flow.
pub(super) async fn asked(
    client: &mut Client,
    request: Request,
    peer: SocketAddr,
) -> Result<AskedDatagrams, Failure> {
    let lanes = match &client.stream {
        Stream::Tunnel(stream) => stream.lanes().cloned(),
        _ => None,
    };
    let lane = match lanes.zip(request.datagrams).map(|(lanes, context)| lanes.accept(context)) {
        None => None,
        Some(Some(lane)) => Some(lane),
        Some(None) => {
            let failure = Failure::new(EndReason::BadRequest, "the request: its context is in use");
            tunnel::refused(client, &failure).await;
            return Err(failure);
        }
    };
    let metadata = request.metadata.into_iter().map(|(key, value)| Metadata { key, value }).collect();
    let connect = Connect {
        destination: request.destination,
        user: client.peer().map(str::to_owned),
        refusals: Arc::new(ToNearSide),
        is_established: false,
    };
    let near = NearSide { host: request.host, metadata, lane };
    Ok(AskedDatagrams { connect, near, peer: request.client.unwrap_or(peer) })
}
