//! Metrics of the packet engine: what its workers do in their rounds, and what they shed.

use super::{Metrics, ReasonLabel, raise};
use crate::live::work::WorkCounts;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LoadLabel {
    load: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkLabel {
    work: &'static str,
}

/// Rounds, work and shed connections of all workers.
#[derive(Debug, Default)]
pub(super) struct EngineMetrics {
    internal: Counter,
    rounds: Family<LoadLabel, Counter>,
    work: Family<WorkLabel, Counter>,
    shed: Family<ReasonLabel, Counter>,
}

impl EngineMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register(
            "engine_internal",
            "Errors of the packet engine itself: always 0, unless it has a bug",
            self.internal.clone(),
        );
        to.register("engine_rounds", "Rounds of the engine's workers, by their load", self.rounds.clone());
        to.register(
            "engine_work",
            "What the engine's workers did: packets of connections, time-outs, packets of other workers, first packets of \
             new connections",
            self.work.clone(),
        );
        to.register(
            "engine_shed",
            "New connections that the engine did not serve, by the reason",
            self.shed.clone(),
        );
    }
}

impl Metrics {
    /// Takes over how many errors of their own the packet engines have counted.
    pub fn read_engine_errors(&self, total: u64) {
        raise(&self.engine.internal, total);
    }

    /// Takes over what the workers of the packet engines have done. Without an engine there are no such metrics.
    pub fn read_engine(&self, counts: &WorkCounts) {
        if *counts == WorkCounts::default() {
            return;
        }
        for (load, total) in counts.rounds() {
            raise(&self.engine.rounds.get_or_create_owned(&LoadLabel { load }), total);
        }
        for (work, total) in counts.served() {
            raise(&self.engine.work.get_or_create_owned(&WorkLabel { work }), total);
        }
        for (reason, total) in counts.shed() {
            raise(&self.engine.shed.get_or_create_owned(&ReasonLabel { reason }), total);
        }
    }
}
