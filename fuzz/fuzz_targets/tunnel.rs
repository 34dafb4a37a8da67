//! The messages of a tunnel: no input panics, a decision stands, and what was read can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::tunnel::{BODY_MAX, Greeting, Parsed, Reply, Request};
use std::fmt::Debug;

fn check<T: Debug + PartialEq>(
    bytes: &[u8],
    parse: fn(&[u8]) -> Parsed<T>,
    encode: impl Fn(&T) -> Vec<u8>,
) {
    let whole = parse(bytes);
    assert!(whole != Parsed::Incomplete || bytes.len() < BODY_MAX + 3);
    for end in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let part = parse(&bytes[..end]);
        assert!(part == Parsed::Incomplete || part == whole, "{part:?} became {whole:?}");
    }
    let Parsed::Message(message, consumed) = whole else { return };
    assert!(consumed <= bytes.len());
    assert_eq!(parse(&bytes[..consumed - 1]), Parsed::Incomplete);
    let written = encode(&message);
    assert_eq!(parse(&written), Parsed::Message(message, written.len()));
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes, Request::parse, |request| request.encode().expect("it fitted when it came"));
    check(bytes, Reply::parse, |reply| reply.encode().expect("it fitted when it came"));
    check(bytes, Greeting::parse, |greeting| greeting.encode().expect("it has no fields"));
});
