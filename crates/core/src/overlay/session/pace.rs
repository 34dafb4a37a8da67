//! How fast a path carries data: the round trip and the rate, measured from what the other end says has arrived, and how
//! much data may be in flight for them (as BBR does: Cardwell and others, *BBR: Congestion-Based Congestion Control*, 2016).
//!
//! The connections of a path have congestion control of their own. This bound is for the *wait*: data that is given to a slow
//! path too early waits in its buffers, and everything behind it waits at the other end.

use crate::time::Instant;
use std::time::Duration;

/// Data in flight on a path, in round trips. One round trip is what the path needs; the second one lets a higher rate be seen.
const ROUND_TRIPS: u64 = 2;

/// Fewest bytes in flight on a path: two data frames.
const ROOM_MIN: u64 = 32 * 1024;
/// The same while nothing is measured: one data frame. A path that turns out to be slow holds up no more.
const ROOM_FIRST: u64 = 1;

/// How long measurements count: each at least this long and at most twice.
const RATE_COUNTS: Duration = Duration::from_secs(1);
const ROUND_TRIP_COUNTS: Duration = Duration::from_secs(10);

/// How long data may be on a path that has told nothing yet, before it is sent on another path, too.
const PATIENCE_FIRST: Duration = Duration::from_millis(500);

/// The same for a measured path: this number of round trips, and some time for a busy node.
const PATIENCE_ROUND_TRIPS: u32 = 4;
const PATIENCE_EXTRA: Duration = Duration::from_millis(50);

/// The best value of the latest measurements, in two parts of time.
#[derive(Clone, Copy, Debug)]
struct Best {
    now: Option<u64>,
    before: Option<u64>,
    since: Instant,
}

impl Best {
    fn new() -> Self {
        Self { now: None, before: None, since: Instant::ZERO }
    }

    fn note(&mut self, now: Instant, counts: Duration, value: u64, better: fn(u64, u64) -> u64) {
        if now.since(self.since) >= counts {
            *self = Self { now: None, before: self.now, since: now };
        }
        self.now = Some(self.now.map_or(value, |known| better(known, value)));
    }

    fn get(&self, better: fn(u64, u64) -> u64) -> Option<u64> {
        self.now.into_iter().chain(self.before).reduce(better)
    }
}

/// What is known about the speed of a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    round_trip_us: Best,
    /// Bytes per second.
    rate: Best,
    /// A rate was measured while the path had all the data that it could carry. Otherwise the path may be faster.
    is_known: bool,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { round_trip_us: Best::new(), rate: Best::new(), is_known: false }
    }

    /// Notes that data arrived: its round trip, and that `bytes` arrived within `over`. `is_full`: the path had all the data
    /// that it could carry. Otherwise the rate may be that of the application, and counts only if it is higher.
    pub(super) fn measured(
        &mut self,
        now: Instant,
        round_trip: Duration,
        (bytes, over): (u64, Duration),
        is_full: bool,
    ) {
        let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1);
        self.round_trip_us.note(now, ROUND_TRIP_COUNTS, us(round_trip), u64::min);
        let rate = bytes.saturating_mul(1_000_000) / us(over);
        if is_full || self.rate().is_none_or(|known| rate > known) {
            self.rate.note(now, RATE_COUNTS, rate, u64::max);
        }
        self.is_known |= is_full;
    }

    /// Whether the path has all the data that it can carry.
    pub(super) fn is_full(&self, in_flight: u64) -> bool {
        self.round_trip_us().is_some() && in_flight.saturating_mul(4) >= self.room().saturating_mul(3)
    }

    fn rate(&self) -> Option<u64> {
        self.rate.get(u64::max)
    }

    fn round_trip_us(&self) -> Option<u64> {
        self.round_trip_us.get(u64::min)
    }

    /// Returns the most bytes that may be in flight.
    pub(super) fn room(&self) -> u64 {
        let product = self.rate().zip(self.round_trip_us());
        let room = |(rate, us): (u64, u64)| rate.saturating_mul(us) / 1_000_000 * ROUND_TRIPS;
        product.map_or(ROOM_FIRST, |product| room(product).max(ROOM_MIN))
    }

    /// Returns after how long data will have arrived if this number of bytes is in flight with it. `None`: nothing is measured.
    /// What the path carries in a round trip does not wait, and nothing waits while the rate is not known. Otherwise a path that
    /// is used little would seem slow, and stay so.
    pub(super) fn delay(&self, in_flight: u64) -> Option<Duration> {
        let (rate, us) = (self.rate()?.max(1), self.round_trip_us()?);
        if !self.is_known {
            return Some(Duration::from_micros(us / 2));
        }
        let waiting = in_flight.saturating_sub(rate.saturating_mul(us) / 1_000_000);
        let queue = waiting.saturating_mul(1_000_000) / rate;
        Some(Duration::from_micros((us / 2).saturating_add(queue)))
    }

    /// Returns how long data may be in flight before it is sent on another path, too.
    pub(super) fn patience(&self) -> Duration {
        let known = |us| Duration::from_micros(us) * PATIENCE_ROUND_TRIPS + PATIENCE_EXTRA;
        self.round_trip_us().map_or(PATIENCE_FIRST, known)
    }
}
