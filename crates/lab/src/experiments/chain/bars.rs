//! The table of costs and their bars.

use std::fmt::Write as _;

use super::super::relay::{Cell, Results, Sample};
use crate::peers::chains::{BARE_COPIES, CHAINS, COUNTING};
use crate::statistics::Spread;

/// Minimum ratio of new connections per second with one further function inside the process.
const NEW_AT_LEAST: f64 = 0.97;
/// Minimum ratio of bulk throughput with one further function.
const BULK_AT_LEAST: f64 = 0.95;

/// One bar and its result.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    /// What is compared.
    pub what: String,
    /// The measured value; or the reason why there is none.
    pub measured: Result<Spread, String>,
    /// The bound.
    pub bound: f64,
    /// Whether a higher value is better.
    pub at_least: bool,
    /// The unit, after the numbers.
    pub unit: &'static str,
}

impl Bar {
    /// Returns true if it was measured and its median is on the right side.
    #[must_use]
    pub(crate) fn holds(&self) -> bool {
        self.measured.as_ref().is_ok_and(|measured| {
            if self.at_least { measured.median >= self.bound } else { measured.median <= self.bound }
        })
    }
}

fn speed(cell: Cell) -> impl Fn(&Sample) -> Option<f64> {
    move |sample| Some(sample.speed(cell))
}

/// The values of each row in each cell.
pub(crate) fn figures(text: &mut String, results: &Results) {
    let cells = results.cells();
    let mut head = "| |".to_owned();
    let mut rule = "|---|".to_owned();
    for cell in &cells {
        head.push_str(&match cell.is_bulk() {
            true => format!(" {cell}, Gbit/s | CPU s/GB |"),
            false => format!(" {cell}, new/s | CPU us | p99 ms |"),
        });
        rule.push_str(if cell.is_bulk() { "---:|---:|" } else { "---:|---:|---:|" });
    }
    let _ = writeln!(text, "{head}\n{rule}");
    for peer in CHAINS {
        let values = cells.iter().map(|cell| row(results, *cell, peer.name));
        let values: Vec<_> = values.collect();
        if values.iter().any(|value| !value.starts_with(" - ")) {
            let _ = writeln!(text, "| {} |{}", peer.name, values.concat());
        }
    }
    text.push('\n');
    for missing in results.missing() {
        let _ = writeln!(text, "- {missing}");
    }
    text.push('\n');
}

fn row(results: &Results, cell: Cell, peer: &str) -> String {
    let Some(speed) = results.spread(cell, peer, speed(cell)) else {
        return if cell.is_bulk() { " - | - |" } else { " - | - | - |" }.to_owned();
    };
    let median = |value: &dyn Fn(&Sample) -> Option<f64>| {
        results.spread(cell, peer, value).map_or(0.0, |value| value.median)
    };
    let (speed, cost) = (speed.median, median(&|sample| sample.cost(cell)));
    let p99 = median(&|sample| Some(sample.report.p99_ns as f64 / 1e6));
    match cell.is_bulk() {
        true => format!(" {speed:.2} | {cost:.2} |"),
        false => format!(" {speed:.0} | {cost:.1} | {p99:.1} |"),
    }
}

/// Returns the bars of each further function inside the process, and of each container, in each measured cell.
#[must_use]
pub(crate) fn judge(results: &Results) -> Vec<Bar> {
    let mut bars = Vec::new();
    for cell in results.cells() {
        let inside: Vec<_> = CHAINS.iter().filter(|peer| peer.name.starts_with("chain of ")).collect();
        let measured: Vec<_> =
            inside.iter().filter(|peer| results.spread(cell, peer.name, speed(cell)).is_some()).collect();
        for pair in measured.windows(2) {
            let [before, after] = pair else { continue };
            bars.push(further(results, cell, before.name, after.name));
        }
        for (row, containers) in [("1 container", 1.0), ("2 containers", 2.0)] {
            if results.spread(cell, row, speed(cell)).is_none() && results.why_missing(cell, row).is_none() {
                continue;
            }
            bars.push(Bar {
                what: format!("{row} / none, {cell}, CPU of the node: one relay each"),
                measured: ratio(results, cell, (row, "chain of 0"), |sample| sample.cost(cell)),
                bound: 1.0 + containers,
                at_least: false,
                unit: "",
            });
        }
    }
    bars
}

/// Returns the cost of the functions that only the longer of two chains has. With the first function that reads
/// bytes, bulk transfers can no longer use `splice(2)`, whatever the function does. There the longer chain is
/// compared with the best of the smallest programs that read and write.
fn further(results: &Results, cell: Cell, before: &'static str, after: &'static str) -> Bar {
    let each = if cell.is_bulk() { BULK_AT_LEAST } else { NEW_AT_LEAST };
    let first_reads = cell.is_bulk() && length(before) <= COUNTING && COUNTING < length(after);
    let median = |row: &str| results.spread(cell, row, speed(cell)).map_or(0.0, |speed| speed.median);
    let best = BARE_COPIES.into_iter().max_by(|a, b| median(a).total_cmp(&median(b)));
    let (than, shorter) = match best.filter(|_| first_reads) {
        Some(bare) => (bare, COUNTING),
        None => (before, length(before)),
    };
    let more = length(after).saturating_sub(shorter);
    Bar {
        what: format!("{after} / {than}, {cell}, speed"),
        measured: ratio(results, cell, (after, than), speed(cell)),
        bound: each.powi(i32::try_from(more).unwrap_or(1)),
        at_least: true,
        unit: "",
    }
}

