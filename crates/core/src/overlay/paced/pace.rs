//! The rate of a link: a token bucket, kept as the time when all that was sent is paid for (the generic cell rate algorithm,
//! ITU-T I.371). In any time T, at most `rate * T + burst` is sent.

use crate::time::Instant;
use std::time::Duration;

/// How far sending may be ahead of the rate, as time. A driver that wakes up this much too late loses no capacity.
pub const BURST: Duration = Duration::from_millis(4);

/// Bytes that the burst holds at least, whatever the rate: two packets of the usual size.
pub const BURST_MIN_BYTES: usize = 3_000;

/// The driver is woken for this much of the rate, not for each packet: less work for the same rate.
const QUANTUM: Duration = Duration::from_millis(1);

/// The token bucket of one direction of a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    bits_per_second: u64,
    burst: Duration,
    /// When all that was sent is paid for.
    paid: Instant,
}

impl Pace {
    /// Makes a bucket that is full. `bits_per_second` is above 0.
    pub(super) fn new(bits_per_second: u64, now: Instant) -> Self {
        let mut pace = Self { bits_per_second, burst: BURST, paid: now };
        pace.set_rate(bits_per_second);
        pace
    }

    /// Changes the rate.
    pub(super) fn set_rate(&mut self, bits_per_second: u64) {
        self.bits_per_second = bits_per_second.max(1);
        self.burst = BURST.max(self.time(BURST_MIN_BYTES));
    }

    /// Returns the time that these bytes take at the rate, rounded up.
    pub(super) fn time(&self, bytes: usize) -> Duration {
        let bits = (bytes as u128) * 8 * 1_000_000_000;
        let nanos = bits.div_ceil(u128::from(self.bits_per_second));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// Returns the most bytes of a packet: two of them are in the burst.
    pub(super) fn packet_bytes(&self) -> usize {
        self.bytes(self.burst) / 2
    }

    /// Returns the bytes that the burst holds.
    pub(super) fn burst_bytes(&self) -> usize {
        self.bytes(self.burst)
    }

    fn bytes(&self, time: Duration) -> usize {
        let bytes = u128::from(self.bits_per_second) * time.as_nanos() / 8_000_000_000;
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Returns when these bytes may be sent.
    pub(super) fn when(&self, bytes: usize) -> Instant {
        let ahead = (self.paid + self.time(bytes)).as_nanos();
        let burst = u64::try_from(self.burst.as_nanos()).unwrap_or(u64::MAX);
        Instant::from_nanos(ahead.saturating_sub(burst))
    }

    /// Returns when to wake up to send packets of these bytes.
    pub(super) fn wake(&self, packet_bytes: usize) -> Instant {
        self.when(packet_bytes.max(self.bytes(QUANTUM)).min(self.burst_bytes()))
    }

    /// Whether these bytes may be sent now.
    pub(super) fn allows(&self, now: Instant, bytes: usize) -> bool {
        self.when(bytes) <= now
    }

    /// Notes that bytes were sent. What was not allowed delays what follows.
    pub(super) fn spend(&mut self, now: Instant, bytes: usize) {
        self.paid = self.paid.max(now) + self.time(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_window_holds_more_than_the_rate_and_the_burst() {
        for rate in [64_000, 1_000_000, 200_000_000, 40_000_000_000_u64] {
            let start = Instant::from_millis(5);
            let mut pace = Pace::new(rate, start);
            let (mut now, mut sent) = (start, Vec::new());
            for turn in 0..3_000_usize {
                let bytes = 40 + turn * 37 % (pace.packet_bytes().min(1_500) - 40);
                now = now.max(pace.when(bytes));
                assert!(pace.allows(now, bytes));
                pace.spend(now, bytes);
                sent.push((now, bytes));
                if turn % 500 == 0 {
                    now = now + Duration::from_millis(7);
                }
            }
            for (first, (from, _)) in sent.iter().enumerate().step_by(97) {
                let mut bytes = 0;
                for (at, more) in &sent[first..] {
                    bytes += more;
                    let allowed = pace.bytes(at.since(*from)) + pace.burst_bytes() + 2;
                    assert!(bytes <= allowed, "{rate}: {bytes} in {:?}", at.since(*from));
                }
            }
        }
    }

    #[test]
    fn what_was_spent_without_leave_delays_the_rest() {
        let mut pace = Pace::new(8_000_000, Instant::ZERO);
        assert_eq!((pace.burst_bytes(), pace.time(1_000)), (4_000, Duration::from_millis(1)));
        pace.spend(Instant::ZERO, 10_000);
        assert_eq!(pace.when(1_000), Instant::from_millis(7));
        assert_eq!(pace.when(0), Instant::from_millis(6));
    }
}
