//! TLS ClientHello: no input panics, a decision stands, and the cut into records makes no difference.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::http::sni::{ClientHello, MAX_BYTES, client_hello};

fuzz_target!(|bytes: &[u8]| {
    let whole = client_hello(bytes);
    assert!(whole != ClientHello::Incomplete || bytes.len() < MAX_BYTES);
    for end in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let part = client_hello(&bytes[..end]);
        assert!(part == ClientHello::Incomplete || part == whole, "{part:?} became {whole:?}");
    }
    // One record is cut anew into small ones; more than one are left as they are.
    if let (ClientHello::Hello(_), Some(fragment)) = (&whole, bytes.get(5..))
        && usize::from(u16::from_be_bytes([bytes[3], bytes[4]])) == fragment.len()
        && fragment.len() < 4000
    {
        let cut: Vec<u8> = fragment
            .chunks(3)
            .flat_map(|part| [&[22, 3, 1, 0, part.len() as u8], part].concat())
            .collect();
        assert_eq!(client_hello(&cut), whole);
    }
});
