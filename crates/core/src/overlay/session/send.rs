//! The sending half of a session: buffers the application's data until the other end has acknowledged it.

use super::state::{Reader, StateError, bits, put_count, put_numbers, put_piece, sure};
use super::{Output, PIECES_MAX, fits_one_frame};
use crate::overlay::frame::{Ack, DATA_MAX, SessionFrame};
use crate::time::Instant;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// The bytes of one data frame.
#[derive(Clone, Debug)]
struct Piece {
    offset: u64,
    bytes: Vec<u8>,
    sent_at: Instant,
}

/// The sending half of a session.
#[derive(Clone, Debug)]
pub(super) struct Sender {
    pieces: VecDeque<Piece>,
    keep_max: u64,
    /// The other end has acknowledged all bytes before this one (one more for the FIN).
    acked: u64,
    /// The far application's kernel has accepted all bytes before this one.
    confirmed: u64,
    /// Bytes read from the application.
    end: u64,
    /// The next byte to send on this path.
    next: u64,
    /// All bytes before this one were sent on some path.
    sent: u64,
    limit: u64,
    fin: bool,
    fin_sent: bool,
    fin_ever_sent: bool,
    /// The value of `end` when the other end's FIN arrived. The application gets this FIN only after these bytes are
    /// confirmed.
    mark: Option<u64>,
    /// Offsets of the pieces to retransmit.
    again: BTreeSet<u64>,
}

impl Sender {
    pub(super) fn new(keep_max_bytes: u32) -> Self {
        Self {
            pieces: VecDeque::new(),
            keep_max: keep_max_bytes.max(1).into(),
            acked: 0,
            confirmed: 0,
            end: 0,
            next: 0,
            sent: 0,
            limit: 0,
            fin: false,
            fin_sent: false,
            fin_ever_sent: false,
            mark: None,
            again: BTreeSet::new(),
        }
    }

