//! Requests to etcd's JSON gateway: HTTP/1.1, over TLS or in the clear, to the members in turn.

use super::super::StoreError;
use super::wire::Refusal;
use crate::settings::EtcdAt;
use axum::body::{Body, Bytes};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;

/// How long a connection and its handshake may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How long a member may take for one answer. etcd itself gives up a request after 7 s.
const ANSWER: Duration = Duration::from_secs(8);
/// How long all members together may take. It is longer than the election of a new leader.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time until a request that no member served is tried again.
const AGAIN: Duration = Duration::from_millis(100);
/// Longest answer, bytes.
const ANSWER_MAX: usize = 64 << 20;
/// gRPC's codes of errors after which another member, or the same one later, may serve the request: DEADLINE_EXCEEDED and UNAVAILABLE.
const TRANSIENT: [u32; 2] = [4, 14];
/// gRPC's code of what does not exist.
const NOT_FOUND: u32 = 5;

/// An answer.
#[derive(Debug)]
pub(super) struct Answer<T> {
    pub value: T,
    /// An earlier attempt was sent and not answered: it may have been carried out.
    pub repeated: bool,
}

/// Why a request was not served.
#[derive(Debug)]
pub(super) enum Failure {
    /// etcd says no: what was asked for does not exist.
    NotFound(String),
    /// Another failure.
    Other(String),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        let (Failure::NotFound(why) | Failure::Other(why)) = failure;
        Self::Failed(why)
    }
}

/// The result of one attempt.
enum Tried {
    Answered(Bytes),
    Failed(Failure),
    /// Not carried out: no connection.
    NotSent(String),
    /// It may have been carried out.
    Unsure(String),
}

/// A connection that is kept for the next request.
struct Kept {
    member: usize,
    sender: SendRequest<Body>,
}

/// A client of all members.
pub(super) struct Client {
    at: EtcdAt,
    /// The member that answered last.
    member: AtomicUsize,
    kept: Mutex<Option<Kept>>,
}

impl Client {
    pub(super) fn new(at: EtcdAt) -> Self {
        Self { at, member: AtomicUsize::new(0), kept: Mutex::default() }
    }

