//! The sending half of a stream: bytes until the other end has them, and what to send next.

use super::ranges::Ranges;
use std::collections::VecDeque;

/// The sending half of a stream.
#[derive(Clone, Debug)]
pub(super) struct Outgoing {
    /// The bytes from `base` on.
    bytes: VecDeque<u8>,
    /// All bytes before this one have arrived.
    base: u64,
    /// The first byte that was never sent.
    sent: u64,
    arrived: Ranges,
    lost: Ranges,
    /// The other end has room for the bytes before this one.
    limit: u64,
}

/// Bytes to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub offset: u64,
    pub bytes: Vec<u8>,
    /// They were sent before.
    pub again: bool,
}

impl Outgoing {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            bytes: VecDeque::new(),
            base: 0,
            sent: 0,
            arrived: Ranges::default(),
            lost: Ranges::default(),
            limit,
        }
    }

    /// Returns the number of bytes that were written.
    pub(super) fn end(&self) -> u64 {
        self.base + self.bytes.len() as u64
    }

    /// Returns the number of bytes in memory.
    pub(super) fn held(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of bytes that were never sent.
    pub(super) fn unsent(&self) -> usize {
        usize::try_from(self.end() - self.sent).unwrap_or(usize::MAX)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Raises the limit. Returns whether it rose.
    pub(super) fn credit(&mut self, limit: u64) -> bool {
        let rises = limit > self.limit;
        self.limit = self.limit.max(limit);
        rises
    }

    pub(super) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Whether there is something to send now.
    pub(super) fn is_ready(&self) -> bool {
        self.has_lost() || self.sent < self.end().min(self.limit)
    }

    /// Returns the next bytes, at most `most`: lost ones first.
    pub(super) fn next(&mut self, most: usize) -> Option<Piece> {
        let most = u64::try_from(most.min(usize::from(u16::MAX))).unwrap_or(0);
        let (range, again) = match self.lost.first() {
            Some(lost) => (lost.start..lost.end.min(lost.start + most), true),
            None => (self.sent..self.end().min(self.limit).min(self.sent + most), false),
        };
        if range.is_empty() {
            return None;
        }
        if again {
            self.lost.remove(range.clone());
        } else {
            self.sent = range.end;
        }
        Some(Piece { offset: range.start, bytes: self.copy(range.start, range.end), again })
    }

    /// Returns the bytes of a range that are still in memory, from its first such byte on.
    pub(super) fn again(&self, from: u64, to: u64, most: usize) -> Option<Piece> {
        let from = from.max(self.base);
        let to = to.min(self.sent).min(from.saturating_add(u64::try_from(most).unwrap_or(0)));
        (from < to).then(|| Piece { offset: from, bytes: self.copy(from, to), again: true })
    }

    fn copy(&self, from: u64, to: u64) -> Vec<u8> {
        let at = |offset: u64| usize::try_from(offset.saturating_sub(self.base)).unwrap_or(usize::MAX);
        let (from, to) = (at(from), at(to).min(self.bytes.len()));
        let (front, back) = self.bytes.as_slices();
        let cut = front.len();
        let mut out = Vec::with_capacity(to.saturating_sub(from));
        out.extend_from_slice(front.get(from.min(cut)..to.min(cut)).unwrap_or_default());
        let rest = from.saturating_sub(cut)..to.saturating_sub(cut);
        out.extend_from_slice(back.get(rest).unwrap_or_default());
        out
    }

    /// Notes that bytes have arrived, and frees their memory.
    pub(super) fn arrived(&mut self, from: u64, to: u64) {
        self.lost.remove(from..to);
        self.arrived.insert(from.max(self.base)..to);
        if let Some(end) =
            self.arrived.first().filter(|first| first.start <= self.base).map(|first| first.end)
        {
            self.arrived.remove(0..end);
            let freed = usize::try_from(end - self.base).unwrap_or(usize::MAX).min(self.bytes.len());
            self.bytes.drain(..freed);
            self.base = end;
        }
    }

    /// Notes that bytes are lost.
    pub(super) fn lost(&mut self, from: u64, to: u64) {
        let from = from.max(self.base);
        if from < to {
            for part in self.arrived.missing(from..to.min(self.sent)) {
                self.lost.insert(part);
            }
        }
    }

    /// Whether all bytes have arrived.
    pub(super) fn is_done(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Drops everything: the other end reads nothing more.
    pub(super) fn clear(&mut self) {
        *self = Self { base: self.end(), sent: self.end(), ..Self::new(self.limit) };
    }
}
