//! Pauses between attempts to reach a collector.

use std::time::Duration;

/// The first pause.
const FIRST: Duration = Duration::from_millis(250);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(30);

/// Pauses that double, from 250 ms to 30 s, each up to a quarter longer by chance.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The pause before the next attempt. `chance` is any number.
    pub(super) fn next(&mut self, chance: u32) -> Duration {
        let pause = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        pause + pause * (chance % 256) / 1024
    }

    /// Starts again with the shortest pause.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..9).map(|_| backoff.next(0).as_millis()).collect();
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]);
        assert!((0..1000).all(|chance| backoff.next(chance) <= LONGEST + LONGEST / 4));
        backoff.reset();
        assert_eq!(backoff.next(0), FIRST);
    }
}
