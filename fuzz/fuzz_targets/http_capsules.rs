//! Any bytes as a stream of capsules and as the path of CONNECT-UDP: no panic, the same result however the bytes are cut, and
//! what is accepted comes back as it was.
#![no_main]

#[allow(dead_code, reason = "this target uses a part of the shared file")]
#[path = "../../crates/core/tests/http/capsules.rs"]
mod capsules;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| capsules::any_bytes(bytes));
