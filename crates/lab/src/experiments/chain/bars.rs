//! The table of costs and their bars.

use super::super::relay::Cell;
use crate::kit::{Bar, Bound, Page, Results, Sample};
use crate::peers::chains::{BARE_COPIES, CHAINS, COUNTING};

/// Minimum ratio of new connections per second with one further function inside the process.
const NEW_AT_LEAST: f64 = 0.97;
/// Minimum ratio of bulk throughput with one further function.
const BULK_AT_LEAST: f64 = 0.95;

fn speed(cell: Cell) -> impl Fn(&Sample) -> Option<f64> {
    move |sample| Some(sample.speed(cell))
}

/// The values of each row in each cell.
pub(super) fn figures(page: &mut Page, results: &Results<Cell>) {
    let cells = results.cells();
    let has_figures =
        |row: &&str| cells.iter().any(|cell| results.median(*cell, row, speed(*cell)).is_some());
    let rows = CHAINS.iter().map(|peer| peer.name).filter(has_figures);
    let head = |cell: Cell| match cell.is_bulk() {
        true => vec![format!("{cell}, Gbit/s:"), "CPU s/GB:".to_owned()],
        false => vec![format!("{cell}, new/s:"), "CPU us:".to_owned(), "p99 ms:".to_owned()],
    };
    Results::table(page, rows, &cells, head, |cell, row| {
        let speed = results.median(cell, row, speed(cell))?;
        let cost = results.median(cell, row, |sample| sample.cost(cell)).unwrap_or_default();
        let p99 = results.median(cell, row, |sample| Some(sample.p99_ms())).unwrap_or_default();
        Some(match cell.is_bulk() {
            true => format!("{speed:.2} | {cost:.2}"),
            false => format!("{speed:.0} | {cost:.1} | {p99:.1}"),
        })
    });
    results.list_missing(page);
}

/// Returns the bars of each further function inside the process, and of each container, in each measured cell.
#[must_use]
pub(super) fn judge(results: &Results<Cell>) -> Vec<Bar> {
    let mut bars = Vec::new();
    for cell in results.cells() {
        let inside: Vec<_> = CHAINS.iter().filter(|peer| peer.name.starts_with("chain of ")).collect();
        let measured: Vec<_> =
            inside.iter().filter(|peer| results.median(cell, peer.name, speed(cell)).is_some()).collect();
        for pair in measured.windows(2) {
            let [before, after] = pair else { continue };
            bars.push(further(results, cell, before.name, after.name));
        }
        for (row, containers) in [("1 container", 1.0), ("2 containers", 2.0)] {
            if results.was_asked(cell, row) {
                let what = format!("{row} / none, {cell}, CPU of the node: one relay each");
                let measured = results.ratio(cell, row, "chain of 0", |sample| sample.cost(cell));
                bars.push(Bar::new(what, measured, Bound::AtMost(1.0 + containers)));
            }
        }
    }
    bars
}

/// Returns the cost of the functions that only the longer of two chains has. With the first function that reads
/// bytes, bulk transfers can no longer use `splice(2)`, whatever the function does. There the longer chain is
/// compared with the best of the smallest programs that read and write.
fn further(results: &Results<Cell>, cell: Cell, before: &'static str, after: &'static str) -> Bar {
    let each = if cell.is_bulk() { BULK_AT_LEAST } else { NEW_AT_LEAST };
    let first_reads = cell.is_bulk() && length(before) <= COUNTING && COUNTING < length(after);
    let best = results.best(cell, &BARE_COPIES, speed(cell)).or(BARE_COPIES.last().copied());
    let (than, shorter) = match best.filter(|_| first_reads) {
        Some(bare) => (bare, COUNTING),
        None => (before, length(before)),
    };
    let more = length(after).saturating_sub(shorter);
    let bound = Bound::AtLeast(each.powi(i32::try_from(more).unwrap_or(1)));
    Bar::new(format!("{after} / {than}, {cell}, speed"), results.ratio(cell, after, than, speed(cell)), bound)
}

fn length(name: &str) -> usize {
    name.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Report;
    use crate::machine::{Disturbance, Machine};

    fn results(rows: &[(&'static str, u64, u64)]) -> Results<Cell> {
        in_cell(Cell::New(32), rows)
    }

    fn in_cell(cell: Cell, rows: &[(&'static str, u64, u64)]) -> Results<Cell> {
        let mut results = Results::new(Machine::probe(), 1, crate::kit::Timing::QUICK);
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
        assert!(bars[0].holds() && (bars[0].bound.value() - 0.97).abs() < 1e-9);
        assert!(bars[1].holds() && (bars[1].bound.value() - 0.97_f64.powi(3)).abs() < 1e-9);
        let bars = judge(&results(&[("chain of 0", 10_000, 50), ("chain of 1", 9_600, 51)]));
        assert!(!bars[0].holds());
    }

    #[test]
    fn a_container_may_cost_the_node_one_relay_more() {
        let cost = |us| judge(&results(&[("chain of 0", 10_000, 50), ("1 container", 5_000, us)]));
        assert!(cost(100)[0].holds() && !cost(101)[0].holds());
    }
}
