//! More new connections than the engine can serve: what connections that exist wait then, and how many new ones are shed.
//!
//! Some connections stay and ask 200 times a second each. Beside them there is one other at a time, as many as the engine serves, or
//! impatient clients that begin far more than it can serve.

use anyhow::{Result, ensure};
use serde::Serialize;
use sidetrack_common::exchange;

use super::wire::Scene;
use crate::kit::{Bar, Bound, Missing, Page};
use crate::packets::{Report, Spec};
use crate::progress::Progress;

/// Connections that stay.
const KEPT: u32 = 64;
/// Connections that the engine serves without a queue.
const SERVED: u32 = 64;
/// Clients of the overload at a time. Each gives up after [`PATIENCE_MS`], and another begins.
const CLIENTS: u32 = 16_384;
const PATIENCE_MS: u64 = 100;
/// Maximum ratio of the 99th percentile under overload to that without.
const RATIO_AT_MOST: f64 = 2.0;
/// The names of the rows.
const ALONE: &str = "one at a time";
const KEPT_UP: &str = "as many as the engine serves";
const OVERLOAD: &str = "more than it can serve";

/// One sample, the median of its rounds by its 99th percentile.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    /// The new connections beside those that stay.
    pub beside: String,
    /// The generator's report.
    pub report: Report,
    /// First packets of new connections that the engine shed, of the whole run.
    pub shed: u64,
    /// Rounds of the engine's worker, and those that were not calm.
    pub rounds: u64,
    /// See `rounds`.
    pub loaded: u64,
}

impl Row {
    fn p99_ns(&self) -> u64 {
        self.report.kept.p99_ns
    }
}

/// Measures.
pub(super) fn run(quick: bool, rounds: u32, progress: &Progress, missing: &mut Missing) -> Vec<Row> {
    let mut rows = Vec::new();
    for beside in [ALONE, KEPT_UP, OVERLOAD].into_iter().skip(usize::from(quick)) {
        let mut samples = Vec::new();
        for round in 0..rounds {
            let name = format!("overload: {beside}, round {} of {rounds}", round + 1);
            progress.now(&name);
            samples.extend(missing.note(&name, sample(beside, quick), progress));
        }
        samples.sort_by_key(Row::p99_ns);
        let middle = samples.len() / 2;
        rows.extend(samples.into_iter().nth(middle));
    }
    rows
}

/// One sample, with a new link.
fn sample(beside: &str, quick: bool) -> Result<Row> {
    let scene = Scene::new()?;
    let (connections, patience_ms) = match beside {
        ALONE => (1, 0),
        KEPT_UP => (SERVED, 0),
        _ => (CLIENTS, PATIENCE_MS),
    };
    let service = scene.start(connections + KEPT, "")?;
    let spec = Spec { kept: KEPT, patience_ms, ..scene.spec(connections, quick)? };
    let (report, _) = scene.by_process(&service, &spec)?;
    ensure!(report.kept.answered > 0, "no question was answered: {:?}", report.kept);
    ensure!(report.kept.reset == 0, "{} connections that stay were reset", report.kept.reset);
    // The worker publishes its counts once a second.
    std::thread::sleep(std::time::Duration::from_millis(1200));
    let (status, text) = exchange::ask(&scene.admin(), "GET", "/metrics", "")?;
    ensure!(status == 200, "{text}");
    let (calm, all) = (count(&text, "rounds", "load=\"calm\""), count(&text, "rounds", ""));
    let shed = count(&text, "shed", "reason=\"overload\"");
    Ok(Row { beside: beside.into(), report, shed, rounds: all, loaded: all.saturating_sub(calm) })
}

/// Sums a counter of the engine over the lines with this label.
pub(super) fn count(metrics: &str, name: &str, label: &str) -> u64 {
    let start = format!("sidetrack_engine_{name}_total{{");
    let lines = metrics.lines().filter(|line| line.starts_with(&start) && line.contains(label));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// Returns the bar of these rows.
pub(super) fn bar(rows: &[Row]) -> Option<Bar> {
    let p99 = |beside: &str| rows.iter().find(|row| row.beside == beside).map(Row::p99_ns);
    let ratio = p99(OVERLOAD).zip(p99(KEPT_UP)).map(|(with, without)| with as f64 / without.max(1) as f64);
    let what = "p99 of connections that exist, under overload to without";
    (!rows.is_empty()).then(|| Bar::single(what, ratio, Bound::AtMost(RATIO_AT_MOST)))
}

/// The table.
pub(super) fn render(page: &mut Page, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    page.line(format_args!(
        "### More new connections than can be served\n\nOver AF_XDP, all in user space. {KEPT} connections stay and ask \
         200 times a second each: the times are theirs, from question to answer. *More than it can serve*: {CLIENTS} \
         clients at a time, each gives up after {PATIENCE_MS} ms and another begins. *Sent again*: no answer came for \
         200 ms. *Shed*: first packets of new connections that the engine dropped. *Loaded*: rounds of the worker that \
         were not calm.\n"
    ));
    page.columns([
        "new connections beside",
        "p50 us:",
        "p99 us:",
        "p99.9 us:",
        "answers:",
        "sent again:",
        "new connections/s:",
        "begun/s:",
        "shed:",
        "loaded rounds:",
    ]);
    for row in rows {
        let (report, kept) = (&row.report, &row.report.kept);
        let us = |ns: u64| ns as f64 / 1e3;
        let whole_s = (report.window_ns as f64 / 1e9).max(f64::MIN_POSITIVE);
        let share = 100.0 * row.loaded as f64 / row.rounds.max(1) as f64;
        page.row(format_args!(
            "{} | {:.0} | {:.0} | {:.0} | {} | {} | {:.0} | {:.0} | {} | {share:.1} %",
            row.beside,
            us(kept.p50_ns),
            us(kept.p99_ns),
            us(kept.p999_ns),
            kept.answered,
            kept.repeated,
            report.rate(),
            report.begun as f64 / whole_s,
            row.shed
        ));
    }
    page.blank();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packets::KeptReport;

    fn row(beside: &str, p99_ns: u64) -> Row {
        let kept = KeptReport { p99_ns, ..KeptReport::default() };
        let report = Report { kept, ..Report::default() };
        Row { beside: beside.into(), report, shed: 0, rounds: 0, loaded: 0 }
    }

    #[test]
    fn the_bar_compares_with_what_the_engine_serves() {
        let held = |p99| bar(&[row(ALONE, 1), row(KEPT_UP, 100), row(OVERLOAD, p99)]).map(|bar| bar.holds());
        assert_eq!((held(200), held(201)), (Some(true), Some(false)));
        assert!(bar(&[]).is_none() && !bar(&[row(OVERLOAD, 1)]).unwrap().holds());
    }

    #[test]
    fn counters_are_summed_by_label() {
        let text = "sidetrack_engine_rounds_total{load=\"calm\"} 7\nsidetrack_engine_rounds_total{load=\"overloaded\"} 2\n\
                    sidetrack_engine_shed_total{reason=\"overload\"} 3\n";
        assert_eq!((count(text, "rounds", ""), count(text, "rounds", "load=\"calm\"")), (9, 7));
        assert_eq!((count(text, "shed", "reason=\"overload\""), count(text, "work", "")), (3, 0));
    }
}
