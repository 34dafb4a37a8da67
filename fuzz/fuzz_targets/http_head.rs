//! HTTP/1 request heads, and the sniffing of both protocols: no input panics, and a decision stands.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::head::{Head, MAX_HEAD, request_head};
use sidetrack_core::http::{SNIFF_MAX, Sniff, sniff};

fuzz_target!(|bytes: &[u8]| {
    let (head, sniffed) = (request_head(bytes), sniff(bytes));
    assert!(head != Head::Incomplete || bytes.len() < MAX_HEAD);
    assert!(sniffed != Sniff::NeedMore || bytes.len() < SNIFF_MAX);
    if let Head::Request(request) = &head {
        assert!(request.length <= bytes.len());
        assert_eq!(request_head(&bytes[..request.length]), head);
        assert_eq!(request_head(&bytes[..request.length - 1]), Head::Incomplete);
    }
    for end in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let part = request_head(&bytes[..end]);
        assert!(part == Head::Incomplete || part == head, "{part:?} became {head:?}");
        let part = sniff(&bytes[..end]);
        assert!(part == Sniff::NeedMore || part == sniffed, "{part:?} became {sniffed:?}");
    }
});
