//! Packets from a queue: no bytes panic, and each answer to a SYN is one that the client's kernel accepts.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::hold::{Answer, Syn};

fuzz_target!(|bytes: &[u8]| {
    let Some(syn) = Syn::parse(bytes) else { return };
    // The headers alone say the same.
    let header = if syn.client.is_ipv4() { usize::from(bytes[0] & 15) * 4 } else { 40 };
    assert_eq!(Syn::parse(&bytes[..header + 20]).as_ref(), Some(&syn));
    assert_eq!(Syn::parse(&bytes[..header + 19]), None);
    for answer in Answer::ALL {
        let Some(packet) = syn.answered(answer) else {
            assert_eq!(answer, Answer::Silent);
            continue;
        };
        assert_eq!(packet[0] >> 4, bytes[0] >> 4, "the same version of IP");
        // An answer is not a SYN, so it is never held itself.
        assert_eq!(Syn::parse(&packet), None);
    }
});
