//! HTTP/2 with clients: each stream is served like a connection of its own.

use super::super::Proxy;
use super::super::buffer::Buffer;
use super::super::connection::Connection;
use super::super::copy::{Outgoing, Stopped};
use super::super::duplex::Duplex;
use super::super::open::Inside;
use super::{connect, datagrams, drain, head, pipe, pour, websocket};
use crate::carry::Client;
use crate::carry::h2::follow::{Followed, Watch};
use crate::carry::h2::{CONNECTION_WINDOW, STREAM_WINDOW, STREAMS_MAX, header_list_max, headers};
use crate::intercept::Listening;
use crate::reactor::{self, timeout};
use crate::worker::{Admission, Idle, Place, Worker};
use bytes::Bytes;
use h2::ext::Protocol;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::StatusCode;
use sidetrack_core::http::auth::request_needs_own_connection;
use sidetrack_core::http::framing::{Decoder, Length, request_length, response_length};
use sidetrack_core::http::h2::{Malformed, Pseudo, proxied, request};
use sidetrack_core::http::message::{Method, Request, Response, Sender};
use sidetrack_core::http::udp;
use sidetrack_sys::sockopt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// How long a connection may have no streams.
const IDLE: Duration = Duration::from_secs(75);
/// How often a connection with active streams checks whether it still has some.
const AT_WORK: Duration = Duration::from_secs(1);
/// How long the last frames may take to be sent.
const FAREWELL: Duration = Duration::from_secs(1);

/// State shared by all streams of a connection.
#[derive(Clone)]
pub(in crate::http) struct Common {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The listener.
    pub listening: Arc<Listening>,
    /// State shared by the listener's connections.
    pub proxy: Arc<Proxy>,
    /// The client's address.
    pub peer: SocketAddr,
    /// The one server that all requests are for. `None`: the client speaks to us. Without a certificate of ours, it may only ask
    /// for tunnels of datagrams then.
    pub inside: Option<Inside>,
    /// The version that brings the requests: "2.0" or "3.0".
    pub received: &'static str,
}

/// Serves a connection to its end, after the client and we have agreed on HTTP/2.
pub(crate) async fn serve(connection: Connection) {
    let patience = Duration::from_millis(connection.worker.config().limits.handshake_timeout_ms);
    let Connection { worker, listening, proxy, peer, stream, mut buffer, inside, .. } = connection;
    let common = Common { worker: worker.clone(), listening, proxy, peer, inside, received: "2.0" };
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(header_list_max())
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .enable_connect_protocol();
    let (stream, peeked) = stream.into_stream();
    let (stream, watch) = Followed::new(stream, [buffer.take(), peeked].concat(), Sender::Client);
    if common.is_secured() {
        watch.for_proxy();
    }
    let place = Place::enter(&worker);
    let shaking = timeout(patience, builder.handshake::<Followed, Bytes>(stream));
    let Some(Ok(Ok(mut connection))) = Place::while_kept(Some(&place), shaking).await else { return };
    drop(place);
    // Its count of references is the number of active streams plus one.
    let at_work = Arc::new(());
    let is_lost = loop {
        let is_idle = Arc::strong_count(&at_work) == 1;
        let wait = if is_idle { IDLE } else { AT_WORK };
        match Place::while_idle(is_idle.then_some(&*worker), wait, connection.accept()).await {
            Idle::Over(Some(Ok((request, respond)))) => {
                let (common, at_work) = (common.clone(), at_work.clone());
                let watch = watch.of(respond.stream_id());
                reactor::spawn(async move {
                    serve_stream(common, request, respond, watch).await;
                    drop(at_work);
                });
            }
            Idle::Over(Some(Err(_)) | None) => return,
            Idle::Late if !is_idle => {}
            Idle::Late => break false,
            Idle::Lost => break true,
        }
    };
    if is_lost {
        // Close at once: another connection waits for the room. GOAWAY tells the client which requests were not processed.
        connection.abrupt_shutdown(Reason::NO_ERROR);
    } else {
        connection.graceful_shutdown();
    }
    // If the client is too slow for the last frames, the connection ends without them.
    let _ = timeout(FAREWELL, poll_fn(|cx| connection.poll_closed(cx))).await;
}

