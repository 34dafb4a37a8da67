//! Tunnels of datagrams over HTTP/2 (RFC 9298 Sec. 3.4, RFC 8441), from clients that speak HTTP/2 to the listener itself. In
//! memory they are upgrades of HTTP/1.1, and their capsules are the same.

use super::super::buffer::Buffer;
use super::super::copy::{Stopped, write_all};
use super::accept::{Common, Switch, answer, fields_of, pseudo};
use super::tunnel;
use crate::carry::h2::Cut;
use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::request::Parts;
use sidetrack_core::http::h2 as map;
use sidetrack_core::http::message::Method;
use std::io::IoSlice;

/// Serves an extended CONNECT request for a tunnel of datagrams to its end.
pub(super) async fn serve(
    common: Common,
    parts: &Parts,
    (body, mut respond): (RecvStream, SendResponse<Bytes>),
) {
    let Ok(request) = map::connect_udp(pseudo(parts), fields_of(parts)) else {
        return respond.send_reset(Reason::PROTOCOL_ERROR);
    };
    let mut head = Vec::with_capacity(512);
    request.write_to(&mut head);
    let (pipe, mut buffer) = (common.connection(), Buffer::default());
    let opened = match write_all(&pipe, &mut [IoSlice::new(&head)]).await {
        Ok(()) => answer((&pipe, &mut buffer), &Method::Get, Some(Switch::Datagrams), &mut respond).await,
        Err(error) => Err(Stopped::Sink(error)),
    };
    match opened {
        Ok(Some(to)) => tunnel(pipe, buffer, (body, to), Cut::Ends).await,
        // The request was rejected, and the response has been sent.
        Ok(None) => {}
        Err(_) => respond.send_reset(Reason::INTERNAL_ERROR),
    }
}
