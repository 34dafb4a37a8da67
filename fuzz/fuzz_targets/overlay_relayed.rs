//! Any bytes as a message about a flow of UDP: no panic, and what is accepted is read back from its own bytes.
#![no_main]

use sidetrack_core::overlay::frame::Relayed;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok((number, said)) = Relayed::parse(bytes) else { return };
    let again = said.to_bytes(number);
    assert_eq!(again.len(), bytes.len());
    assert_eq!(Relayed::parse(&again), Ok((number, said)));
});
