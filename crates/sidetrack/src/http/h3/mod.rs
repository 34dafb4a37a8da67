//! HTTP/3 with clients of an `http` listener, and with servers. As with HTTP/2, each stream passes through a connection in memory that speaks
//! HTTP/1.1, so that policy, records, the cache and the strict parsers are the same for all versions.
//!
//! Early data (0-RTT) is off, so no request can be replayed.

mod ask;
pub(super) mod reach;
mod stream;

use super::Proxy;
use super::h2::Common;
use crate::carry::h3::{Peer, number, transport};
use crate::intercept::Listening;
use crate::reactor::{self, Arrival, QuicRuntime, arrival, proven, timeout};
use crate::tls::Own;
use crate::worker::{Idle, Place, Worker};
use anyhow::Context;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Connection, Endpoint, EndpointConfig, Incoming, ServerConfig};
use sidetrack_core::http::h3::{ALPN, Code};
use sidetrack_core::http::message::Sender;
use sidetrack_sys::sockopt;
use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Most QUIC connections of one listener and worker in total: open ones, those in their handshake, and closed ones that still
/// answer late packets.
const OPEN_MAX: usize = 4096;

/// How long a connection may have no streams.
const IDLE: Duration = Duration::from_secs(75);

/// How often a connection with active streams checks whether it still has some.
const AT_WORK: Duration = Duration::from_secs(1);

/// Makes the configuration of a listener's QUIC connections.
///
/// # Errors
/// rustls rejects it.
pub(super) fn config(own: &Own) -> anyhow::Result<ServerConfig> {
    let tls = own.server(&[ALPN]).context("HTTP/3")?;
    let crypto = QuicServerConfig::try_from(Arc::new(tls)).context("HTTP/3")?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(Arc::new(transport()));
    Ok(config)
}

impl Proxy {
    /// Accepts QUIC connections until `stop` becomes true or its sender is dropped. If `stop` becomes true, requests under way
    /// are served to their end.
    pub async fn accept_quic(
        self: Arc<Self>,
        worker: Arc<Worker>,
        listening: Arc<Listening>,
        socket: UdpSocket,
        mut stop: watch::Receiver<bool>,
    ) {
        let Some(config) = self.secured.as_ref().and_then(|secured| secured.quic.clone()) else { return };
        let endpoint = Endpoint::new(EndpointConfig::default(), Some(config), socket, Arc::new(QuicRuntime));
        let endpoint = match endpoint {
            Ok(endpoint) => endpoint,
            Err(error) => return tracing::error!(listener = %listening.name, %error, "cannot speak QUIC"),
        };
        worker.keep_quic(&endpoint, number(Code::NoError));
        loop {
            let incoming = match arrival(&endpoint, &mut stop).await {
                Arrival::Connection(incoming) => incoming,
                Arrival::Out => break,
                // The worker closes the endpoint.
                Arrival::Stopping => return,
            };
            if endpoint.open_connections() >= OPEN_MAX {
                incoming.refuse();
            } else if let Some(incoming) = proven(incoming, &endpoint) {
                let (proxy, worker, listening) = (self.clone(), worker.clone(), listening.clone());
                reactor::spawn(proxy.let_in(worker, listening, incoming, stop.clone()));
            }
        }
        endpoint.set_server_config(None);
        endpoint.wait_idle().await;
        worker.forget_quic(&endpoint);
    }

    async fn let_in(
        self: Arc<Self>,
        worker: Arc<Worker>,
        listening: Arc<Listening>,
        incoming: Incoming,
        stop: watch::Receiver<bool>,
    ) {
        let patience = Duration::from_millis(worker.config().limits.handshake_timeout_ms);
        let place = Place::enter(&worker);
        let shaken = Place::while_kept(Some(&place), timeout(patience, incoming.into_future())).await;
        drop(place);
        let Some(Ok(Ok(connection))) = shaken else { return };
        let peer = sockopt::canonical(connection.remote_address());
        let common = Common { worker, listening, proxy: self, peer, inside: None, received: "3.0" };
        serve(common, connection, stop).await;
    }
}

/// Serves a connection to its end.
async fn serve(common: Common, connection: Connection, mut stop: watch::Receiver<bool>) {
    let Ok(peer) = Peer::begin(connection.clone(), Sender::Client).await else { return };
    // Its count of references is the number of active streams plus one.
    let at_work = Arc::new(());
    let (mut is_leaving, mut next) = (false, 0);
    loop {
        let is_idle = Arc::strong_count(&at_work) == 1;
        if is_leaving && is_idle {
            break;
        }
        let wait = if is_idle { IDLE } else { AT_WORK };
        let accepting = Place::while_idle(is_idle.then_some(&*common.worker), wait, connection.accept_bi());
        let came = tokio::select! {
            biased;
            changed = stop.changed(), if !is_leaving => {
                is_leaving = changed.is_err() || *stop.borrow();
                if is_leaving {
                    peer.goaway(next).await;
                }
                continue;
            }
            came = accepting => came,
        };
        match came {
            Idle::Over(Ok((mut send, mut recv))) if is_leaving => {
                // Each fails only if its direction is over.
                let _ = send.reset(number(Code::RequestRejected));
                let _ = recv.stop(number(Code::RequestRejected));
            }
            Idle::Over(Ok((send, recv))) => {
                next = crate::carry::h3::id_of(send.id()) + 4;
                let (common, peer, at_work) = (common.clone(), peer.clone(), at_work.clone());
                reactor::spawn(async move {
                    stream::serve(common, &peer, send, recv).await;
                    drop(at_work);
                });
            }
            Idle::Over(Err(_)) => return,
            Idle::Late if !is_idle => {}
            Idle::Late | Idle::Lost => break,
        }
    }
    if !is_leaving {
        peer.goaway(next).await;
    }
    connection.close(number(Code::NoError), b"");
}
