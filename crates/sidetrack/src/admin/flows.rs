//! Routes for flows.

use super::AdminState;
use super::error::ApiError;
use super::{Back, Killed};
use crate::live::{Decided, LiveFlow};
use crate::record::{FlowRecord, Follow, Traced};
use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde::Deserialize;
use sidetrack_core::filter::Filter;
use sidetrack_core::flow::{EndReason, Intercept};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// The flows that a request is about.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Selection {
    #[serde(default)]
    filter: Option<String>,
    #[serde(default)]
    recent: usize,
}

/// The flows that a follower wants.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Interest {
    #[serde(default)]
    filter: Option<String>,
    #[serde(default)]
    opened: bool,
}

pub(super) type Asked<T> = Result<Query<T>, QueryRejection>;

fn asked<T>(query: Asked<T>) -> Result<T, ApiError> {
    let help = "the path takes filter=… (percent-encoded), recent=N for lists, opened=true for events";
    query.map(|Query(query)| query).map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))
}

pub(super) fn filter(text: Option<&str>) -> Result<Filter, ApiError> {
    let text = text.unwrap_or("");
    Filter::parse(text).map_err(|error| {
        let help = "proc == curl and dst in 10.0.0.0/8 and bytes > 1MiB: see docs/filters.md";
        ApiError::bad_request(error.caret(text), help)
    })
}

impl AdminState {
    /// Returns the running flows that match `filter`, oldest first.
    fn live(&self, filter: &Filter) -> Vec<Arc<LiveFlow>> {
        let mut flows: Vec<_> = self.ledgers.iter().flat_map(|ledger| ledger.snapshot()).collect();
        if !filter.is_everything() {
            flows.retain(|flow| {
                let decided = flow.decided();
                filter.matches(&FlowRecord::live(flow, decided.as_deref()).facts())
            });
        }
        flows.sort_unstable_by_key(|flow| flow.id);
        flows
    }
}

/// Appends the JSON of `record` to a list of records.
fn append(list: &mut Vec<u8>, record: &FlowRecord<'_>) {
    if list.last() == Some(&b'}') {
        list.push(b',');
    }
    // Writing to a Vec cannot fail, and a record contains nothing that JSON cannot express.
    let _ = serde_json::to_writer(list, record);
}

