//! The edits of one direction: they map each sequence number of the sender to the number that the receiver sees.
//!
//! The sender's numbers are "old", the receiver's are "new". Between edits the two differ by a constant. An edit replaces
//! `len` old bytes by new ones. It is kept until the receiver has acknowledged all of them: until then a retransmission
//! must give the same bytes again.

use super::narrow::length;
use super::seq::Seq;
use std::collections::VecDeque;

/// Capacity for first bytes that is kept for the next connection, bytes.
const ROOM_KEPT: usize = 2048;

/// One range of bytes that was replaced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Edit {
    /// The first old number.
    pub(super) start: Seq,
    /// The number of old bytes, plus one for a FIN.
    pub(super) len: u32,
    /// The new bytes.
    pub(super) bytes: Vec<u8>,
    /// A FIN follows the bytes, and takes a number in both spaces.
    pub(super) fin: bool,
    /// The engine has acknowledged the old bytes, so it must deliver the new ones itself.
    pub(super) owned: bool,
}

impl Edit {
    /// Returns the first old number after the edit.
    #[inline]
    pub(super) fn end(&self) -> Seq {
        self.start + self.len
    }

    /// Returns how many new numbers the edit takes.
    #[inline]
    pub(super) fn new_len(&self) -> u32 {
        length(self.bytes.len()) + u32::from(self.fin)
    }

    /// Returns how far the edit moves the numbers that follow it.
    #[inline]
    fn shift(&self) -> u32 {
        self.new_len().wrapping_sub(self.len)
    }
}

/// A part of a segment, ready for the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    /// Unchanged bytes: the first old number, the length, and the first new number.
    Same(Seq, u32, Seq),
    /// The bytes of an edit, and the new number of the first one.
    Edited(&'a Edit, Seq),
}

/// The edits of one direction that are not yet acknowledged, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Edits {
    /// New number minus old number, before the first edit.
    base: u32,
    /// The owned edit, which comes before all others. Before it is owned, the held bytes are collected here. Its capacity
    /// is kept for the next connection.
    front: Edit,
    list: VecDeque<Edit>,
}

impl Edits {
    /// Returns an empty list; new numbers are old ones plus `base`.
    pub(super) fn new(base: u32) -> Self {
        Self { base, ..Self::default() }
    }

    /// Removes all edits; new numbers are old ones plus `base`. Held bytes stay.
    pub(super) fn begin(&mut self, base: u32) {
        self.list.clear();
        self.base = base;
        self.front.owned = false;
    }

    /// Resets everything except the capacity for bytes, of which it keeps what most connections need.
    pub(super) fn reset(&mut self) {
        self.begin(0);
        self.front.bytes.clear();
        self.front.bytes.shrink_to(ROOM_KEPT);
    }

    /// Returns the held bytes, which will become the owned edit.
    #[inline]
    pub(super) fn held(&self) -> &[u8] {
        if self.front.owned { &[] } else { &self.front.bytes }
    }

    /// Like [`Edits::held`], for changes; must not be called while there is an owned edit.
    #[inline]
    pub(super) fn held_mut(&mut self) -> &mut Vec<u8> {
        &mut self.front.bytes
    }

    /// Turns the held bytes into the owned edit: `len` old numbers from `start` on, with a FIN after them if `fin`.
    #[inline]
    pub(super) fn own(&mut self, start: Seq, len: u32, fin: bool) {
        (self.front.start, self.front.len, self.front.fin, self.front.owned) = (start, len, fin, true);
    }

    /// Returns the bytes of the owned edit; a caller that takes them must put them back.
    #[inline]
    pub(super) fn owned_bytes(&mut self) -> Option<&mut Vec<u8>> {
        self.front.owned.then_some(&mut self.front.bytes)
    }

    #[inline]
    fn all(&self) -> impl Iterator<Item = &Edit> {
        self.front.owned.then_some(&self.front).into_iter().chain(&self.list)
    }

    #[inline]
    fn first(&self) -> Option<&Edit> {
        if self.front.owned { Some(&self.front) } else { self.list.front() }
    }

    /// Returns new minus old, before the first edit that is kept.
    #[inline]
    pub(super) fn base(&self) -> u32 {
        self.base
    }

    /// Returns new minus old, after the last edit.
    #[inline]
    pub(super) fn total(&self) -> u32 {
        self.all().fold(self.base, |sum, edit| sum.wrapping_add(edit.shift()))
    }

