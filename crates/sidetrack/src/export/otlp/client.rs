//! Requests to a collector: HTTP/1.1, over TLS or in the clear, on one connection that is kept.

use super::super::dial;
use crate::carry::tls::roots;
use crate::config::Otlp;
use axum::body::{Body, Bytes, to_bytes};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, RETRY_AFTER, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// How long a collector may take for an answer, with its connection and TLS.
const ANSWER: Duration = Duration::from_secs(10);
/// Longest answer that is read, bytes.
const ANSWER_MAX: usize = 64 << 10;

/// An answer.
#[derive(Debug)]
pub(super) enum Answer {
    /// The collector has taken the request, and this is what it says of it.
    Taken(Bytes),
    /// It will never take it, and why.
    Refused(String),
    /// It may take it later: after this time, if it says so; and why.
    Later(Option<Duration>, String),
}

/// A collector, and the connection to it.
pub(super) struct Client {
    settings: Otlp,
    mark: Option<u32>,
    kept: Option<SendRequest<Body>>,
}

impl Client {
    pub(super) fn new(settings: &Otlp, mark: Option<u32>) -> Self {
        Self { settings: settings.clone(), mark, kept: None }
    }

    /// Sends a request, and returns its answer.
    ///
    /// # Errors
    /// There is no connection, or no answer in time.
    pub(super) async fn post(&mut self, path: &str, body: Vec<u8>) -> io::Result<Answer> {
        let Otlp { headers, prefix, .. } = &self.settings;
        let mut request = Request::post(format!("{prefix}{path}"))
            .header(HOST, self.settings.authority())
            .header(CONTENT_TYPE, "application/x-protobuf")
            .header(USER_AGENT, concat!("sidetrack/", env!("CARGO_PKG_VERSION")));
        for (name, value) in headers {
            request = request.header(name, value.clone());
        }
        let request = request.body(Body::from(body)).map_err(io::Error::other)?;
        let asked = async {
            let mut sender = match self.kept.take().filter(|kept| !kept.is_closed()) {
                Some(kept) => kept,
                None => connect(&self.settings, self.mark).await?,
            };
            sender.ready().await.map_err(io::Error::other)?;
            let answer = sender.send_request(request).await.map_err(io::Error::other)?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            let body = to_bytes(Body::new(answer.into_body()), ANSWER_MAX).await.map_err(io::Error::other)?;
            // Without an answer in time, the connection is not used again.
            self.kept = Some(sender);
            Ok(judged(status, &headers, body))
        };
        timeout(ANSWER, asked).await?
    }
}

async fn connect(settings: &Otlp, mark: Option<u32>) -> io::Result<SendRequest<Body>> {
    let stream = dial::stream(&settings.collector, mark).await?;
    stream.set_nodelay(true)?;
    if !settings.secure {
        return open(stream).await;
    }
    let failed = |failure: crate::carry::Failure| io::Error::other(failure.detail);
    let mut config = (*roots(settings.ca_pem.as_ref()).map_err(failed)?).clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let host = settings.collector.host.to_string();
    let name = ServerName::try_from(host).map_err(io::Error::other)?;
    open(TlsConnector::from(Arc::new(config)).connect(name, stream).await?).await
}

async fn open(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> io::Result<SendRequest<Body>> {
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // The task ends with the sender, or when the collector disconnects.
    tokio::spawn(connection);
    Ok(sender)
}

/// What to do after an answer (OTLP specification, "OTLP/HTTP Response").
fn judged(status: StatusCode, headers: &HeaderMap, body: Bytes) -> Answer {
    if status.is_success() {
        return Answer::Taken(body);
    }
    let why = format!("the collector answers with status {}", status.as_u16());
    match status.as_u16() {
        429 | 502 | 503 | 504 => {
            let after = headers.get(RETRY_AFTER).and_then(|after| after.to_str().ok()?.trim().parse().ok());
            Answer::Later(after.map(Duration::from_secs), why)
        }
        _ => Answer::Refused(why),
    }
}
