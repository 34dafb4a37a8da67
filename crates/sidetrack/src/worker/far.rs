//! The far side of tunnels: connections without a flow yet, and the flows that arrive on them.

use super::waiting::Places;
use super::{Arrived, Place, Service, Worker};
use crate::carry::Stream;
use crate::carry::tunnel::lanes::Lanes;
use crate::carry::tunnel::path::quic_peer;
use crate::carry::tunnel::pool::{tls_peer, watch as watch_over};
use crate::carry::tunnel::{self, quic};
use crate::config::Tunnel;
use crate::intercept::{Catches, Listening};
use crate::reactor::{self, Arrival, QuicRuntime, TcpStream, arrival, proven, timeout};
use quinn::{Connection, Endpoint, EndpointConfig, Incoming, VarInt};
use sidetrack_core::tunnel::Greeting;
use sidetrack_sys::sync::lock;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio_rustls::{TlsAcceptor, TlsStream};

/// Most accepted QUIC connections of one listener and worker.
const CONNECTIONS_MAX: usize = 1024;

/// Most concurrent QUIC handshakes of one listener and worker. For one more, the oldest is ended.
const HANDSHAKES_MAX: usize = 512;

/// Most QUIC connections of one listener and worker in total: accepted ones, those in their handshake, and closed ones that
/// still answer late packets (RFC 9000 Sec. 10.2).
const OPEN_MAX: usize = 4 * CONNECTIONS_MAX;

/// Most accepted TLS connections of one worker that have no flow.
pub const WAITING_MAX: usize = 256;

/// How long a stopping worker waits for its near sides to acknowledge the close.
const CLOSING: Duration = Duration::from_millis(200);

/// The far sides of tunnels that a worker serves.
#[derive(Debug, Default)]
pub(super) struct Far {
    /// Endpoints of QUIC, and the code with which each closes.
    endpoints: Mutex<Vec<(Endpoint, VarInt)>>,
    waiting: Arc<AtomicUsize>,
}

impl Far {
    fn forget(&self, endpoint: &Endpoint) {
        let address = endpoint.local_addr().ok();
        let mut endpoints = lock(&self.endpoints);
        endpoints.retain(|(other, _)| other.local_addr().ok() != address);
    }

    pub(super) async fn close(&self) {
        let endpoints = std::mem::take(&mut *lock(&self.endpoints));
        for (endpoint, code) in endpoints {
            endpoint.close(code, b"stopping");
            // A near side that misses the close detects it by its own timeout.
            let _ = timeout(CLOSING, endpoint.wait_idle()).await;
        }
    }
}

