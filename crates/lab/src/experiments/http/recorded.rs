//! The cost of a record line for a new connection, by the kind of its listener.

use super::Options;
use crate::experiments::relay::{self, Cell};
use crate::kit::{Bar, Bound, Page, Results, Sample};
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
pub(super) fn run(site: &Site, options: &Options, page: &mut Page, progress: &Progress) -> Vec<Bar> {
    let mut results = Results::new(Machine::probe(), options.rounds(), options.timing());
    relay::measure_cell(site, NEW, RECORDED, None, &mut results, progress);
    page.line(format_args!("### A record line for each new connection\n"));
    page.columns([&format!("{NEW}"), "/s:", "CPU us:", "p50 ms:", "p99 ms:"]);
    let mut absent = Vec::new();
    for peer in RECORDED {
        let median = |value: &dyn Fn(&Sample) -> Option<f64>| {
            results.median(NEW, peer.name, value).unwrap_or_default()
        };
        if let Some(missing) = results.why_missing(NEW, peer.name) {
            absent.push(missing.to_string());
            continue;
        }
        page.row(format_args!(
            "{} | {:.0} | {:.1} | {:.2} | {:.2}",
            peer.name,
            median(&rate),
            median(&|sample| sample.cost(NEW)),
            median(&|sample| Some(sample.p50_ms())),
            median(&p99_ms)
        ));
    }
    page.blank();
    for missing in absent {
        page.line(format_args!("- {missing}\n"));
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
    Some(sample.p99_ms())
}

/// Returns the bars of one kind of listener.
fn judge(results: &Results<Cell>, with: &str, without: &str) -> [Bar; 2] {
    let bar = |what: &str, value: fn(&Sample) -> Option<f64>, bound| {
        let what = format!("{with} / no records, {NEW}, {what}");
        Bar::new(what, results.ratio(NEW, with, without, value), bound)
    };
    [bar("rate", rate, Bound::AtLeast(RATE_AT_LEAST)), bar("p99", p99_ms, Bound::AtMost(P99_AT_MOST))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::Timing;
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
