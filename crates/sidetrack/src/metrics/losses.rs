//! Metrics of what cannot be written because a file system is full or read-only.

use super::{Metrics, raise};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WhatLabel {
    what: &'static str,
}

#[derive(Debug, Default)]
pub(super) struct LossMetrics {
    unwritable: Family<WhatLabel, Gauge>,
    cache: Counter,
}

impl LossMetrics {
    pub(super) fn register(&self, to: &mut Registry) {
        to.register(
            "unwritable",
            "1 while records, the history or a cache on disk cannot be written",
            self.unwritable.clone(),
        );
        to.register(
            "cache_unwritten_responses",
            "Responses that were not written to the disk because writing failed or was paused",
            self.cache.clone(),
        );
    }
}

impl Metrics {
    /// Takes over whether this cannot be written at present.
    pub fn read_unwritable(&self, what: &'static str, is_so: bool) {
        self.losses.unwritable.get_or_create_owned(&WhatLabel { what }).set(i64::from(is_so));
    }

    /// Takes over how many responses were not written to the disk.
    pub fn read_unwritten(&self, responses: u64) {
        raise(&self.losses.cache, responses);
    }
}
