//! Any bytes as a datagram of UDP ASSOCIATE: no panic, and what is accepted comes back as it was.
#![no_main]

#[allow(dead_code, reason = "this target uses a part of the shared file")]
#[path = "../../crates/core/tests/socks/drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drive::any_datagram_v5(bytes));
