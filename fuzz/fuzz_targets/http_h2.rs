//! HTTP/2 requests as HTTP/1.1: no input panics, and what comes out is read as one request with the same target.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::h2::{Pseudo, request};
use sidetrack_core::http::message::{Request, Scan, Sender};

fuzz_target!(|data: &[u8]| {
    let mut lines = data.split(|byte| *byte == 0xff);
    let (Some(method), Some(authority), Some(path)) = (lines.next(), lines.next(), lines.next()) else {
        return;
    };
    let fields: Vec<(&[u8], &[u8])> = lines
        .map(|line| line.split_at(line.iter().position(|byte| *byte == b'=').unwrap_or(line.len())))
        .map(|(name, value)| (name, value.get(1..).unwrap_or_default()))
        .collect();
    let pseudo = Pseudo { method, scheme: None, authority: (!authority.is_empty()).then_some(authority), path };
    let Ok(made) = request(pseudo, fields.iter().copied(), data.len() % 2 == 0) else { return };
    let mut bytes = Vec::new();
    made.write_to(&mut bytes);
    // The strict reading decides: it may refuse, and never sees another request, or more than one.
    if let Ok(Some(length)) = Scan::default().advance(&bytes, Sender::Client) {
        assert_eq!(length, bytes.len());
        if let Ok(read) = Request::parse(&bytes) {
            assert_eq!((read.target, read.fields.len()), (made.target, made.fields.len()));
        }
    }
});
