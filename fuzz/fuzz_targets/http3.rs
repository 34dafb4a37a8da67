//! Any bytes as each kind of stream of HTTP/3, as a field section and as a datagram: no panic, the same result however the bytes are
//! cut, and what is written again is read as it was.
#![no_main]

#[allow(dead_code, reason = "this target uses a part of the shared file")]
#[path = "../../crates/core/tests/http/h3.rs"]
mod h3;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| h3::any_bytes(bytes));
