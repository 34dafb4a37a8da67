//! Metrics of the memory that the control group allows.

use super::{Metrics, raise, signed};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// What is known about the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounts {
    /// Bytes in use that the kernel cannot take back by itself.
    pub used_bytes: u64,
    /// Bytes that the control group allows; 0 without a limit.
    pub limit_bytes: u64,
    /// Whether new flows are refused.
    pub is_short: bool,
    /// Flows that were refused since the start.
    pub refused: u64,
    /// Bytes that flows buffer because their receivers do not take them.
    pub buffered_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct MemoryMetrics {
    used: Gauge,
    limit: Gauge,
    short: Gauge,
    refused: Counter,
    buffered: Gauge,
}

impl MemoryMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register(
            "memory_used_bytes",
            "Memory of the control group in use, without the pages of files",
            self.used.clone(),
        );
        to.register(
            "memory_limit_bytes",
            "Memory that the control group allows; 0 without a limit",
            self.limit.clone(),
        );
        to.register(
            "memory_short",
            "1 while new flows are refused because memory is short",
            self.short.clone(),
        );
        to.register("memory_refused_flows", "Flows refused because memory was short", self.refused.clone());
        to.register(
            "memory_buffered_bytes",
            "Bytes that flows buffer because their receivers do not take them",
            self.buffered.clone(),
        );
    }
}

impl Metrics {
    /// Takes over what is known about the memory.
    pub fn read_memory(&self, counts: &MemoryCounts) {
        self.memory.used.set(signed(counts.used_bytes));
        self.memory.limit.set(signed(counts.limit_bytes));
        self.memory.short.set(i64::from(counts.is_short));
        raise(&self.memory.refused, counts.refused);
        self.memory.buffered.set(signed(counts.buffered_bytes));
    }
}
