//! Routes about the overlay.

use super::AdminState;
use super::error::ApiError;
use crate::overlay::{Entry, PingView, Status};
use axum::Json;
use axum::extract::{Path, State};
use std::sync::Arc;

fn entry(state: &AdminState) -> Result<Arc<Entry>, ApiError> {
    let none = || {
        let help = "write an [overlay] section, see docs/overlay-protocol.md";
        ApiError::not_found("this sidetrack is no node of an overlay", help)
    };
    state.control.overlay().ok_or_else(none)
}

pub(super) async fn status(State(state): State<AdminState>) -> Result<Json<Status>, ApiError> {
    let stopping = || ApiError::busy("the overlay is stopping", "ask again when sidetrack runs");
    entry(&state)?.status().await.map(Json).ok_or_else(stopping)
}

pub(super) async fn ping(
    State(state): State<AdminState>,
    Path(node): Path<String>,
) -> Result<Json<PingView>, ApiError> {
    let failed = |error| ApiError::conflict(error, "'sidetrack overlay status' shows links and paths");
    entry(&state)?.ping(&node).await.map(Json).map_err(failed)
}
