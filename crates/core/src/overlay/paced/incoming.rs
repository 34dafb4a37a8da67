//! The receiving half of a stream: bytes in any order until they are read in order, and the credit for more.

use super::ranges::Ranges;
use std::collections::VecDeque;

/// Most gaps in a stream. Only a peer that cuts its bytes into tiny parts exceeds it.
const HOLES_MAX: usize = 4_096;

/// The receiving half of a stream.
#[derive(Clone, Debug)]
pub(super) struct Incoming {
    /// The bytes from `base` on; those that are missing are 0.
    bytes: VecDeque<u8>,
    /// The next byte to read.
    base: u64,
    /// All bytes before this one have arrived.
    next: u64,
    ahead: Ranges,
    /// The number of bytes of the stream, if the other end has said so.
    end: Option<u64>,
    limit: u64,
    /// What arrives is dropped: no one reads it.
    is_dropped: bool,
}

impl Incoming {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            bytes: VecDeque::new(),
            base: 0,
            next: 0,
            ahead: Ranges::default(),
            end: None,
            limit,
            is_dropped: false,
        }
    }

    /// Whether these bytes may come: within the credit, before the end, and not behind too many gaps.
    pub(super) fn accepts(&self, offset: u64, length: usize) -> bool {
        let end = offset.saturating_add(length as u64);
        end <= self.limit
            && self.end.is_none_or(|last| end <= last)
            && (offset <= self.next || self.ahead.len() < HOLES_MAX)
    }

    /// Takes bytes. Returns whether there is more to read now.
    pub(super) fn data(&mut self, offset: u64, bytes: &[u8]) -> bool {
        let end = offset.saturating_add(bytes.len() as u64);
        if end <= self.next {
            return false;
        }
        if self.is_dropped {
            self.drop_arrived(offset, end);
            return false;
        }
        let skip = usize::try_from(self.next.saturating_sub(offset)).unwrap_or(usize::MAX);
        let (offset, bytes) = (offset.max(self.next), bytes.get(skip..).unwrap_or_default());
        self.put(offset, bytes);
        self.ahead.insert(offset..end);
        match self.ahead.take_at(self.next) {
            Some(next) => {
                self.next = next;
                true
            }
            None => false,
        }
    }

    /// Counts bytes that no one reads, so that the other end can go on to its end.
    fn drop_arrived(&mut self, offset: u64, end: u64) {
        self.ahead.insert(offset.max(self.next)..end);
        if let Some(next) = self.ahead.take_at(self.next) {
            (self.next, self.base) = (next, next);
        }
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let at = usize::try_from(offset - self.base).unwrap_or(usize::MAX);
        let held = self.bytes.len();
        if at > held {
            self.bytes.resize(at, 0);
        }
        let (over, new) = bytes.split_at(self.bytes.len().saturating_sub(at).min(bytes.len()));
        let (front, back) = self.bytes.as_mut_slices();
        let cut = front.len();
        let in_front = over.len().min(cut.saturating_sub(at));
        if let Some(room) = front.get_mut(at.min(cut)..at.min(cut) + in_front) {
            room.copy_from_slice(&over[..in_front]);
        }
        let rest = &over[in_front..];
        let start = at.saturating_sub(cut);
        if let Some(room) = back.get_mut(start..start + rest.len()) {
            room.copy_from_slice(rest);
        }
        self.bytes.extend(new);
    }

    /// Whether the other end may say that the stream has this number of bytes.
    pub(super) fn may_end(&self, offset: u64) -> bool {
        self.end.is_none_or(|end| end == offset) && offset >= self.next
    }

    pub(super) fn set_end(&mut self, offset: u64) {
        self.end = Some(offset);
    }

    /// Whether all bytes were read and no more come.
    pub(super) fn is_over(&self) -> bool {
        self.end == Some(self.base)
    }

    /// Whether there is something to read: bytes or the end.
    pub(super) fn is_ready(&self) -> bool {
        self.base < self.next || self.is_over()
    }

    /// Reads bytes. Returns how many.
    pub(super) fn read(&mut self, room: &mut [u8]) -> usize {
        let ready = usize::try_from(self.next - self.base).unwrap_or(usize::MAX).min(room.len());
        let (front, back) = self.bytes.as_slices();
        let first = ready.min(front.len());
        room[..first].copy_from_slice(&front[..first]);
        room[first..ready].copy_from_slice(&back[..ready - first]);
        self.bytes.drain(..ready);
        self.base += ready as u64;
        ready
    }

    /// Returns the number of bytes in memory.
    pub(super) fn held(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the number of bytes that the credit allows to be in memory.
    pub(super) fn granted(&self) -> u64 {
        if self.is_dropped { 0 } else { self.limit.saturating_sub(self.base) }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Raises the credit so that `window` bytes may be in memory. Returns whether this is worth a message.
    pub(super) fn grant(&mut self, window: u64) -> bool {
        let limit = self.base.saturating_add(window);
        let least = self.limit.saturating_add((window / 4).max(1));
        let is_worth = self.end.is_none() && limit >= least;
        if is_worth {
            self.limit = limit;
        }
        is_worth
    }

    /// Drops all bytes and what still comes.
    pub(super) fn clear(&mut self) {
        self.bytes = VecDeque::new();
        self.base = self.next;
        self.is_dropped = true;
    }
}
