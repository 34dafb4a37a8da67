//! What the admin socket of a running node says.

use super::{Record, Up};
use sidetrack_common::exchange;

/// Asks and gives the status and the body of the answer.
pub(crate) fn ask(up: &Up, method: &str, path: &str) -> (u16, String) {
    exchange::ask(&up.folder().join("admin.sock"), method, path, "").expect("the admin socket")
}

/// The body of a good answer.
pub(crate) fn show(up: &Up, path: &str) -> String {
    let (status, body) = ask(up, "GET", path);
    assert_eq!(status, 200, "{body}");
    body
}

/// The flows in flight.
pub(crate) fn flows(up: &Up) -> Vec<Record> {
    let body = show(up, "/v1/flows");
    let mut body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let flows = body["flows"].take();
    serde_json::from_value::<Vec<serde_json::Value>>(flows).expect("a list").into_iter().map(Record).collect()
}
