//! Bandwidth limits: a token bucket over bytes, and the stage that limits a flow with it.

use super::{Directions, Interest, Stage};
use crate::flow::Side;
use crate::time::Instant;
use std::time::Duration;

/// A token bucket of bytes (RFC 2697 Sec. 3, with one rate and one burst).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByteBucket {
    bytes_per_second: u64,
    burst_bytes: u64,
    /// Bytes times [`NANOS`]. A negative level is a debt.
    level: i128,
    updated: Instant,
}

const NANOS: i128 = 1_000_000_000;

/// When the bucket is empty, the next check comes after this part of a second's bytes, or after the burst if that is
/// smaller. Waking for every byte would cost more than the bytes. The rest of the burst absorbs late checks without
/// losing bytes.
const QUANTA_PER_SECOND: u64 = 1000;

impl ByteBucket {
    /// Makes a full bucket of `burst_bytes` (at least 1) that gains `bytes_per_second` (at least 1).
    pub fn new(bytes_per_second: u64, burst_bytes: u64, now: Instant) -> Self {
        let burst_bytes = burst_bytes.max(1);
        let level = i128::from(burst_bytes) * NANOS;
        Self { bytes_per_second: bytes_per_second.max(1), burst_bytes, level, updated: now }
    }

    /// Returns the number of bytes available now.
    pub fn available(&mut self, now: Instant) -> u64 {
        self.refill(now);
        u64::try_from((self.level / NANOS).max(0)).unwrap_or(u64::MAX)
    }

    /// Takes bytes. If that is more than is available, the bucket goes into debt, which must be refilled first. This
    /// happens because flows on several threads that share a bucket may all have been offered the same bytes.
    pub fn take(&mut self, now: Instant, bytes: u64) {
        self.refill(now);
        self.level = self.level.saturating_sub(i128::from(bytes) * NANOS);
    }

    /// Returns when to ask again after [`ByteBucket::available`] returned 0.
    pub fn deadline(&self) -> Instant {
        let quantum = (self.bytes_per_second / QUANTA_PER_SECOND).clamp(1, self.burst_bytes);
        let lacking = (i128::from(quantum) * NANOS - self.level).max(0).unsigned_abs();
        let nanos = lacking.div_ceil(u128::from(self.bytes_per_second));
        self.updated + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn refill(&mut self, now: Instant) {
        let gained =
            now.since(self.updated).as_nanos().cast_signed().saturating_mul(self.bytes_per_second.into());
        self.level = self.level.saturating_add(gained).min(i128::from(self.burst_bytes) * NANOS);
        self.updated = self.updated.max(now);
    }
}

/// The source of a [`Throttle`]'s bytes: its own bucket, or one shared with other flows.
pub trait Tokens: Send {
    /// Returns the number of bytes available now, or the time to ask again if there are none.
    fn available(&mut self, now: Instant) -> Result<u64, Instant>;
    /// Takes bytes.
    fn take(&mut self, now: Instant, bytes: u64);
}

impl Tokens for ByteBucket {
    fn available(&mut self, now: Instant) -> Result<u64, Instant> {
        match ByteBucket::available(self, now) {
            0 => Err(self.deadline()),
            bytes => Ok(bytes),
        }
    }

    fn take(&mut self, now: Instant, bytes: u64) {
        ByteBucket::take(self, now, bytes);
    }
}

/// Limits a flow to a bandwidth. It needs only byte counts, so the kernel may move the bytes.
#[derive(Clone, Debug)]
pub struct Throttle<T> {
    tokens: T,
    directions: Directions,
    /// By side: when to ask again.
    waits: [Option<Instant>; 2],
}

impl<T: Tokens> Throttle<T> {
    /// Makes a throttle for one direction, or for both together, with these tokens.
    pub const fn new(tokens: T, directions: Directions) -> Self {
        Self { tokens, directions, waits: [None; 2] }
    }
}

impl<T: Tokens> Stage for Throttle<T> {
    fn interest(&self, from: Side) -> Interest {
        if self.directions.contains(from) { Interest::Count } else { Interest::Nothing }
    }

    fn deadline(&self, from: Side) -> Option<Instant> {
        self.waits[from as usize]
    }

    fn allowance(&mut self, now: Instant, from: Side) -> usize {
        let (bytes, wait) = match self.tokens.available(now) {
            Ok(bytes) => (usize::try_from(bytes).unwrap_or(usize::MAX), None),
            Err(until) => (0, Some(until)),
        };
        self.waits[from as usize] = wait;
        bytes
    }

