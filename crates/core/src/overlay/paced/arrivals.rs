//! The packets that have arrived, and when to say so: often enough for the sender, and seldom enough for the rate.

use super::flight::{expand, low};
use super::ranges::Ranges;
use crate::overlay::frame::{Paced, PacedAck, RUNS_MAX, Run};
use crate::time::Instant;
use std::time::Duration;

/// Acknowledgements take at most this part of the bytes that have arrived: 1 of 32.
pub const ACK_SHARE: usize = 32;

/// An acknowledgement follows after this time at the earliest.
const ACK_EVERY: Duration = Duration::from_millis(1);

/// An acknowledgement follows after this time at the latest, although it takes more than its share.
pub const ACK_DELAY_MAX: Duration = Duration::from_millis(20);

/// Most bytes of budget that are saved up.
const SAVED_MAX: usize = 4_096;

/// The arrived packets of one direction.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    got: Ranges,
    /// Behind the newest packet.
    next: u64,
    newest_at: Instant,
    /// Packets before this one do not matter.
    floor: u64,
    /// The first packet that is not acknowledged came then.
    waiting: Option<Instant>,
    told: Instant,
    /// Bytes that acknowledgements may take.
    budget: usize,
}

impl Arrivals {
    /// Returns an empty list. The first packet has a number near `first`.
    pub(super) fn new(first: u64, now: Instant) -> Self {
        Self {
            got: Ranges::default(),
            next: first,
            newest_at: now,
            floor: 0,
            waiting: None,
            told: now,
            budget: 0,
        }
    }

    /// Notes that a packet of this size has arrived.
    pub(super) fn came(&mut self, now: Instant, packet: &Paced, bytes: usize) {
        let number = expand(packet.number, self.next);
        self.floor = self.floor.max(number.saturating_sub(packet.back.into()));
        self.got.insert(number..number.saturating_add(1));
        self.got.remove(0..self.floor);
        while self.got.len() > RUNS_MAX + 1 {
            if let Some(oldest) = self.got.first() {
                self.got.remove(oldest);
            }
        }
        if number >= self.next {
            (self.next, self.newest_at) = (number.saturating_add(1), now);
        }
        self.budget = (self.budget + bytes / ACK_SHARE).min(SAVED_MAX);
        self.waiting.get_or_insert(now);
    }

    /// Returns when an acknowledgement is due. `around`: bytes that a datagram adds to it.
    pub(super) fn due(&self, around: usize) -> Option<Instant> {
        let waiting = self.waiting?;
        let latest = waiting + ACK_DELAY_MAX;
        let earliest = self.told + ACK_EVERY;
        let pays = self.budget >= self.bytes() + around;
        Some(if pays { earliest.max(waiting).min(latest) } else { latest })
    }

    /// Returns the bytes of an acknowledgement.
    pub(super) fn bytes(&self) -> usize {
        11 + 4 * self.got.len().saturating_sub(1)
    }

    /// Returns an acknowledgement of all that has arrived.
    pub(super) fn acknowledge(&mut self, now: Instant, around: usize) -> Option<PacedAck> {
        self.budget = self.budget.saturating_sub(self.bytes() + around);
        (self.waiting, self.told) = (None, now);
        let mut runs = self.got.newest_first();
        let newest = runs.next()?;
        let short = |count: u64| u16::try_from(count).unwrap_or(u16::MAX);
        let mut ack = PacedAck {
            newest: low(newest.end - 1),
            age_us: u32::try_from(now.since(self.newest_at).as_micros()).unwrap_or(u32::MAX),
            arrived: short(newest.end - newest.start),
            runs: Vec::new(),
        };
        // A run that is longer than its field would put the older ones at wrong places: leave them out.
        let mut whole = newest.end - newest.start <= u16::MAX.into();
        let mut above = newest.start;
        for run in runs.take(RUNS_MAX) {
            let (missing, arrived) = (above - run.end, run.end - run.start);
            if !whole || missing > u16::MAX.into() {
                break;
            }
            ack.runs.push(Run { missing: short(missing), arrived: short(arrived) });
            whole = arrived <= u16::MAX.into();
            above = run.start;
        }
        Some(ack)
    }
}
