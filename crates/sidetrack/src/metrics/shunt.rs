//! Metrics of the shunt.

use super::{EntriesLabel, Metrics, ReasonLabel, raise, signed};

impl Metrics {
    /// Takes over how full the shunt's fast path is.
    pub fn read_shunt(&self, values: &[(&'static str, u64)], evicted: u64) {
        for &(entries, value) in values {
            self.shunt_entries.get_or_create_owned(&EntriesLabel { entries }).set(signed(value));
        }
        raise(&self.shunt_evicted.get_or_create_owned(&ReasonLabel { reason: "faster" }), evicted);
    }
}