fn length(name: &str) -> usize {
    name.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn ratio(
    results: &Results,
    cell: Cell,
    (ours, theirs): (&str, &str),
    value: impl Fn(&Sample) -> Option<f64>,
) -> Result<Spread, String> {
    let missing = || {
        let missing = [ours, theirs].into_iter().find_map(|row| results.why_missing(cell, row));
        missing.map_or_else(|| "every round was disturbed".to_owned(), ToString::to_string)
    };
    results.ratio(cell, ours, theirs, value).ok_or_else(missing)
}

/// Formats the bars as a table.
pub(crate) fn render(text: &mut String, bars: &[Bar]) {
    let _ = writeln!(text, "| bar | measured (quartiles) | wanted | |\n|---|---|---|---|");
    for bar in bars {
        let unit = bar.unit;
        let measured = match &bar.measured {
            Ok(spread) => format!("{:.2} ({:.2} to {:.2}){unit}", spread.median, spread.low, spread.high),
            Err(why) => format!("not measured: {why}"),
        };
        let wanted = if bar.at_least { "at least" } else { "at most" };
        let result = if bar.holds() { "ok" } else { "**FAIL**" };
        let _ = writeln!(text, "| {} | {measured} | {wanted} {:.2}{unit} | {result} |", bar.what, bar.bound);
    }
    let failed = bars.iter().filter(|bar| !bar.holds()).count();
    let _ = writeln!(text, "\n{} bars, {failed} failed.", bars.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Report;
    use crate::machine::{Disturbance, Machine};

    fn results(rows: &[(&'static str, u64, u64)]) -> Results {
        in_cell(Cell::New(32), rows)
    }

    fn in_cell(cell: Cell, rows: &[(&'static str, u64, u64)]) -> Results {
        let mut results = Results::new(Machine::probe(), 1, super::super::Timing::QUICK);
        for (name, amount, cpu_us) in rows {
            let (requests, bytes) = if cell.is_bulk() { (1, *amount) } else { (*amount, 0) };
            let report = Report { requests, bytes, window_ns: 1_000_000_000, ..Report::default() };
            let cpu_ns = Some(cpu_us * 1000 * amount);
            let sample = Sample { report, cpu_ns, disturbance: Disturbance::default() };
            results.add(cell, name, 0, Some(sample));
        }
        results
    }

    #[test]
    fn the_first_function_that_reads_is_held_against_the_least_that_copies() {
        let rows = |third, fourth| {
            let bulk = [
                ("chain of 2", 8_000_000_000, 0),
                ("chain of 3", third, 0),
                ("chain of 4", fourth, 0),
                ("bare copy, 64 KiB", 3_000_000_000, 0),
                ("bare copy, 256 KiB", 4_000_000_000, 0),
            ];
            judge(&in_cell(Cell::Bulk(1), &bulk))
        };
        let bars = rows(3_900_000_000, 3_700_000_000);
        assert_eq!(bars[0].what, "chain of 3 / bare copy, 256 KiB, bulk at 1, speed");
        assert!(bars[0].holds() && !bars[1].holds(), "{bars:?}");
        assert!(!rows(3_700_000_000, 3_700_000_000)[0].holds());
        // If the shorter of two chains already reads, or neither reads, they are compared with each other.
        let judged = judge(&in_cell(Cell::Bulk(1), &[("chain of 1", 10, 0), ("chain of 2", 9, 0)]));
        assert_eq!((judged.len(), judged[0].holds()), (1, false));
    }

    #[test]
    fn each_further_function_has_its_share_and_a_gap_the_shares_of_all() {
        let rows = [("chain of 0", 10_000, 50), ("chain of 1", 9_800, 51), ("chain of 4", 9_000, 60)];
        let bars = judge(&results(&rows));
        assert_eq!(bars.len(), 2);
        assert!(bars[0].holds() && (bars[0].bound - 0.97).abs() < 1e-9);
        assert!(bars[1].holds() && (bars[1].bound - 0.97_f64.powi(3)).abs() < 1e-9);
        let bars = judge(&results(&[("chain of 0", 10_000, 50), ("chain of 1", 9_600, 51)]));
        assert!(!bars[0].holds());
    }

    #[test]
    fn a_container_may_cost_the_node_one_relay_more() {
        let cost = |us| judge(&results(&[("chain of 0", 10_000, 50), ("1 container", 5_000, us)]));
        assert!(cost(100)[0].holds() && !cost(101)[0].holds());
    }
}
