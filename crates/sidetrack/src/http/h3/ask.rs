//! HTTP/3 with servers: requests share a connection. Each uses a connection in memory of its own.

use super::super::buffer::Buffer;
use super::super::copy::{Outgoing, write_all};
use super::super::duplex::Duplex;
use super::super::h2::{head, pipe};
use super::stream::pour;
use crate::carry::Cutter;
use crate::carry::h3::{Broken, Came, Peer, Reading, number};
use crate::reactor;
use quinn::{ConnectionError, SendStream};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::{Decoder, Length, may_trail, request_length, response_length};
use sidetrack_core::http::h2::fields;
use sidetrack_core::http::h3::message::{Lines, Message, Request as Asked, put_request};
use sidetrack_core::http::h3::{Code, Error};
use sidetrack_core::http::message::{Method, Request, Response, Sender};
use std::io::IoSlice;
use std::pin::pin;
use std::rc::Rc;

/// A connection to a server, for one request after another.
pub(super) struct Asking {
    /// The connection.
    pub peer: Rc<Peer>,
    /// Keeps the connection open as long as requests are under way.
    pub _at_work: Rc<()>,
    /// The alternative service that is used (RFC 7838 Sec. 5), if it has another port than the server.
    pub alternative: Option<Vec<u8>>,
    /// Is called if the connection turns out to be dead.
    pub on_dead: Rc<dyn Fn()>,
}

/// Returns a connection in memory. Its requests are sent as streams, one after the other.
pub(super) fn connection(asking: Asking) -> Duplex {
    let (ours, other) = pipe();
    let cutter = other.cutter();
    reactor::spawn(serve(Duplex::from(other), asking, cutter));
    ours.of_http3()
}

/// Forwards requests until there are no more, or one is cut. Then the connection ends, and the response is cut, too.
async fn serve(from: Duplex, asking: Asking, cutter: Option<Cutter>) {
    let mut buffer = Buffer::default();
    while let Ok(Some(bytes)) = head(&from, &mut buffer, Sender::Client).await {
        let Ok(request) = Request::parse(&bytes) else { return };
        let Ok(length) = request_length(&request) else { return };
        if let Err(broken) = exchange((&from, &mut buffer), &request, length, &asking).await {
            tracing::debug!(%broken, "an HTTP/3 request was cut");
            let lost = asking.peer.connection().close_reason();
            let why = lost.map_or_else(|| broken.to_string(), |lost| lost.to_string());
            if let Some(cutter) = cutter {
                cutter.cut_because(format!("HTTP/3: {why}"));
            }
            if is_dead(&asking.peer) {
                (asking.on_dead)();
            }
            return;
        }
    }
}

/// Whether the connection was lost, and not closed in order by one of its ends.
fn is_dead(peer: &Peer) -> bool {
    use ConnectionError as Ended;
    match peer.connection().close_reason() {
        None | Some(Ended::LocallyClosed) => false,
        Some(Ended::ApplicationClosed(close)) => close.error_code != number(Code::NoError),
        Some(_) => true,
    }
}

fn cut(_: impl Sized) -> Broken {
    Error::of_stream(Code::RequestCancelled, "the request was cut").into()
}

fn malformed(_: impl Sized) -> Broken {
    Error::of_stream(Code::Message, "the response is malformed").into()
}

/// Forwards one request and its response. What fails resets the stream, or ends the connection if the server has broken that.
async fn exchange(
    from: (&Duplex, &mut Buffer),
    request: &Request,
    length: Length,
    asking: &Asking,
) -> Result<(), Broken> {
    let gone = |error: ConnectionError| Broken::Gone(error.to_string());
    let (mut send, recv) = asking.peer.connection().open_bi().await.map_err(gone)?;
    let message = Message::new(Sender::Server);
    let message = if request.method == Method::Head { message.to_head() } else { message };
    let mut reading = Reading::new(recv, message);
    let passed = pass(from, (request, length), asking, (&mut send, &mut reading)).await;
    let code = match &passed {
        Ok(()) => Code::NoError,
        Err(Broken::Protocol(error)) => {
            if !error.is_of_stream {
                asking.peer.abort(*error);
            }
            error.code
        }
        Err(Broken::Cut(_) | Broken::Gone(_)) => Code::RequestCancelled,
    };
    if passed.is_err() {
        // This fails only if our direction is over.
        let _ = send.reset(number(code));
    }
    reading.stop(code);
    passed
}

