//! OpenFlow from a switch: no bytes panic, any split gives the same messages, what is held stays bounded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::openflow::{Decoder, MESSAGE_MAX, Message, read};

/// The messages of a stream, until it is malformed.
fn messages(parts: &[&[u8]]) -> Vec<Message> {
    let mut decoder = Decoder::new();
    let mut found = Vec::new();
    for part in parts {
        decoder.push(part);
        while let Ok(Some(frame)) = decoder.frame() {
            assert!(frame.body.len() <= MESSAGE_MAX);
            found.extend(read(&frame).ok());
        }
    }
    found
}

fuzz_target!(|bytes: &[u8]| {
    let whole = messages(&[bytes]);
    for at in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let (first, second) = bytes.split_at(at);
        assert_eq!(messages(&[first, second]), whole);
    }
});
