//! Errors in the form of the admin interface.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use sidetrack_common::admin::ErrorBody;

/// The status and the body of an error.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
}

impl ApiError {
    fn new(status: StatusCode, error: impl Into<String>, help: impl Into<String>) -> Self {
        Self { status, body: ErrorBody { error: error.into(), help: help.into() } }
    }

    /// A part of the request that cannot be read, with the status that the reader chose.
    pub(super) fn unreadable(status: StatusCode, error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(status, error, help)
    }

    pub(super) fn bad_request(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error, help)
    }

    pub(super) fn not_found(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, error, help)
    }

    pub(super) fn method_not_allowed() -> Self {
        let help = "see docs/admin.md for what each path takes";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method", help)
    }

    /// The request uses a host name that is not ours.
    pub(super) fn misdirected(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::MISDIRECTED_REQUEST, error, help)
    }

    /// The request needs a login.
    pub(super) fn unauthorized(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, error, help)
    }

    /// The caller may not do this.
    pub(super) fn forbidden(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, error, help)
    }

    /// The caller has to wait.
    pub(super) fn too_many(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, error, help)
    }

    pub(super) fn busy(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, error, help)
    }

    /// The request is valid, but the present state does not allow it.
    pub(super) fn conflict(error: impl Into<String>, help: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, error, help)
    }

    pub(super) fn internal(error: impl Into<String>) -> Self {
        let help = "this is a fault of Sidetrack's own: the log may say more";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error, help)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}
