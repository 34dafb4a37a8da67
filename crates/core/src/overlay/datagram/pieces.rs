//! Cuts frames that are larger than a datagram into pieces, and joins the pieces again.

use super::super::frame::{FRAME_MAX, Frame, Piece};
use std::collections::VecDeque;

/// Most pieces in one frame.
pub const PIECES_MAX: usize = 64;

/// Bytes that a piece adds to its part of the frame: type, message, index, count.
pub const PIECE_BYTES: usize = 7;

/// Most incomplete frames at a time. When one more begins, the oldest is dropped, because a piece of it was probably
/// lost.
const INCOMPLETE_MAX: usize = 16;

/// Cuts an encoded frame into pieces of at most `room` bytes. `message` identifies the frame. `None` if the frame
/// would need more than [`PIECES_MAX`] pieces.
pub fn cut(frame: &[u8], message: u32, room: usize) -> Option<impl Iterator<Item = Vec<u8>>> {
    let part = room.checked_sub(PIECE_BYTES).filter(|part| *part > 0)?;
    let count = u8::try_from(frame.len().div_ceil(part)).ok();
    let count = count.filter(|count| (1..=PIECES_MAX).contains(&usize::from(*count)))?;
    let pieces = (0..count).zip(frame.chunks(part));
    Some(pieces.map(move |(index, bytes)| {
        Frame::Piece(Piece { message, index, count, bytes: bytes.to_vec() }).to_datagram()
    }))
}

/// A frame of which some pieces have not arrived yet.
#[derive(Clone, Debug)]
struct Incomplete {
    message: u32,
    parts: Vec<Option<Vec<u8>>>,
    missing: usize,
    bytes: usize,
}

/// Joins pieces to frames. Stores at most 16 incomplete frames, together 1 MiB.
#[derive(Clone, Debug, Default)]
pub struct Joiner {
    incomplete: VecDeque<Incomplete>,
}

impl Joiner {
    /// Takes a piece. Returns the encoded frame if this piece completes it.
    pub fn join(&mut self, piece: Piece) -> Option<Vec<u8>> {
        let count = usize::from(piece.count);
        if usize::from(piece.index) >= count || count > PIECES_MAX {
            return None;
        }
        let known = self.incomplete.iter().position(|frame| frame.message == piece.message);
        let at = match known {
            Some(at) => at,
            None => self.begin(piece.message, count),
        };
        let frame = self.incomplete.get_mut(at)?;
        // A piece with the same message number but another count does not belong to this frame: drop it.
        let is_ours = frame.parts.len() == count && frame.bytes + piece.bytes.len() <= FRAME_MAX;
        let part = frame.parts.get_mut(usize::from(piece.index)).filter(|part| is_ours && part.is_none())?;
        frame.bytes += piece.bytes.len();
        *part = Some(piece.bytes);
        frame.missing -= 1;
        if frame.missing > 0 {
            return None;
        }
        let frame = self.incomplete.remove(at)?;
        Some(frame.parts.into_iter().flatten().flatten().collect())
    }

    fn begin(&mut self, message: u32, count: usize) -> usize {
        if self.incomplete.len() >= INCOMPLETE_MAX {
            self.incomplete.pop_front();
        }
        self.incomplete.push_back(Incomplete { message, parts: vec![None; count], missing: count, bytes: 0 });
        self.incomplete.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(frame: &[u8], message: u32, room: usize) -> Vec<Piece> {
        let cut = cut(frame, message, room).expect("few enough");
        cut.map(|bytes| {
            assert!(bytes.len() <= room);
            match Frame::from_datagram(&bytes) {
                Ok(Some(Frame::Piece(piece))) => piece,
                other => panic!("{other:?}"),
            }
        })
        .collect()
    }

    #[test]
    fn pieces_join_in_any_order_once_and_only_if_all_came() {
        let frame: Vec<u8> = (0..1450_u32).map(|at| (at * 7) as u8).collect();
        for room in [30, 31, 700, 1171, 1456, 1457, 5000] {
            let all = pieces(&frame, 9, room);
            for first in 0..all.len() {
                let mut joiner = Joiner::default();
                let order = (first..all.len()).chain(0..first);
                let joined: Vec<_> = order.clone().filter_map(|at| joiner.join(all[at].clone())).collect();
                assert_eq!(joined, std::slice::from_ref(&frame), "room {room}, from {first}");
                assert!(joiner.incomplete.is_empty());
                let without: Vec<_> = order.skip(1).filter_map(|at| joiner.join(all[at].clone())).collect();
                assert!(without.is_empty(), "one is missing");
                if all.len() > 1 {
                    assert_eq!(joiner.join(all[(first + 1) % all.len()].clone()), None, "the same once more");
                }
            }
        }
        assert!(cut(&frame, 1, PIECE_BYTES).is_none() && cut(&frame, 1, PIECE_BYTES + 22).is_none());
    }

    #[test]
    fn what_is_never_completed_is_bounded() {
        let mut joiner = Joiner::default();
        for message in 0..10_000 {
            let piece = Piece { message, index: 0, count: 64, bytes: vec![0; 1400] };
            assert_eq!(joiner.join(piece), None);
            assert!(joiner.incomplete.len() <= INCOMPLETE_MAX);
        }
        let mut joiner = Joiner::default();
        for index in 0..64 {
            let piece = Piece { message: 1, index, count: 64, bytes: vec![0; 60_000] };
            assert_eq!(joiner.join(piece), None, "larger than any frame");
        }
        assert!(joiner.incomplete.iter().all(|frame| frame.bytes <= FRAME_MAX));
        for (index, count) in [(0, 0), (3, 3), (64, 65), (255, 255)] {
            assert_eq!(joiner.join(Piece { message: 2, index, count, bytes: vec![1] }), None);
        }
    }
}
