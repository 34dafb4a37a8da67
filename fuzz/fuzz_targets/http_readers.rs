//! The two readers of HTTP/1 request heads do not contradict each other.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/core/tests/http/readers.rs"]
mod readers;

fuzz_target!(|bytes: &[u8]| readers::agree(bytes));