/// Serves one stream.
async fn serve_stream(
    common: Common,
    asked: http::Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    watch: Watch,
) {
    if let Err(malformed) = watch.take() {
        tracing::debug!(%malformed, "a malformed HTTP/2 request was reset");
        return respond.send_reset(Reason::PROTOCOL_ERROR);
    }
    let (parts, body) = asked.into_parts();
    match (parts.extensions.get::<Protocol>().map(Protocol::as_str), &common.inside) {
        (None, Some(_)) => {}
        (None, None) if common.is_secured() && parts.method == http::Method::CONNECT => {
            return connect::serve(common, &parts, (body, respond)).await;
        }
        (None, None) if common.is_secured() => {}
        (Some("websocket"), Some(_)) => return websocket::serve(common, &parts, (body, respond)).await,
        (Some(udp::PROTOCOL), None) => return datagrams::serve(common, &parts, (body, respond)).await,
        _ => {
            let mut head = http::Response::new(());
            *head.status_mut() = StatusCode::NOT_IMPLEMENTED;
            // An error means that the client is gone.
            let _ = respond.send_response(head, true);
            return;
        }
    }
    let (request, length) = match head_of(&common, &parts, !body.is_end_stream()) {
        Ok(read) => read,
        Err(_) => return respond.send_reset(Reason::PROTOCOL_ERROR),
    };
    if request_needs_own_connection(&request.fields) {
        // The scheme authenticates the whole connection, but streams share this one (RFC 9113 Sec. 7).
        return respond.send_reset(Reason::HTTP_1_1_REQUIRED);
    }
    let pipe = common.connection();
    let mut bytes = Vec::with_capacity(512);
    request.write_to(&mut bytes);
    let reason = {
        let mut upload = pin!(async {
            let mut out = Outgoing::new(&pipe, bytes, length);
            drain(body, &mut out, &watch).await
        });
        let mut buffer = Buffer::default();
        let mut download = pin!(answer((&pipe, &mut buffer), &request.method, None, &mut respond));
        let mut uploaded = false;
        loop {
            tokio::select! {
                biased;
                sent = &mut upload, if !uploaded => match sent {
                    // A response may arrive before the whole body was read.
                    Ok(()) | Err(Stopped::Sink(_)) => uploaded = true,
                    Err(_) if watch.is_malformed() => break Some(Reason::PROTOCOL_ERROR),
                    Err(Stopped::Source(_) | Stopped::Ended(_) | Stopped::Broken(_)) => break Some(Reason::CANCEL),
                },
                answered = &mut download => break match answered {
                    Ok(_) if uploaded => None,
                    // The rest of the body is not needed (RFC 9113 Sec. 8.1).
                    Ok(_) => Some(Reason::NO_ERROR),
                    Err(_) => Some(Reason::INTERNAL_ERROR),
                },
            }
        }
    };
    if let Some(reason) = reason {
        respond.send_reset(reason);
    }
}

impl Common {
    /// Whether the client speaks to the listener itself, by TLS.
    fn is_secured(&self) -> bool {
        self.inside.is_none() && self.proxy.secured.is_some()
    }

    /// Whether the configuration names the server of requests that are for us.
    pub(in crate::http) fn names_server(&self) -> bool {
        self.proxy.settings.to.is_some()
    }

    /// Asks for room for what a stream of this connection opens.
    ///
    /// # Errors
    /// Which limit is reached.
    pub(in crate::http) fn admit(&self) -> Result<Admission, String> {
        let ip = self.peer.ip();
        Admission::ask(&self.worker, ip, || ip.is_loopback() || sockopt::is_of_this_host(ip))
    }

    /// Starts serving a connection in memory with the shared state; returns its other end.
    pub(in crate::http) fn connection(self) -> Duplex {
        let (pipe, other) = pipe();
        let Self { worker, listening, proxy, peer, inside, received } = self;
        let served = Connection::new(worker, listening, proxy, Client::new(other), peer);
        reactor::spawn(Connection { inside, received: Some(received), ..served }.serve_all());
        pipe
    }
}

