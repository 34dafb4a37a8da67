//! Routes for captures: the packets of flows as a pcapng file.

use super::AdminState;
use super::error::ApiError;
use super::flows::{Asked, filter};
use crate::capture::{Capture, CaptureError, Finish};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde::{Deserialize, Serialize};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

/// Longest name of a capture, bytes.
const NAME_MAX: usize = 64;

/// Which packets to capture.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    filter: Option<String>,
    /// Only what was kept of this time before now.
    last_ms: Option<u64>,
    /// The caller's name of the capture, to end it by.
    name: Option<String>,
}

/// Which capture to end.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    name: String,
}

/// The answer to the end of a capture.
#[derive(Debug, Serialize)]
pub(super) struct Ended {
    ended: bool,
}

/// The captures that have names.
pub(super) type Running = Arc<Mutex<BTreeMap<String, Finish>>>;

impl From<CaptureError> for ApiError {
    fn from(error: CaptureError) -> Self {
        Self::conflict(error.to_string(), error.help())
    }
}

/// Captures until the reader leaves, or the capture is ended by its name.
pub(super) async fn start(State(state): State<AdminState>, query: Asked<Wish>) -> Result<Response, ApiError> {
    let help = "the path takes filter=… (percent-encoded), last_ms=N, name=…";
    let Query(wish) = query.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let filter = filter(wish.filter.as_deref())?;
    let named = wish.name.map(|name| {
        let is_good = (1..=NAME_MAX).contains(&name.len());
        is_good.then_some(name).ok_or_else(|| ApiError::bad_request("this name is too long, or empty", help))
    });
    let named = named.transpose()?;
    let captures = state.captures.as_ref().ok_or_else(|| {
        ApiError::conflict("there are no captures here", "ask `sidetrack up` or `sidetrack run`")
    })?;
    let capture = captures.view(filter, wish.last_ms.map(Duration::from_millis))?;
    let named = named.map(|name| {
        lock(&state.capturing).insert(name.clone(), capture.finish());
        Entry { running: state.capturing.clone(), name }
    });
    let headers = [(header::CONTENT_TYPE, "application/x-pcapng")];
    Ok((headers, Body::new(Pieces { capture, _named: named })).into_response())
}

/// Ends a capture in order.
pub(super) async fn end(
    State(state): State<AdminState>,
    query: Asked<Named>,
) -> Result<Json<Ended>, ApiError> {
    let help = "the path takes name=…, as the capture was started with";
    let Query(named) = query.map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))?;
    let finish = lock(&state.capturing).get(&named.name).cloned();
    let finish = finish.ok_or_else(|| ApiError::not_found("no capture has this name", help))?;
    finish.now();
    Ok(Json(Ended { ended: true }))
}

/// The name of a capture, while it runs.
struct Entry {
    running: Running,
    name: String,
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.running).remove(&self.name);
    }
}

/// The body of a file in pieces. The capture ends when its reader is gone.
struct Pieces {
    capture: Capture,
    _named: Option<Entry>,
}

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = std::task::ready!(self.capture.pieces().poll_recv(cx));
        Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
    }
}
