//! One request stream of HTTP/3.

use super::super::buffer::Buffer;
use super::super::copy::{Outgoing, write_all};
use super::super::duplex::Duplex;
use super::super::h2::{Common, head};
use crate::carry::h3::{Broken, Came, Peer, Reading, id_of, number, pump, send_data};
use crate::reactor::timeout;
use bytes::Bytes;
use quinn::{RecvStream, SendStream};
use sidetrack_core::http::auth::request_needs_own_connection;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::{Decoder, Length, may_trail, request_length, response_length};
use sidetrack_core::http::h2 as map;
use sidetrack_core::http::h3::message::{Lines, Message, Request as Asked, put_response, put_trailers};
use sidetrack_core::http::h3::{Code, Error};
use sidetrack_core::http::message::{Method, Request, Response, Sender};
use sidetrack_core::http::udp;
use std::io::IoSlice;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// What a response may turn the stream into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Switch {
    /// A tunnel of bytes, after CONNECT.
    Bytes,
    /// A tunnel of datagrams.
    Datagrams,
}

/// Serves one stream to its end.
pub(super) async fn serve(common: Common, peer: &Rc<Peer>, mut send: SendStream, recv: RecvStream) {
    let mut reading = Reading::new(recv, Message::new(Sender::Client));
    let late = Error::of_stream(Code::RequestCancelled, "the request did not come in time");
    let result = match timeout(patience(&common), reading.next()).await {
        Ok(Ok(Some(Came::Request(asked)))) => {
            // Boxed: kinds of requests differ in size.
            Box::pin(respond(common, peer, &asked, (&mut send, &mut reading))).await
        }
        Ok(Ok(_)) => Err(Error::of_stream(Code::RequestIncomplete, "there is no request").into()),
        Ok(Err(broken)) => Err(broken),
        Err(_) => Err(late.into()),
    };
    let code = match result {
        Ok(()) => {
            // This fails only if the stream is over.
            let _ = send.finish();
            return reading.stop(Code::NoError);
        }
        Err(Broken::Protocol(error)) if !error.is_of_stream => return peer.abort(error),
        Err(Broken::Protocol(error)) => {
            tracing::debug!(why = error.why, "an HTTP/3 request was reset");
            error.code
        }
        Err(Broken::Cut(_) | Broken::Gone(_)) => Code::RequestCancelled,
    };
    let _ = send.reset(number(code));
    reading.stop(code);
}

fn patience(common: &Common) -> Duration {
    Duration::from_millis(common.worker.config().limits.handshake_timeout_ms)
}

/// The error for something that fails between the stream and its connection in memory.
fn internal(_: impl Sized) -> Broken {
    Error::of_stream(Code::Internal, "the request was cut").into()
}

fn malformed(_: impl Sized) -> Broken {
    Error::of_stream(Code::Message, "the request is malformed").into()
}

/// Serves one request.
async fn respond(
    common: Common,
    peer: &Rc<Peer>,
    asked: &Asked,
    (send, reading): (&mut SendStream, &mut Reading),
) -> Result<(), Broken> {
    let fields = || asked.lines.iter().map(|(name, value)| (name.as_slice(), value.as_slice()));
    let pseudo = map::Pseudo {
        method: &asked.method,
        scheme: asked.scheme.as_deref(),
        authority: asked.authority.as_deref(),
        path: asked.path.as_deref().unwrap_or(b"/"),
    };
    let (request, switch) = match asked.protocol.as_deref() {
        Some(protocol) if protocol == udp::PROTOCOL.as_bytes() => {
            (map::connect_udp(pseudo, fields()).map_err(malformed)?, Switch::Datagrams)
        }
        Some(_) => return refuse(send, 501).await,
        None if asked.method == b"CONNECT" => {
            let authority = asked.authority.as_deref().unwrap_or_default();
            (map::connect(authority, fields()).map_err(malformed)?, Switch::Bytes)
        }
        None => {
            let has_body = has_body(&common, asked, reading).await?;
            let request = map::proxied(pseudo, fields(), has_body, common.names_server());
            return exchange(common, &request.map_err(malformed)?, (send, reading)).await;
        }
    };
    let id = id_of(send.id());
    let datagrams = (switch == Switch::Datagrams).then(|| peer.datagrams(id));
    if datagrams.is_some() {
        // Its settings may come after its request. A client that tells none gets capsules.
        let _ = timeout(patience(&common), peer.told()).await;
    }
    // A tunnel of datagrams asks for its place itself.
    let admission = datagrams.is_none().then(|| common.admit()).transpose();
    let Ok(_admission) = admission else { return refuse(send, 503).await };
    let (pipe, mut buffer) = (common.connection(), Buffer::default());
    let mut head = Vec::with_capacity(512);
    request.write_to(&mut head);
    write_all(&pipe, &mut [IoSlice::new(&head)]).await.map_err(internal)?;
    if !answer((&pipe, &mut buffer), &request.method, Some(switch), send).await? {
        return Ok(());
    }
    let (stream, peeked) = pipe.into_stream();
    let early = [buffer.take(), peeked].concat();
    let cutter = stream.cutter();
    let (reader, writer) = tokio::io::split(stream);
    match datagrams {
        Some(datagrams) => {
            pump::datagrams((reader, writer), early, (peer, id, datagrams), (send, reading)).await
        }
        None => pump::bytes((reader, writer, cutter), early, (send, reading)).await,
    }
}

