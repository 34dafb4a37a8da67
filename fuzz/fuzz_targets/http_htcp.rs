//! Datagrams of HTCP: no input panics, and what is read is written and read back as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::htcp::{Message, parse, write_test};

fuzz_target!(|data: &[u8]| {
    if let Some(Message::Test(test)) = parse(data)
        && let Some(written) = write_test(test.id, test.uri, test.fields)
    {
        let again = parse(&written);
        assert!(
            matches!(again, Some(Message::Test(same)) if (same.id, same.uri, same.fields) == (test.id, test.uri, test.fields))
        );
    }
});
