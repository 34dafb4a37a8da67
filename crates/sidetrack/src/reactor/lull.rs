//! Estimates how long a loop will be idle, from the last idle times.

use std::time::Duration;

/// Below this time sleeping does not pay: a sleep and its wake-up take about as long, in both threads.
pub(super) const SHORT: Duration = Duration::from_micros(10);
/// Longer times count as this, so that one of them is forgotten after a few tens of short ones.
const LONG: Duration = Duration::from_millis(1);

/// A moving average of the last idle times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lull {
    mean_ns: u64,
}

impl Default for Lull {
    fn default() -> Self {
        Self { mean_ns: LONG.as_nanos() as u64 }
    }
}

impl Lull {
    /// Whether the next idle time will probably be short.
    pub(super) fn is_short(self) -> bool {
        self.mean_ns < SHORT.as_nanos() as u64
    }

    /// Adds one idle time.
    pub(super) fn lasted(&mut self, time: Duration) {
        let time = time.min(LONG).as_nanos() as u64;
        self.mean_ns = (self.mean_ns * 7 + time) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_is_never_idle_for_long_does_not_sleep_and_one_that_rests_does() {
        let mut lull = Lull::default();
        assert!(!lull.is_short(), "nothing is known");
        let mut lasted = |time, times| {
            (0..times).for_each(|_| lull.lasted(Duration::from_micros(time)));
            lull.is_short()
        };
        assert!(lasted(2, 60), "events come every 2 us");
        assert!(!lasted(100, 1), "a rest");
        assert!(lasted(2, 20), "and on");
        assert!(!lasted(30, 4), "events come every 30 us: each look of 10 us would be in vain");
        assert!(!lasted(1_000_000, 1));
        assert!(!lasted(2, 10) && lasted(2, 20), "a second counts no more than a millisecond");
    }
}
