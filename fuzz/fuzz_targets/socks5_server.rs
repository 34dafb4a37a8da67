//! Any bytes from a client that begins with version 5, to servers of every configuration: no panic, an orderly end, and the same result
//! however the bytes are cut.
#![no_main]

#[allow(dead_code, reason = "this target uses a part of the shared file")]
#[path = "../../crates/core/tests/socks/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::any_bytes_to_servers_v5(bytes));
