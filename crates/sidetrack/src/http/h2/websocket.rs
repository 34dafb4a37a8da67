//! WebSockets over HTTP/2 (RFC 8441), from clients and to servers. Between the two streams, also for policy, they are
//! upgrades of HTTP/1.1. So each end may use its own HTTP version.

use super::super::buffer::Buffer;
use super::super::copy::{Stopped, write_all};
use super::super::duplex::Duplex;
use super::accept::{Common, Switch, answer, fields_of, pseudo};
use super::ask::{Requests, answered, asked, download};
use super::tunnel;
use crate::carry::h2::Cut;
use bytes::Bytes;
use data_encoding::BASE64;
use h2::ext::Protocol;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::request::Parts;
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::h2 as map;
use sidetrack_core::http::message::{Method, Request, Response};
use std::io::IoSlice;

/// The text that is appended to the key before hashing (RFC 6455 Sec. 1.3).
const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// Serves an extended CONNECT request for a WebSocket to its end.
pub(super) async fn serve(
    common: Common,
    parts: &Parts,
    (body, mut respond): (RecvStream, SendResponse<Bytes>),
) {
    let key = BASE64.encode(&sidetrack_sys::random::bytes::<16>());
    let Ok(request) = map::websocket(pseudo(parts), fields_of(parts), &key) else {
        return respond.send_reset(Reason::PROTOCOL_ERROR);
    };
    let accept = accept_of(&key);
    let mut head = Vec::with_capacity(512);
    request.write_to(&mut head);
    let (pipe, mut buffer) = (common.connection(), Buffer::default());
    let opened = match write_all(&pipe, &mut [IoSlice::new(&head)]).await {
        Ok(()) => {
            answer((&pipe, &mut buffer), &Method::Get, Some(Switch::WebSocket(&accept)), &mut respond).await
        }
        Err(error) => Err(Stopped::Sink(error)),
    };
    match opened {
        Ok(Some(to)) => tunnel(pipe, buffer, (body, to), Cut::Ends).await,
        // The request was rejected, and the response has been sent.
        Ok(None) => {}
        Err(_) => respond.send_reset(Reason::INTERNAL_ERROR),
    }
}

/// Computes Sec-WebSocket-Accept for a key (RFC 6455 Sec. 4.2.2).
fn accept_of(key: &str) -> String {
    BASE64.encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, format!("{key}{GUID}").as_bytes()).as_ref())
}

/// Asks a server for a WebSocket stream instead of an upgrade (RFC 8441 Sec. 5). If the server accepts, answers like an
/// upgrade and copies bytes both ways; otherwise forwards the server's response.
///
/// # Errors
/// Which side stopped it before there was a response.
pub(super) async fn ask(
    (from, buffer): (Duplex, Buffer),
    request: &Request,
    requests: Requests,
) -> Result<(), Stopped> {
    let gone = |error: h2::Error| Stopped::Source(error.to_string());
    let odd = || Stopped::Source("it asks for no WebSocket".to_owned());
    let key = request.fields.first("sec-websocket-key").and_then(|key| std::str::from_utf8(key).ok());
    let (key, mut asked) = key.zip(asked(request)).ok_or_else(odd)?;
    *asked.method_mut() = http::Method::CONNECT;
    asked.headers_mut().remove("sec-websocket-key");
    asked.extensions_mut().insert(Protocol::from_static("websocket"));
    let mut requests = requests.ready().await.map_err(gone)?;
    let (answer, mut to, watch) = requests.send(asked, false).map_err(gone)?;
    let answer = answered(answer, &watch).await;
    if watch.is_malformed() {
        to.send_reset(Reason::PROTOCOL_ERROR);
    }
    let answer = answer?;
    if !answer.status().is_success() {
        // The server has rejected it: an error here does not matter.
        let _ = to.send_data(Bytes::new(), true);
        return download(answer, &Method::Get, &from, &watch).await;
    }
    let (parts, body) = answer.into_parts();
    let mut fields = Fields::from([("Connection", "Upgrade"), ("Upgrade", "websocket")]);
    fields.push("Sec-WebSocket-Accept", accept_of(key));
    let of_the_stream = ["sec-websocket-accept", "content-length"];
    for (name, value) in parts.headers.iter().filter(|(name, _)| !of_the_stream.contains(&name.as_str())) {
        fields.push(name.as_str(), value.as_bytes());
    }
    let mut head = Vec::with_capacity(512);
    Response::new(101, fields).write_to(&mut head);
    write_all(&from, &mut [IoSlice::new(&head)]).await.map_err(Stopped::Sink)?;
    tunnel(from, buffer, (body, to), Cut::Ends).await;
    Ok(())
}
