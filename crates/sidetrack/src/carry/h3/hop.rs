//! A proxy that is reached by HTTP/3: CONNECT and CONNECT-UDP as streams of one shared connection.
//!
//! Each tunnel is a connection in memory that speaks HTTP/1.1, as with a proxy of kind `http`. A task translates: the request and
//! its answer, the bytes of the tunnel, and between capsules and datagrams of QUIC (RFC 9297). One that is too long for those
//! travels as a capsule in the stream.

use super::{Broken, Came, Peer, Reading, id_of, number, pump, transport};
use crate::carry::gate::Admitted;
use crate::carry::tls::roots;
use crate::carry::{Dialing, Failure, Stream, datagrams};
use crate::reactor::{self, QuicRuntime, timeout};
use crate::tls::server_name;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, SendStream};
use sidetrack_core::carrier::Hop;
use sidetrack_core::flow::{EndReason, Host};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::h2::fields;
use sidetrack_core::http::h3::message::{Lines, Message, Request as Asked, put_request};
use sidetrack_core::http::h3::{ALPN, Code, Error};
use sidetrack_core::http::message::{Method, Request, Response, Scan, Sender};
use sidetrack_core::http::udp;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf};

/// Bytes buffered in each direction of a connection in memory.
const PIPE_BYTES: usize = 64 * 1024;
/// How long the handshake with one address may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// The time between two signs of life of a connection with tunnels.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// Most connections that are kept. One that ends leaves at the next look.
const KEPT_MAX: usize = 64;

thread_local! {
    /// The connections of this worker, by their hops.
    static KEPT: RefCell<Vec<(Hop, Rc<Peer>)>> = const { RefCell::new(Vec::new()) };
}

/// Returns a connection in memory to the proxy. It takes one request of HTTP/1.1: CONNECT, or the upgrade of CONNECT-UDP.
///
/// # Errors
/// The proxy cannot be reached by HTTP/3.
pub async fn dial(hop: &Hop, addresses: &[Admitted], dialing: &Dialing) -> Result<Stream, Failure> {
    let peer = match kept(hop) {
        Some(peer) => peer,
        None => {
            let peer = connect(hop, addresses, dialing).await?;
            KEPT.with_borrow_mut(|kept| {
                kept.truncate(KEPT_MAX - 1);
                kept.push((hop.clone(), peer.clone()));
            });
            peer
        }
    };
    let (ours, other) = tokio::io::duplex(PIPE_BYTES);
    reactor::spawn(async move {
        if let Err(broken) = serve(&peer, ours).await {
            tracing::debug!(%broken, "a tunnel over HTTP/3 was cut");
        }
    });
    Ok(Stream::Memory(other))
}

/// Returns the open connection to this hop.
fn kept(hop: &Hop) -> Option<Rc<Peer>> {
    KEPT.with_borrow_mut(|kept| {
        kept.retain(|(_, peer)| peer.connection().close_reason().is_none() && !peer.is_leaving());
        kept.iter().find(|(other, _)| other == hop).map(|(_, peer)| peer.clone())
    })
}

/// Opens a connection to the first address that answers.
async fn connect(hop: &Hop, addresses: &[Admitted], dialing: &Dialing) -> Result<Rc<Peer>, Failure> {
    let mut first = None;
    for to in addresses {
        let to = to.address();
        let late = Failure::new(EndReason::ConnectTimeout, format!("QUIC to {to}: no answer"));
        match timeout(PATIENCE, connect_to(hop, to, dialing)).await.unwrap_or(Err(late)) {
            Ok(peer) => return Ok(peer),
            Err(failure) => drop(first.get_or_insert(failure)),
        }
    }
    Err(first.unwrap_or_else(|| Failure::new(EndReason::Dns, "it has no address")))
}

async fn connect_to(hop: &Hop, to: SocketAddr, dialing: &Dialing) -> Result<Rc<Peer>, Failure> {
    let internal = |why: String| Failure::new(EndReason::Internal, format!("QUIC to {to}: {why}"));
    if dialing.is_own_datagrams(to) {
        return Err(Failure::new(EndReason::Loop, format!("{to} is our own listener")));
    }
    let name = name_of(&hop.address.host)?;
    let mut tls = (*roots(hop.ca_pem.as_ref())?).clone();
    tls.alpn_protocols = vec![ALPN.to_vec()];
    let crypto = QuicClientConfig::try_from(Arc::new(tls)).map_err(|error| internal(error.to_string()))?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    let mut transport = transport();
    transport.keep_alive_interval(Some(KEEPALIVE));
    config.transport_config(Arc::new(transport));
    let opened = datagrams::bound(dialing, to)
        .and_then(|socket| Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(QuicRuntime)));
    let endpoint = opened.map_err(|error| internal(error.to_string()))?;
    let connecting = endpoint.connect_with(config, to, &name).map_err(|error| internal(error.to_string()))?;
    let connection = connecting.await.map_err(|error| failed(to, &error))?;
    let lost = |why: String| Failure::new(EndReason::HopFailed, format!("QUIC to {to}: {why}"));
    let peer = Peer::begin(connection, Sender::Server).await.map_err(lost)?;
    if peer.told().await { Ok(peer) } else { Err(failed(to, &closed(peer.connection()))) }
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

