//! Statistics of several samples: medians, quartiles, percentiles, deviation, and the rank-sum test (Wilcoxon 1945;
//! Mann and Whitney 1947) as in NFShunt, Tables V and VI.

use std::fmt;

use serde::Serialize;

/// A median with its quartiles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// First quartile.
    pub low: f64,
    /// Median.
    pub median: f64,
    /// Third quartile.
    pub high: f64,
}

/// `1.02 (0.97 to 1.10)`: the median and the quartiles. One figure stands alone.
impl fmt::Display for Spread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:.2}", self.median)?;
        if self.low == self.high {
            return Ok(());
        }
        write!(formatter, " ({:.2} to {:.2})", self.low, self.high)
    }
}

impl Spread {
    /// Makes that of one value.
    #[must_use]
    pub const fn single(value: f64) -> Self {
        Self { low: value, median: value, high: value }
    }

    /// Computes them for a list of values; `None` if it is empty.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let at = |share| quantile(&values, share);
        Some(Self { low: at(0.25)?, median: at(0.5)?, high: at(0.75)? })
    }
}

/// Returns the value below which `share` (0 to 1) of the ascending `values` lie, interpolated between two of them;
/// `None` if there are none.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let at = values.len().checked_sub(1)? as f64 * share;
    let (below, above) = (values.get(at.floor() as usize)?, values.get(at.ceil() as usize)?);
    Some(below + (above - below) * at.fract())
}

/// Returns the median; `None` if there are no values.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    Spread::of(values.to_vec()).map(|spread| spread.median)
}

/// Returns the least of `values` that at least `share` (0 to 1) of them do not exceed; it is always one of them.
/// Returns NaN without values, so that no bar holds.
#[must_use]
pub fn percentile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() as f64 * share).ceil().max(1.0) as usize - 1;
    sorted.get(at).or(sorted.last()).copied().unwrap_or(f64::NAN)
}

/// Returns the standard deviation of a sample.
#[must_use]
pub fn deviation(values: &[f64]) -> f64 {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0)).sqrt()
}

/// Returns the two-sided probability that two samples of one population differ in their ranks at least as much as
/// these. It is exact: all divisions of the values into two samples of these sizes are tried, so the samples must be
/// small.
#[must_use]
pub fn rank_sum(first: &[f64], second: &[f64]) -> f64 {
    let all: Vec<f64> = first.iter().chain(second).copied().collect();
    let rank = |value: f64| {
        let below = all.iter().filter(|other| **other < value).count();
        let equal = all.iter().filter(|other| **other == value).count();
        below as f64 + (equal as f64 + 1.0) / 2.0
    };
    let ranks: Vec<f64> = all.iter().map(|value| rank(*value)).collect();
    let expected = first.len() as f64 * (all.len() as f64 + 1.0) / 2.0;
    let seen = (ranks.iter().take(first.len()).sum::<f64>() - expected).abs();
    let (mut as_far, mut divisions) = (0_u64, 0_u64);
    for bits in 0_u64..1 << all.len().min(20) {
        if bits.count_ones() as usize != first.len() {
            continue;
        }
        divisions += 1;
        let sum: f64 =
            ranks.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1).map(|(_, rank)| rank).sum();
        as_far += u64::from((sum - expected).abs() >= seen - 1e-9);
    }
    as_far as f64 / divisions.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::{Spread, deviation, median, percentile, rank_sum};

    #[test]
    fn quartiles_interpolate() {
        assert_eq!(Spread::of(Vec::new()), None);
        assert_eq!(Spread::of(vec![2.0]), Some(Spread { low: 2.0, median: 2.0, high: 2.0 }));
        let spread = Spread::of(vec![5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!(spread, Some(Spread { low: 2.0, median: 3.0, high: 4.0 }));
        assert_eq!((median(&[2.0, 1.0]), median(&[])), (Some(1.5), None));
    }

    #[test]
    fn percentiles_are_values_of_the_sample() {
        let values: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let shares = [0.0, 0.5, 0.99, 0.999, 1.0];
        assert_eq!(shares.map(|share| percentile(&values, share)), [1.0, 500.0, 990.0, 999.0, 1000.0]);
        assert!(percentile(&[], 0.5).is_nan());
        assert!((deviation(&[5.0, 1.0, 3.0, 2.0, 4.0]) - 2.5_f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn the_rank_sum_test_gives_the_values_of_the_tables() {
        // 5 against 5, no overlap: 2 of 252 divisions.
        let p = rank_sum(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]);
        assert!((p - 2.0 / 252.0).abs() < 1e-12, "{p}");
        assert!((rank_sum(&[1.0, 4.0], &[2.0, 3.0]) - 1.0).abs() < 1e-12, "the same sums");
        assert!((rank_sum(&[2.0; 4], &[2.0; 4]) - 1.0).abs() < 1e-12, "ties");
    }
}
