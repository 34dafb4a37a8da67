//! Routes for the history of flows.

use super::AdminState;
use super::error::ApiError;
use super::flows::{Asked, filter};
use crate::record::FlowRecord;
use crate::record::history::{By, Found, Group, History, Key, Moved, Query, Sum, Top, Window, millis};
use axum::Json;
use axum::extract::{self, State};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::SystemTime;

/// Flows or groups of an answer, unless the request says another number.
const LIMIT: usize = 1000;
/// Most flows or groups of an answer.
const LIMIT_MAX: usize = 100_000;

/// What is asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Question {
    filter: Option<String>,
    since: Option<String>,
    until: Option<String>,
    limit: Option<usize>,
    top: Option<String>,
    by: Option<By>,
}

/// The answer of `/v1/history`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Flows in rising order of their ends; those that run come last. Empty if groups were asked for.
    pub flows: Vec<FlowRecord<'static>>,
    /// The largest groups.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// The sums of all other groups.
    #[serde(default)]
    pub rest: Sum,
    /// Flows in the files that were searched.
    pub searched: u64,
    /// There are earlier flows that match.
    pub has_more: bool,
    /// Files that could not be read, and why.
    #[serde(default)]
    pub damaged: Vec<String>,
}

/// The answer of `/v1/history/moved`.
#[derive(Debug, Serialize, Deserialize)]
pub struct MovedAnswer {
    /// In rising order of time.
    pub moved: Vec<Moved>,
}

/// Which samples are asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Samples {
    flow: Option<u64>,
    since: Option<String>,
    until: Option<String>,
}

/// Reads a moment: RFC 3339 in UTC, or how long ago (`2h`).
fn moment(text: &str, now: SystemTime) -> Result<i64, ApiError> {
    if let Ok(time) = humantime::parse_rfc3339_weak(text) {
        return Ok(millis(time));
    }
    let ago = humantime::parse_duration(text).ok().and_then(|ago| now.checked_sub(ago));
    ago.map(millis).ok_or_else(|| {
        ApiError::bad_request(
            format!("'{text}' is not a moment"),
            "write how long ago (30m, 2h, 3days), or a time in UTC: 2026-11-28T06:00:00Z",
        )
    })
}

fn window(since: Option<&str>, until: Option<&str>) -> Result<Window, ApiError> {
    let now = SystemTime::now();
    let mut window = Window::ALL;
    if let Some(text) = since {
        window.since_ms = moment(text, now)?;
    }
    if let Some(text) = until {
        window.until_ms = moment(text, now)?;
    }
    if window.since_ms > window.until_ms {
        return Err(ApiError::bad_request("since is later than until", "swap them"));
    }
    Ok(window)
}

fn keys(text: &str) -> Result<Vec<Key>, ApiError> {
    let help = "write up to four fields with commas between them: top=host,process";
    let keys: Result<Vec<_>, _> = text.split(',').map(|name| Key::parse(name.trim())).collect();
    let keys = keys.map_err(|message| ApiError::bad_request(message, help))?;
    if keys.len() > Key::MOST {
        return Err(ApiError::bad_request(format!("{} fields are too many", keys.len()), help));
    }
    Ok(keys)
}

impl Question {
    fn query(&self) -> Result<(Query, By), ApiError> {
        let by = self.by.unwrap_or_default();
        let keys = self.top.as_deref().map(keys).transpose()?;
        if keys.is_none() && self.by.is_some() {
            return Err(ApiError::bad_request("`by` orders groups", "add top=…, or leave `by` out"));
        }
        let query = Query {
            window: window(self.since.as_deref(), self.until.as_deref())?,
            filter: filter(self.filter.as_deref())?,
            limit: self.limit.unwrap_or(LIMIT).clamp(1, LIMIT_MAX),
            top: keys.map(|keys| Top { keys, by }),
        };
        Ok((query, by))
    }
}

impl AdminState {
    /// Runs a question on another thread; no more than some at a time.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&History) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let history = self.history.clone().ok_or_else(|| {
            ApiError::not_found(
                "this node keeps no history",
                "add [history] with a `path` to its configuration, and start it again",
            )
        })?;
        let turn = self.searches.clone().acquire_owned().await;
        let answer = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            question(&history)
        });
        answer.await.map_err(|_| ApiError::internal("the search ended by a panic"))
    }
}

pub(super) async fn search(
    State(state): State<AdminState>,
    question: Asked<Question>,
) -> Result<Json<Answer>, ApiError> {
    let (query, by) = asked(question)?.query()?;
    state.look().await;
    let query = Arc::new(query);
    let mut found = state
        .ask({
            let query = query.clone();
            move |history| history.search(&query)
        })
        .await?;
    // Flows that run were there until now.
    let mut running = Found::default();
    for flow in state.ledgers.iter().flat_map(|ledger| ledger.snapshot()) {
        let decided = flow.decided();
        running.offer(&FlowRecord::live(&flow, decided.as_deref()), &query);
    }
    found.cut(&query);
    found.searched += running.searched;
    let mut flows = found.flows;
    flows.extend(running.flows);
    found.groups.join(running.groups);
    let (groups, rest) = found.groups.largest(by, query.limit);
    Ok(Json(Answer {
        flows,
        groups,
        rest,
        searched: found.searched,
        has_more: found.has_more,
        damaged: found.damaged,
    }))
}

pub(super) async fn moved(
    State(state): State<AdminState>,
    samples: Asked<Samples>,
) -> Result<Json<MovedAnswer>, ApiError> {
    let samples = asked(samples)?;
    let window = window(samples.since.as_deref(), samples.until.as_deref())?;
    let moved = state.ask(move |history| history.moved(samples.flow, window)).await?;
    let moved = moved
        .map_err(|error| ApiError::internal(format!("a file of the history cannot be read: {error}")))?;
    Ok(Json(MovedAnswer { moved }))
}

fn asked<T>(query: Asked<T>) -> Result<T, ApiError> {
    let help = "the path takes filter=…, since=2h, until=…, limit=N, top=host,process and by=bytes";
    query
        .map(|extract::Query(query)| query)
        .map_err(|rejection| ApiError::bad_request(rejection.body_text(), help))
}
