//! The bars for ours, and the programs they are compared with.

use std::fmt::Write as _;

use super::cells::{Cell, Part};
use super::rows::Row;
use super::sample::{Sample, Samples};
use crate::experiments::chain::bars::Bar;

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
    Some(sample.rate())
}

fn p99_ms(sample: &Sample) -> Option<f64> {
    Some(sample.report.p99_ns as f64 / 1e6)
}

/// Returns all bars with both rows requested in this run.
#[must_use]
pub(super) fn judge(samples: &Samples, part: Part) -> Vec<Bar> {
    let in_part = |wanted: &&Wanted| Cell::of(part, false).any(|cell| cell.name == wanted.cell);
    WANTED.iter().filter(in_part).filter_map(|wanted| wanted.judge(samples)).collect()
}

impl Wanted {
    fn judge(&self, samples: &Samples) -> Option<Bar> {
        let was_asked = |row: &str| {
            samples.spread(self.cell, row, rate).is_some() || samples.why_missing(self.cell, row).is_some()
        };
        let asked = was_asked(self.ours)
            && (self.others.is_empty() || self.others.iter().any(|other| was_asked(other)));
        if !asked {
            return None;
        }
        let speed = |row: &&&str| samples.spread(self.cell, row, rate).map(|rate| rate.median);
        let fastest = self.others.iter().filter_map(|other| Some((speed(&other)?, *other)));
        let fastest = fastest.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, other)| other);
        let other = fastest.or(self.others.first().copied()).unwrap_or_default();
        let pair = (self.ours, other);
        let (measured, what, bound, unit) = match self.demand {
            Demand::Rate(bound) => (samples.ratio(self.cell, pair, rate), "rate", bound, ""),
            Demand::Cpu(bound) => (samples.ratio(self.cell, pair, Sample::cpu_us), "CPU", bound, ""),
            Demand::P99(bound) => (samples.ratio(self.cell, pair, p99_ms), "p99", bound, ""),
            Demand::CpuUs(bound) => {
                (samples.spread(self.cell, self.ours, Sample::cpu_us), "CPU", bound, " us")
            }
        };
        let against = if self.others.is_empty() { String::new() } else { format!(" / {other}") };
        Some(Bar {
            what: format!("{}: {}{against}, {what}", self.cell, self.ours),
            measured: measured.ok_or_else(|| self.why(samples, other)),
            bound,
            at_least: matches!(self.demand, Demand::Rate(_)),
            unit,
        })
    }

    fn why(&self, samples: &Samples, other: &str) -> String {
        let missing = |row: &str| Some(format!("{row}: {}", samples.why_missing(self.cell, row)?));
        let first = missing(self.ours).or_else(|| missing(other));
        first.unwrap_or_else(|| "every round was disturbed".to_owned())
    }
}

/// The table of a part.
pub(super) fn figures(text: &mut String, samples: &Samples, part: Part) {
    let cells: Vec<&Cell> = Cell::of(part, false)
        .filter(|cell| Row::of(part, false).any(|row| samples.spread(cell.name, row.name, rate).is_some()))
        .collect();
    // Writing to a String cannot fail.
    let _ = write!(text, "### {}\n\n| |", part.title());
    for cell in &cells {
        let _ = write!(text, " {}, /s at {} | CPU us | p50 ms | p99 ms |", cell.name, cell.connections);
    }
    let _ = writeln!(text, "\n|---|{}", "---:|".repeat(cells.len() * 4));
    for row in Row::of(part, false) {
        let values: Vec<_> = cells.iter().map(|cell| figure(samples, cell, row)).collect();
        if values.iter().any(|value| !value.starts_with(" - ")) {
            let _ = writeln!(text, "| {} |{}", row.name, values.concat());
        }
    }
    text.push('\n');
    for row in Row::of(part, false) {
        for cell in Cell::of(part, false) {
            if let Some(why) = samples.why_missing(cell.name, row.name) {
                let _ = writeln!(text, "- {}, {}: {why}", row.name, cell.name);
            }
        }
    }
    text.push('\n');
}

fn figure(samples: &Samples, cell: &Cell, row: &Row) -> String {
    let median = |value: &dyn Fn(&Sample) -> Option<f64>| {
        samples.spread(cell.name, row.name, value).map(|spread| spread.median)
    };
    let Some(speed) = median(&rate) else { return " - | - | - | - |".to_owned() };
    let cpu = median(&Sample::cpu_us).map_or_else(String::new, |cpu| format!("{cpu:.1}"));
    let p50 = median(&|sample| Some(sample.report.p50_ns as f64 / 1e6)).unwrap_or_default();
    let p99 = median(&p99_ms).unwrap_or_default();
    format!(" {speed:.0} | {cpu} | {p50:.2} | {p99:.2} |")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Report;
    use crate::machine::Disturbance;

    fn samples(rows: &[(&'static str, u64, u64)]) -> Samples {
        let mut samples = Samples::default();
        let cell = Cell::of(Part::Hit, true).next().expect("a column");
        for (name, requests, cpu_us) in rows {
            let report = Report { requests: *requests, window_ns: 1_000_000_000, ..Report::default() };
            let cpu_ns = Some(cpu_us * 1000 * requests);
            let row = Row::named(name).expect("a row");
            samples.add(cell, row, 0, Sample { report, cpu_ns, disturbance: Disturbance::default() });
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
