//! Histories of agreements, which an attacker may have changed: no input panics. What is read is written again byte for byte,
//! and a change of any entry that was read is noticed.
#![no_main]
#![allow(dead_code, reason = "a module of the program, of which this uses a part")]

#[path = "../../crates/common/src/history/chain.rs"]
mod chain;

use chain::{Head, read};
use libfuzzer_sys::fuzz_target;

/// Stands for SHA-256, so that the fuzzer can make lines that follow: FNV-1a of 64 bits, repeated.
fn digest(pieces: &[&[u8]]) -> [u8; 32] {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = pieces.iter().flat_map(|piece| piece.iter()).fold(0xcbf2_9ce4_8422_2325, step);
    let mut all = [0; 32];
    all.chunks_mut(8).for_each(|part| part.copy_from_slice(&hash.to_be_bytes()));
    all
}

/// Makes the hashes of all lines right, so that more than the first hash is read.
fn chained(data: &[u8]) -> Vec<u8> {
    let (mut out, mut hash) = (Vec::new(), [0; 32]);
    for json in data.split(|byte| *byte == b'\n') {
        hash = digest(&[&hash, json]);
        out.extend_from_slice(chain::hex(&hash).as_bytes());
        out.push(b' ');
        out.extend_from_slice(json);
        out.push(b'\n');
    }
    out
}

fuzz_target!(|data: &[u8]| {
    let _ = read(data, |_, _| {});
    let text = chained(data);
    let (mut entries, mut at_ms) = (0, 0);
    let end = read(&text, |entry, head| {
        entries += 1;
        assert_eq!((entry.number, head.number), (entries, entries));
        assert!(entry.at_ms >= at_ms && head.version <= entries);
        at_ms = entry.at_ms;
    });
    let Ok(end) = end else { return };
    assert_eq!(end.number, entries);
    // Written by the program itself, the same entries can be read again.
    let (mut head, mut again) = (Head::default(), String::new());
    let _ = read(&text, |mut entry, _| {
        let (line, next) = head.append(&mut entry).expect("it followed");
        again.push_str(&line);
        head = next;
    });
    assert_eq!(read(again.as_bytes(), |_, _| {}), Ok(head));
    let mut changed = text;
    if let Some(last) = changed.len().checked_sub(3) {
        changed[last] ^= 1;
        assert!(read(&changed, |_, _| {}).is_err());
    }
});