/// Answers with a status alone.
async fn refuse(send: &mut SendStream, status: u16) -> Result<(), Broken> {
    let mut out = Vec::new();
    put_response(&mut out, status, &vec![(b"content-length".to_vec(), b"0".to_vec())]);
    Ok(send.write_all(&out).await?)
}

/// Whether content follows the head. Without Content-Length only the next part tells.
async fn has_body(common: &Common, asked: &Asked, reading: &mut Reading) -> Result<bool, Broken> {
    if asked.lines.iter().any(|(name, _)| name == b"content-length") {
        return Ok(true);
    }
    match timeout(patience(common), reading.next()).await {
        Ok(next) => {
            let next = next?;
            let has_body = next.is_some();
            reading.put_back(next);
            Ok(has_body)
        }
        Err(_) => Ok(true),
    }
}

/// Forwards a request and its response, at the same time.
async fn exchange(
    common: Common,
    request: &Request,
    (send, reading): (&mut SendStream, &mut Reading),
) -> Result<(), Broken> {
    let length = request_length(request).map_err(malformed)?;
    if request_needs_own_connection(&request.fields) {
        // The scheme authenticates the whole connection, but streams share this one.
        return Err(
            Error::of_stream(Code::VersionFallback, "the request needs a connection of its own").into()
        );
    }
    let Ok(_admission) = common.admit() else { return refuse(send, 503).await };
    let pipe = common.connection();
    let mut bytes = Vec::with_capacity(512);
    request.write_to(&mut bytes);
    let mut upload = pin!(upload(&pipe, (bytes, length), reading));
    let mut buffer = Buffer::default();
    let mut download = pin!(answer((&pipe, &mut buffer), &request.method, None, send));
    let mut uploaded = false;
    loop {
        tokio::select! {
            biased;
            sent = &mut upload, if !uploaded => {
                sent?;
                uploaded = true;
            }
            answered = &mut download => {
                answered?;
                return Ok(());
            }
        }
    }
}

/// Copies content from a stream to a connection in memory.
async fn upload(
    pipe: &Duplex,
    (head, length): (Vec<u8>, Length),
    reading: &mut Reading,
) -> Result<(), Broken> {
    let mut out = Outgoing::new(pipe, head, length);
    // A response may arrive before the whole body was read: then the connection in memory takes no more.
    if out.flush().await.is_err() {
        return Ok(());
    }
    let mut trailers = Fields::new();
    while let Some(came) = reading.next().await? {
        match came {
            Came::Content(content) => {
                if out.push(&content).await.is_err() || out.flush().await.is_err() {
                    return Ok(());
                }
            }
            Came::Trailers(lines) => {
                for (name, value) in lines.iter().filter(|(name, _)| may_trail(name)) {
                    trailers.push(name, value);
                }
            }
            Came::Request(_) | Came::Response(..) => {}
        }
    }
    let _ = out.finish(&trailers).await;
    Ok(())
}

/// Whether a response turns the stream into what was asked for.
fn switches(switch: Option<Switch>, response: &Response) -> bool {
    match switch {
        Some(Switch::Bytes) => (200..300).contains(&response.status),
        Some(Switch::Datagrams) => {
            response.status == 101 && response.fields.first("upgrade") == Some(udp::PROTOCOL.as_bytes())
        }
        None => false,
    }
}

/// Sends the response from the connection in memory to the stream. Returns whether the stream is a tunnel now.
async fn answer(
    (from, buffer): (&Duplex, &mut Buffer),
    method: &Method,
    switch: Option<Switch>,
    send: &mut SendStream,
) -> Result<bool, Broken> {
    loop {
        let bytes = head(from, buffer, Sender::Server).await.map_err(internal)?;
        let bytes = bytes.ok_or_else(|| internal(()))?;
        let mut response = Response::parse(&bytes).map_err(internal)?;
        let length = response_length(method, &response).map_err(internal)?.length;
        let switches = switches(switch, &response);
        if response.status == 101 {
            if !switches {
                return Err(internal(()));
            }
            response.status = 200;
        }
        let lines: Lines =
            map::fields(&response.fields).map(|(name, value)| (name, value.to_vec())).collect();
        let mut out = Vec::with_capacity(bytes.len());
        put_response(&mut out, response.status, &lines);
        send.write_all(&out).await?;
        if response.is_interim() {
            continue;
        }
        if !switches {
            pour((from, buffer), Decoder::new(length), send).await?;
        }
        return Ok(switches);
    }
}

/// Copies content from a connection in memory to a stream.
pub(super) async fn pour(
    (from, buffer): (&Duplex, &mut Buffer),
    mut decoder: Decoder,
    send: &mut SendStream,
) -> Result<(), Broken> {
    loop {
        while !decoder.is_done() && !buffer.is_empty() {
            let decoded = decoder.decode(buffer.data()).map_err(internal)?;
            let (data, consumed) = (Bytes::copy_from_slice(decoded.data), decoded.consumed);
            buffer.consume(consumed);
            send_data(send, data).await?;
        }
        if decoder.is_done() {
            let trailers = decoder.take_trailers();
            let lines: Lines = map::fields(&trailers).map(|(name, value)| (name, value.to_vec())).collect();
            if !lines.is_empty() {
                let mut out = Vec::new();
                put_trailers(&mut out, &lines);
                send.write_all(&out).await?;
            }
            return Ok(());
        }
        if buffer.fill(from).await.map_err(internal)? == 0 {
            decoder.end().map_err(internal)?;
        }
    }
}
