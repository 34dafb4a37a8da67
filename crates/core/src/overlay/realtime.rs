//! The recovery of one real-time link: a lost packet is sent again only while it can still arrive in time. Every repetition
//! is the answer to evidence of a loss; there is no schedule of requests or of repetitions (ADR 17).
//!
//! ```text
//! receiving end, for each missing transmission:        sending end, for each packet in the buffer:
//!
//!   a later number came, time is left                     sent ----------------- its time is over ---> forgotten
//!          |                                                |
//!     REQUESTED <---- again, only if a later frame       requested
//!      |     |        shows, after a full round trip,       |
//!  it came   |        that the request was not heard     sent again, once, under a new number; the loss
//!      |     |                                           of this repetition leaves a gap of its own
//!  recovered its time is over ---> given up
//! ```
//!
//! No packet waits for another: the driver passes each one on when it comes. A loss shows when a later transmission comes.
//! So after [`QUIET`] without a packet, the sending end says which transmission was the newest one. All memory is bounded
//! by [`KEPT_MAX`] and [`MISSING_MAX`], and the copies of a packet by [`REPETITIONS_MAX`].

use super::frame::{Frame, Mark, Newest, RESEND_MAX, Repeats, Resend, Spread, Timed};
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// After this time without a packet, the other end learns the number of the newest one.
pub const QUIET: Duration = Duration::from_millis(5);

/// How often it learns the number then, [`QUIET`] apart: a burst of losses may outlast the first time.
pub const NOTES: u8 = 2;

/// How often a packet is sent again at most, whatever the other end requests.
pub const REPETITIONS_MAX: u8 = 4;

/// Most packets in the buffer of the sending end.
pub const KEPT_MAX: usize = 1024;

/// Most missing numbers at the receiving end. If more are missing, the link is down rather than lossy.
pub const MISSING_MAX: usize = 512;

/// A request counts as lost after this part of the round trip, in quarters, and not before [`HEARD_AFTER`].
const HEARD_QUARTERS: u32 = 5;
const HEARD_AFTER: Duration = Duration::from_millis(1);

/// An event that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Send this packet. It is of use for this long.
    Send(Box<Spread>, Duration),
    /// A packet came. It is of use for this long.
    Came(Mark, Duration),
    /// The other end says which transmission was its newest one.
    Newest(Newest),
    /// The other end requests transmissions.
    Requested(Resend),
    /// The round trip of the link, as measured.
    RoundTrip(Duration),
    /// The deadline may have passed.
    Tick,
}

/// Counts of one link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets that were sent for the first time.
    pub sent: u64,
    /// Repetitions that were sent.
    pub repeated: u64,
    /// Numbers that were requested, each time they were.
    pub requested: u64,
    /// Missing packets that came in time by a repetition.
    pub recovered: u64,
    /// Missing packets that did not come in time, or could not have.
    pub given_up: u64,
}

/// A packet at the sending end, under the number of its latest transmission.
#[derive(Clone, Debug)]
struct Kept {
    packet: Box<Spread>,
    /// Its first transmission, and when that was.
    first: (u64, Instant),
    until: Instant,
    repetitions: u8,
}

/// A missing number at the receiving end.
#[derive(Clone, Copy, Debug)]
struct Missing {
    /// The latest request for it, and when that was.
    request: (u32, Instant),
    until: Instant,
}

/// One real-time link: both directions of one end.
#[derive(Clone, Debug, Default)]
pub struct Recovery {
    round_trip: Duration,
    /// The number of the next transmission.
    next: u64,
    kept: BTreeMap<u64, Kept>,
    /// When to tell the newest number, and how often this was done. `None`: often enough.
    tell: Option<(Instant, u8)>,
    /// The highest request of the other end.
    heard: u32,
    /// The number that is expected next.
    expected: u64,
    missing: BTreeMap<u64, Missing>,
    /// How long the latest packet was of use when it came.
    left: Duration,
    /// The latest request of this end.
    request: u32,
    counts: Counts,
    outputs: VecDeque<Frame>,
}

impl Recovery {
    /// Returns the counts since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Returns the number of packets in the buffer of the sending end, at most [`KEPT_MAX`], and of missing numbers at the
    /// receiving end, at most [`MISSING_MAX`].
    pub fn held(&self) -> (usize, usize) {
        (self.kept.len(), self.missing.len())
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        match input {
            Input::Send(packet, left) => self.send(now, packet, left),
            Input::Came(mark, left) => self.came(now, mark, left),
            Input::Newest(newest) => {
                let from = self.expected;
                self.reached(newest.number.saturating_add(1));
                self.look(now, from..self.expected, newest.heard, self.left);
            }
            Input::Requested(resend) => self.requested(now, &resend),
            Input::RoundTrip(time) => self.round_trip = time,
            Input::Tick => {}
        }
        if let Some((_, told)) = self.tell.filter(|(at, _)| *at <= now) {
            self.tell = (told + 1 < NOTES).then_some((now + QUIET, told + 1));
            // A packet was sent, so there is a newest number.
            let newest = Newest { number: self.next.saturating_sub(1), heard: self.heard };
            self.outputs.push_back(Frame::Newest(newest));
        }
    }