    pub(super) fn room(&self) -> usize {
        if self.fin {
            return 0;
        }
        let kept = self.end - self.acked.min(self.end);
        // Without credit nothing is read, so the sending application slows down to the pace of the receiving one.
        let room = self.keep_max.saturating_sub(kept).min(self.limit.saturating_sub(self.end));
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    pub(super) fn set_keep_max(&mut self, bytes: u32) {
        self.keep_max = bytes.max(1).into();
    }

    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    pub(super) fn acked(&self) -> u64 {
        self.acked
    }

    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    pub(super) fn has_fin(&self) -> bool {
        self.fin
    }

    pub(super) fn read(&mut self, bytes: Vec<u8>) {
        if self.fin || bytes.is_empty() {
            return;
        }
        let length = bytes.len() as u64;
        match self.pieces.back_mut() {
            // A piece that was never sent may still grow.
            Some(last) if last.offset >= self.sent && fits_one_frame(last.bytes.len(), bytes.len()) => {
                last.bytes.extend_from_slice(&bytes);
            }
            _ if bytes.len() <= DATA_MAX => self.push(self.end, bytes),
            _ => {
                let mut offset = self.end;
                for part in bytes.chunks(DATA_MAX) {
                    self.push(offset, part.to_vec());
                    offset += part.len() as u64;
                }
            }
        }
        self.end += length;
    }

    fn push(&mut self, offset: u64, bytes: Vec<u8>) {
        self.pieces.push_back(Piece { offset, bytes, sent_at: Instant::ZERO });
    }

    pub(super) fn fin(&mut self) {
        self.fin = true;
    }

    /// Notes that the other end's FIN has just arrived.
    pub(super) fn mark(&mut self) {
        self.mark.get_or_insert(self.end);
    }

    /// Whether the other end's FIN may be passed to the application. If the application has sent its FIN, the far
    /// kernel must have accepted all its bytes. If it still sends, only the bytes before the FIN of the other end
    /// count: otherwise it could delay the FIN for ever.
    pub(super) fn is_confirmed_to_mark(&self) -> bool {
        let mark = if self.fin { Some(self.end) } else { self.mark };
        self.confirmed >= mark.unwrap_or(self.end)
    }

    /// Whether the far application's kernel has accepted all bytes, and the other end has the FIN.
    pub(super) fn is_complete(&self) -> bool {
        self.fin && self.acked > self.end && self.confirmed >= self.end
    }

    fn index_of(&self, offset: u64) -> Option<usize> {
        self.pieces.binary_search_by_key(&offset, |piece| piece.offset).ok()
    }

    pub(super) fn data(&self, offset: u64) -> &[u8] {
        self.index_of(offset).map_or(&[], |at| &self.pieces[at].bytes)
    }

    /// Returns what to send on the only path.
    pub(super) fn poll(&mut self, path: u8, now: Instant) -> Option<Output> {
        if let Some(offset) = self.again.pop_first()
            && let Some(at) = self.index_of(offset)
        {
            self.pieces[at].sent_at = now;
            return Some(Output::SendData { path, offset });
        }
        // Retransmissions are done; now send new data within the credit.
        if self.next < self.end {
            let at = self.index_of(self.next)?;
            let piece = &mut self.pieces[at];
            let after = piece.offset + piece.bytes.len() as u64;
            if after > self.limit {
                return None;
            }
            piece.sent_at = now;
            let offset = piece.offset;
            self.next = after;
            self.sent = self.sent.max(after);
            return Some(Output::SendData { path, offset });
        }
        if self.fin && !self.fin_sent && self.acked <= self.end {
            (self.fin_sent, self.fin_ever_sent) = (true, true);
            return Some(Output::Send(path, SessionFrame::Fin { offset: self.end }));
        }
        None
    }

    /// Whether the other end can have received everything before `next`.
    fn is_possible(&self, next: u64) -> bool {
        next <= self.sent + u64::from(self.fin_ever_sent && self.sent == self.end)
    }

    /// Takes an acknowledgement. Returns false if it acknowledges what was never sent.
    pub(super) fn ack(&mut self, ack: &Ack) -> bool {
        if !self.is_possible(ack.next) || ack.confirmed > ack.next.max(self.acked) {
            return false;
        }
        self.limit = self.limit.max(ack.limit);
        self.confirmed = self.confirmed.max(ack.confirmed.min(self.end));
        self.advance(ack.next);
        true
    }

    fn advance(&mut self, next: u64) {
        if next <= self.acked {
            return;
        }
        self.acked = next;
        self.next = self.next.max(next.min(self.end));
        while self.pieces.front().is_some_and(|piece| piece.offset + piece.bytes.len() as u64 <= next) {
            self.pieces.pop_front();
        }
        let again = self.again.split_off(&next);
        // The other end has part of a piece only. It may do so, even if it usually acknowledges whole pieces.
        let is_part = self.pieces.front_mut().filter(|piece| piece.offset < next);
        let mut again = std::mem::replace(&mut self.again, again);
        if let Some(piece) = is_part {
            let taken = usize::try_from(next - piece.offset).unwrap_or(usize::MAX);
            piece.bytes.drain(..taken.min(piece.bytes.len()));
            if again.remove(&piece.offset) {
                self.again.insert(next);
            }
            piece.offset = next;
        }
    }

    /// Takes what the other end says at the beginning of one of several paths. Returns false if it expects what was never
    /// sent. It may expect a byte that is acknowledged by now: it has said so before the path began.
    pub(super) fn catch_up(&mut self, next: u64, limit: u64) -> bool {
        if !self.is_possible(next) {
            return false;
        }
        self.advance(next);
        self.limit = self.limit.max(limit);
        true
    }

    /// Continues at the first byte that is not acknowledged.
    pub(super) fn rewind_to_acked(&mut self) {
        self.next = self.acked.min(self.end);
        self.again.clear();
    }

    /// Marks data for another path, because the path that it was sent on is gone.
    pub(super) fn lost(&mut self, offset: u64, bytes: u64) {
        if offset + bytes > self.acked {
            self.again.insert(offset.max(self.acked));
        }
    }

    /// Whether the data at this offset is still buffered.
    pub(super) fn has(&self, offset: u64) -> bool {
        self.index_of(offset).is_some()
    }

    /// Returns data for whichever path is free: what was lost with a path, then new data.
    pub(super) fn stripe(&mut self) -> Option<u64> {
        while let Some(offset) = self.again.pop_first() {
            if self.has(offset) {
                return Some(offset);
            }
        }
        let (offset, after) = self.piece_at(self.next)?;
        self.next = after;
        Some(offset)
    }

    /// Returns the data at this offset, or behind it the first data that is not acknowledged.
    pub(super) fn copy(&mut self, offset: u64) -> Option<u64> {
        let (offset, after) = self.piece_at(offset.max(self.acked))?;
        self.next = self.next.max(after);
        Some(offset)
    }

    /// Returns the piece at this offset, if it may be sent: its offset, and that of the next one.
    fn piece_at(&mut self, offset: u64) -> Option<(u64, u64)> {
        let at = self.index_of(offset).filter(|at| *at < PIECES_MAX)?;
        let after = offset + self.pieces[at].bytes.len() as u64;
        if after > self.limit {
            return None;
        }
        self.sent = self.sent.max(after);
        Some((offset, after))
    }

    /// Returns FIN if it may be sent: all data was sent on some path, and the other end does not have the FIN.
    pub(super) fn fin_of_paths(&mut self) -> Option<SessionFrame> {
        let is_due = self.fin && self.next >= self.end && self.again.is_empty() && self.acked <= self.end;
        is_due.then(|| {
            self.fin_ever_sent = true;
            SessionFrame::Fin { offset: self.end }
        })
    }

    /// Continues on a new path at the byte that the other end expects. Returns false if this byte is impossible.
    pub(super) fn rewind(&mut self, next: u64, limit: u64) -> bool {
        if !self.is_possible(next) || next < self.acked {
            return false;
        }
        self.advance(next);
        self.next = next.min(self.end);
        self.limit = self.limit.max(limit);
        self.fin_sent = false;
        self.again.clear();
        true
    }

    /// Marks the missing pieces before `hole_end` for retransmission, except those sent less than `guard` ago.
    pub(super) fn fill_hole(&mut self, hole_end: u64, now: Instant, guard: Duration) {
        let missing = self.pieces.iter().take_while(|piece| piece.offset < hole_end.min(self.next));
        self.again.extend(missing.filter(|piece| piece.sent_at + guard <= now).map(|piece| piece.offset));
    }

    /// Repeats the first unacknowledged piece and the FIN, because the other end was silent for a while.
    pub(super) fn repeat(&mut self) {
        if let Some(first) = self.pieces.front().filter(|piece| piece.offset < self.next) {
            self.again.insert(first.offset);
        }
        self.fin_sent = false;
    }
}

/// Bits of the flags of a state.
const FIN: u8 = 1;
const FIN_EVER_SENT: u8 = 2;
const HAS_MARK: u8 = 4;

impl Sender {
    /// Writes the state of an end whose paths are gone.
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        put_numbers(out, &[self.acked, self.confirmed, self.end, self.sent, self.limit]);
        out.push(bits(&[
            (self.fin, FIN),
            (self.fin_ever_sent, FIN_EVER_SENT),
            (self.mark.is_some(), HAS_MARK),
        ]));
        put_numbers(out, &[self.mark.unwrap_or_default()]);
        put_count(out, self.pieces.len());
        self.pieces.iter().for_each(|piece| put_piece(out, &piece.bytes));
        self.pieces.iter().for_each(|piece| out.extend_from_slice(&piece.bytes));
    }

