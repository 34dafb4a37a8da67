//! Health and readiness, for programs that start, stop and balance nodes. Both say one word and nothing secret, and need no login.
//!
//! ```text
//! starting --listeners are open--> ready --SIGTERM, SIGINT or the keeper's end--> stopping
//! ```

use super::AdminState;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::get;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

/// Whether new flows are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Not yet.
    Starting = 0,
    /// They are.
    Ready = 1,
    /// Not any more: flows in flight are going on.
    Stopping = 2,
}

/// The stage of this process, which several threads may read and set.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<AtomicU8>);

impl Readiness {
    pub(super) fn new(stage: Stage) -> Self {
        Self(Arc::new(AtomicU8::new(stage as u8)))
    }

    /// Sets the stage.
    pub fn set(&self, stage: Stage) {
        self.0.store(stage as u8, SeqCst);
    }

    fn stage(&self) -> Stage {
        match self.0.load(SeqCst) {
            0 => Stage::Starting,
            1 => Stage::Ready,
            _ => Stage::Stopping,
        }
    }
}

/// The paths that need no login.
pub(super) fn is_open(path: &str) -> bool {
    path == "/healthz" || path == "/readyz"
}

/// Adds both routes.
pub(super) fn routes(router: Router<AdminState>) -> Router<AdminState> {
    router.route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(ready))
}

async fn ready(State(state): State<AdminState>) -> impl IntoResponse {
    match state.readiness.stage() {
        Stage::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting\n"),
        Stage::Ready => (StatusCode::OK, "ready\n"),
        Stage::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "stopping\n"),
    }
}
