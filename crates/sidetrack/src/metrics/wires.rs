//! Metrics of flows that the kernel has taken over from our sockets.

use super::buckets::Buckets;
use super::{Metrics, ReasonLabel, raise, signed};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use sidetrack_core::wire::{FREEZE_BOUNDS, Freezes};

/// What is counted of the wire.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WireCounts {
    /// Flows that are there now.
    pub flows: u64,
    /// Flows that went there since the start.
    pub taken: u64,
    /// Flows of an earlier process that this one went on with.
    pub adopted: u64,
    /// Flows that came back into two sockets.
    pub back: u64,
    /// Flows that stayed with their sockets, by the reason.
    pub stayed: Vec<(&'static str, u64)>,
    /// How long neither sockets nor kernel passed the packets of a flow on when the kernel took it over.
    pub freezes: Freezes,
}

#[derive(Debug)]
pub(super) struct WireMetrics {
    flows: Gauge,
    taken: Counter,
    adopted: Counter,
    back: Counter,
    stayed: Family<ReasonLabel, Counter>,
    freezes: Buckets,
}

impl Default for WireMetrics {
    fn default() -> Self {
        Self {
            flows: Gauge::default(),
            taken: Counter::default(),
            adopted: Counter::default(),
            back: Counter::default(),
            stayed: Family::default(),
            freezes: Buckets::new(&FREEZE_BOUNDS),
        }
    }
}

impl WireMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register(
            "wire_flows",
            "Flows on the wire: the kernel passes their packets on",
            self.flows.clone(),
        );
        to.register("wire_taken_flows", "Flows that the kernel has taken over", self.taken.clone());
        to.register(
            "wire_adopted_flows",
            "Flows that an earlier process had left on the wire, and that go on",
            self.adopted.clone(),
        );
        to.register(
            "wire_back_flows",
            "Flows that came back from the wire into two sockets",
            self.back.clone(),
        );
        to.register(
            "wire_stayed_flows",
            "Attempts after which a flow stayed with its sockets, by the reason",
            self.stayed.clone(),
        );
        to.register(
            "wire_freeze_seconds",
            "How long neither sockets nor kernel passed a flow's packets on when the kernel took it over",
            self.freezes.clone(),
        );
    }
}

impl Metrics {
    /// Takes over what is counted of the wire.
    pub fn read_wires(&self, counts: &WireCounts) {
        self.wires.flows.set(signed(counts.flows));
        raise(&self.wires.taken, counts.taken);
        raise(&self.wires.adopted, counts.adopted);
        raise(&self.wires.back, counts.back);
        self.wires.freezes.set(&counts.freezes.counts, counts.freezes.sum);
        for &(reason, total) in &counts.stayed {
            raise(&self.wires.stayed.get_or_create_owned(&ReasonLabel { reason }), total);
        }
    }
}
