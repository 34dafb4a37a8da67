//! CONNECT over HTTP/2 (RFC 9113 Sec. 8.5), from clients that speak TLS to the listener itself.

use super::super::buffer::Buffer;
use super::super::copy::{Stopped, write_all};
use super::accept::{Common, Switch, answer, fields_of, pseudo};
use super::tunnel;
use crate::carry::h2::Cut;
use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::StatusCode;
use http::request::Parts;
use sidetrack_core::http::h2 as map;
use sidetrack_core::http::message::Method;
use std::io::IoSlice;

/// Serves a CONNECT request to its end.
pub(super) async fn serve(
    common: Common,
    parts: &Parts,
    (body, mut respond): (RecvStream, SendResponse<Bytes>),
) {
    let authority = pseudo(parts).authority.unwrap_or_default();
    let Ok(request) = map::connect(authority, fields_of(parts)) else {
        return respond.send_reset(Reason::PROTOCOL_ERROR);
    };
    let Ok(_admission) = common.admit() else {
        let mut head = http::Response::new(());
        *head.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        // An error means that the client is gone.
        let _ = respond.send_response(head, true);
        return;
    };
    let mut head = Vec::with_capacity(512);
    request.write_to(&mut head);
    let (pipe, mut buffer) = (common.connection(), Buffer::default());
    let opened = match write_all(&pipe, &mut [IoSlice::new(&head)]).await {
        Ok(()) => answer((&pipe, &mut buffer), &Method::Connect, Some(Switch::Bytes), &mut respond).await,
        Err(error) => Err(Stopped::Sink(error)),
    };
    match opened {
        Ok(Some(to)) => tunnel(pipe, buffer, (body, to), Cut::Resets).await,
        // The request was rejected, and the response has been sent.
        Ok(None) => {}
        Err(_) => respond.send_reset(Reason::CONNECT_ERROR),
    }
}
