//! What one neighbour has of one reliable flow, and what this node has to tell it.

use crate::overlay::frame::{FLOW_WINDOW, Holding};
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long an acknowledgement waits for further messages that it can cover.
pub(super) const ACK_DELAY: Duration = Duration::from_millis(10);

/// Shortest and longest time after which a neighbour is told again what the destination has confirmed.
const REPEAT: Duration = Duration::from_millis(100);
const REPEAT_MAX: Duration = Duration::from_secs(3);

/// Shortest and longest time after which messages without acknowledgement are sent again.
const TIMEOUT_MIN: Duration = Duration::from_millis(50);
const TIMEOUT_MAX: Duration = Duration::from_secs(2);

/// Messages in flight to a neighbour that has not answered in time.
const CAREFUL: usize = 16;

/// What one neighbour has of one flow.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    /// What it has said last.
    said: Option<Holding>,
    /// It has sent these itself since then.
    showed: BTreeSet<u64>,
    /// Messages that were sent to it and not acknowledged, with their times.
    in_flight: BTreeMap<u64, Instant>,
    /// Most messages in flight.
    allowed: usize,
    /// No message before this one has to be sent now.
    cursor: u64,
    /// The number behind the last one that was ever sent to it.
    high: u64,
    /// How often in a row it has not answered in time.
    failures: u32,
    timer: Option<Instant>,
    /// When it was served last, as a number that rises.
    pub turn: u64,
    tell_at: Option<Instant>,
    repeat: Duration,
    /// What is due is a repetition.
    repeats: bool,
}

impl Peer {
    pub(super) fn new(base: u64) -> Self {
        Self {
            said: None,
            showed: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            allowed: usize::try_from(FLOW_WINDOW).unwrap_or(CAREFUL),
            cursor: base,
            high: base,
            failures: 0,
            timer: None,
            turn: 0,
            tell_at: None,
            repeat: REPEAT,
            repeats: false,
        }
    }

    fn has(&self, sequence: u64) -> bool {
        self.showed.contains(&sequence) || self.said.as_ref().is_some_and(|said| said.has(sequence))
    }

    /// The neighbour has sent this message itself, so it has it.
    pub(super) fn showed(&mut self, sequence: u64) {
        self.showed.insert(sequence);
        self.in_flight.remove(&sequence);
    }

    /// There is a new message for it.
    pub(super) fn offer(&mut self, sequence: u64) {
        self.cursor = self.cursor.min(sequence);
    }

    /// Messages before this one are confirmed and need not be sent.
    pub(super) fn confirmed(&mut self, base: u64) {
        self.showed = self.showed.split_off(&base);
        self.in_flight = self.in_flight.split_off(&base);
        self.cursor = self.cursor.max(base);
        if self.in_flight.is_empty() {
            self.timer = None;
        }
        self.repeat = REPEAT;
    }

    /// It is told within [`ACK_DELAY`] what this node has.
    pub(super) fn tell_soon(&mut self, now: Instant) {
        let at = now + ACK_DELAY;
        if self.repeats || self.tell_at.is_none_or(|due| due > at) {
            self.tell_at = Some(at);
            self.repeats = false;
        }
    }

    /// It is told now.
    pub(super) fn tell_now(&mut self, now: Instant) {
        (self.tell_at, self.repeats) = (Some(now), false);
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.tell_at.is_some_and(|at| at <= now)
    }

    /// It is told now. Returns true if it is asked to answer.
    pub(super) fn told(&mut self, now: Instant, confirmed: u64) -> bool {
        let asks = std::mem::take(&mut self.repeats);
        self.tell_at = None;
        let knows = self.said.as_ref().and_then(|said| said.confirmed).map_or(0, |said| said.next);
        if knows < confirmed {
            // Its acknowledgement or this statement may get lost.
            self.tell_at = Some(now + self.repeat);
            self.repeat = (self.repeat * 2).min(REPEAT_MAX);
            self.repeats = true;
        }
        asks
    }

    /// It has said what it has; messages before `base` do not matter any more.
    pub(super) fn heard(
        &mut self,
        now: Instant,
        holding: &Holding,
        (base, confirmed): (u64, u64),
        round_trip: Duration,
    ) {
        let before = self.in_flight.len();
        self.in_flight.retain(|sequence, _| !holding.has(*sequence));
        let has_progress = self.in_flight.len() < before;
        // A message that was sent long before one that it has is lost.
        let end = holding.end();
        let patience = round_trip * 5 / 4 + ACK_DELAY;
        self.in_flight.retain(|sequence, at| *sequence >= end || now.since(*at) < patience);
        let knows = holding.confirmed.map_or(0, |said| said.next) >= confirmed;
        if holding.asks {
            self.tell_soon(now);
        }
        if knows && self.repeats {
            (self.tell_at, self.repeats) = (None, false);
        }
        // If it has restarted or frames have overtaken each other, it has less than it said before.
        self.said = Some(holding.clone());
        self.showed.clear();
        self.cursor = base;
        if has_progress {
            let window = usize::try_from(FLOW_WINDOW).unwrap_or(CAREFUL);
            (self.allowed, self.failures) = ((self.allowed * 2).min(window), 0);
            self.timer = None;
        }
        if self.in_flight.is_empty() {
            self.timer = None;
        }
    }

    /// Messages without acknowledgement are due again when the time for it is over.
    pub(super) fn expire(&mut self, now: Instant, base: u64, timeout: Duration) {
        if self.in_flight.is_empty() {
            return;
        }
        let wait = wait(timeout, self.failures);
        let at = *self.timer.get_or_insert(now + wait);
        if at > now {
            return;
        }
        // An attacker, or a network that is gone or full: try with less, and less often.
        self.in_flight.clear();
        (self.timer, self.allowed, self.cursor) = (None, CAREFUL, base);
        self.failures = self.failures.saturating_add(1);
    }

    /// Returns the next message to send to it, of those from `base` on and before `end`.
    pub(super) fn next(&mut self, base: u64, end: u64, is_kept: impl Fn(u64) -> bool) -> Option<u64> {
        if self.in_flight.len() >= self.allowed {
            return None;
        }
        let known = self.said.as_ref().and_then(|said| said.confirmed).map_or(0, |said| said.next);
        // Before it has said anything, it is taken to know what this node knows.
        let first = if self.said.is_some() { known } else { base };
        let end = end.min(first.saturating_add(FLOW_WINDOW));
        self.cursor = self.cursor.max(base);
        while self.cursor < end {
            let at = self.cursor;
            if is_kept(at) && !self.has(at) && !self.in_flight.contains_key(&at) {
                return Some(at);
            }
            self.cursor += 1;
        }
        None
    }

    /// A message is sent to it. Returns true if it was sent before.
    pub(super) fn sent(&mut self, now: Instant, sequence: u64, timeout: Duration) -> bool {
        self.in_flight.insert(sequence, now);
        self.timer.get_or_insert(now + wait(timeout, self.failures));
        let is_again = sequence < self.high;
        self.high = self.high.max(sequence.saturating_add(1));
        is_again
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let timer = self.timer.filter(|_| !self.in_flight.is_empty());
        timer.into_iter().chain(self.tell_at).min()
    }
}

/// Returns the time-out after this number of failures in a row.
fn wait(timeout: Duration, failures: u32) -> Duration {
    let factor = 1_u32.checked_shl(failures.min(16)).unwrap_or(u32::MAX);
    timeout.max(TIMEOUT_MIN).saturating_mul(factor).min(TIMEOUT_MAX)
}
