//! Latencies in nanoseconds: constant memory, no sorting.

/// Counts of durations in nanoseconds.
#[derive(Debug, Clone)]
pub struct Histogram(hdrhistogram::Histogram<u64>);

/// Largest duration that is told from longer ones: an hour, in nanoseconds.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// Digits of a duration that count: the error is at most 0.1 %.
const DIGITS: u8 = 3;

impl Histogram {
    /// Makes an empty one.
    #[must_use]
    pub fn new() -> Self {
        let histogram = hdrhistogram::Histogram::new_with_max(LONGEST_NS, DIGITS);
        Self(histogram.expect("these bounds are valid"))
    }

    /// Counts one duration, in nanoseconds.
    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    /// Removes all counts.
    pub fn clear(&mut self) {
        self.0.reset();
    }

    /// Returns the duration below which `share` (0 to 1) of the counts lie, in nanoseconds; 0 if empty.
    #[must_use]
    pub fn quantile(&self, share: f64) -> u64 {
        self.0.value_at_quantile(share)
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_a_ramp() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.quantile(0.5), 0);
        (1..=1000).for_each(|value| histogram.record(value * 1000));
        let near = |found: u64, wanted: u64| found.abs_diff(wanted) * 50 < wanted;
        assert!(near(histogram.quantile(0.5), 500_000));
        assert!(near(histogram.quantile(0.99), 990_000));
        histogram.record(u64::MAX);
        assert!(histogram.quantile(1.0) >= LONGEST_NS, "longer ones count as the longest");
        histogram.clear();
        assert_eq!(histogram.quantile(0.99), 0);
    }
}
