//! The receiving half: what the other end sent, held until the application takes it.

use super::{Config, fits_one_frame};
use crate::overlay::frame::Ack;
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most pieces that are held behind a gap; more would be a peer that cuts its data into crumbs.
const AHEAD_MAX: usize = 2048;

/// Bytes after which what has come is acknowledged.
const ACK_EVERY: u64 = 128 * 1024;

/// The window grows while a whole one is delivered within this time: where the path is slower, a larger one would only wait
/// longer at its beginning. More than three round trips, which a byte that is lost twice takes, of a satellite.
const GROW_WITHIN: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Receiver {
    /// In order, for the application; the first begins `taken` bytes in.
    queue: VecDeque<Vec<u8>>,
    taken: usize,
    /// Behind a gap.
    ahead: BTreeMap<u64, Vec<u8>>,
    /// All before this have come.
    next: u64,
    delivered: u64,
    confirmed: u64,
    fin: Option<u64>,
    fin_delivered: bool,
    window: u64,
    window_max: u64,
    /// How much was delivered, and when, when it was last looked whether the window should grow.
    looked_at: (u64, Instant),
    /// What was told last.
    told: Ack,
    must_ack: bool,
}

impl Receiver {
    pub(super) fn new(config: &Config, now: Instant) -> Self {
        let window = u64::from(config.window_bytes);
        Self {
            queue: VecDeque::new(),
            taken: 0,
            ahead: BTreeMap::new(),
            next: 0,
            delivered: 0,
            confirmed: 0,
            fin: None,
            fin_delivered: false,
            window,
            window_max: config.window_max_bytes.into(),
            looked_at: (0, now),
            told: Ack { limit: window, ..Ack::default() },
            must_ack: false,
        }
    }

    /// The next byte expected; one more once the FIN has come, too.
    pub(super) fn next(&self) -> u64 {
        self.next + u64::from(self.fin == Some(self.next))
    }

    /// How far the other end knows that it may send.
    pub(super) fn told_limit(&self) -> u64 {
        self.told.limit
    }

    fn limit(&self) -> u64 {
        // What was granted stays granted.
        self.told.limit.max(self.delivered + self.window)
    }

    pub(super) fn delivered(&self) -> u64 {
        self.delivered
    }

    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    pub(super) fn has_fin(&self) -> bool {
        self.fin.is_some()
    }

    pub(super) fn must_ack(&mut self) {
        self.must_ack = true;
    }

    pub(super) fn set_window_max(&mut self, bytes: u32) {
        self.window_max = u64::from(bytes).max(Config::WINDOW_MIN.into());
        self.window = self.window.min(self.window_max);
    }

    pub(super) fn deliverable(&self) -> &[u8] {
        self.queue.front().map_or(&[], |first| &first[self.taken..])
    }

    /// Whether all has come, and its end was passed on.
    pub(super) fn is_complete(&self) -> bool {
        self.fin_delivered && self.confirmed >= self.delivered
    }

    /// True once: all was delivered and the end is to be passed on.
    pub(super) fn take_fin(&mut self) -> bool {
        let due = !self.fin_delivered && self.fin == Some(self.next) && self.queue.is_empty();
        self.fin_delivered |= due;
        due
    }

    /// False: the other end sent what it must not. `gaps`: the path may lose and reorder.
    pub(super) fn data(&mut self, offset: u64, mut bytes: Vec<u8>, gaps: bool) -> bool {
        let end = offset.saturating_add(bytes.len() as u64);
        if end > self.told.limit || self.fin.is_some_and(|fin| end > fin) || (offset > self.next && !gaps) {
            return false;
        }
        if offset > self.next {
            if self.ahead.len() < AHEAD_MAX {
                self.ahead.entry(offset).or_insert(bytes);
            }
            self.must_ack = true;
            return true;
        }
        let known = usize::try_from(self.next - offset).unwrap_or(usize::MAX);
        if known >= bytes.len() {
            // All of it was here before: the acknowledgement was lost, or is on its way.
            self.must_ack |= gaps;
            return true;
        }
        bytes.drain(..known);
        self.append(bytes);
        while let Some((offset, mut bytes)) = self.ahead.pop_first() {
            if offset > self.next {
                self.ahead.insert(offset, bytes);
                break;
            }
            let known = usize::try_from(self.next - offset).unwrap_or(usize::MAX).min(bytes.len());
            bytes.drain(..known);
            self.append(bytes);
        }
        self.must_ack |= gaps || self.next >= self.told.next + ACK_EVERY || self.fin == Some(self.next);
        true
    }

    fn append(&mut self, bytes: Vec<u8>) {
        self.next += bytes.len() as u64;
        match self.queue.back_mut() {
            Some(last) if fits_one_frame(last.len(), bytes.len()) => last.extend_from_slice(&bytes),
            _ if bytes.is_empty() => {}
            _ => self.queue.push_back(bytes),
        }
    }

    /// False: an end that cannot be.
    pub(super) fn fin(&mut self, offset: u64) -> bool {
        let ahead = self.ahead.last_key_value().map_or(0, |(at, bytes)| at + bytes.len() as u64);
        if offset < self.next.max(ahead)
            || self.fin.is_some_and(|fin| fin != offset)
            || offset > self.told.limit
        {
            return false;
        }
        self.fin = Some(offset);
        self.must_ack = true;
        true
    }

    pub(super) fn written(&mut self, n: usize, now: Instant) {
        let Some(first) = self.queue.front() else { return };
        let n = n.min(first.len() - self.taken);
        self.taken += n;
        self.delivered += n as u64;
        if self.taken == first.len() {
            self.queue.pop_front();
            self.taken = 0;
        }
        let (delivered, since) = self.looked_at;
        if self.queue.is_empty() && self.delivered - delivered >= self.window {
            if now.since(since) <= GROW_WITHIN {
                self.window = (self.window * 2).min(self.window_max);
            }
            self.looked_at = (self.delivered, now);
        }
        self.must_ack |= self.limit() >= self.told.limit + self.window / 4;
    }

    pub(super) fn confirm(&mut self, offset: u64) {
        let offset = offset.min(self.delivered);
        if offset > self.confirmed {
            self.confirmed = offset;
            self.must_ack = true;
        }
    }

    /// What is to be acknowledged, if it is time.
    pub(super) fn take_ack(&mut self) -> Option<Ack> {
        if !std::mem::take(&mut self.must_ack) {
            return None;
        }
        let hole_end = self.ahead.first_key_value().map_or(0, |(offset, _)| *offset);
        self.told = Ack { next: self.next(), limit: self.limit(), confirmed: self.confirmed, hole_end };
        Some(self.told)
    }
}
