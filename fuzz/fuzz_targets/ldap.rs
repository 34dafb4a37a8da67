//! The first request of an LDAP client, and a server's answer to an anonymous bind: any bytes. No panic, more bytes never change
//! the request, and what is left of the server's bytes does not depend on how they are cut.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::ldap::{First, answer_to_anonymous_bind, first_request, is_below};

const ANONYMOUS: &[u8] = b"\x30\x0c\x02\x01\x01\x60\x07\x02\x01\x03\x04\x00\x80\x00";

fuzz_target!(|bytes: &[u8]| {
    let whole = first_request(bytes);
    for end in 0..bytes.len() {
        match first_request(&bytes[..end]) {
            First::NeedMore => {}
            decided => assert_eq!(decided, whole),
        }
    }
    let (_, mut removal) = answer_to_anonymous_bind(ANONYMOUS).expect("an answer");
    let mut bytewise = removal.clone();
    let left = removal.pass(bytes);
    let one_by_one: Vec<u8> = bytes.chunks(1).flat_map(|byte| bytewise.pass(byte)).collect();
    assert_eq!((left, removal.is_over()), (one_by_one, bytewise.is_over()));
    let _ = answer_to_anonymous_bind(bytes);
    if let First::Request(request) = whole {
        assert!(is_below(request.dn, "") && is_below(request.dn, request.dn));
    }
});
