//! HTTP/2 on a connection (RFC 9113): what listeners, connections to servers and hops share. The library `h2` has frames and flow
//! control; [`follow`] judges header blocks beside it.

pub mod follow;
mod hop;
mod pump;

pub use hop::{Trial, dial};
pub use pump::{Cut, Pipe, send, tunnel};

use super::{Failure, Stream};
use bytes::Bytes;
use follow::{Followed, Follows, Watch};
use h2::client::{Connection, ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};
use sidetrack_core::flow::EndReason;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::h2 as map;
use sidetrack_core::http::message::{MAX_HEAD, Sender};
use std::task::{Context, Poll, Waker};

/// The word for ALPN (RFC 9113 Sec. 3.1).
pub const ALPN: &[u8] = b"h2";
/// Most streams of a connection at the same time, of either side (RFC 9113 Sec. 5.1.2).
pub const STREAMS_MAX: u32 = 100;
/// Most bytes of content that are buffered for us in one stream.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// The same limit for all streams of a connection together. All of them fit, so that unread streams do not stop the others.
pub const CONNECTION_WINDOW: u32 = STREAMS_MAX * STREAM_WINDOW;

/// Opens streams on a connection to a server or a hop.
#[derive(Clone, Debug)]
pub struct Requests {
    sending: SendRequest<Bytes>,
    follows: Follows,
}

impl Requests {
    /// Waits until the peer allows another stream.
    ///
    /// # Errors
    /// The connection has ended.
    pub async fn ready(self) -> Result<Self, h2::Error> {
        Ok(Self { sending: self.sending.ready().await?, ..self })
    }

    /// Whether another stream may be opened: the connection is not lost, and the peer has not sent GOAWAY.
    pub fn is_open(&self) -> bool {
        let polled = self.sending.clone().poll_ready(&mut Context::from_waker(Waker::noop()));
        !matches!(polled, Poll::Ready(Err(_)))
    }

    /// The number of streams that the peer allows at the same time.
    pub fn streams_max(&self) -> usize {
        self.sending.current_max_send_streams()
    }

    /// Whether the peer has enabled Extended CONNECT (RFC 8441 Sec. 3). Known once its settings have arrived.
    pub fn is_extended_connect_protocol_enabled(&self) -> bool {
        self.sending.is_extended_connect_protocol_enabled()
    }

    /// Sends a request. Returns its response, the way for its content, and what watches the stream.
    ///
    /// # Errors
    /// The connection has ended, or HTTP/2 cannot express the request.
    pub fn send(
        &mut self,
        asked: http::Request<()>,
        ends: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>, Watch), h2::Error> {
        let (answer, to) = self.sending.send_request(asked, ends)?;
        // Nothing was sent yet: the connection has a task of its own on this thread.
        let watch = self.follows.open(answer.stream_id());
        Ok((answer, to, watch))
    }
}

/// A connection to a server or a hop: it moves while it is awaited, and its requests.
pub type Begun = (Connection<Followed, Bytes>, Requests);

/// Starts HTTP/2 on a connection after ALPN has agreed on it.
///
/// # Errors
/// The peer does not speak HTTP/2.
pub async fn begin(stream: Stream) -> Result<Begun, Failure> {
    let mut builder = h2::client::Builder::new();
    builder
        .enable_push(false)
        .max_header_list_size(header_list_max())
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    let (stream, follows) = Followed::new(stream, Vec::new(), Sender::Server);
    let (sending, connection) = builder.handshake::<Followed, Bytes>(stream).await.map_err(failed)?;
    Ok((connection, Requests { sending, follows }))
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(EndReason::HopFailed, format!("HTTP/2: {error}"))
}

/// Why there is no response that can be used.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// The stream or the connection has ended.
    #[error(transparent)]
    Ended(#[from] h2::Error),
    /// The response is malformed: nothing of it is used.
    #[error(transparent)]
    Malformed(#[from] map::Malformed),
}

/// Waits for the response on a stream.
///
/// # Errors
/// There is none that can be used.
pub async fn answered(answer: ResponseFuture, watch: &Watch) -> Result<http::Response<RecvStream>, NoAnswer> {
    let answer = answer.await?;
    watch.check()?;
    Ok(answer)
}

/// Converts fields to HTTP/2 form.
pub fn headers(fields: &Fields) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in map::fields(fields) {
        // Fields that do not fit were rejected when the head was parsed.
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(&name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    headers
}

/// The largest header list that we accept, in bytes (RFC 9113 Sec. 6.5.2).
pub fn header_list_max() -> u32 {
    u32::try_from(MAX_HEAD).unwrap_or(u32::MAX)
}
