//! HTTP/1 messages: no input panics, and any split of a stream gives the same messages.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::framing::{Decoder, request_length, response_length};
use sidetrack_core::http::message::{MessageError, Method, Request, Response, Scan, Sender};

/// Head and content of the first message, or how it is broken; `None` while it is not whole.
fn first(pieces: &[&[u8]], sender: Sender) -> Option<Result<(Vec<u8>, Vec<u8>), MessageError>> {
    let (mut held, mut scan, mut decoder) = (Vec::new(), Scan::default(), None);
    let (mut written, mut content) = (Vec::new(), Vec::new());
    for piece in pieces {
        held.extend_from_slice(piece);
        if decoder.is_none() {
            let length = match scan.advance(&held, sender) {
                Ok(Some(length)) => length,
                Ok(None) => continue,
                Err(error) => return Some(Err(error)),
            };
            let head: Vec<u8> = held.drain(..length).collect();
            let length = match sender {
                Sender::Client => Request::parse(&head).and_then(|head| {
                    head.write_to(&mut written);
                    request_length(&head)
                }),
                Sender::Server => Response::parse(&head).and_then(|head| {
                    head.write_to(&mut written);
                    response_length(&Method::Get, &head).map(|length| length.length)
                }),
            };
            match length {
                Ok(length) => decoder = Some(Decoder::new(length)),
                Err(error) => return Some(Err(error)),
            }
        }
        let decoder = decoder.as_mut()?;
        loop {
            let decoded = match decoder.decode(&held) {
                Ok(decoded) => decoded,
                Err(error) => return Some(Err(error)),
            };
            assert!(decoded.data.len() <= decoded.consumed);
            content.extend_from_slice(decoded.data);
            let consumed = decoded.consumed;
            if consumed == 0 {
                break;
            }
            held.drain(..consumed);
        }
        if decoder.is_done() {
            return Some(Ok((written, content)));
        }
    }
    None
}

fuzz_target!(|bytes: &[u8]| {
    for sender in [Sender::Client, Sender::Server] {
        let whole = first(&[bytes], sender);
        for cut in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
            let (left, right) = bytes.split_at(cut);
            assert_eq!(first(&[left, right], sender), whole);
        }
        if let (Some(Ok((head, _))), Sender::Client) = (&whole, sender) {
            // HTTP/1.0 needs no Host, and what we write is 1.1: what goes to a server has one put in first.
            let has_host = head.to_ascii_lowercase().windows(7).any(|text| text == b"\r\nhost:");
            // What we write is what we would read.
            match Request::parse(head) {
                Err(MessageError::BadHost) if !has_host => {}
                again => {
                    let mut twice = Vec::new();
                    again.expect("our own head").write_to(&mut twice);
                    assert_eq!(&twice, head);
                }
            }
        }
    }
});