fn json(body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

pub(super) async fn list(
    State(state): State<AdminState>,
    query: Asked<Selection>,
) -> Result<Response, ApiError> {
    let Selection { filter: text, recent } = asked(query)?;
    let filter = filter(text.as_deref())?;
    state.look().await;
    let mut body = b"{\"flows\":[".to_vec();
    let ended = state.feed.recent(recent, |ended| {
        let decided = ended.flow.decided();
        filter.matches(&FlowRecord::ended(ended, decided.as_deref()).facts())
    });
    for ended in ended.iter().rev() {
        append(&mut body, &FlowRecord::ended(ended, ended.flow.decided().as_deref()));
    }
    for flow in state.live(&filter) {
        append(&mut body, &FlowRecord::live(&flow, flow.decided().as_deref()));
    }
    body.extend_from_slice(b"]}\n");
    Ok(json(body))
}

fn id(text: &str) -> Result<u64, ApiError> {
    text.parse().map_err(|_| {
        ApiError::bad_request(
            format!("'{text}' is not the number of a flow"),
            "a flow is a number, as `sidetrack flows` shows it",
        )
    })
}

fn not_in_flight(id: u64) -> ApiError {
    let help = "`sidetrack flows` shows those that are; it may have ended just now";
    ApiError::not_found(format!("no flow {id} is in flight"), help)
}

pub(super) async fn show(
    State(state): State<AdminState>,
    Path(text): Path<String>,
) -> Result<Response, ApiError> {
    let id = id(&text)?;
    state.look().await;
    let mut body = Vec::new();
    found(&state, id, |record, _, _| record.write_line(&mut body))?;
    Ok(json(body))
}

/// How long the owner of a running flow may take to say what TCP measures.
const PATIENCE: Duration = Duration::from_millis(200);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

pub(super) async fn trace(
    State(state): State<AdminState>,
    Path(text): Path<String>,
) -> Result<Response, ApiError> {
    let id = id(&text)?;
    state.look().await;
    if let Some(flow) = state.ledgers.iter().find_map(|ledger| ledger.find(id)) {
        flow.want_tcp();
        let until = Instant::now() + PATIENCE;
        // A flow whose path is being set up has no owner that would answer yet.
        while flow.waits_for_tcp() && flow.connect_time().is_some() && Instant::now() < until {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
    let mut body = Vec::new();
    found(&state, id, |record, flow, decided| write(&mut body, &Traced::new(record, flow, decided)))?;
    Ok(json(body))
}

fn write(body: &mut Vec<u8>, value: &impl serde::Serialize) {
    // Writing to a Vec cannot fail, and the value contains nothing that JSON cannot express.
    let _ = serde_json::to_writer(&mut *body, value);
    body.push(b'\n');
}

/// Finds a flow in flight, or among the latest that ended, and shows its record.
fn found(
    state: &AdminState,
    id: u64,
    show: impl FnOnce(FlowRecord<'_>, &LiveFlow, Option<&Decided>),
) -> Result<(), ApiError> {
    if let Some(flow) = state.ledgers.iter().find_map(|ledger| ledger.find(id)) {
        let decided = flow.decided();
        show(FlowRecord::live(&flow, decided.as_deref()), &flow, decided.as_deref());
        return Ok(());
    }
    let ended = state.feed.recent(1, |ended| ended.flow.id.0 == id).pop().ok_or_else(|| {
        ApiError::not_found(
            format!("flow {id} is neither in flight nor among the latest that ended"),
            "[record] recent in the configuration says how many are kept",
        )
    })?;
    let decided = ended.flow.decided();
    show(FlowRecord::ended(&ended, decided.as_deref()), &ended.flow, decided.as_deref());
    Ok(())
}

/// Whether the kernel forwards it without us.
fn is_the_kernels(flow: &LiveFlow) -> bool {
    flow.decided().is_some_and(|decided| decided.flow.intercept == Intercept::Kernel)
}

pub(super) async fn kill_one(
    State(state): State<AdminState>,
    Path(text): Path<String>,
) -> Result<Json<Killed>, ApiError> {
    let id = id(&text)?;
    let flow = state.ledgers.iter().find_map(|ledger| ledger.find(id)).ok_or_else(|| not_in_flight(id))?;
    if is_the_kernels(&flow) {
        let help = "the kernel carries it alone; a rule with kernel = \"never\" keeps its flows in our hands";
        return Err(ApiError::bad_request(format!("flow {id} is not ours to end"), help));
    }
    flow.end(EndReason::Killed);
    Ok(Json(Killed { killed: vec![id] }))
}

pub(super) async fn bring_back(
    State(state): State<AdminState>,
    Path(text): Path<String>,
) -> Result<Json<Back>, ApiError> {
    let id = id(&text)?;
    if !state.ledgers.iter().any(|ledger| ledger.find(id).is_some()) {
        return Err(not_in_flight(id));
    }
    let control = state.control.clone();
    let done = tokio::task::spawn_blocking(move || control.bring_back(id)).await;
    match done.map_err(|error| ApiError::internal(error.to_string()))? {
        Ok(()) => Ok(Json(Back { back: vec![id] })),
        Err(why) => {
            let help = "the flow goes on as before; docs/wire.md says which flows come back";
            Err(ApiError::conflict(format!("flow {id} does not come back from the wire: {why}"), help))
        }
    }
}

pub(super) async fn kill_many(
    State(state): State<AdminState>,
    query: Asked<Selection>,
) -> Result<Json<Killed>, ApiError> {
    let filter = filter(asked(query)?.filter.as_deref())?;
    if filter.is_everything() {
        let help = "say which flows to end with filter=…; to end all of them: filter=id > 0";
        return Err(ApiError::bad_request("no filter: this would end every flow", help));
    }
    let flows = state.live(&filter);
    let ours = flows.iter().filter(|flow| !is_the_kernels(flow));
    let killed = ours.filter(|flow| flow.end(EndReason::Killed)).map(|flow| flow.id.0).collect();
    Ok(Json(Killed { killed }))
}

pub(super) async fn events(
    State(state): State<AdminState>,
    query: Asked<Interest>,
) -> Result<Response, ApiError> {
    let Interest { filter: text, opened } = asked(query)?;
    let follow = state.feed.follow(filter(text.as_deref())?, opened).map_err(|error| {
        ApiError::busy(error.to_string(), "the records on standard output or in a file have the same lines")
    })?;
    let headers = [(header::CONTENT_TYPE, "application/x-ndjson")];
    Ok((headers, Body::new(Events(follow))).into_response())
}

/// A body that ends with its reader or with the recorder.
struct Events(Follow);

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let line = std::task::ready!(self.0.poll_next(cx));
        Poll::Ready(line.map(|line| Ok(Frame::data(Bytes::copy_from_slice(line.as_bytes())))))
    }
}
