//! HTTP/2 over TLS 1.3 between orchestrators and domains. Both ends are authenticated by certificate or pinned
//! key.

use super::api::Refusal;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::server::conn::http2;
use hyper::{Method, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sidetrack_common::tls::{self, Mutual};
use sidetrack_sys::sync::lock;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The application protocol in TLS (ALPN).
pub const ALPN: &[u8] = b"h2";
/// How long a connection and its handshake may take.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest body that is read, bytes: the size of an agreement.
pub const BODY_MAX: usize = sidetrack_common::agreement::FILE_MAX as usize;
/// Most connections at a time. Further ones wait.
const CONNECTIONS_MAX: usize = 256;
/// Most open requests of one connection.
const STREAMS_MAX: u32 = 64;

/// The other end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The name in its certificate, otherwise its pin. If peers are trusted by pins, a peer chooses this name
    /// itself.
    pub name: String,
    /// What no other peer can claim: the name if an authority signed it, otherwise the pin of its key.
    pub identity: String,
}

/// Why a request failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer does not answer, or its identity is wrong.
    #[error("{0} cannot be reached: {1}")]
    Unreachable(String, String),
    /// The peer refused the request.
    #[error("{error}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The reason.
        error: String,
    },
    /// The peer's answer is malformed.
    #[error("{0} does not answer as it should: {1}")]
    Broken(String, String),
}

/// A refusal: the HTTP status and its body.
#[derive(Clone, Debug)]
pub struct No(pub StatusCode, pub Refusal);

impl No {
    /// A refusal with this status.
    pub fn new(status: StatusCode, error: impl ToString, help: &str) -> Self {
        Self(status, Refusal { error: error.to_string(), help: help.to_owned() })
    }
}

impl IntoResponse for No {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

/// Serves a router until `stop` becomes true or its sender is dropped. Each request has its [`Peer`] as an
/// extension.
///
/// # Errors
/// Fails if the listener cannot accept any more.
pub async fn serve(
    listener: TcpListener,
    mutual: Mutual,
    router: Router,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let (acceptor, signed) = (TlsAcceptor::from(mutual.server()), mutual.has_authority());
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = room.clone().acquire_owned().await else { return Ok(()) };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections; trying again");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (acceptor, router, mut stop) = (acceptor.clone(), router.clone(), stop.clone());
        tokio::spawn(async move {
            let _place = place;
            tokio::select! {
                () = connection(stream, acceptor, signed, router) => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        });
    }
}

async fn connection(stream: TcpStream, acceptor: TlsAcceptor, signed: bool, router: Router) {
    let _ = stream.set_nodelay(true);
    let stream = match timeout(CONNECT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::info!(%error, "a TLS handshake failed"),
        Err(_) => return,
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let Some(certificate) = certificate else { return };
    let name = tls::peer_name(certificate);
    let identity = if signed { name.clone() } else { tls::peer_pin(certificate) };
    let peer = Peer { name, identity };
    let service = TowerToHyperService::new(router.layer(Extension(peer)));
    let mut server = http2::Builder::new(TokioExecutor::new());
    server.max_concurrent_streams(STREAMS_MAX);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// A peer for requests, with one connection that is opened again after it breaks.
pub struct Link {
    name: String,
    /// Tried in this order.
    addresses: Vec<String>,
    server_name: String,
    mutual: Mutual,
    held: Mutex<Option<SendRequest<Body>>>,
}

impl Link {
    /// A peer at one of these addresses: the first that answers is taken. `name` is for messages; `server_name` is the
    /// name in the peer's certificate.
    pub fn new(
        name: &str,
        addresses: impl IntoIterator<Item = impl Into<String>>,
        server_name: &str,
        mutual: Mutual,
    ) -> Self {
        let addresses = addresses.into_iter().map(Into::into).collect();
        let (name, server_name) = (name.to_owned(), server_name.to_owned());
        Self { name, addresses, server_name, mutual, held: Mutex::default() }
    }

    /// The name of the peer for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends JSON and parses the JSON answer, within a time limit.
    ///
    /// # Errors
    /// Fails if the peer cannot be reached, refuses, or sends something else.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        within: Duration,
    ) -> Result<T, LinkError> {
        let body = serde_json::to_vec(body).map_err(|error| self.broken(error))?;
        let asked = async {
            let answer = self.send(method, path, body).await?;
            let bytes = self.whole(answer).await?;
            serde_json::from_slice(&bytes).map_err(|error| self.broken(error))
        };
        timeout(within, asked)
            .await
            .unwrap_or_else(|_| Err(self.unreachable(format!("no answer in {within:?}"))))
    }

    /// Sends a body. Returns the answer as soon as it begins, if it is not a refusal.
    ///
    /// # Errors
    /// As in [`Link::ask`].
    pub async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Response<Body>, LinkError> {
        self.stream(method, path, "application/json", Body::from(body)).await
    }

    /// Streams a body with this media type. Returns the answer as soon as it begins, if it is not a refusal.
    ///
    /// # Errors
    /// As in [`Link::ask`].
    pub async fn stream(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        body: Body,
    ) -> Result<Response<Body>, LinkError> {
        let mut sender = self.sender().await?;
        let request = Request::builder().method(method).uri(format!("https://{}{path}", self.server_name));
        let request = request.header("content-type", kind).body(body);
        let answer = sender.send_request(request.map_err(|error| self.broken(error))?).await;
        let answer = answer.map_err(|error| {
            *lock(&self.held) = None;
            self.unreachable(error)
        })?;
        let status = answer.status();
        let answer = answer.map(Body::new);
        if status.is_success() {
            return Ok(answer);
        }
        let bytes = self.whole(answer).await?;
        let error = serde_json::from_slice(&bytes)
            .map_or_else(|_| format!("status {status}"), |no: Refusal| no.error);
        Err(LinkError::Refused { status: status.as_u16(), error })
    }

    async fn whole(&self, answer: Response<Body>) -> Result<Bytes, LinkError> {
        axum::body::to_bytes(answer.into_body(), BODY_MAX).await.map_err(|error| self.unreachable(error))
    }

    async fn sender(&self) -> Result<SendRequest<Body>, LinkError> {
        let held = lock(&self.held).clone();
        if let Some(held) = held.filter(|held| !held.is_closed()) {
            return Ok(held);
        }
        let mut failed = self.unreachable("it has no address");
        for address in &self.addresses {
            match timeout(CONNECT, self.connect(address)).await {
                Ok(Ok(sender)) => {
                    *lock(&self.held) = Some(sender.clone());
                    return Ok(sender);
                }
                Ok(Err(error)) => failed = self.unreachable(error),
                Err(_) => failed = self.unreachable("no answer"),
            }
        }
        Err(failed)
    }

    async fn connect(&self, address: &str) -> io::Result<SendRequest<Body>> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::try_from(self.server_name.clone()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(self.mutual.client()).connect(name, stream).await?;
        let shaken = handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (sender, connection) = shaken.map_err(io::Error::other)?;
        // The task ends with the last sender, or when the peer disconnects.
        tokio::spawn(connection);
        Ok(sender)
    }

    fn unreachable(&self, why: impl ToString) -> LinkError {
        LinkError::Unreachable(format!("{} at {}", self.name, self.addresses.join(" or ")), why.to_string())
    }

    fn broken(&self, why: impl ToString) -> LinkError {
        LinkError::Broken(self.name.clone(), why.to_string())
    }
}
