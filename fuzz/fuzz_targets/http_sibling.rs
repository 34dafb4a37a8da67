//! Questions of siblings: no input panics, and what is read is sent and read back as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::sibling::{question, siblings, write_question};

fuzz_target!(|data: &[u8]| {
    if let Some(Ok(resource)) = question(data)
        && let Some(sent) = write_question(&resource)
    {
        assert_eq!(question(&sent), Some(Ok(resource)));
    }
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = siblings(text);
    }
});
