//! A histogram that adds the observations of many flows in one step.

use super::lock;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Most bounds of a histogram.
const BOUNDS_MAX: usize = 12;

/// From 0.5 ms to 16 s.
pub(super) static CONNECT_BUCKETS: [f64; 12] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 4.0, 16.0];

/// From 1 ms to a day.
pub(super) static DURATION_BUCKETS: [f64; 12] =
    [0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0, 300.0, 1_800.0, 10_800.0, 86_400.0];

/// The wait is limited to tens of milliseconds. A value above the last bucket shows a problem.
pub(super) static SNIFF_BUCKETS: [f64; 8] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1];

/// A histogram of times. Clones share their counts.
#[derive(Clone, Debug)]
pub(super) struct Buckets {
    /// Upper bounds, seconds. Above the last one there is one more bucket.
    bounds: &'static [f64],
    counted: Arc<Mutex<Counted>>,
}

#[derive(Clone, Debug, Default)]
struct Counted {
    sum: Duration,
    counts: [u64; BOUNDS_MAX + 1],
}

/// Observations to be added to a histogram.
#[derive(Debug)]
pub(super) struct Seen {
    bounds: &'static [f64],
    counted: Counted,
}

impl Seen {
    /// Starts without observations.
    pub(super) fn of(buckets: &Buckets) -> Self {
        Self { bounds: buckets.bounds, counted: Counted::default() }
    }

    /// Adds one observation.
    pub(super) fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let at = self.bounds.iter().position(|bound| seconds <= *bound).unwrap_or(self.bounds.len());
        self.counted.counts[at.min(BOUNDS_MAX)] += 1;
        self.counted.sum = self.counted.sum.saturating_add(time);
    }
}

impl Buckets {
    /// A histogram with these upper bounds in seconds, in rising order, at most [`BOUNDS_MAX`].
    pub(super) fn new(bounds: &'static [f64]) -> Self {
        debug_assert!(bounds.len() <= BOUNDS_MAX, "more bounds than there are counters");
        Self { bounds, counted: Arc::default() }
    }

    /// Adds the observations.
    pub(super) fn take(&self, seen: &Seen) {
        let mut counted = lock(&self.counted);
        counted.sum = counted.sum.saturating_add(seen.counted.sum);
        for (count, more) in counted.counts.iter_mut().zip(seen.counted.counts) {
            *count += more;
        }
    }
}

impl Buckets {
    /// Takes over what was counted elsewhere with the same bounds.
    pub(super) fn set(&self, counts: &[u64], sum: Duration) {
        let mut counted = lock(&self.counted);
        counted.sum = sum;
        for (count, all) in counted.counts.iter_mut().zip(counts) {
            *count = *all;
        }
    }
}

impl EncodeMetric for Buckets {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let counted = lock(&self.counted).clone();
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counted.counts).collect();
        let count = counted.counts.iter().sum();
        encoder.encode_histogram::<NoLabelSet>(counted.sum.as_secs_f64(), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl TypedMetric for Buckets {
    const TYPE: MetricType = MetricType::Histogram;
}