    fn count(&mut self, now: Instant, _from: Side, bytes: usize) {
        self.tokens.take(now, bytes as u64);
    }

    fn tick(&mut self, _now: Instant, from: Side, _out: &mut Vec<u8>) {
        self.waits[from as usize] = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::function::LimitSpec;

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    #[test]
    fn what_two_flows_took_at_once_is_owed() {
        let mut bucket = ByteBucket::new(1_000_000, 5_000, at(0));
        // Both ask before either takes.
        assert_eq!((bucket.available(at(0)), bucket.available(at(0))), (5_000, 5_000));
        bucket.take(at(0), 5_000);
        bucket.take(at(0), 5_000);
        assert_eq!(bucket.available(at(5)), 0, "the debt comes in first");
        assert_eq!((bucket.deadline(), bucket.available(at(6))), (at(6), 1_000));
        assert_eq!(bucket.available(at(10)), 5_000);
    }

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let mut bucket = ByteBucket::new(1_000_000, 5_000, at(0));
        assert_eq!(bucket.available(at(0)), 5_000);
        bucket.take(at(0), 5_000);
        assert_eq!(bucket.available(at(0)), 0);
        assert_eq!((bucket.deadline(), bucket.available(at(1))), (at(1), 1_000));
        assert_eq!(bucket.available(at(5)), 5_000);
        assert_eq!(bucket.available(at(50_000)), 5_000);
        let mut moved = 0;
        let mut now = at(60_000);
        while now < at(70_000) {
            match Tokens::available(&mut bucket, now) {
                Ok(bytes) => {
                    Tokens::take(&mut bucket, now, bytes);
                    moved += bytes;
                }
                Err(later) => {
                    assert!(later > now);
                    now = later;
                }
            }
        }
        assert!((10_000_000..=10_010_000).contains(&moved), "{moved} in ten seconds");
    }

    /// Returns when and how much a flow moves from 0 to `end` by this bucket, if it always has data to send.
    fn greedy(rate: u64, end: Instant) -> Vec<(Instant, u64)> {
        let mut bucket = ByteBucket::new(rate, LimitSpec::usual_burst_bytes(rate), at(0));
        let (mut now, mut moved) = (at(0), Vec::new());
        while now < end {
            match Tokens::available(&mut bucket, now) {
                Ok(bytes) => {
                    Tokens::take(&mut bucket, now, bytes);
                    moved.push((now, bytes));
                }
                Err(later) => now = later,
            }
        }
        moved
    }

    #[test]
    fn ten_seconds_are_within_a_hundredth_and_no_tenth_of_a_second_bursts() {
        // From 64 kbit/s to 1 Gbit/s.
        for rate in [8_000, 31_250, 125_000, 1_250_000, 12_500_000, 125_000_000] {
            let moved = greedy(rate, at(11_000));
            let since = |from: Instant| moved.iter().filter(move |(when, _)| *when >= from);
            let ten: u64 = since(at(1000)).map(|(_, bytes)| bytes).sum();
            assert!(ten.abs_diff(10 * rate) * 100 <= 10 * rate, "{ten} bytes in ten seconds at {rate}");
            let most = (rate / 10 + rate * 6 / 1000).max(rate / 10 + 1460);
            for (start, _) in &moved {
                let end = *start + Duration::from_millis(100);
                let window: u64 = since(*start).take_while(|(when, _)| *when < end).map(|(_, n)| n).sum();
                assert!(window <= most, "{window} bytes in 100 ms at {rate}: at most {most}");
            }
        }
    }

    #[test]
    fn odd_rates_neither_panic_nor_stall() {
        for (rate, burst) in [(0, 0), (1, 1), (u64::MAX, u64::MAX), (7, 1 << 40)] {
            let mut bucket = ByteBucket::new(rate, burst, at(1));
            let first = bucket.available(at(1));
            bucket.take(at(1), first);
            bucket.take(at(0), 1);
            let later = bucket.deadline();
            assert!(bucket.available(later) > 0 || later == Instant::from_nanos(u64::MAX), "{rate} {burst}");
            let _ = bucket.available(Instant::from_nanos(u64::MAX));
        }
    }

    #[test]
    fn a_direction_that_is_not_held_is_left_alone() {
        let throttle = Throttle::new(ByteBucket::new(1, 1, at(0)), Directions::Down);
        assert_eq!(throttle.interest(Side::Client), Interest::Nothing);
        assert_eq!(throttle.interest(Side::Server), Interest::Count);
    }
}
