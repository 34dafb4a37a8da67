//! How long flows stood still when the kernel took them over.

use std::time::Duration;

/// Upper bounds of what is told apart, seconds. Above the last one there is one more count.
pub const FREEZE_BOUNDS: [f64; 11] =
    [0.000_01, 0.000_025, 0.000_05, 0.000_075, 0.000_1, 0.000_15, 0.000_25, 0.000_5, 0.001, 0.005, 0.025];

/// The freezes of many hand-overs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freezes {
    /// How many lie at or below each of [`FREEZE_BOUNDS`] and above the one before; then those above the last.
    pub counts: [u64; FREEZE_BOUNDS.len() + 1],
    /// All of them together.
    pub sum: Duration,
}

impl Freezes {
    /// Adds one.
    pub fn add(&mut self, freeze: Duration) {
        let seconds = freeze.as_secs_f64();
        let at = FREEZE_BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(FREEZE_BOUNDS.len());
        self.counts[at] += 1;
        self.sum = self.sum.saturating_add(freeze);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_counted_once_at_its_bound() {
        let mut freezes = Freezes::default();
        for us in [10, 11, 100, 1_000, 25_000, 25_001] {
            freezes.add(Duration::from_micros(us));
        }
        assert_eq!(freezes.counts, [1, 1, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1]);
        assert_eq!(freezes.sum, Duration::from_micros(51_122));
    }
}
