//! QUIC connections (RFC 9000), with quinn.

use crate::carry::{Dialing, Failure, datagrams};
use crate::reactor::QuicRuntime;
use crate::tls::Mutual;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, IdleTimeout, RecvStream,
    ServerConfig, TransportConfig, VarInt,
};
use sidetrack_core::flow::EndReason;
use sidetrack_core::tunnel::{Greeting, Parsed};
use sidetrack_sys::sockopt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

/// Flow-control window of one direction of one flow, bytes: unread and in-flight bytes together. At 20 ms
/// round-trip time it allows 400 Mbit/s.
const FLOW_WINDOW: u32 = 1 << 20;

/// Most flows of one connection at a time.
const FLOWS_MAX: u32 = 4096;

/// Requested size of socket buffers, bytes. The kernel limits it to `net.core.rmem_max` and `wmem_max`.
const SOCKET_BUFFER: usize = 4 << 20;

/// Most bytes of datagrams that wait in one connection, in each direction.
const DATAGRAMS_MAX: usize = 1 << 20;

/// Most bytes of a greeting.
const GREETING_MAX: usize = 1024;

/// Application error code of a connection that is closed because its end stops.
pub const CLOSED: VarInt = VarInt::from_u32(0);

fn transport(keepalive: Duration, lost_after: Duration) -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .keep_alive_interval(Some(keepalive))
        // Fails above 2^62 ms; the configuration allows much less.
        .max_idle_timeout(IdleTimeout::try_from(lost_after).ok())
        .max_concurrent_bidi_streams(FLOWS_MAX.into())
        .max_concurrent_uni_streams(1_u8.into())
        .stream_receive_window(FLOW_WINDOW.into())
        // Each flow has its own window. With a shared one, an unread flow would stop the others.
        .receive_window(VarInt::MAX)
        .send_window(u64::MAX)
        .datagram_receive_buffer_size(Some(DATAGRAMS_MAX))
        .datagram_send_buffer_size(DATAGRAMS_MAX);
    config
}

/// Configures the end that accepts connections. The end that opens them decides when they count as lost.
///
/// # Errors
/// Fails if the cipher suite that QUIC starts with is missing.
pub fn server_config(mutual: &Mutual) -> io::Result<ServerConfig> {
    let crypto = QuicServerConfig::try_from(mutual.server()).map_err(io::Error::other)?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(Arc::new(transport(Duration::from_secs(10), Duration::from_secs(60))));
    Ok(config)
}

/// Enlarges the buffers of a socket for connections. Failing to do so only costs speed.
pub fn enlarge_buffers(socket: &UdpSocket) {
    let _ = sockopt::set_receive_buffer(socket, SOCKET_BUFFER);
    let _ = sockopt::set_send_buffer(socket, SOCKET_BUFFER);
}

/// How to dial the far side.
#[derive(Clone, Copy, Debug)]
pub struct Dial<'a> {
    /// Its address.
    pub to: SocketAddr,
    /// The name in its certificate.
    pub name: &'a str,
    /// Our identity, and how the peer's certificate is checked.
    pub mutual: &'a Mutual,
    /// Time between two keep-alive messages when nothing else is sent.
    pub keepalive: Duration,
    /// After this time of silence, the connection is lost.
    pub lost_after: Duration,
}

/// Opens a connection and waits until the far side has accepted us.
///
/// # Errors
/// Fails with `auth_failed` if either end does not trust the other, otherwise with the fitting reason.
pub async fn connect(dial: &Dial<'_>, dialing: &Dialing) -> Result<(Endpoint, Connection), Failure> {
    let internal =
        |error: io::Error| Failure::new(EndReason::Internal, format!("QUIC to {}: {error}", dial.to));
    if dialing.is_own(dial.to) {
        return Err(Failure::new(EndReason::Loop, format!("{} is our own listener", dial.to)));
    }
    let socket = datagrams::bound(dialing, dial.to).map_err(internal)?;
    enlarge_buffers(&socket);
    let runtime = Arc::new(QuicRuntime);
    let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, runtime).map_err(internal)?;
    let crypto = QuicClientConfig::try_from(dial.mutual.client())
        .map_err(|error| internal(io::Error::other(error)))?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(Arc::new(transport(dial.keepalive, dial.lost_after)));
    let connecting = endpoint
        .connect_with(config, dial.to, dial.name)
        .map_err(|error| internal(io::Error::other(error)))?;
    let connection = connecting.await.map_err(|error| failure(dial.to, &error))?;
    let greeting = connection.accept_uni().await.map_err(|error| failure(dial.to, &error))?;
    hear_greeting(greeting, dial.to, &connection).await?;
    Ok((endpoint, connection))
}

async fn hear_greeting(
    mut greeting: RecvStream,
    to: SocketAddr,
    connection: &Connection,
) -> Result<(), Failure> {
    let bytes =
        greeting.read_to_end(GREETING_MAX).await.map_err(|error| match connection.close_reason() {
            Some(reason) => failure(to, &reason),
            None => Failure::new(EndReason::HopFailed, format!("QUIC to {to}: greeting: {error}")),
        })?;
    match Greeting::parse(&bytes) {
        Parsed::Message(..) => Ok(()),
        other => Err(Failure::new(EndReason::HopFailed, format!("QUIC to {to}: greeting: {other:?}"))),
    }
}

/// The first of the error codes that carry a TLS alert (RFC 9001 Sec. 4.8).
const CRYPTO_ERROR: u64 = 0x100;

/// Maps a failed or lost connection to an end reason.
pub fn failure(to: SocketAddr, error: &ConnectionError) -> Failure {
    let is_about_tls = |code: u64| (CRYPTO_ERROR..CRYPTO_ERROR + 0x100).contains(&code);
    let reason = match error {
        ConnectionError::TransportError(error) if is_about_tls(error.code.into()) => EndReason::AuthFailed,
        ConnectionError::ConnectionClosed(close) if is_about_tls(close.error_code.into()) => {
            EndReason::AuthFailed
        }
        ConnectionError::TimedOut => EndReason::ConnectTimeout,
        _ => EndReason::HopFailed,
    };
    Failure::new(reason, format!("QUIC to {to}: {error}"))
}
