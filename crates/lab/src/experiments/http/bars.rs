//! The bars for ours, and the programs they are compared with.

use super::cells::{Cell, Part};
use super::rows::Row;
use crate::kit::{Bar, Bound, Page, Results, Sample};

/// The compared quantity, and the meaning of the bound.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Demand {
    /// Minimum ratio of answers per second to those of the fastest of the others.
    Rate(f64),
    /// Maximum ratio of CPU to that of the fastest of the others.
    Cpu(f64),
    /// Maximum microseconds of CPU per answer.
    CpuUs(f64),
    /// Maximum ratio of the 99th percentile of times to that of the fastest of the others.
    P99(f64),
}

/// One bar of one of our rows.
struct Wanted {
    cell: &'static str,
    ours: &'static str,
    /// The fastest of these is the opponent.
    others: &'static [&'static str],
    demand: Demand,
}

const fn wanted(
    cell: &'static str,
    ours: &'static str,
    others: &'static [&'static str],
    demand: Demand,
) -> Wanted {
    Wanted { cell, ours, others, demand }
}

const CACHES: &[&str] = &["nginx", "HAProxy", "Varnish", "Traffic Server", "Squid"];
const FOR_ORIGIN: &str = "ours, for the origin";
const OPENING: &str = "ours, opening";
const RECORDED: &str = "ours, records";
const UNRECORDED: &[&str] = &["ours, no records"];

const WANTED: &[Wanted] = &[
    wanted("hit 1 KB", "ours", &["nginx"], Demand::Rate(0.9)),
    wanted("hit 1 KB", "ours", &["nginx"], Demand::Cpu(1.1)),
    wanted("hit 1 KB", FOR_ORIGIN, &["nginx"], Demand::Rate(0.9)),
    wanted("hit 1 KB", FOR_ORIGIN, &["nginx"], Demand::Cpu(1.1)),
    wanted("hit 100 KB", "ours", &["Traffic Server", "Varnish"], Demand::Rate(1.0)),
    wanted("hit 10 MB", "ours", CACHES, Demand::Rate(1.0)),
    wanted("miss 1 KB", "ours", &["HAProxy", "nginx"], Demand::Rate(1.0)),
    wanted("miss 1 KB", "ours", &[], Demand::CpuUs(20.0)),
    wanted("miss 1 KB", "ours, no cache", &["HAProxy", "nginx"], Demand::Rate(1.0)),
    wanted("miss 1 KB", "ours, no cache", &[], Demand::CpuUs(20.0)),
    wanted("tunnel, kept, 1 KB", "ours", &["Squid"], Demand::Rate(1.0)),
    wanted("tunnel, new", "ours", &["Squid"], Demand::Rate(1.3)),
    wanted("new, hit 1 KB", OPENING, &["Squid ssl_bump"], Demand::Rate(4.0)),
    wanted("new, hit 1 KB", OPENING, &["mitmproxy"], Demand::Rate(10.0)),
    wanted("new, hit 1 KB", OPENING, &[], Demand::CpuUs(1000.0)),
    wanted("kept, hit 1 KB", OPENING, &["direct"], Demand::Rate(0.9)),
    wanted("kept, hit 1 KB", OPENING, &[], Demand::CpuUs(27.0)),
    wanted("recorded hit 1 KB", RECORDED, UNRECORDED, Demand::Rate(0.95)),
    wanted("recorded hit 1 KB", RECORDED, UNRECORDED, Demand::P99(1.2)),
    wanted("recorded hit 1 KB", RECORDED, &["nginx"], Demand::P99(1.0)),
    wanted("recorded miss 1 KB", RECORDED, UNRECORDED, Demand::Rate(0.95)),
    wanted("recorded miss 1 KB", RECORDED, UNRECORDED, Demand::P99(1.2)),
    wanted("recorded miss 1 KB", RECORDED, &["nginx"], Demand::Rate(1.0)),
];

fn rate(sample: &Sample) -> Option<f64> {
    Some(sample.report.rate())
}

fn p99_ms(sample: &Sample) -> Option<f64> {
    Some(sample.p99_ms())
}

/// Returns all bars with both rows requested in this run.
#[must_use]
pub(super) fn judge(results: &Results<&'static str>, part: Part) -> Vec<Bar> {
    let in_part = |wanted: &&Wanted| Cell::of(part, false).any(|cell| cell.name == wanted.cell);
    WANTED.iter().filter(in_part).filter_map(|wanted| wanted.judge(results)).collect()
}

