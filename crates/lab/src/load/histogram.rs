//! Latencies in buckets of 1.6 % width: constant memory, no sorting.

/// Buckets per power of two; the relative error is half of 1/32.
const STEPS: u32 = 32;

/// Counts of durations in nanoseconds.
#[derive(Debug, Clone)]
pub struct Histogram {
    buckets: Vec<u64>,
    total: u64,
}

impl Histogram {
    /// Makes an empty one.
    #[must_use]
    pub fn new() -> Self {
        Self { buckets: vec![0; (64 * STEPS) as usize], total: 0 }
    }

    /// Counts one duration, in nanoseconds.
    pub fn record(&mut self, ns: u64) {
        if let Some(bucket) = self.buckets.get_mut(bucket(ns)) {
            *bucket += 1;
            self.total += 1;
        }
    }

    /// Removes all counts.
    pub fn clear(&mut self) {
        self.buckets.fill(0);
        self.total = 0;
    }

    /// Returns the duration below which `share` (0 to 1) of the counts lie, in nanoseconds; 0 if empty.
    #[must_use]
    pub fn quantile(&self, share: f64) -> u64 {
        let wanted = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (position, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted && self.total > 0 {
                return middle(position as u32);
            }
        }
        0
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

fn bucket(ns: u64) -> usize {
    if ns < u64::from(STEPS) {
        return ns as usize;
    }
    let exponent = ns.ilog2() - STEPS.ilog2();
    ((exponent + 1) * STEPS) as usize + ((ns >> exponent) as usize - STEPS as usize)
}

fn middle(position: u32) -> u64 {
    if position < STEPS {
        return position.into();
    }
    let exponent = position / STEPS - 1;
    let low = u64::from(STEPS + position % STEPS) << exponent;
    low + (1 << exponent) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_falls_within_two_per_cent_of_its_bucket() {
        for shift in 0..63 {
            for value in [1u64 << shift, (1 << shift) + (1 << shift) / 3] {
                let error = middle(bucket(value) as u32).abs_diff(value) as f64 / value as f64;
                assert!(error < 0.02, "{value}: {error}");
            }
        }
    }

    #[test]
    fn quantiles_of_a_ramp() {
        let mut histogram = Histogram::new();
        assert_eq!(histogram.quantile(0.5), 0);
        (1..=1000).for_each(|value| histogram.record(value * 1000));
        let near = |found: u64, wanted: u64| found.abs_diff(wanted) * 50 < wanted;
        assert!(near(histogram.quantile(0.5), 500_000));
        assert!(near(histogram.quantile(0.99), 990_000));
        histogram.clear();
        assert_eq!(histogram.quantile(0.99), 0);
    }
}
