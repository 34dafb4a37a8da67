//! Frames of the overlay: no input panics, every cut of it gives the same frames, and what is read is written as it
//! came. The first byte is where it is cut.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::frame::{Decoder, Frame, FrameError};

fn frames<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (Vec<Frame>, Option<FrameError>) {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    for part in parts {
        decoder.push(part);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error)),
            }
        }
    }
    (frames, None)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((cut, bytes)) = bytes.split_first() else { return };
    let whole = frames([bytes].into_iter());
    assert_eq!(frames(bytes.chunks(usize::from(*cut) + 1)), whole);
    for frame in whole.0 {
        let again = frame.to_bytes();
        assert_eq!(frames([&again[..]].into_iter()), (vec![frame], None));
    }
});
