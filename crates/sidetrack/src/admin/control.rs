//! What the orchestrator of the control plane says, for screens.

use super::AdminState;
use super::error::ApiError;
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// How long an answer is kept, so that many viewers do not ask the orchestrator more often.
const KEPT: Duration = Duration::from_secs(1);

/// The applications of an orchestrator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Applications {
    /// Each application with its state, as the orchestrator's `GET /v1/applications` has it.
    pub applications: Vec<serde_json::Value>,
    /// The steps of the latest set-ups, as its `GET /v1/progress` has them.
    pub progress: Vec<serde_json::Value>,
}

/// The latest answer, and when it came.
pub(super) type Latest = Arc<Mutex<Option<(Instant, Result<Option<Applications>, String>)>>>;

pub(super) async fn show(State(state): State<AdminState>) -> Result<Json<Applications>, ApiError> {
    // Requests that come meanwhile wait here, and get the same answer.
    let mut latest = state.applications.lock().await;
    let known = latest.as_ref().filter(|(at, _)| at.elapsed() < KEPT).map(|(_, answer)| answer.clone());
    let answer = match known {
        Some(answer) => answer,
        None => {
            let control = state.control.clone();
            let asked = tokio::task::spawn_blocking(move || control.applications()).await;
            let answer = asked.map_err(|error| ApiError::internal(format!("asking ended early: {error}")))?;
            *latest = Some((Instant::now(), answer.clone()));
            answer
        }
    };
    let none = || {
        let help = "add [admin.orchestrator] with address, identity and ca to the configuration, and restart";
        ApiError::not_found("this node knows no orchestrator", help)
    };
    let busy = |error| ApiError::busy(error, "the log of the orchestrator says more; docs/control.md");
    answer.map_err(busy)?.map(Json).ok_or_else(none)
}