/// Forwards the body of a request, and its response, at the same time.
async fn pass(
    (from, buffer): (&Duplex, &mut Buffer),
    (request, length): (&Request, Length),
    asking: &Asking,
    (send, reading): (&mut SendStream, &mut Reading),
) -> Result<(), Broken> {
    let mut out = Vec::with_capacity(512);
    put_request(&mut out, &asked(request, asking.alternative.as_deref()));
    send.write_all(&out).await?;
    let decoder = Decoder::new(length);
    // Whether the body is being sent, and whether all of it was.
    let (mut is_sending, mut is_whole) = (!decoder.is_done(), decoder.is_done());
    if is_whole {
        // This fails only if the stream is over.
        let _ = send.finish();
    }
    let mut upload = pin!(async {
        pour((from, buffer), decoder, send).await?;
        let _ = send.finish();
        Ok::<(), Broken>(())
    });
    let mut download = pin!(download(from, &request.method, reading));
    loop {
        tokio::select! {
            biased;
            sent = &mut upload, if is_sending => match sent {
                Ok(()) => (is_sending, is_whole) = (false, true),
                // The server may have answered before it stopped reading.
                Err(Broken::Gone(_)) => is_sending = false,
                Err(source) => return Err(source),
            },
            answered = &mut download => {
                // The rest of the body would be taken for the next request: the connection in memory must end.
                return answered.and(if is_whole { Ok(()) } else { Err(cut(())) });
            }
        }
    }
}

/// The request for HTTP/3 (RFC 9114 Sec. 4.3.1).
fn asked(request: &Request, alternative: Option<&[u8]>) -> Asked {
    let mut lines: Lines = fields(&request.fields).map(|(name, value)| (name, value.to_vec())).collect();
    lines.extend(alternative.map(|alternative| (b"alt-used".to_vec(), alternative.to_vec())));
    Asked {
        method: request.method.as_bytes().to_vec(),
        scheme: Some(b"https".to_vec()),
        authority: request.fields.first("host").map(<[u8]>::to_vec),
        path: Some(request.target.clone()),
        protocol: None,
        lines,
    }
}

/// Writes the response as HTTP/1.1.
async fn download(to: &Duplex, method: &Method, reading: &mut Reading) -> Result<(), Broken> {
    let (response, length) = loop {
        let Some(Came::Response(status, lines)) = reading.next().await? else {
            return Err(malformed(()));
        };
        let mut fields = Fields::new();
        for (name, value) in &lines {
            fields.push(name, value);
        }
        let mut response = Response::new(status, fields);
        if status == 101 {
            // RFC 9114 Sec. 4.5.
            return Err(malformed(()));
        }
        let has_content = *method != Method::Head && !matches!(status, 204 | 304) && !response.is_interim();
        if has_content && !response.fields.has("content-length") {
            response.fields.push("Transfer-Encoding", "chunked");
        }
        if !response.is_interim() {
            let length = response_length(method, &response).map_err(malformed)?.length;
            break (response, length);
        }
        let mut bytes = Vec::with_capacity(256);
        response.write_to(&mut bytes);
        write_all(to, &mut [IoSlice::new(&bytes)]).await.map_err(cut)?;
    };
    let mut bytes = Vec::with_capacity(512);
    response.write_to(&mut bytes);
    let mut out = Outgoing::new(to, bytes, length);
    let gone = |_: std::io::Error| cut(());
    out.flush().await.map_err(gone)?;
    let mut trailers = Fields::new();
    while let Some(came) = reading.next().await? {
        match came {
            Came::Content(content) => {
                out.push(&content).await.map_err(gone)?;
                out.flush().await.map_err(gone)?;
            }
            Came::Trailers(lines) => {
                for (name, value) in lines.iter().filter(|(name, _)| may_trail(name)) {
                    trailers.push(name, value);
                }
            }
            Came::Request(_) | Came::Response(..) => {}
        }
    }
    out.finish(&trailers).await.map_err(gone)
}
