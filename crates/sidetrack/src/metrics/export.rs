//! Metrics of the reports that collectors of others get.

use super::{Metrics, raise, signed};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ToLabel {
    to: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DropLabels {
    to: &'static str,
    reason: &'static str,
}

/// What was sent to one collector since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportCounts {
    /// The word of the collector: `ipfix` or `otlp`.
    pub to: &'static str,
    /// Reports of flows that it, or its network, has taken.
    pub sent: u64,
    /// Reports that were not sent, by the reason.
    pub dropped: Vec<(&'static str, u64)>,
    /// Attempts to reach it, or to send, that failed.
    pub failures: u64,
    /// Flows that wait now.
    pub waiting: u64,
}

/// What is counted about collectors.
#[derive(Default)]
pub(super) struct ExportMetrics {
    reports: Family<ToLabel, Counter>,
    dropped: Family<DropLabels, Counter>,
    failures: Family<ToLabel, Counter>,
    waiting: Family<ToLabel, Gauge>,
}

impl ExportMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register("export_reports", "Reports of flows that a collector has taken", self.reports.clone());
        to.register(
            "export_dropped_reports",
            "Reports of flows that were not sent, by the reason",
            self.dropped.clone(),
        );
        to.register(
            "export_failures",
            "Attempts to reach a collector, or to send to it, that failed",
            self.failures.clone(),
        );
        to.register("export_waiting_flows", "Flows that wait for a collector", self.waiting.clone());
    }
}

impl Metrics {
    /// Takes over what was sent to collectors.
    pub fn read_exports(&self, counts: &[ExportCounts]) {
        let ExportMetrics { reports, dropped, failures, waiting } = &self.export;
        for ExportCounts { to, sent, dropped: drops, failures: failed, waiting: now } in counts {
            let label = ToLabel { to };
            raise(&reports.get_or_create_owned(&label), *sent);
            raise(&failures.get_or_create_owned(&label), *failed);
            waiting.get_or_create_owned(&label).set(signed(*now));
            for (reason, total) in drops {
                raise(&dropped.get_or_create_owned(&DropLabels { to, reason }), *total);
            }
        }
    }
}
