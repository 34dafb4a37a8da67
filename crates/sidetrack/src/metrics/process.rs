//! Metrics of the process itself, under the names that all Prometheus clients use. They have no prefix.

use super::{Metrics, Surroundings, signed};
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;

/// What the process uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUse {
    /// CPU time in user and kernel mode since the start, microseconds.
    pub cpu_us: u64,
    /// Resident memory, bytes.
    pub resident_bytes: u64,
    /// Virtual memory, bytes.
    pub virtual_bytes: u64,
    /// When it started, milliseconds since 1970.
    pub started_unix_ms: u64,
}

pub(super) struct ProcessMetrics {
    registry: Registry,
    cpu: Counter<f64, AtomicU64>,
    resident: Gauge,
    virtual_memory: Gauge,
    open_fds: Gauge,
    max_fds: Gauge,
    started: Gauge<f64, AtomicU64>,
}

impl Default for ProcessMetrics {
    fn default() -> Self {
        let mut made = Self {
            registry: Registry::default(),
            cpu: Counter::default(),
            resident: Gauge::default(),
            virtual_memory: Gauge::default(),
            open_fds: Gauge::default(),
            max_fds: Gauge::default(),
            started: Gauge::default(),
        };
        let to = &mut made.registry;
        to.register("process_cpu_seconds", "CPU time in user and kernel mode", made.cpu.clone());
        to.register("process_resident_memory_bytes", "Resident memory", made.resident.clone());
        to.register("process_virtual_memory_bytes", "Virtual memory", made.virtual_memory.clone());
        to.register("process_open_fds", "Descriptors open", made.open_fds.clone());
        to.register("process_max_fds", "Descriptors allowed (RLIMIT_NOFILE)", made.max_fds.clone());
        to.register("process_start_time_seconds", "Start of the process since 1970", made.started.clone());
        made
    }
}

impl ProcessMetrics {
    /// Appends them, without the end of the text.
    pub(super) fn write(&self, surroundings: &Surroundings, out: &mut String) {
        let used = &surroundings.process;
        self.cpu.inc_by((used.cpu_us as f64 / 1e6 - self.cpu.get()).max(0.0));
        self.resident.set(signed(used.resident_bytes));
        self.virtual_memory.set(signed(used.virtual_bytes));
        self.open_fds.set(signed(surroundings.fds_in_use));
        self.max_fds.set(signed(surroundings.fds_limit));
        self.started.set(used.started_unix_ms as f64 / 1e3);
        // Writing to a String cannot fail.
        let _ = text::encode_registry(out, &self.registry);
    }
}

impl Metrics {
    /// Registers what is told of this process under our own names.
    pub(super) fn register_process(&mut self) {
        let to = &mut self.registry;
        to.register(
            "records_dropped",
            "Records lost: their reader was too slow, or writing failed",
            self.records_dropped.clone(),
        );
        to.register("fds_in_use", "Descriptors open", self.fds_in_use.clone());
        to.register("fds_limit", "Descriptors allowed (RLIMIT_NOFILE)", self.fds_limit.clone());
        to.register("config_generation", "Configuration in force, from 1", self.generation.clone());
        to.register(
            "config_last_reload_success",
            "1 if the latest attempt to load a configuration went well",
            self.reload_success.clone(),
        );
        to.register("build", "This build", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
    }
}
