//! Datagrams between neighbours: no input panics, a header is written as it was read, and a frame that is cut is joined again
//! from its pieces in any order. The first two bytes say how.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::datagram::pieces::{Joiner, cut};
use sidetrack_core::overlay::datagram::{HEADER_BYTES, Header, Window};
use sidetrack_core::overlay::frame::Frame;

fuzz_target!(|bytes: &[u8]| {
    let [room, turn, bytes @ ..] = bytes else { return };
    let mut window = Window::default();
    let mut joiner = Joiner::default();
    for datagram in bytes.chunks(usize::from(*room).max(1)) {
        if let Some((header, sealed)) = Header::split(datagram) {
            assert_eq!(header.to_bytes(), datagram[..HEADER_BYTES]);
            assert_eq!(HEADER_BYTES + sealed.len(), datagram.len());
            if window.is_new(header.sequence) {
                window.accept(header.sequence);
            }
            assert!(!window.is_new(header.sequence));
        }
        if let Ok(Some(Frame::Piece(piece))) = Frame::from_datagram(datagram) {
            let _ = joiner.join(piece);
        }
    }
    let Some(pieces) = cut(bytes, 1, usize::from(*room)) else { return };
    let mut pieces: Vec<_> = pieces.collect();
    let count = pieces.len();
    pieces.rotate_left(usize::from(*turn) % count);
    let mut joiner = Joiner::default();
    let joined = pieces.iter().filter_map(|piece| match Frame::from_datagram(piece) {
        Ok(Some(Frame::Piece(piece))) => joiner.join(piece),
        other => panic!("{other:?}"),
    });
    assert_eq!(joined.collect::<Vec<_>>(), [bytes]);
});
