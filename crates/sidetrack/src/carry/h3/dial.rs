//! Opens connections that speak HTTP/3: to hops, and to servers.

use super::{Peer, path, transport};
use crate::carry::datagrams::{self, Datagrams};
use crate::carry::gate::Admitted;
use crate::carry::{Dialing, Failure};
use crate::reactor::{QuicRuntime, sleep, timeout};
use crate::tls::server_name;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, IdleTimeout};
use sidetrack_core::flow::{Destination, EndReason, Host};
use sidetrack_core::http::h3::ALPN;
use sidetrack_core::http::message::Sender;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// One attempt to reach an address.
type Attempt<'a> = Pin<Box<dyn Future<Output = Result<Rc<Peer>, Failure>> + 'a>>;

/// Head start of each address before the next is tried in parallel (RFC 8305 Sec. 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// How long the handshake with one address may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// The time between two signs of life of a connection.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The time without any packet after which the peer counts as dead. Two signs of life may be lost.
const DEAD_AFTER: Duration = Duration::from_secs(30);

/// The far end of a connection that is to be opened.
pub struct Goal<'a> {
    /// The host whose certificate is required.
    pub host: &'a Host,
    /// Which authorities are trusted. Early data (0-RTT) is not offered: no request can be replayed.
    pub tls: rustls::ClientConfig,
    /// Mark and own addresses.
    pub dialing: &'a Dialing,
}

impl Goal<'_> {
    /// Opens a connection to the first address that answers; each has a head start over the next.
    ///
    /// # Errors
    /// No address answers, the certificate is not trusted, or the far end does not speak HTTP/3.
    pub async fn connect(&self, addresses: &[Admitted]) -> Result<Rc<Peer>, Failure> {
        let (mut first, mut rest) = (None, addresses.iter());
        let mut attempts: Vec<Attempt<'_>> = Vec::new();
        loop {
            if attempts.is_empty() {
                let Some(to) = rest.next() else { break };
                attempts.push(Box::pin(self.try_connect(to.address())));
            }
            tokio::select! {
                biased;
                ended = any(&mut attempts) => match ended {
                    Ok(peer) => return Ok(peer),
                    Err(failure) => drop(first.get_or_insert(failure)),
                },
                () = sleep(ATTEMPT_DELAY), if rest.len() > 0 => {
                    attempts.extend(rest.next().map(|to| Box::pin(self.try_connect(to.address())) as Attempt<'_>));
                }
            }
        }
        Err(first.unwrap_or_else(|| Failure::new(EndReason::Dns, "it has no address")))
    }

    async fn try_connect(&self, to: SocketAddr) -> Result<Rc<Peer>, Failure> {
        let late = Failure::new(EndReason::ConnectTimeout, format!("QUIC to {to}: no answer"));
        timeout(PATIENCE, self.connect_to(to)).await.unwrap_or(Err(late))
    }

    async fn connect_to(&self, to: SocketAddr) -> Result<Rc<Peer>, Failure> {
        if self.dialing.is_own_datagrams(to) {
            return Err(Failure::new(EndReason::Loop, format!("{to} is our own listener")));
        }
        let opened = datagrams::bound(self.dialing, to)
            .and_then(|socket| Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(QuicRuntime)));
        let endpoint = opened.map_err(|error| unopened(to, &error))?;
        self.begin(&endpoint, to).await
    }

    /// Opens a connection over this path, whose only peer is `to`.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_over(
        &self,
        path: Box<dyn Datagrams>,
        to: &Destination,
    ) -> Result<Rc<Peer>, Failure> {
        let (socket, peer) = path::socket(path, to);
        let (config, runtime) = (EndpointConfig::default(), Arc::new(QuicRuntime));
        let opened = Endpoint::new_with_abstract_socket(config, None, socket, runtime);
        let endpoint = opened.map_err(|error| unopened(peer, &error))?;
        let late = Failure::new(EndReason::ConnectTimeout, format!("QUIC to {to}: no answer"));
        timeout(PATIENCE, self.begin(&endpoint, peer)).await.unwrap_or(Err(late))
    }

    /// Makes the handshake, and waits until the far end speaks HTTP/3.
    async fn begin(&self, endpoint: &Endpoint, to: SocketAddr) -> Result<Rc<Peer>, Failure> {
        let internal = |why: String| Failure::new(EndReason::Internal, format!("QUIC to {to}: {why}"));
        let name = name_of(self.host)?;
        let config = self.config().map_err(internal)?;
        let connecting =
            endpoint.connect_with(config, to, &name).map_err(|error| internal(error.to_string()))?;
        let connection = connecting.await.map_err(|error| failed(to, &error))?;
        let lost = |why: String| Failure::new(EndReason::HopFailed, format!("QUIC to {to}: {why}"));
        let peer = Peer::begin(connection, Sender::Server).await.map_err(lost)?;
        if peer.told().await { Ok(peer) } else { Err(failed(to, &closed(peer.connection()))) }
    }

    fn config(&self) -> Result<ClientConfig, String> {
        let mut tls = self.tls.clone();
        tls.alpn_protocols = vec![ALPN.to_vec()];
        tls.enable_early_data = false;
        let crypto = QuicClientConfig::try_from(Arc::new(tls)).map_err(|error| error.to_string())?;
        let mut config = ClientConfig::new(Arc::new(crypto));
        let mut transport = transport();
        // Fails above 2^62 ms.
        transport.max_idle_timeout(IdleTimeout::try_from(DEAD_AFTER).ok());
        transport.keep_alive_interval(Some(KEEPALIVE));
        config.transport_config(Arc::new(transport));
        Ok(config)
    }
}

/// Returns the first result, and forgets its attempt.
async fn any(attempts: &mut Vec<Attempt<'_>>) -> Result<Rc<Peer>, Failure> {
    let (at, result) = poll_fn(|cx| {
        let done =
            attempts.iter_mut().enumerate().find_map(|(at, attempt)| match attempt.as_mut().poll(cx) {
                Poll::Ready(result) => Some((at, result)),
                Poll::Pending => None,
            });
        done.map_or(Poll::Pending, Poll::Ready)
    })
    .await;
    drop(attempts.swap_remove(at));
    result
}

fn unopened(to: SocketAddr, error: &io::Error) -> Failure {
    Failure::new(EndReason::Internal, format!("QUIC to {to}: {error}"))
}

fn closed(connection: &Connection) -> ConnectionError {
    connection.close_reason().unwrap_or(ConnectionError::LocallyClosed)
}

/// Returns the name that the certificate of a host must have.
fn name_of(host: &Host) -> Result<String, Failure> {
    let why = || Failure::new(EndReason::Certificate, format!("no certificate can be for {host}"));
    server_name(host).map(|name| name.to_str().into_owned()).ok_or_else(why)
}

/// Maps a connection that was not made, or was lost, to an end reason.
fn failed(to: SocketAddr, error: &ConnectionError) -> Failure {
    let is_tls = |code: u64| (0x100..0x200).contains(&code);
    let reason = match error {
        ConnectionError::TransportError(error) if is_tls(error.code.into()) => EndReason::Certificate,
        ConnectionError::ConnectionClosed(close) if is_tls(close.error_code.into()) => EndReason::TlsFailed,
        ConnectionError::TimedOut => EndReason::ConnectTimeout,
        _ => EndReason::HopFailed,
    };
    Failure::new(reason, format!("QUIC to {to}: {error}"))
}
