//! All samples of a run, and their statistics.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::{Cell, Sample, Timing};
use crate::machine::Machine;
use crate::peers::Unavailable;
use crate::statistics::Spread;

/// The samples of one peer in one cell, by round; a round without a sample was disturbed.
#[derive(Debug, Serialize)]
struct Series {
    cell: Cell,
    peer: &'static str,
    samples: BTreeMap<u32, Sample>,
}

/// A peer without figures, and why.
#[derive(Debug, Serialize)]
pub struct Missing {
    /// The row.
    pub peer: &'static str,
    /// The cell; absent: all cells.
    pub cell: Option<Cell>,
    /// What is missing or failed, on one line.
    pub reason: String,
}

/// A run.
#[derive(Debug, Serialize)]
pub struct Results {
    /// The machine and the date.
    pub machine: Machine,
    /// Load average when it ended.
    pub load_at_end: f64,
    /// Requested rounds.
    pub rounds: u32,
    /// Length of the samples.
    pub timing: Timing,
    /// Samples dropped because others took more than 2 % of the CPU.
    pub dropped: u32,
    missing: Vec<Missing>,
    series: Vec<Series>,
}

impl fmt::Display for Missing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cell {
            Some(cell) => write!(formatter, "{}, {cell}: {}", self.peer, self.reason),
            None => write!(formatter, "{}: {}", self.peer, self.reason),
        }
    }
}

impl Results {
    /// Makes empty results.
    #[must_use]
    pub fn new(machine: Machine, rounds: u32, timing: Timing) -> Self {
        let (missing, series) = (Vec::new(), Vec::new());
        Self { machine, load_at_end: 0.0, rounds, timing, dropped: 0, missing, series }
    }

    /// Adds a sample; `None` is a round that stayed disturbed.
    pub fn add(&mut self, cell: Cell, peer: &'static str, round: u32, sample: Option<Sample>) {
        let Some(sample) = sample else { return };
        match self.series.iter_mut().find(|series| series.cell == cell && series.peer == peer) {
            Some(series) => {
                series.samples.insert(round, sample);
            }
            None => self.series.push(Series { cell, peer, samples: BTreeMap::from([(round, sample)]) }),
        }
    }

    /// Notes that a peer is absent or does not do this work, and returns the line for people.
    pub fn unavailable(&mut self, peer: &'static str, cell: Cell, reason: &Unavailable) -> String {
        let reason_line = reason.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        let cell = matches!(reason, Unavailable::Failed(_)).then_some(cell);
        self.missing.push(Missing { peer, cell, reason: reason_line });
        self.missing.last().map(Missing::to_string).unwrap_or_default()
    }

    /// Returns every peer without figures.
    #[must_use]
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Returns why a peer has no figures in a cell, if it has none.
    #[must_use]
    pub fn why_missing(&self, cell: Cell, peer: &str) -> Option<&Missing> {
        self.missing
            .iter()
            .find(|missing| missing.peer == peer && missing.cell.is_none_or(|failed| failed == cell))
    }

    /// Returns the cells with samples, in the order of measurement.
    #[must_use]
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells: Vec<Cell> = self.series.iter().map(|series| series.cell).collect();
        cells.sort();
        cells.dedup();
        cells
    }

    /// Returns the summary of a value over all samples of a peer in a cell.
    #[must_use]
    pub fn spread(&self, cell: Cell, peer: &str, value: impl Fn(&Sample) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.samples(cell, peer)?.values().filter_map(value).collect())
    }

    /// Returns the ratio `ours / theirs` of a value, taken within each round.
    #[must_use]
    pub fn ratio(
        &self,
        cell: Cell,
        ours: &str,
        theirs: &str,
        value: impl Fn(&Sample) -> Option<f64>,
    ) -> Option<Spread> {
        let (ours, theirs) = (self.samples(cell, ours)?, self.samples(cell, theirs)?);
        let pair = |(round, sample): (&u32, &Sample)| {
            let divisor = value(theirs.get(round)?)?;
            (divisor > 0.0).then_some(value(sample)? / divisor)
        };
        Spread::of(ours.iter().filter_map(pair).collect())
    }

    /// Returns the largest share of time in which tasks waited for a CPU, in percent, over all samples.
    #[must_use]
    pub fn median_pressure_percent(&self) -> f64 {
        let all = self.series.iter().flat_map(|series| series.samples.values());
        Spread::of(all.map(|sample| sample.disturbance.pressure_percent).collect())
            .map_or(0.0, |all| all.median)
    }

    fn samples(&self, cell: Cell, peer: &str) -> Option<&BTreeMap<u32, Sample>> {
        let series = self.series.iter().find(|series| series.cell == cell && series.peer == peer)?;
        Some(&series.samples)
    }
}
