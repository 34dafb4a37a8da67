//! Texts of agreements, which come from other machines: each is facts and clauses, or problems that can be shown at their places.
//! Conditions end here at the bounds that are kept before the policy engine sees them; a test of the program
//! (`crates/sidetrack/tests/policy/file.rs`) leads the same seeds through the engine.
#![no_main]
#![allow(dead_code, unused_imports, reason = "modules of the program, of which this uses a part")]

extern crate self as sidetrack_common;

mod file;
mod reader;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    if let Err(error) = reader::read(&text) {
        assert!(error.render(false).contains("agreement.toml"));
    }
});
