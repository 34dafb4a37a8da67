//! Entries of flows on the wire: no input panics, and what is read is written and read again as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::wire::{NOTE_BYTES, NOTE_MAGIC, NOTE_VERSION, Note};

/// The bytes behind a head that fits them.
fn with_head(body: &[u8]) -> Vec<u8> {
    let sum = body.iter().fold(0x811c_9dc5_u32, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    let used = (12 + body.len()) as u16;
    [&NOTE_MAGIC[..], &NOTE_VERSION.to_le_bytes(), &used.to_le_bytes(), &sum.to_le_bytes(), body].concat()
}

fuzz_target!(|bytes: &[u8]| {
    let _ = Note::parse(bytes);
    let body = &bytes[..bytes.len().min(NOTE_BYTES - 12)];
    if let Ok(note) = Note::parse(&with_head(body)) {
        assert_eq!(Note::parse(&note.encode()), Ok(note));
    }
});
