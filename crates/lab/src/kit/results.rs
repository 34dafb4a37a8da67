//! All samples of a run, taken in turns, and their statistics.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Page;
use crate::load::Report;
use crate::machine::{Disturbance, Machine};
use crate::peers::Unavailable;
use crate::progress::Progress;
use crate::statistics::Spread;

/// A sample with more steal than this, in percent, is dropped.
pub const STEAL_LIMIT_PERCENT: f64 = 2.0;

/// Length of a sample.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Timing {
    /// Warm-up, in milliseconds.
    pub warmup_ms: u64,
    /// Counted time, in milliseconds.
    pub window_ms: u64,
}

impl Timing {
    /// For figures.
    pub const FULL: Self = Self { warmup_ms: 250, window_ms: 1000 };
    /// For a quick look.
    pub const QUICK: Self = Self { warmup_ms: 150, window_ms: 400 };
}

/// The measurement of one slice.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sample {
    /// The client's report.
    pub report: Report,
    /// CPU time of the row's programs in the window, in nanoseconds; `None` if it has no programs.
    pub cpu_ns: Option<u64>,
    /// The disturbance by other work.
    pub disturbance: Disturbance,
}

impl Sample {
    /// Returns microseconds of CPU per answer.
    #[must_use]
    pub fn cpu_us(&self) -> Option<f64> {
        let answers = self.report.requests as f64;
        (answers > 0.0).then_some(self.cpu_ns? as f64 / 1e3 / answers)
    }

    /// Returns the median time of an answer, in milliseconds.
    #[must_use]
    pub fn p50_ms(&self) -> f64 {
        self.report.p50_ns as f64 / 1e6
    }

    /// Returns the 99th percentile of the times of answers, in milliseconds.
    #[must_use]
    pub fn p99_ms(&self) -> f64 {
        self.report.p99_ns as f64 / 1e6
    }
}

/// Returns the rows in the order of a round: forwards, backwards, forwards...
#[must_use]
pub fn in_turn<R: Clone>(rows: &[R], round: u32) -> Vec<R> {
    if round.is_multiple_of(2) { rows.to_vec() } else { rows.iter().rev().cloned().collect() }
}

/// The samples of one row in one cell, by round; a round without a sample was disturbed.
#[derive(Debug, Serialize)]
struct Series<C> {
    cell: C,
    peer: &'static str,
    samples: BTreeMap<u32, Sample>,
}

/// A row without figures, and why.
#[derive(Debug, Serialize)]
pub struct Unmeasured<C> {
    /// The row.
    pub peer: &'static str,
    /// The cell; absent: all cells.
    pub cell: Option<C>,
    /// What is missing or failed, on one line.
    pub reason: String,
}

impl<C: fmt::Display> fmt::Display for Unmeasured<C> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cell {
            Some(cell) => write!(formatter, "{}, {cell}: {}", self.peer, self.reason),
            None => write!(formatter, "{}: {}", self.peer, self.reason),
        }
    }
}

/// A run: rows that were measured in cells of the kind `C`.
#[derive(Debug, Serialize)]
pub struct Results<C> {
    /// The machine and the date.
    pub machine: Machine,
    /// Load average when it ended.
    pub load_at_end: f64,
    /// Requested rounds.
    pub rounds: u32,
    /// Length of the samples.
    pub timing: Timing,
    /// Samples dropped because other work took more than [`STEAL_LIMIT_PERCENT`] of the CPU.
    pub dropped: u32,
    missing: Vec<Unmeasured<C>>,
    series: Vec<Series<C>>,
}

impl<C: Copy + Ord + fmt::Display> Results<C> {
    /// Makes empty results.
    #[must_use]
    pub fn new(machine: Machine, rounds: u32, timing: Timing) -> Self {
        let (missing, series) = (Vec::new(), Vec::new());
        Self { machine, load_at_end: 0.0, rounds, timing, dropped: 0, missing, series }
    }

