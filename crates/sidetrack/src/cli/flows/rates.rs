//! Computes the rates of running flows from two readings of their bytes.

use super::human;
use crate::record::FlowRecord;
use std::collections::BTreeMap;
use std::time::Instant;

/// The bytes of running flows at the last reading.
#[derive(Debug, Default)]
pub(super) struct Rates {
    last: BTreeMap<u64, (u64, u64)>,
    at: Option<Instant>,
}

impl Rates {
    /// Returns the flows that have moved bytes since the last reading, with their rates in words. The first call returns none.
    pub(super) fn moved<'f>(
        &mut self,
        flows: &'f [FlowRecord<'static>],
        now: Instant,
    ) -> Vec<(&'f FlowRecord<'static>, String)> {
        let passed = self.at.map(|at| now.saturating_duration_since(at).as_secs_f64().max(1e-3));
        let is_live = |flow: &&FlowRecord<'_>| flow.reason.is_none();
        let moved = flows.iter().filter(is_live).filter_map(|flow| {
            // A flow that is new since the last reading has usually moved its bytes since then. But a flow that the shunt has
            // just taken over may be older: use its age.
            let known = self.last.get(&flow.flow).copied();
            let passed =
                passed.map(|passed| if known.is_some() { passed } else { passed.max(flow.duration_seconds) });
            let (up, down) = known.unwrap_or_default();
            let (up, down) = (flow.bytes_up.saturating_sub(up), flow.bytes_down.saturating_sub(down));
            let rate = |bytes: u64, passed: f64| human::bytes((bytes as f64 / passed) as u64);
            let passed = passed.filter(|_| up + down > 0)?;
            Some((flow, format!("live: {}/s up, {}/s down", rate(up, passed), rate(down, passed))))
        });
        let moved = moved.collect();
        self.last = flows.iter().map(|flow| (flow.flow, (flow.bytes_up, flow.bytes_down))).collect();
        self.at = Some(now);
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn flow(id: u64, up: u64, down: u64) -> FlowRecord<'static> {
        let mut flow: FlowRecord<'static> = serde_json::from_str(LINE).expect("a record");
        (flow.flow, flow.bytes_up, flow.bytes_down) = (id, up, down);
        flow
    }

    const LINE: &str = r#"{"ts":"2026-11-21T23:07:19.123Z","flow":9,"rule":"fast","chain":[],"carrier":"kernel","listener":"out",
        "intercept":"kernel","client":"10.1.0.5:40000","orig_dst":"10.9.8.7:22","host":null,"process":null,"user":null,
        "bytes_up":0,"bytes_down":0,"connect_seconds":null,"first_byte_seconds":null,"duration_seconds":1.5,"shunted":true,
        "reason":null,"detail":null,"path":null,"agreement":null}"#;

    #[test]
    fn what_moved_between_two_looks_is_shown_by_the_second() {
        let (mut rates, begin) = (Rates::default(), Instant::now());
        assert!(rates.moved(&[flow(1, 50, 0), flow(2, 7, 7)], begin).is_empty());
        let mut old = flow(4, 0, 3_000_000);
        old.duration_seconds = 600.0;
        let later = [flow(1, 4_050, 1_000_000), flow(2, 7, 7), flow(3, 20, 0), old];
        let shown: Vec<_> = rates
            .moved(&later, begin + Duration::from_secs(2))
            .into_iter()
            .map(|(flow, rate)| (flow.flow, rate))
            .collect();
        assert_eq!(shown[0], (1, "live: 2.0 kB/s up, 500 kB/s down".to_owned()));
        assert_eq!(shown[1], (3, "live: 10 B/s up, 0 B/s down".to_owned()));
        assert_eq!(shown[2], (4, "live: 0 B/s up, 5.0 kB/s down".to_owned()), "over the time it took");
        assert_eq!(shown.len(), 3, "one that stands still is not shown");
    }
}