/// Serves one connection in memory to its end.
async fn serve(peer: &Rc<Peer>, pipe: DuplexStream) -> Result<(), Broken> {
    let (mut reader, writer) = tokio::io::split(pipe);
    let Some((request, early)) = request(&mut reader).await? else { return Ok(()) };
    let gone = |error: ConnectionError| Broken::Gone(error.to_string());
    let (mut send, recv) = peer.connection().open_bi().await.map_err(gone)?;
    let mut reading = Reading::new(recv, Message::new(Sender::Server));
    let passed = pass(peer, (request, early), (reader, writer), (&mut send, &mut reading)).await;
    let code = match &passed {
        Ok(()) => Code::NoError,
        Err(Broken::Protocol(error)) if !error.is_of_stream => {
            peer.abort(*error);
            error.code
        }
        Err(Broken::Protocol(error)) => error.code,
        Err(Broken::Cut(_) | Broken::Gone(_)) => Code::RequestCancelled,
    };
    if passed.is_err() {
        // This fails only if our direction is over.
        let _ = send.reset(number(code));
    }
    reading.stop(code);
    passed
}

fn cut(_: impl Sized) -> Broken {
    Error::of_stream(Code::Connect, "the tunnel was cut").into()
}

/// Reads the request, and what came behind it. `None`: there is none.
async fn request(reader: &mut ReadHalf<DuplexStream>) -> Result<Option<(Request, Vec<u8>)>, Broken> {
    let (mut held, mut scan) = (Vec::new(), Scan::default());
    loop {
        if let Some(length) = scan.advance(&held, Sender::Client).map_err(cut)? {
            let request = Request::parse(held.get(..length).unwrap_or_default()).map_err(cut)?;
            return Ok(Some((request, held.split_off(length))));
        }
        if reader.read_buf(&mut held).await.map_err(cut)? == 0 {
            return Ok(None);
        }
    }
}

/// The request for HTTP/3 (RFC 9114 Sec. 4.4, RFC 9298 Sec. 3.4).
fn asked(request: &Request) -> Asked {
    let of_upgrade = [&b"upgrade"[..], b"host"];
    let lines: Lines = fields(&request.fields)
        .filter(|(name, _)| !of_upgrade.contains(&name.as_slice()))
        .map(|(name, value)| (name, value.to_vec()))
        .collect();
    let host = request.fields.first("host").map(<[u8]>::to_vec);
    let method = b"CONNECT".to_vec();
    if request.method == Method::Connect {
        return Asked { method, authority: Some(request.target.clone()), lines, ..Asked::default() };
    }
    // The target may be a whole URL (RFC 9298 Sec. 3.2).
    let at = request.target.windows(udp::PREFIX.len()).position(|part| part == udp::PREFIX.as_bytes());
    Asked {
        method,
        scheme: Some(b"https".to_vec()),
        authority: host,
        path: Some(request.target.get(at.unwrap_or(0)..).unwrap_or_default().to_vec()),
        protocol: Some(udp::PROTOCOL.as_bytes().to_vec()),
        lines,
    }
}

/// Forwards the request and its answer, and then the tunnel.
async fn pass(
    peer: &Rc<Peer>,
    (request, early): (Request, Vec<u8>),
    (reader, mut writer): (ReadHalf<DuplexStream>, WriteHalf<DuplexStream>),
    (send, reading): (&mut SendStream, &mut Reading),
) -> Result<(), Broken> {
    let is_bytes = request.method == Method::Connect;
    let id = id_of(send.id());
    let datagrams = peer.datagrams(id);
    let mut out = Vec::with_capacity(512);
    put_request(&mut out, &asked(&request));
    send.write_all(&out).await?;
    let is_open = answer(reading, &mut writer, is_bytes).await?;
    if !is_open {
        // This fails only if the stream is over.
        let _ = send.finish();
        return refused(reading, &mut writer).await;
    }
    if is_bytes {
        pump::bytes((reader, writer), early, (send, reading)).await
    } else {
        pump::datagrams((reader, writer), early, (peer, id, datagrams), (send, reading)).await
    }
}

/// Forwards the head of the answer. Returns whether the tunnel is open.
async fn answer(
    reading: &mut Reading,
    writer: &mut WriteHalf<DuplexStream>,
    is_bytes: bool,
) -> Result<bool, Broken> {
    loop {
        let Some(Came::Response(status, lines)) = reading.next().await? else { return Err(cut(())) };
        if status < 200 {
            continue;
        }
        let is_open = (200..300).contains(&status);
        let response = if is_open && !is_bytes {
            Response::new(101, udp::switching())
        } else {
            let mut fields = Fields::new();
            for (name, value) in lines.iter().filter(|(name, _)| name != b"content-length") {
                fields.push(name, value);
            }
            if !is_open {
                fields.push("Connection", "close");
            }
            Response::new(status, fields)
        };
        let mut head = Vec::with_capacity(512);
        response.write_to(&mut head);
        writer.write_all(&head).await.map_err(cut)?;
        return Ok(is_open);
    }
}

/// Forwards the text of a refusal.
async fn refused(reading: &mut Reading, writer: &mut WriteHalf<DuplexStream>) -> Result<(), Broken> {
    while let Some(came) = reading.next().await? {
        if let Came::Content(content) = came {
            writer.write_all(&content).await.map_err(cut)?;
        }
    }
    writer.shutdown().await.map_err(cut)
}
