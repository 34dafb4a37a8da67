//! What the admin socket of a running node says.

use super::{Record, Up};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

/// Asks and gives the status and the body of the answer.
pub(crate) fn ask(up: &Up, method: &str, path: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(up.folder().join("admin.sock")).expect("the admin socket");
    stream.set_read_timeout(Some(sidetrack_testkit::LIMIT)).expect("limit");
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: sidetrack\r\nConnection: close\r\n\r\n")
        .expect("asked");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, body.to_owned())
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
