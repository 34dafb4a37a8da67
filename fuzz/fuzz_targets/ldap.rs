//! The first request of an LDAP client: any bytes. No panic, and more bytes never change an answer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::ldap::{First, first_request, is_below};

fuzz_target!(|bytes: &[u8]| {
    let whole = first_request(bytes);
    for end in 0..bytes.len() {
        match first_request(&bytes[..end]) {
            First::NeedMore => {}
            decided => assert_eq!(decided, whole),
        }
    }
    if let First::Request(request) = whole {
        assert!(is_below(request.dn, "") && is_below(request.dn, request.dn));
    }
});
