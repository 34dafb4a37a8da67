//! The OpenAPI document of this interface. It is written by hand; tests compare it with the routes, the types and the answers.

use axum::http::header;
use axum::response::IntoResponse;

/// The OpenAPI 3.1 document of the admin interface, as JSON: `docs/openapi.json`.
pub const OPENAPI: &str = include_str!("../../../../docs/openapi.json");

/// `GET /v1/openapi.json`
pub(super) async fn show() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI)
}