    /// Returns the next frame to send to the other end, or `None`.
    pub fn poll(&mut self) -> Option<Frame> {
        self.outputs.pop_front()
    }

    /// Returns when to call `handle(now, Input::Tick)`. What only has to be forgotten waits for another event.
    pub fn deadline(&self) -> Option<Instant> {
        self.tell.map(|(at, _)| at)
    }

    fn send(&mut self, now: Instant, packet: Box<Spread>, left: Duration) {
        // Most packets leave the buffer in order, so those whose time is over are at its front, or soon will be.
        while let Some(first) = self.kept.first_entry()
            && (first.get().until <= now || self.kept.len() >= KEPT_MAX)
        {
            self.kept.pop_first();
        }
        self.counts.sent += 1;
        let kept = Kept { packet, first: (self.next, now), until: now + left, repetitions: 0 };
        self.transmit(now, kept, None);
    }

    /// Sends a packet under the next number, and keeps it under that number.
    fn transmit(&mut self, now: Instant, kept: Kept, repeats: Option<Repeats>) {
        let mut packet = kept.packet.clone();
        let waited = now.since(kept.first.1).as_micros();
        packet.grow_older(u32::try_from(waited).unwrap_or(u32::MAX));
        let mark = Mark { number: self.next, heard: self.heard, repeats };
        self.kept.insert(self.next, kept);
        // No machine sends 2^64 packets.
        self.next = self.next.saturating_add(1);
        self.tell = Some((now + QUIET, 0));
        self.outputs.push_back(Frame::Timed(Timed { mark, packet }));
    }

    fn requested(&mut self, now: Instant, resend: &Resend) {
        self.heard = self.heard.max(resend.request);
        for lost in &resend.numbers {
            // A number is answered once: the packet moves to the number of its repetition.
            let Some(mut kept) = self.kept.remove(lost) else { continue };
            if now + self.round_trip / 2 > kept.until || kept.repetitions >= REPETITIONS_MAX {
                continue;
            }
            kept.repetitions += 1;
            self.counts.repeated += 1;
            let repeats = Repeats { first: kept.first.0, lost: *lost };
            self.transmit(now, kept, Some(repeats));
        }
    }

    fn came(&mut self, now: Instant, mark: Mark, left: Duration) {
        let Mark { number, heard, repeats } = mark;
        // A number that came late was not lost.
        self.missing.remove(&number);
        if let Some(Repeats { first, lost }) = repeats {
            let found = [first, lost].map(|number| self.missing.remove(&number));
            if let Some(missing) = found.into_iter().flatten().next() {
                let in_time = missing.until >= now;
                let count = if in_time { &mut self.counts.recovered } else { &mut self.counts.given_up };
                *count += 1;
            }
        }
        let from = self.expected;
        self.reached(number);
        let gap = from..self.expected;
        if number >= self.expected {
            self.reached(number.saturating_add(1));
        }
        // What is missing was sent a little before this packet, and has about the same time left. A packet with a much
        // shorter deadline than the one before it says nothing about that one.
        let longest = left.max(self.left);
        self.left = left;
        self.look(now, gap, heard, longest);
    }

    /// The transmissions before this number were sent.
    fn reached(&mut self, number: u64) {
        self.expected = self.expected.max(number);
    }

    /// Looks for evidence of losses: the numbers that are missing now, and requests that the other end has not heard.
    fn look(&mut self, now: Instant, gap: std::ops::Range<u64>, heard: u32, left: Duration) {
        let before = self.missing.len();
        self.missing.retain(|_, missing| missing.until > now);
        self.counts.given_up += (before - self.missing.len()) as u64;
        let patience = (self.round_trip * HEARD_QUARTERS / 4).max(HEARD_AFTER);
        let is_unheard = |missing: &Missing| missing.request.0 > heard && missing.request.1 + patience <= now;
        let in_time = |missing: &Missing| now + self.round_trip <= missing.until;
        let again = self.missing.iter().filter(|(_, missing)| is_unheard(missing) && in_time(missing));
        let mut wanted: Vec<(u64, Instant)> =
            again.map(|(number, missing)| (*number, missing.until)).collect();
        let count = gap.end.saturating_sub(gap.start);
        let room = (MISSING_MAX - self.missing.len()) as u64;
        // A request and its answer take a round trip.
        if left < self.round_trip || count > room {
            self.counts.given_up = self.counts.given_up.saturating_add(count);
        } else {
            wanted.extend(gap.map(|number| (number, now + left)));
        }
        for numbers in wanted.chunks(RESEND_MAX) {
            self.request = self.request.saturating_add(1);
            self.counts.requested += numbers.len() as u64;
            let request = (self.request, now);
            let missing = numbers.iter().map(|(number, until)| (*number, Missing { request, until: *until }));
            self.missing.extend(missing);
            let numbers = numbers.iter().map(|(number, _)| *number).collect();
            self.outputs.push_back(Frame::Resend(Resend { request: self.request, numbers }));
        }
    }
}