/// One counted connection; on drop it is no longer counted.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn enter(count: &Arc<AtomicUsize>, most: usize) -> Option<Self> {
        let entered = Self(count.clone());
        (count.fetch_add(1, Relaxed) < most).then_some(entered)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Worker {
    /// Closes this endpoint with this code when the worker stops.
    pub fn keep_quic(&self, endpoint: &Endpoint, code: VarInt) {
        lock(&self.far.endpoints).push((endpoint.clone(), code));
    }

    /// Forgets an endpoint that is closed.
    pub fn forget_quic(&self, endpoint: &Endpoint) {
        self.far.forget(endpoint);
    }

    /// Accepts QUIC connections and their flows until `stop` becomes true or its sender is dropped. If `stop` becomes true,
    /// the connections end, too.
    pub async fn accept_quic(
        self: Arc<Self>,
        service: Arc<Service>,
        socket: UdpSocket,
        mut stop: watch::Receiver<bool>,
    ) {
        let endpoint = match endpoint(&service.listening, socket) {
            Ok(endpoint) => endpoint,
            Err(error) => {
                return tracing::error!(listener = %service.listening.name, %error, "cannot speak QUIC");
            }
        };
        self.keep_quic(&endpoint, quic::CLOSED);
        let handshakes = Places::new(HANDSHAKES_MAX.min(self.shared.handshakes.most()));
        let let_in = Arc::new(AtomicUsize::new(0));
        loop {
            let incoming = match arrival(&endpoint, &mut stop).await {
                Arrival::Connection(incoming) => incoming,
                Arrival::Out => break,
                // `Far::close` tells the near sides.
                Arrival::Stopping => return,
            };
            let is_full = let_in.load(Relaxed) >= CONNECTIONS_MAX || endpoint.open_connections() >= OPEN_MAX;
            if is_full {
                incoming.refuse();
            } else if let Some(incoming) = proven(incoming, &endpoint) {
                let place = Place::enter_quic(&handshakes, &self);
                reactor::spawn(self.clone().hold_quic(service.clone(), incoming, place, let_in.clone()));
            }
        }
        self.far.forget(&endpoint);
        endpoint.close(quic::CLOSED, b"the listener is gone");
        endpoint.wait_idle().await;
    }

    async fn hold_quic(
        self: Arc<Self>,
        service: Arc<Service>,
        incoming: Incoming,
        place: Place,
        counted: Arc<AtomicUsize>,
    ) {
        let from = incoming.remote_address();
        let patience = Duration::from_millis(self.config().limits.handshake_timeout_ms);
        let shaken = Place::while_kept(Some(&place), timeout(patience, let_in(incoming))).await;
        drop(place);
        let connection = match shaken {
            Some(Ok(Ok(connection))) => connection,
            Some(Ok(Err(error))) => {
                return tracing::warn!(listener = %service.listening.name, %from, %error, "tunnel: not let in");
            }
            Some(Err(_)) | None => return,
        };
        let Some(_counted) = Counted::enter(&counted, CONNECTIONS_MAX) else {
            return connection.close(quic::CLOSED, b"too many connections");
        };
        let peer = quic_peer(&connection);
        tracing::info!(listener = %service.listening.name, %from, %peer, transport = "quic", "tunnel: let in");
        let lanes = Lanes::new(connection.clone());
        let why = loop {
            match connection.accept_bi().await {
                Ok(streams) => {
                    let stream = tunnel::Stream::quic(streams, peer.clone(), lanes.clone());
                    // The client's address may change during the connection (RFC 9000 Sec. 9).
                    self.flow(&service, stream, connection.remote_address(), Vec::new());
                }
                Err(error) => break error,
            }
        };
        tracing::info!(listener = %service.listening.name, %from, %peer, %why, "tunnel: gone");
    }

    fn flow(self: &Arc<Self>, service: &Service, stream: tunnel::Stream, peer: SocketAddr, held: Vec<u8>) {
        let peer = sidetrack_sys::sockopt::canonical(peer);
        let arrived = Arrived { stream: Stream::Tunnel(Box::new(stream)), peer, held };
        service.take(self, arrived);
    }

    /// Serves one TLS connection: the handshake, the wait for a flow, and the flow.
    pub(super) async fn accept_tls(
        self: Arc<Self>,
        service: Arc<Service>,
        socket: TcpStream,
        from: SocketAddr,
        mut stop: watch::Receiver<bool>,
    ) {
        let patience = Duration::from_millis(self.config().limits.handshake_timeout_ms);
        // Unauthenticated clients have their own places, so that they take none from authenticated ones.
        let place = Place::enter(&self);
        let shaken =
            Place::while_kept(Some(&place), timeout(patience, shake(&service.listening, socket))).await;
        drop(place);
        let mut stream = match shaken {
            Some(Ok(Ok(stream))) => stream,
            Some(Ok(Err(error))) => {
                return tracing::warn!(listener = %service.listening.name, %from, %error, "tunnel: not let in");
            }
            Some(Err(_)) | None => return,
        };
        let Some(waiting) = Counted::enter(&self.far.waiting, WAITING_MAX) else {
            return tracing::warn!(listener = %service.listening.name, %from, "tunnel: {WAITING_MAX} TLS connections wait already");
        };
        let mut held = Vec::with_capacity(2048);
        let read = tokio::select! {
            read = stream.read_buf(&mut held) => read,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        drop(waiting);
        // No bytes: the near side needs fewer connections and has closed this one.
        if matches!(read, Ok(n) if n > 0) {
            let peer = tls_peer(stream.get_ref().1.peer_certificates());
            self.flow(&service, tunnel::Stream::tls(stream, peer), from, held);
        }
    }
}

fn endpoint(listening: &Listening, socket: UdpSocket) -> io::Result<Endpoint> {
    let Catches::Tunnel(mutual) = &listening.catches else {
        return Err(io::Error::other("this listener is not a far side of a tunnel"));
    };
    let config = quic::server_config(mutual)?;
    Endpoint::new(EndpointConfig::default(), Some(config), socket, Arc::new(QuicRuntime))
}

/// Completes the handshake, and sends the greeting that tells the near side that it is accepted.
async fn let_in(incoming: Incoming) -> io::Result<Connection> {
    let connection = incoming.await?;
    let greeting = Greeting.encode().map_err(io::Error::other)?;
    let mut stream = connection.open_uni().await?;
    stream.write_all(&greeting).await?;
    stream.finish().map_err(io::Error::from)?;
    Ok(connection)
}

/// Like [`let_in`], over TLS.
async fn shake(listening: &Listening, socket: TcpStream) -> io::Result<TlsStream<TcpStream>> {
    let Catches::Tunnel(mutual) = &listening.catches else {
        return Err(io::Error::other("this listener is not a far side of a tunnel"));
    };
    sidetrack_sys::sockopt::set_tcp_nodelay(&socket, true)?;
    watch_over(&socket, Tunnel::KEEPALIVE_MS, 10 * Tunnel::LOST_AFTER_MS)?;
    let mut stream = TlsAcceptor::from(mutual.server()).accept(socket).await?;
    stream.write_all(&Greeting.encode().map_err(io::Error::other)?).await?;
    stream.flush().await?;
    Ok(TlsStream::Server(stream))
}