    /// Reads such a state. It continues at the first byte that is not acknowledged.
    pub(super) fn read_from(from: &mut Reader<'_>, keep_max_bytes: u32) -> Result<Self, StateError> {
        let [acked, confirmed, end, sent, limit] =
            [from.u64()?, from.u64()?, from.u64()?, from.u64()?, from.u64()?];
        let (flags, mark) = (from.u8()?, from.u64()?);
        sure(flags & !(FIN | FIN_EVER_SENT | HAS_MARK) == 0, "a flag of the sender is unknown")?;
        let (fin, fin_ever_sent) = (flags & FIN != 0, flags & FIN_EVER_SENT != 0);
        let mark = (flags & HAS_MARK != 0).then_some(mark);
        let mut this = Self {
            acked,
            confirmed,
            end,
            sent,
            limit,
            fin,
            fin_ever_sent,
            mark,
            ..Self::new(keep_max_bytes)
        };
        sure(end <= MOST_BYTES && limit <= MOST_BYTES, "a direction has too many bytes")?;
        sure(sent <= end && this.is_possible(acked), "more is acknowledged than was sent")?;
        sure(confirmed <= acked.min(end), "more is confirmed than acknowledged")?;
        sure(mark.is_none_or(|mark| mark <= end) && (fin || !fin_ever_sent), "a FIN has no place")?;
        let lengths: Vec<usize> = (0..from.count(2)?).map(|_| from.piece()).collect::<Result<_, _>>()?;
        this.next = acked.min(end);
        let mut offset = this.next;
        for length in lengths {
            this.push(offset, from.take(length)?.to_vec());
            offset += length as u64;
        }
        sure(offset == end, "the pieces do not lead from what is acknowledged to the end")?;
        Ok(this)
    }
}

/// Most bytes of one direction. No session gets there, and sums of offsets cannot overflow below it.
pub(super) const MOST_BYTES: u64 = 1 << 62;