/// The pseudo-fields of a request.
pub(super) fn pseudo(parts: &http::request::Parts) -> Pseudo<'_> {
    let authority = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let path = parts.uri.path_and_query().map_or(&b"/"[..], |path| path.as_str().as_bytes());
    let scheme = parts.uri.scheme_str().map(str::as_bytes);
    Pseudo { method: parts.method.as_str().as_bytes(), scheme, authority, path }
}

/// The fields of a request.
pub(super) fn fields_of(parts: &http::request::Parts) -> impl Iterator<Item = (&[u8], &[u8])> {
    parts.headers.iter().map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes()))
}

/// The request in HTTP/1.1 form, and the framing of its body there.
fn head_of(
    common: &Common,
    parts: &http::request::Parts,
    has_body: bool,
) -> Result<(Request, Length), Malformed> {
    let request = if common.is_secured() {
        proxied(pseudo(parts), fields_of(parts), has_body, common.names_server())?
    } else {
        request(pseudo(parts), fields_of(parts), has_body)?
    };
    let length = request_length(&request).map_err(|_| Malformed::Field)?;
    Ok((request, length))
}

/// A protocol that a response may switch to, and what confirms it.
#[derive(Clone, Copy)]
pub(super) enum Switch<'a> {
    /// A WebSocket, with this value of Sec-WebSocket-Accept.
    WebSocket(&'a str),
    /// A tunnel of datagrams.
    Datagrams,
    /// A tunnel of bytes, after CONNECT.
    Bytes,
}

impl Switch<'_> {
    /// Whether a response confirms it.
    fn is_confirmed(self, response: &Response) -> bool {
        let says = |name: &str, value: &str| response.fields.first(name) == Some(value.as_bytes());
        match self {
            Self::Bytes => (200..300).contains(&response.status),
            Self::WebSocket(accept) => says("sec-websocket-accept", accept),
            Self::Datagrams => says("upgrade", udp::PROTOCOL),
        }
    }
}

/// Sends the response from the connection in memory to the stream. `switch` is what it may switch to; after a switch the stream
/// is returned.
pub(super) async fn answer(
    (from, buffer): (&Duplex, &mut Buffer),
    method: &Method,
    switch: Option<Switch<'_>>,
    respond: &mut SendResponse<Bytes>,
) -> Result<Option<SendStream<Bytes>>, Stopped> {
    let lost = |what: &str| Stopped::Source(what.to_owned());
    let gone = |error: h2::Error| Stopped::Sink(std::io::Error::other(error));
    loop {
        let read = head(from, buffer, Sender::Server).await.map_err(|error| lost(&error.to_string()))?;
        let bytes = read.ok_or_else(|| lost("no answer"))?;
        let mut response = Response::parse(&bytes).map_err(|error| lost(&error.to_string()))?;
        let length = response_length(method, &response).map_err(|error| lost(&error.to_string()))?.length;
        let is_bytes = matches!(switch, Some(Switch::Bytes));
        let switches = response.status == 101 || is_bytes && Switch::Bytes.is_confirmed(&response);
        if response.status == 101 {
            if !switch.is_some_and(|switch| switch.is_confirmed(&response)) {
                return Err(lost("it switches to what was not asked for"));
            }
            response.fields.remove("sec-websocket-accept");
            // RFC 8441 Sec. 5.
            response.status = 200;
        }
        let mut head = http::Response::new(());
        *head.status_mut() = StatusCode::from_u16(response.status).map_err(|_| lost("no status"))?;
        *head.headers_mut() = headers(&response.fields);
        if response.is_interim() {
            respond.send_informational(head).map_err(gone)?;
            continue;
        }
        let mut decoder = Decoder::new(length);
        let mut stream = respond.send_response(head, decoder.is_done() && !switches).map_err(gone)?;
        if switches {
            return Ok(Some(stream));
        }
        if !decoder.is_done() {
            pour((from, buffer), &mut decoder, &mut stream).await?;
        }
        return Ok(None);
    }
}
