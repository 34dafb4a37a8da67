//! Metrics of the profile: counted while `sidetrack profile` measures.

use super::{Metrics, raise};
use crate::live::profile::{Counts, Stage};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

/// Events and time of each stage.
#[derive(Debug, Default)]
pub(super) struct ProfileMetrics {
    events: Family<StageLabel, Counter>,
    busy_ns: Family<StageLabel, Counter>,
}

impl ProfileMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register("profile_events", "Events of each stage while a profile ran", self.events.clone());
        to.register("profile_busy_ns", "Time at each stage while a profile ran", self.busy_ns.clone());
    }
}

impl Metrics {
    /// Takes over the counts of the profile. Stages that were never measured are left out.
    pub fn read_profile(&self, counts: &Counts) {
        for (stage, busy) in Stage::ALL.into_iter().zip(counts).filter(|(_, busy)| busy.events > 0) {
            let label = StageLabel { stage: stage.as_str() };
            raise(&self.profile.events.get_or_create_owned(&label), busy.events);
            raise(&self.profile.busy_ns.get_or_create_owned(&label), busy.ns);
        }
    }
}
