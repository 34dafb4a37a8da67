//! HTTP/2 with servers: requests share a connection. Each uses a connection in memory of its own.

use super::super::buffer::Buffer;
use super::super::copy::{Outgoing, Stopped};
use super::super::duplex::Duplex;
use super::{drain, head, pipe, pour, websocket};
pub(crate) use crate::carry::h2::Requests;
use crate::carry::h2::follow::Watch;
use crate::carry::h2::{self as carry, headers};
use crate::carry::{Failure, Stream};
use crate::reactor;
use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use http::{Method as H2Method, Uri, Version as H2Version};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::{Decoder, Length, request_length, response_length};
use sidetrack_core::http::message::{Method, Request, Response, Sender};
use std::pin::pin;

/// Waits for the response on a stream.
///
/// # Errors
/// There is none, or it is malformed: nothing of it is used.
pub(super) async fn answered(
    answer: ResponseFuture,
    watch: &Watch,
) -> Result<http::Response<RecvStream>, Stopped> {
    carry::answered(answer, watch).await.map_err(|error| Stopped::Source(error.to_string()))
}

/// Starts HTTP/2 on a connection after ALPN has agreed on it.
///
/// # Errors
/// The server does not speak HTTP/2.
pub(crate) async fn begin(stream: Stream) -> Result<Requests, Failure> {
    let (connection, requests) = carry::begin(stream).await?;
    reactor::spawn(async move {
        // Requests under way learn about the end from their streams.
        if let Err(error) = connection.await {
            tracing::debug!(%error, "an HTTP/2 connection to a server ended");
        }
    });
    Ok(requests)
}

/// Returns a connection in memory. Its requests are sent as streams, one after the other.
pub(crate) fn connection(requests: Requests) -> Duplex {
    let (ours, other) = pipe();
    reactor::spawn(serve(Duplex::from(other), requests));
    ours
}

/// Forwards requests until there are no more, or one is cut. Then the connection ends, and the response is cut, too.
async fn serve(from: Duplex, requests: Requests) {
    let mut buffer = Buffer::default();
    loop {
        let Ok(Some(bytes)) = head(&from, &mut buffer, Sender::Client).await else { return };
        let Ok(request) = Request::parse(&bytes) else { return };
        if request.fields.has("upgrade") {
            // The stream becomes a WebSocket: no request follows it on this connection.
            if let Err(stopped) = websocket::ask((from, buffer), &request, requests).await {
                tracing::debug!(?stopped, "a WebSocket over HTTP/2 was cut");
            }
            return;
        }
        let Ok(length) = request_length(&request) else { return };
        let passed = pass((&from, &mut buffer), &request, length, requests.clone()).await;
        if let Err(stopped) = passed {
            tracing::debug!(?stopped, "an HTTP/2 request was cut");
            return;
        }
    }
}

/// Forwards one request and its response.
async fn pass(
    (from, buffer): (&Duplex, &mut Buffer),
    request: &Request,
    length: Length,
    requests: Requests,
) -> Result<(), Stopped> {
    let gone = |error: h2::Error| Stopped::Source(error.to_string());
    let mut requests = requests.ready().await.map_err(gone)?;
    let asked = asked(request).ok_or_else(|| Stopped::Source("it is not an HTTP/2 request".to_owned()))?;
    let mut decoder = Decoder::new(length);
    let (answer, mut body, watch) = requests.send(asked, decoder.is_done()).map_err(gone)?;
    let answer = async {
        let answer = answered(answer, &watch).await?;
        download(answer, &request.method, from, &watch).await
    };
    let passed = exchange((from, buffer), (&mut decoder, &mut body), answer).await;
    if watch.is_malformed() {
        body.send_reset(Reason::PROTOCOL_ERROR);
    }
    passed
}

/// Forwards the body of a request, and its response, at the same time.
async fn exchange(
    from: (&Duplex, &mut Buffer),
    (decoder, body): (&mut Decoder, &mut SendStream<Bytes>),
    download: impl Future<Output = Result<(), Stopped>>,
) -> Result<(), Stopped> {
    // Whether the body is being sent, and whether all of it was.
    let (mut is_sending, mut is_whole) = (!decoder.is_done(), decoder.is_done());
    let mut upload = pin!(upload(from, decoder, body));
    let mut download = pin!(download);
    loop {
        tokio::select! {
            biased;
            sent = &mut upload, if is_sending => match sent {
                Ok(()) => (is_sending, is_whole) = (false, true),
                // The server may have answered before it stopped reading.
                Err(Stopped::Sink(_)) => is_sending = false,
                Err(source) => return Err(source),
            },
            answered = &mut download => {
                // The rest of the body would be taken for the next request: the connection must end.
                let whole = if is_whole { Ok(()) } else { Err(Stopped::Source("answered early".to_owned())) };
                return answered.and(whole);
            }
        }
    }
}

async fn upload(
    from: (&Duplex, &mut Buffer),
    decoder: &mut Decoder,
    body: &mut SendStream<Bytes>,
) -> Result<(), Stopped> {
    if decoder.is_done() { Ok(()) } else { pour(from, decoder, body).await }
}

/// The request head in HTTP/2 form.
pub(super) fn asked(request: &Request) -> Option<http::Request<()>> {
    let host = std::str::from_utf8(request.fields.first("host")?).ok()?;
    let target = std::str::from_utf8(&request.target).ok()?;
    let uri = Uri::builder().scheme("https").authority(host).path_and_query(target).build().ok()?;
    let mut asked = http::Request::new(());
    *asked.method_mut() = H2Method::from_bytes(request.method.as_bytes()).ok()?;
    *asked.uri_mut() = uri;
    *asked.version_mut() = H2Version::HTTP_2;
    *asked.headers_mut() = headers(&request.fields);
    Some(asked)
}

/// Writes a response as HTTP/1.1.
pub(super) async fn download(
    answer: http::Response<RecvStream>,
    method: &Method,
    to: &Duplex,
    watch: &Watch,
) -> Result<(), Stopped> {
    let (parts, body) = answer.into_parts();
    let mut fields = Fields::new();
    for (name, value) in &parts.headers {
        fields.push(name.as_str(), value.as_bytes());
    }
    let mut response = Response::new(parts.status.as_u16(), fields);
    let has_content = *method != Method::Head && !matches!(response.status, 204 | 304);
    if has_content && body.is_end_stream() {
        response.fields.set("Content-Length", "0");
    } else if has_content && !response.fields.has("content-length") {
        response.fields.push("Transfer-Encoding", "chunked");
    }
    let length =
        response_length(method, &response).map_err(|error| Stopped::Source(error.to_string()))?.length;
    let mut bytes = Vec::with_capacity(512);
    response.write_to(&mut bytes);
    drain(body, &mut Outgoing::new(to, bytes, length), watch).await
}
