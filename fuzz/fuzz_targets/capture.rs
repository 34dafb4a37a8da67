//! Captures: any packet is looked at and gets other addresses without a panic, and a stream of blocks is split in the same way
//! wherever it is cut.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::capture::pcapng::{self, Blocks};
use sidetrack_core::capture::{hello_random, look, readdress};
use std::net::SocketAddr;

/// The whole blocks of a stream that comes in these parts, and whether all of it was right.
fn split(parts: &[&[u8]]) -> (Vec<u8>, bool) {
    let (mut blocks, mut whole) = (Blocks::default(), Vec::new());
    for part in parts {
        blocks.push(part);
        loop {
            match blocks.whole() {
                Ok(Some(block)) => {
                    let _ = (block.is_packet(), block.counts());
                    whole.extend_from_slice(block.bytes);
                }
                Ok(None) => break,
                Err(_) => return (whole, false),
            }
        }
    }
    (whole, true)
}

fuzz_target!(|bytes: &[u8]| {
    let _ = hello_random(bytes);
    if let Some(seen) = look(bytes) {
        let mut packet = bytes.to_vec();
        let new: [SocketAddr; 2] = [([192, 0, 2, 1], 443).into(), ([0xfe80, 0, 0, 0, 0, 0, 0, 1], 443).into()];
        for address in new {
            readdress(&mut packet, &seen, Some(address), None);
            readdress(&mut packet, &seen, None, Some(address));
        }
        assert_eq!(packet.len(), bytes.len());
        assert!(look(&packet).is_some());
    }
    let at_once = split(&[bytes]);
    for cut in [bytes.len() / 3, bytes.len() / 2, bytes.len().saturating_sub(1)] {
        assert_eq!(split(&[&bytes[..cut], &bytes[cut..]]), at_once);
    }
    // What is written can be split again.
    let mut file = Vec::new();
    pcapng::section(&mut file, &String::from_utf8_lossy(bytes));
    pcapng::names(&mut file, [([127, 0, 0, 1].into(), &*String::from_utf8_lossy(bytes))]);
    pcapng::secrets(&mut file, &String::from_utf8_lossy(bytes));
    assert_eq!(split(&[&file]), (file.clone(), true));
});