    /// Sends JSON and parses the JSON answer. Members that do not serve it are passed over, for a bounded time.
    ///
    /// # Errors
    /// etcd refuses, or no member serves it in time.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<Answer<T>, Failure> {
        let body: Bytes = serde_json::to_vec(body).map_err(|error| Failure::Other(error.to_string()))?.into();
        let (until, mut repeated) = (Instant::now() + PATIENCE, false);
        loop {
            let why = match self.once(path, body.clone()).await {
                Tried::Answered(bytes) => {
                    let value = serde_json::from_slice(&bytes).map_err(|error| {
                        Failure::Other(format!("etcd does not answer as it should: {error}"))
                    })?;
                    return Ok(Answer { value, repeated });
                }
                Tried::Failed(failure) => return Err(failure),
                Tried::NotSent(why) => why,
                Tried::Unsure(why) => {
                    repeated = true;
                    why
                }
            };
            self.member.fetch_add(1, Relaxed);
            if Instant::now() >= until {
                return Err(Failure::Other(format!("no member of etcd serves requests: {why}")));
            }
            sleep(AGAIN).await;
        }
    }

    fn current(&self) -> usize {
        self.member.load(Relaxed) % self.at.endpoints.len().max(1)
    }

    async fn once(&self, path: &str, body: Bytes) -> Tried {
        let member = self.current();
        // Held during the request: HTTP/1.1 has one at a time on a connection.
        let mut kept = self.kept.lock().await;
        let usable = kept.take().filter(|kept| kept.member == member && !kept.sender.is_closed());
        let mut sender = match usable {
            Some(kept) => kept.sender,
            None => match self.connect(member).await {
                Ok(sender) => sender,
                Err(error) => return Tried::NotSent(self.named(member, &error)),
            },
        };
        let request = match self.request(member, path, body) {
            Ok(request) => request,
            Err(error) => return Tried::Failed(Failure::Other(error)),
        };
        let asked = async {
            sender.ready().await?;
            let answer = sender.send_request(request).await?;
            let status = answer.status().as_u16();
            let bytes = axum::body::to_bytes(Body::new(answer.into_body()), ANSWER_MAX).await;
            Ok::<_, hyper::Error>((status, bytes))
        };
        match timeout(ANSWER, asked).await {
            Ok(Ok((status, Ok(bytes)))) => {
                *kept = Some(Kept { member, sender });
                judged(status, bytes)
            }
            Ok(Ok((_, Err(error)))) => Tried::Unsure(self.named(member, &error)),
            Ok(Err(error)) => Tried::Unsure(self.named(member, &error)),
            Err(_) => Tried::Unsure(self.named(member, &"no answer")),
        }
    }

    fn named(&self, member: usize, error: &dyn std::fmt::Display) -> String {
        let endpoint = self.at.endpoints.get(member).map_or("?", |endpoint| &endpoint.address);
        format!("{endpoint}: {error}")
    }

    fn request(&self, member: usize, path: &str, body: Bytes) -> Result<Request<Body>, String> {
        let host = self.at.endpoints.get(member).map_or("", |endpoint| &endpoint.address);
        let request = Request::post(path).header("host", host).header("content-type", "application/json");
        request.body(Body::from(body)).map_err(|error| error.to_string())
    }

    /// Begins a request whose answer does not end, on a connection of its own.
    ///
    /// # Errors
    /// The member cannot be reached, or refuses.
    pub(super) async fn stream(&self, path: &str, body: &impl Serialize) -> io::Result<Response<Body>> {
        let member = self.current();
        let opened = async {
            let mut sender = self.connect(member).await?;
            let body = serde_json::to_vec(body).map_err(io::Error::other)?;
            let request = self.request(member, path, body.into()).map_err(io::Error::other)?;
            let answer = sender.send_request(request).await.map_err(io::Error::other)?;
            // The connection lives as long as its sender or its answer.
            Ok(answer.map(Body::new))
        };
        let opened = timeout(ANSWER, opened).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let opened = opened.and_then(|answer| {
            let status = answer.status();
            if status.is_success() { Ok(answer) } else { Err(io::Error::other(format!("status {status}"))) }
        });
        if opened.is_err() {
            self.member.fetch_add(1, Relaxed);
        }
        opened
    }

    async fn connect(&self, member: usize) -> io::Result<SendRequest<Body>> {
        let endpoint = self.at.endpoints.get(member).ok_or(io::ErrorKind::NotFound)?;
        let connected = async {
            let stream = TcpStream::connect(&endpoint.address).await?;
            stream.set_nodelay(true)?;
            let Some(mutual) = &self.at.mutual else { return open(stream).await };
            let name = ServerName::try_from(endpoint.name.clone()).map_err(io::Error::other)?;
            open(TlsConnector::from(mutual.client()).connect(name, stream).await?).await
        };
        timeout(CONNECT, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

async fn open(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> io::Result<SendRequest<Body>> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // The task ends with the sender, or when the member disconnects.
    tokio::spawn(connection);
    Ok(sender)
}

fn judged(status: u16, bytes: Bytes) -> Tried {
    if status == 200 {
        return Tried::Answered(bytes);
    }
    let Ok(Refusal { code, message, error }) = serde_json::from_slice(&bytes) else {
        return Tried::Unsure(format!("status {status}"));
    };
    let why = if message.is_empty() { error } else { message };
    match code {
        NOT_FOUND => Tried::Failed(Failure::NotFound(why)),
        code if TRANSIENT.contains(&code) => Tried::Unsure(why),
        _ => Tried::Failed(Failure::Other(format!("etcd refuses the request: {why}"))),
    }
}