    /// Takes all rounds of one cell, in which the rows take turns. A row that does not work has no further turn. A
    /// disturbed sample is dropped and taken again, until it was taken `attempts` times.
    pub fn measure<R: Clone>(
        &mut self,
        cell: C,
        rows: &[(&'static str, R)],
        attempts: u32,
        progress: &Progress,
        take: impl Fn(R) -> Result<Sample, Unavailable>,
    ) {
        for round in 0..self.rounds {
            for (peer, row) in in_turn(rows, round) {
                if self.why_missing(cell, peer).is_some() {
                    continue;
                }
                progress.now(&format!("{cell}, round {} of {}: {peer}", round + 1, self.rounds));
                match self.undisturbed(attempts, || take(row.clone())) {
                    Ok(sample) => self.add(cell, peer, round, sample),
                    Err(reason) => progress.say(&self.unavailable(peer, cell, &reason)),
                }
            }
        }
        progress.say(&format!("{cell}: done"));
    }

    fn undisturbed(
        &mut self,
        attempts: u32,
        take: impl Fn() -> Result<Sample, Unavailable>,
    ) -> Result<Option<Sample>, Unavailable> {
        for _ in 0..attempts {
            let sample = take()?;
            if sample.disturbance.steal_percent <= STEAL_LIMIT_PERCENT {
                return Ok(Some(sample));
            }
            self.dropped += 1;
        }
        Ok(None)
    }

    /// Adds a sample; `None` is a round that stayed disturbed.
    pub fn add(&mut self, cell: C, peer: &'static str, round: u32, sample: Option<Sample>) {
        let Some(sample) = sample else { return };
        match self.series.iter_mut().find(|series| series.cell == cell && series.peer == peer) {
            Some(series) => {
                series.samples.insert(round, sample);
            }
            None => self.series.push(Series { cell, peer, samples: BTreeMap::from([(round, sample)]) }),
        }
    }

    /// Notes that a row is absent, or fails in this cell, and returns the line for people.
    pub fn unavailable(&mut self, peer: &'static str, cell: C, reason: &Unavailable) -> String {
        let reason_line = reason.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let cell = matches!(reason, Unavailable::Failed(_)).then_some(cell);
        let missing = Unmeasured { peer, cell, reason: reason_line };
        let line = missing.to_string();
        self.missing.push(missing);
        line
    }

    /// Returns why a row has no figures in a cell, if it has none.
    #[must_use]
    pub fn why_missing(&self, cell: C, peer: &str) -> Option<&Unmeasured<C>> {
        self.missing
            .iter()
            .find(|missing| missing.peer == peer && missing.cell.is_none_or(|failed| failed == cell))
    }

    /// Returns why a figure that needs all of these rows is missing.
    #[must_use]
    pub fn why_none(&self, cell: C, rows: &[&str]) -> String {
        let missing = rows.iter().find_map(|row| self.why_missing(cell, row));
        missing.map_or_else(|| "every round was disturbed".to_owned(), ToString::to_string)
    }

    /// Returns true if a row was measured in a cell, or tried.
    #[must_use]
    pub fn was_asked(&self, cell: C, peer: &str) -> bool {
        self.samples(cell, peer).is_some() || self.why_missing(cell, peer).is_some()
    }

    /// Returns the cells with samples, in the order of measurement.
    #[must_use]
    pub fn cells(&self) -> Vec<C> {
        let mut cells: Vec<C> = self.series.iter().map(|series| series.cell).collect();
        cells.sort();
        cells.dedup();
        cells
    }

    /// Returns the summary of a value over all samples of a row in a cell.
    #[must_use]
    pub fn spread(&self, cell: C, peer: &str, value: impl Fn(&Sample) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.samples(cell, peer)?.values().filter_map(value).collect())
    }

    /// Returns the median of a value over all samples of a row in a cell.
    #[must_use]
    pub fn median(&self, cell: C, peer: &str, value: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        self.spread(cell, peer, value).map(|spread| spread.median)
    }

    /// Returns the ratio `ours / theirs` of a value, taken within each round; or why there is none.
    ///
    /// # Errors
    /// A row is missing, or no round has samples of both.
    pub fn ratio(
        &self,
        cell: C,
        ours: &str,
        theirs: &str,
        value: impl Fn(&Sample) -> Option<f64>,
    ) -> Result<Spread, String> {
        let ratios = self.samples(cell, ours).zip(self.samples(cell, theirs)).map(|(ours, theirs)| {
            let pair = |(round, sample): (&u32, &Sample)| {
                let divisor = value(theirs.get(round)?)?;
                (divisor > 0.0).then_some(value(sample)? / divisor)
            };
            ours.iter().filter_map(pair).collect()
        });
        ratios.and_then(Spread::of).ok_or_else(|| self.why_none(cell, &[ours, theirs]))
    }

    /// Returns which of these rows has the highest median of a value.
    #[must_use]
    pub fn best<'r>(
        &self,
        cell: C,
        rows: &[&'r str],
        value: impl Fn(&Sample) -> Option<f64>,
    ) -> Option<&'r str> {
        let scored = rows.iter().filter_map(|row| Some((self.median(cell, row, &value)?, *row)));
        scored.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, row)| row)
    }

    /// Writes a table with these rows, and in each of these cells the columns of `head`. `figures` returns a row's
    /// figures in a cell, divided by ` | `; if there are none, the table has dashes.
    pub fn table<'r>(
        page: &mut Page,
        rows: impl IntoIterator<Item = &'r str>,
        cells: &[C],
        head: impl Fn(C) -> Vec<String>,
        figures: impl Fn(C, &str) -> Option<String>,
    ) {
        let heads: Vec<_> = cells.iter().map(|cell| head(*cell)).collect();
        page.columns(std::iter::once("").chain(heads.iter().flatten().map(String::as_str)));
        for row in rows {
            let figures: Vec<_> = cells
                .iter()
                .zip(&heads)
                .map(|(cell, head)| figures(*cell, row).unwrap_or_else(|| vec!["-"; head.len()].join(" | ")))
                .collect();
            page.row(format_args!("{row} | {}", figures.join(" | ")));
        }
        page.blank();
    }

    /// Writes the rows without figures as a list; nothing if none is missing.
    pub fn list_missing(&self, page: &mut Page) {
        for missing in &self.missing {
            page.line(format_args!("- {missing}"));
        }
        if !self.missing.is_empty() {
            page.blank();
        }
    }

    /// Returns the median share of time in which tasks waited for a CPU, in percent, over all samples.
    #[must_use]
    pub fn median_pressure_percent(&self) -> f64 {
        let all = self.series.iter().flat_map(|series| series.samples.values());
        Spread::of(all.map(|sample| sample.disturbance.pressure_percent).collect())
            .map_or(0.0, |all| all.median)
    }

    fn samples(&self, cell: C, peer: &str) -> Option<&BTreeMap<u32, Sample>> {
        let series = self.series.iter().find(|series| series.cell == cell && series.peer == peer)?;
        Some(&series.samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn rows_take_turns_and_a_disturbed_sample_is_taken_again() {
        let mut results = Results::new(Machine::probe(), 2, Timing::QUICK);
        let taken = RefCell::new(Vec::new());
        results.measure("cell", &[("a", 1), ("b", 2), ("c", 3)], 2, &Progress::new(), |row| {
            taken.borrow_mut().push(row);
            if row == 2 {
                return Err(anyhow::anyhow!("it broke").into());
            }
            // The first sample of all is disturbed.
            let steal_percent = if taken.borrow().len() == 1 { 3.0 } else { 0.0 };
            let disturbance = Disturbance { steal_percent, ..Disturbance::default() };
            Ok(Sample { report: Report::default(), cpu_ns: Some(row), disturbance })
        });
        assert_eq!(*taken.borrow(), [1, 1, 2, 3, 3, 1], "backwards in the second round, without b");
        assert_eq!((results.dropped, results.cells()), (1, vec!["cell"]));
        let cpu = |sample: &Sample| sample.cpu_ns.map(|ns| ns as f64);
        assert_eq!(results.ratio("cell", "c", "a", cpu), Ok(Spread::single(3.0)));
        assert_eq!(results.best("cell", &["a", "b", "c"], cpu), Some("c"));
        assert_eq!(results.ratio("cell", "c", "b", cpu), Err("b, cell: failed: it broke".to_owned()));
    }
}
