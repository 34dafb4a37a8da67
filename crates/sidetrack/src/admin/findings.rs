//! What this machine lacks, as `sidetrack doctor` says it, as far as a running process may look.

use super::error::ApiError;
use super::{AdminState, losses};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// How long findings are kept before the machine is looked at again.
const KEPT: Duration = Duration::from_secs(10);

/// One check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was checked, in a few words.
    pub name: String,
    /// `ok`, `warn` or `fail`.
    pub level: String,
    /// What was found.
    pub found: String,
    /// What it is needed for.
    pub needed_for: String,
    /// What to do; `None` if nothing needs to be done.
    pub fix: Option<String>,
}

/// The findings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Findings {
    /// All checks.
    pub checks: Vec<Finding>,
}

/// The latest findings, and when they were made.
pub(super) type Latest = Arc<Mutex<Option<(Instant, Findings)>>>;

pub(super) async fn show(State(state): State<AdminState>) -> Result<Json<Findings>, ApiError> {
    // Requests that come meanwhile wait here, and get the same findings.
    let mut latest = state.findings.lock().await;
    if let Some((_, findings)) = latest.as_ref().filter(|(at, _)| at.elapsed() < KEPT) {
        return Ok(Json(findings.clone()));
    }
    let looking = state.clone();
    let looked = tokio::task::spawn_blocking(move || {
        [losses::findings(&looking), looking.control.findings()].concat()
    })
    .await;
    let checks = looked.map_err(|error| ApiError::internal(format!("looking ended early: {error}")))?;
    let findings = Findings { checks };
    *latest = Some((Instant::now(), findings.clone()));
    Ok(Json(findings))
}
