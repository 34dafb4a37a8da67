//! Metrics of the history of flows.

use super::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// What is counted about the history.
#[derive(Default)]
pub(super) struct HistoryMetrics {
    missing: Counter,
    bytes: Gauge,
}

impl HistoryMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register(
            "history_missing",
            "Flows that the history lacks: the disk was too slow, or writing failed",
            self.missing.clone(),
        );
        to.register("history_bytes", "Bytes of all files of the history", self.bytes.clone());
    }

    pub(super) fn missing(&self, flows: u64) {
        self.missing.inc_by(flows);
    }
}

impl Metrics {
    /// Takes over how many bytes the files of the history have.
    pub fn read_history(&self, bytes: u64) {
        self.history.bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}
