//! PROXY protocol: no input panics, a decision stands, and what was read can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::proxy_protocol::{Addresses, MAX_V2, Parsed, encode_v1, encode_v2, parse};

fuzz_target!(|bytes: &[u8]| {
    let whole = parse(bytes);
    assert!(whole != Parsed::Incomplete || bytes.len() < MAX_V2);
    for end in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        let part = parse(&bytes[..end]);
        assert!(part == Parsed::Incomplete || part == whole, "{part:?} became {whole:?}");
    }
    let Parsed::Header { header, consumed } = whole else { return };
    assert!(consumed <= bytes.len());
    assert_eq!(parse(&bytes[..consumed - 1]), Parsed::Incomplete);
    if header.tcp_addresses().is_some() {
        let line = encode_v1(&header.addresses);
        assert!(matches!(parse(&line), Parsed::Header { header: read, .. } if read.addresses == header.addresses));
    }
    if !matches!(header.addresses, Addresses::Local | Addresses::Unknown) {
        for checksum in [false, true] {
            // Only what grew by a family change or a checksum can be too long now.
            if let Ok(written) = encode_v2(&header.addresses, &header.tlvs, checksum) {
                let Parsed::Header { header: read, .. } = parse(&written) else { panic!("not read again") };
                assert_eq!((read.addresses, read.tlvs), (header.addresses.clone(), header.tlvs.clone()));
            }
        }
    }
});
