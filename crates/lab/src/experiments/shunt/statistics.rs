//! Medians, percentiles and the rank-sum test (Wilcoxon 1945; Mann and Whitney 1947), as the seed's Tables V and VI use it.

/// The value below which `part` (0 to 1) of the values are, in order; 0 of none.
pub fn percentile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

/// The median.
pub fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

/// Standard deviation of a sample.
pub fn deviation(values: &[f64]) -> f64 {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0)).sqrt()
}

/// The chance that two samples of one population differ in their ranks at least so much, both sides: exact, by trying every
/// division of the values into two samples of these sizes, of which there must be few.
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
    use super::{deviation, median, percentile, rank_sum};

    #[test]
    fn the_rank_sum_test_gives_the_values_of_the_tables() {
        // 5 against 5, no overlap: 2 of 252 divisions.
        let p = rank_sum(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]);
        assert!((p - 2.0 / 252.0).abs() < 1e-12, "{p}");
        assert!((rank_sum(&[1.0, 4.0], &[2.0, 3.0]) - 1.0).abs() < 1e-12, "the same sums");
        assert!((rank_sum(&[2.0; 4], &[2.0; 4]) - 1.0).abs() < 1e-12, "ties");
    }

    #[test]
    fn percentiles_are_values_of_the_sample() {
        let values = [5.0, 1.0, 3.0, 2.0, 4.0];
        assert_eq!((median(&values), percentile(&values, 0.99), percentile(&[], 0.5)), (3.0, 5.0, 0.0));
        assert!((deviation(&values) - 2.5_f64.sqrt()).abs() < 1e-12);
    }
}
