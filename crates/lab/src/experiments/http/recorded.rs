//! The cost of a record line for a new connection, by the kind of its listener.

use std::fmt::Write as _;

use super::Options;
use crate::experiments::chain::bars::Bar;
use crate::experiments::relay::{self, Cell, Results, Sample};
use crate::machine::Machine;
use crate::peers::RECORDED;
use crate::progress::Progress;
use crate::site::Site;

/// The column: this number of connections at a time, one request on each.
const NEW: Cell = Cell::New(32);
/// Minimum ratio of the rate with a line for each flow to the rate without.
const RATE_AT_LEAST: f64 = 0.95;
/// Largest ratio of the 99th percentile with records to that without.
const P99_AT_MOST: f64 = 1.2;

/// Measures, writes the table and returns the bars.
pub(super) fn run(site: &Site, options: &Options, text: &mut String, progress: &Progress) -> Vec<Bar> {
    let mut results = Results::new(Machine::probe(), options.rounds(), options.timing());
    relay::measure_cell(site, NEW, RECORDED, None, &mut results, progress);
    let _ = writeln!(
        text,
        "### A record line for each new connection\n\n| {NEW} | /s | CPU us | p50 ms | p99 ms |\n|---|---:|---:|---:|---:|"
    );
    let mut absent = Vec::new();
    for peer in RECORDED {
        let median = |value: &dyn Fn(&Sample) -> Option<f64>| {
            results.spread(NEW, peer.name, value).map_or(0.0, |spread| spread.median)
        };
        if let Some(missing) = results.why_missing(NEW, peer.name) {
            absent.push(missing.to_string());
            continue;
        }
        let _ = writeln!(
            text,
            "| {} | {:.0} | {:.1} | {:.2} | {:.2} |",
            peer.name,
            median(&rate),
            median(&|sample| sample.cost(NEW)),
            median(&|sample| Some(sample.report.p50_ns as f64 / 1e6)),
            median(&p99_ms),
        );
    }
    text.push('\n');
    for missing in absent {
        let _ = writeln!(text, "- {missing}\n");
    }
    RECORDED
        .as_chunks::<2>()
        .0
        .iter()
        .flat_map(|[with, without]| judge(&results, with.name, without.name))
        .collect()
}

fn rate(sample: &Sample) -> Option<f64> {
    Some(sample.speed(NEW))
}

fn p99_ms(sample: &Sample) -> Option<f64> {
    Some(sample.report.p99_ns as f64 / 1e6)
}

/// Returns the bars of one kind of listener.
fn judge(results: &Results, with: &str, without: &str) -> [Bar; 2] {
    let bar = |what: &str, value: &dyn Fn(&Sample) -> Option<f64>, bound: f64, at_least: bool| Bar {
        what: format!("{with} / no records, {NEW}, {what}"),
        measured: results.ratio(NEW, with, without, value).ok_or_else(|| {
            let missing = [with, without].into_iter().find_map(|row| results.why_missing(NEW, row));
            missing.map_or_else(|| "every round was disturbed".to_owned(), ToString::to_string)
        }),
        bound,
        at_least,
        unit: "",
    };
    [bar("rate", &rate, RATE_AT_LEAST, true), bar("p99", &p99_ms, P99_AT_MOST, false)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::relay::Timing;
    use crate::load::Report;
    use crate::machine::Disturbance;

    #[test]
    fn a_tail_that_records_make_longer_misses_its_bar() {
        let mut results = Results::new(Machine::probe(), 1, Timing::QUICK);
        let mut add = |peer, requests, p99_ns| {
            let report = Report { requests, p99_ns, window_ns: 1_000_000_000, ..Report::default() };
            let sample = Sample { report, cpu_ns: None, disturbance: Disturbance::default() };
            results.add(NEW, peer, 0, Some(sample));
        };
        add("without", 10_000, 1_000_000);
        add("with", 9_600, 1_100_000);
        add("slow", 9_400, 1_300_000);
        assert!(judge(&results, "with", "without").iter().all(Bar::holds));
        assert!(!judge(&results, "slow", "without").iter().any(Bar::holds));
        assert!(!judge(&results, "absent", "without").iter().any(Bar::holds));
    }

    #[test]
    fn each_kind_of_listener_has_a_row_with_records_and_one_without() {
        for pair in RECORDED.chunks(2) {
            let names: Vec<_> = pair.iter().map(|peer| peer.name.split_once(", ")).collect();
            assert!(
                matches!(names[..], [Some((a, "records")), Some((b, "no records"))] if a == b),
                "{names:?}"
            );
        }
    }
}