    /// True if the receiver has acknowledged all edits.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        !self.front.owned && self.list.is_empty()
    }

    /// Returns the number of new bytes kept, including held ones.
    pub(super) fn bytes(&self) -> usize {
        self.front.bytes.len() + self.list.iter().map(|edit| edit.bytes.len()).sum::<usize>()
    }

    /// Returns the owned edit, if there is one, and its first new number.
    #[inline]
    pub(super) fn owned(&self) -> Option<(&Edit, Seq)> {
        self.front.owned.then(|| (&self.front, self.front.start + self.base))
    }

    /// Returns the new number after the owned edit, if it is the only edit, left its bytes unchanged and has no FIN.
    pub(super) fn only_owned(&self) -> Option<Seq> {
        let (edit, start) = self.owned()?;
        (self.list.is_empty() && edit.shift() == 0 && !edit.fin).then(|| start + edit.new_len())
    }

    /// Appends an edit.
    pub(super) fn push(&mut self, edit: Edit) {
        self.list.push_back(edit);
    }

    /// Returns the new number for an old one; inside an edit, that of its first byte.
    #[inline]
    pub(super) fn seq(&self, old: Seq) -> Seq {
        let mut shift = self.base;
        for edit in self.all() {
            if old.before(edit.end()) {
                return old.min(edit.start) + shift;
            }
            shift = shift.wrapping_add(edit.shift());
        }
        old + shift
    }

    /// Returns the old number for an acknowledgement that was already given to [`Edits::acknowledge`].
    #[inline]
    pub(super) fn acknowledged(&self, new: Seq) -> Seq {
        let old = new - self.base;
        self.first().map_or(old, |edit| old.min(edit.start))
    }

    /// Handles an acknowledgement of the receiver: removes the edits it covers, and returns the old number for it.
    ///
    /// An edit is acknowledged when its last new byte is; an edit without bytes, when everything before it is.
    #[inline]
    pub(super) fn acknowledge(&mut self, new: Seq) -> Seq {
        while let Some(edit) = self.first() {
            let end = edit.start + self.base + edit.new_len();
            if new.before(end) {
                return (new - self.base).min(edit.start);
            }
            self.base = self.base.wrapping_add(edit.shift());
            if self.front.owned {
                self.front.owned = false;
                self.front.bytes.clear();
            } else {
                self.list.pop_front();
            }
        }
        new - self.base
    }

    /// Cuts the old numbers from `start` to `end` into pieces; an edit in that range comes as a whole.
    pub(super) fn pieces(&self, start: Seq, end: Seq, mut take: impl FnMut(Piece<'_>)) {
        let mut at = start;
        let mut shift = self.base;
        for edit in self.all() {
            if !at.before(end) {
                return;
            }
            let before = edit.start.min(end);
            if at.before(before) {
                take(Piece::Same(at, before - at, at + shift));
                at = before;
            }
            if at.before(end) && at.before(edit.end()) {
                take(Piece::Edited(edit, edit.start + shift));
                at = edit.end();
            }
            shift = shift.wrapping_add(edit.shift());
        }
        if at.before(end) {
            take(Piece::Same(at, end - at, at + shift));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn edit(start: u32, len: u32, bytes: &[u8]) -> Edit {
        Edit { start: Seq(start), len, bytes: bytes.to_vec(), fin: false, owned: false }
    }

    #[test]
    fn numbers_before_between_and_after() {
        let mut edits = Edits::new(1000);
        edits.push(edit(10, 2, b"abcd")); // 1010..1014, then +1002
        edits.push(edit(20, 5, b"")); // 1022..1022, then +997
        assert_eq!(edits.seq(Seq(10)), Seq(1010));
        assert_eq!((edits.seq(Seq(11)), edits.seq(Seq(12))), (Seq(1010), Seq(1014)));
        assert_eq!((edits.seq(Seq(25)), edits.total()), (Seq(1022), 997));
        assert_eq!(edits.acknowledge(Seq(1013)), Seq(10), "not the whole edit: nothing of it");
        assert_eq!(edits.acknowledge(Seq(1015)), Seq(13));
        assert_eq!(
            edits.acknowledge(Seq(1022)),
            Seq(25),
            "bytes that were dropped are acknowledged with what precedes"
        );
        assert!(edits.is_empty() && edits.base() == 997 && edits.bytes() == 0);
    }

    proptest! {
        /// For any cuts, in any order, the receiver gets the edited stream.
        #[test]
        fn pieces_of_any_segments_make_the_same_stream(
            parts in prop::collection::vec((1_u32..9, prop::option::of(prop::collection::vec(any::<u8>(), 0..12))), 1..12),
            cuts in prop::collection::vec((0_u32..120, 1_u32..40), 0..30),
            isn in any::<u32>(), base in any::<u32>(),
        ) {
            let old: Vec<u8> = (0..parts.iter().map(|(len, _)| len).sum::<u32>()).map(|n| n as u8).collect();
            let mut edits = Edits::new(base);
            let (mut new, mut at) = (Vec::new(), 0_u32);
            for (len, replaced) in &parts {
                match replaced {
                    Some(bytes) => {
                        edits.push(edit(isn.wrapping_add(at), *len, bytes));
                        new.extend_from_slice(bytes);
                    }
                    None => new.extend_from_slice(&old[at as usize..(at + len) as usize]),
                }
                at += len;
            }
            let mut got: Vec<Option<u8>> = vec![None; new.len()];
            let whole = (0, old.len() as u32);
            for (start, len) in cuts.into_iter().chain([whole]) {
                let start = start.min(old.len() as u32);
                let end = (start + len).min(old.len() as u32);
                edits.pieces(Seq(isn) + start, Seq(isn) + end, |piece| {
                    let (bytes, seq) = match piece {
                        Piece::Same(from, len, seq) => {
                            let from = (from - Seq(isn)) as usize;
                            (old[from..from + len as usize].to_vec(), seq)
                        }
                        Piece::Edited(edit, seq) => (edit.bytes.clone(), seq),
                    };
                    let place = (seq - (Seq(isn) + base)) as usize;
                    for (offset, byte) in bytes.into_iter().enumerate() {
                        let slot = &mut got[place + offset];
                        assert!(slot.is_none_or(|before| before == byte), "two answers for one number");
                        *slot = Some(byte);
                    }
                });
            }
            prop_assert_eq!(got.into_iter().collect::<Option<Vec<_>>>(), Some(new.clone()));
            // Acknowledging step by step never goes back, and ends at the end.
            let mut last = Seq(isn);
            for n in 0..=new.len() as u32 {
                let told = edits.acknowledge(Seq(isn) + base + n);
                prop_assert!(!told.before(last));
                last = told;
            }
            prop_assert_eq!(last, Seq(isn) + old.len() as u32);
        }
    }
}