impl Wanted {
    fn judge(&self, results: &Results<&'static str>) -> Option<Bar> {
        let was_asked = |row: &&str| results.was_asked(self.cell, row);
        if !was_asked(&self.ours) || !self.others.is_empty() && !self.others.iter().any(was_asked) {
            return None;
        }
        let fastest = results.best(self.cell, self.others, rate);
        let other = fastest.or(self.others.first().copied()).unwrap_or_default();
        let ratio = |value: fn(&Sample) -> Option<f64>| results.ratio(self.cell, self.ours, other, value);
        let (measured, what, bound, unit) = match self.demand {
            Demand::Rate(bound) => (ratio(rate), "rate", Bound::AtLeast(bound), ""),
            Demand::Cpu(bound) => (ratio(Sample::cpu_us), "CPU", Bound::AtMost(bound), ""),
            Demand::P99(bound) => (ratio(p99_ms), "p99", Bound::AtMost(bound), ""),
            Demand::CpuUs(bound) => {
                let own = results.spread(self.cell, self.ours, Sample::cpu_us);
                let own = own.ok_or_else(|| results.why_none(self.cell, &[self.ours]));
                (own, "CPU", Bound::AtMost(bound), " us")
            }
        };
        let against = if self.others.is_empty() { String::new() } else { format!(" / {other}") };
        Some(Bar::new(format!("{}: {}{against}, {what}", self.cell, self.ours), measured, bound).unit(unit))
    }
}

/// The table of a part.
pub(super) fn figures(page: &mut Page, results: &Results<&'static str>, part: Part) {
    let has_figures = |cell: &str, row: &Row| results.median(cell, row.name, rate).is_some();
    let rows: Vec<&Row> = Row::of(part, false).collect();
    let cells: Vec<&Cell> =
        Cell::of(part, false).filter(|cell| rows.iter().any(|row| has_figures(cell.name, row))).collect();
    let names: Vec<&str> = cells.iter().map(|cell| cell.name).collect();
    let measured = rows.iter().filter(|row| names.iter().any(|cell| has_figures(cell, row)));
    let head = |name: &str| {
        let at_once = cells.iter().find(|cell| cell.name == name).map_or(0, |cell| cell.connections);
        vec![format!("{name}, /s at {at_once}:"), "CPU us:".into(), "p50 ms:".into(), "p99 ms:".into()]
    };
    page.line(format_args!("### {}\n", part.title()));
    Results::table(page, measured.map(|row| row.name), &names, head, |cell, row| {
        let rate = results.median(cell, row, rate)?;
        let cpu = results.median(cell, row, Sample::cpu_us);
        let cpu = cpu.map_or_else(String::new, |cpu| format!("{cpu:.1}"));
        let p50 = results.median(cell, row, |sample| Some(sample.p50_ms())).unwrap_or_default();
        let p99 = results.median(cell, row, p99_ms).unwrap_or_default();
        Some(format!("{rate:.0} | {cpu} | {p50:.2} | {p99:.2}"))
    });
    for row in rows {
        for cell in Cell::of(part, false) {
            if let Some(why) = results.why_missing(cell.name, row.name) {
                page.line(format_args!("- {}, {}: {}", row.name, cell.name, why.reason));
            }
        }
    }
    page.blank();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::Timing;
    use crate::load::Report;
    use crate::machine::{Disturbance, Machine};

    fn samples(rows: &[(&'static str, u64, u64)]) -> Results<&'static str> {
        let mut samples = Results::new(Machine::probe(), 1, Timing::QUICK);
        let cell = Cell::of(Part::Hit, true).next().expect("a column");
        for (name, requests, cpu_us) in rows {
            let report = Report { requests: *requests, window_ns: 1_000_000_000, ..Report::default() };
            let cpu_ns = Some(cpu_us * 1000 * requests);
            let row = Row::named(name).expect("a row");
            let sample = Sample { report, cpu_ns, disturbance: Disturbance::default() };
            samples.add(cell.name, row.name, 0, Some(sample));
        }
        samples
    }

    #[test]
    fn bars_name_rows_and_columns_that_exist() {
        for wanted in WANTED {
            let cell = super::super::cells::CELLS.iter().find(|cell| cell.name == wanted.cell);
            let part = cell.expect("a column").part;
            for row in std::iter::once(&wanted.ours).chain(wanted.others) {
                let row = Row::named(row).expect("a row");
                assert!(row.parts.contains(&part), "{} is not in {}", row.name, wanted.cell);
            }
        }
    }

    #[test]
    fn rate_and_cpu_are_held_against_nginx_in_the_same_round() {
        let bars = judge(&samples(&[("nginx", 40_000, 15), ("ours", 36_000, 16)]), Part::Hit);
        assert_eq!(bars.iter().map(Bar::holds).collect::<Vec<_>>(), [true, true]);
        let bars = judge(&samples(&[("nginx", 40_000, 15), ("ours", 35_000, 17)]), Part::Hit);
        assert_eq!(bars.iter().map(Bar::holds).collect::<Vec<_>>(), [false, false]);
        assert!(judge(&samples(&[("ours", 36_000, 16)]), Part::Hit).is_empty(), "nothing to hold it against");
    }
}
