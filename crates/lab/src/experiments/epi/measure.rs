//! Measures the figures. Rows take turns in rounds, so that a slow minute of the machine affects all of them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, anyhow};
use serde::Serialize;

use crate::kit::in_turn;
use crate::link::{Conditions, Network, Wire};
use crate::peers::{self, Running, Unavailable};
use crate::progress::Progress;
use crate::site::Site;
use crate::statistics::{self, Spread};

use super::clients::{self, Rate};
use super::paper::{TABLE_I, Topology};
use super::rows::{LIMITS, ROWS, Row};

/// The amount of measurement.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Plan {
    /// Number of turns of every row.
    pub rounds: u32,
    /// Requests in each turn and topology.
    pub requests: u32,
    /// Connections of `wrk`, in the order of the table.
    pub connections: Vec<u32>,
    /// Duration of `wrk` for each, in seconds.
    pub window_seconds: u64,
    /// Number of turns of `wrk`.
    pub rate_rounds: u32,
}

impl Plan {
    /// For CI: ends within 90 seconds.
    #[must_use]
    pub(super) fn quick() -> Self {
        Self { rounds: 2, requests: 5, connections: vec![16], window_seconds: 1, rate_rounds: 2 }
    }

    /// The paper's counts, `runs` times: 120 requests, and the connections of Fig. 13.
    #[must_use]
    pub(super) fn full(runs: u32) -> Self {
        let connections = vec![1, 2, 4, 8, 16, 32, 64];
        Self { rounds: 4 * runs, requests: 30, connections, window_seconds: 1, rate_rounds: 5 }
    }

    /// Returns the approximate duration.
    #[must_use]
    pub(super) fn estimate(&self, rows: &[Row]) -> Duration {
        const START_SECONDS: f64 = 0.5;
        const AROUND_A_REQUEST_MS: f64 = 8.0;
        let timed = rows.iter().filter(|row| row.has_times);
        let requests = f64::from(self.requests + 1);
        let one = |row: &Row, topology: &Topology| row.model.time_ms(topology) + AROUND_A_REQUEST_MS;
        let turn =
            |row: &Row| TABLE_I.iter().map(|topology| one(row, topology) * requests / 1000.0).sum::<f64>();
        let times: f64 = timed.map(|row| turn(row) + START_SECONDS).sum();
        let windows = self.connections.len() as f64 * (self.window_seconds as f64 + START_SECONDS);
        let rated = rows.iter().filter(|row| row.has_rate).count() as f64;
        let rates = f64::from(self.rate_rounds) * rated * windows;
        Duration::from_secs_f64(f64::from(self.rounds) * times + rates)
    }
}

/// All measurements.
#[derive(Debug, Default, Serialize)]
pub(super) struct Figures {
    /// Times of requests by row and topology, in milliseconds.
    pub times: BTreeMap<String, Vec<Times>>,
    /// The results of `wrk` by row: one list for each round, with one figure for each number of connections.
    pub rates: BTreeMap<String, Vec<Vec<Option<Rate>>>>,
    /// Why a row has no figures.
    pub missing: BTreeMap<String, String>,
}

/// Requests of one row in one topology.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Times {
    /// Sorted, in milliseconds.
    pub each_ms: Vec<f64>,
    /// Requests without an answer.
    pub failed: u32,
}

impl Times {
    /// Returns the value below which `share` (0 to 1) of the times lie; `None` without any.
    #[must_use]
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        statistics::quantile(&self.each_ms, share)
    }

    /// Returns the median time.
    #[must_use]
    pub(super) fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    /// Returns mean and standard deviation.
    #[must_use]
    pub(super) fn mean_and_deviation(&self) -> Option<(f64, f64)> {
        let count = self.each_ms.len() as f64;
        let mean = self.each_ms.iter().sum::<f64>() / count;
        let variance = self.each_ms.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / count;
        (count > 0.0).then(|| (mean, variance.sqrt()))
    }

    fn add(&mut self, pings: &clients::Pings) {
        self.each_ms.extend(&pings.times_ms);
        self.each_ms.sort_by(f64::total_cmp);
        self.failed += pings.failed;
    }
}

impl Figures {
    /// Returns the times of a row in topology number `topology` of Table I.
    #[must_use]
    pub(super) fn times(&self, row: &str, topology: usize) -> Option<&Times> {
        self.times.get(row)?.get(topology)
    }

    /// Returns the median minus that without a proxy in the same topology, in milliseconds.
    #[must_use]
    pub(super) fn overhead_ms(&self, row: &str, topology: usize) -> Option<f64> {
        let median = |row: &str| self.times(row, topology)?.median();
        Some(median(row)? - median(super::rows::NO_PROXY)?)
    }

    /// Returns the median over the rounds of a row's rate with the `at`th number of connections.
    #[must_use]
    pub(super) fn rate(&self, row: &str, at: usize) -> Option<f64> {
        self.median(row, at, |rate| rate.per_second)
    }

    /// Returns the median over the rounds of the 99th percentile of its times, in milliseconds.
    #[must_use]
    pub(super) fn p99_ms(&self, row: &str, at: usize) -> Option<f64> {
        self.median(row, at, |rate| rate.p99_ms)
    }

    fn median(&self, row: &str, at: usize, value: impl Fn(Rate) -> f64) -> Option<f64> {
        let rounds = self.rates.get(row)?.iter();
        Some(Spread::of(rounds.filter_map(|round| (*round.get(at)?).map(&value)).collect())?.median)
    }

    /// Returns the ratio of a row to another one with the `at`th number of connections: the median over the rounds
    /// that have both. Their windows are seconds apart.
    #[must_use]
    pub(super) fn rate_of(&self, row: &str, other: &str, at: usize) -> Option<f64> {
        self.ratio(row, other, at, |rate| rate.per_second)
    }

    /// Returns the same ratio of the 99th percentiles of times.
    #[must_use]
    pub(super) fn p99_of(&self, row: &str, other: &str, at: usize) -> Option<f64> {
        self.ratio(row, other, at, |rate| rate.p99_ms)
    }

    fn ratio(&self, row: &str, other: &str, at: usize, value: impl Fn(Rate) -> f64) -> Option<f64> {
        let rounds = self.rates.get(row)?.iter().zip(self.rates.get(other)?);
        let of = |round: &Vec<Option<Rate>>| (*round.get(at)?).map(&value);
        let ratios = rounds.filter_map(|(ours, theirs)| Some(of(ours)? / of(theirs)?));
        Some(Spread::of(ratios.collect())?.median)
    }
}

/// Measures set-up times on emulated links.
///
/// # Errors
/// The site cannot be built, or its links cannot be changed.
pub(super) fn times(
    network: &Network,
    plan: &Plan,
    rows: &[Row],
    figures: &mut Figures,
    progress: &Progress,
) -> Result<()> {
    clients::require("httping")?;
    let (site, wires) = Site::emulated(network)?;
    let rows: Vec<Row> = rows.iter().copied().filter(|row| row.has_times).collect();
    for round in 0..plan.rounds {
        for (at, row) in in_turn(&rows, round).into_iter().enumerate() {
            let done = round as usize * rows.len() + at;
            progress.bar(done, plan.rounds as usize * rows.len(), &format!("set-up times: {}", row.name));
            let outcome = turn(&site, &wires, &row, plan.requests, figures);
            note(figures, &row, outcome);
        }
    }
    Ok(())
}

fn note(figures: &mut Figures, row: &Row, outcome: Result<(), Unavailable>) {
    if let Err(why) = outcome {
        let why = why.to_string().replace('\n', " ");
        figures.missing.insert(row.name.to_owned(), why);
    }
}

fn start<'s>(site: &'s Site, row: &Row) -> Result<Running<'s>, Unavailable> {
    let peer = peers::find(row.peer).ok_or_else(|| anyhow!("no peer is called {}", row.peer))?;
    peer.start(site)
}

/// Measures one row in all topologies.
fn turn(
    site: &Site,
    wires: &[Wire],
    row: &Row,
    requests: u32,
    figures: &mut Figures,
) -> Result<(), Unavailable> {
    let running = start(site, row)?;
    for (number, topology) in TABLE_I.iter().enumerate() {
        for (wire, delay) in wires.iter().zip(topology.delays()) {
            wire.set_both(Conditions::delayed(delay))?;
        }
        let pings = clients::httping(site, &running, requests)?;
        let times =
            figures.times.entry(row.name.to_owned()).or_insert_with(|| vec![Times::default(); TABLE_I.len()]);
        if let Some(times) = times.get_mut(number) {
            times.add(&pings);
        }
    }
    Ok(())
}

/// Measures rates on plain links, as the paper's three virtual machines have them.
///
/// # Errors
/// The site cannot be built.
pub(super) fn rates(plan: &Plan, rows: &[Row], figures: &mut Figures, progress: &Progress) -> Result<()> {
    clients::require("wrk")?;
    let site = Site::new()?;
    let rows: Vec<Row> = rows.iter().copied().filter(|row| row.has_rate).collect();
    let turns = plan.rate_rounds as usize * plan.connections.len() * rows.len();
    let mut done = 0;
    for round in 0..plan.rate_rounds {
        for (at, connections) in plan.connections.iter().enumerate() {
            for row in in_turn(&rows, round) {
                progress.bar(done, turns, &format!("rates at {connections}: {}", row.name));
                let seen = window_rate(&site, &row, *connections, plan.window_seconds);
                let rounds = figures.rates.entry(row.name.to_owned()).or_default();
                rounds.resize(round as usize + 1, vec![None; plan.connections.len()]);
                rounds[round as usize][at] = seen.as_ref().ok().copied();
                note(figures, &row, seen.map(drop));
                done += 1;
            }
        }
    }
    Ok(())
}

fn window_rate(site: &Site, row: &Row, connections: u32, window_seconds: u64) -> Result<Rate, Unavailable> {
    let running = start(site, row)?;
    Ok(clients::wrk(site, &running, connections, Duration::from_secs(window_seconds))?)
}

/// Returns the rows whose name contains one of `only`, and the row that all are compared with. A quick run leaves out
/// the limits unless they are requested.
#[must_use]
pub(super) fn chosen(only: &[String], is_quick: bool) -> Vec<Row> {
    let wanted = |row: &&Row| {
        only.is_empty() && !(is_quick && LIMITS.contains(&row.name))
            || row.name == super::rows::NO_PROXY
            || only.iter().any(|part| row.name.contains(part.as_str()))
    };
    ROWS.iter().filter(wanted).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_mean_and_overhead_are_those_of_the_requests() {
        let times = |each: &[f64]| Times { each_ms: each.to_vec(), failed: 0 };
        let four = times(&[1.0, 2.0, 3.0, 10.0]);
        assert_eq!(
            (four.median(), four.quantile(1.0), four.quantile(0.0)),
            (Some(2.5), Some(10.0), Some(1.0))
        );
        assert_eq!(four.mean_and_deviation().map(|(mean, _)| mean), Some(4.0));
        assert_eq!((times(&[]).median(), times(&[]).mean_and_deviation()), (None, None));
        let mut figures = Figures::default();
        figures.times.insert("no proxy".into(), vec![times(&[20.0])]);
        figures.times.insert("x".into(), vec![times(&[17.5]), times(&[1.0])]);
        assert_eq!(figures.overhead_ms("x", 0), Some(-2.5));
        assert_eq!((figures.overhead_ms("x", 1), figures.overhead_ms("y", 0)), (None, None));
    }

    fn seen(rates: &[Option<f64>]) -> Vec<Vec<Option<Rate>>> {
        let rate = |rate: f64| Rate { per_second: rate, p99_ms: 10.0 * rate };
        rates.iter().map(|seen| vec![seen.map(rate)]).collect()
    }

    #[test]
    fn rates_are_medians_over_rounds_that_had_one_and_ratios_over_those_that_had_both() {
        let mut figures = Figures::default();
        figures.rates.insert("x".into(), seen(&[Some(3.0), None, Some(1.0), Some(2.0)]));
        assert_eq!(
            (figures.rate("x", 0), figures.p99_ms("x", 0), figures.rate("x", 1), figures.rate("y", 0)),
            (Some(2.0), Some(20.0), None, None)
        );
        // A slow round of the machine affects both.
        figures.rates.insert("y".into(), seen(&[Some(2.0), Some(9.0), Some(1.0), Some(1.0)]));
        assert_eq!(
            (figures.rate_of("x", "y", 0), figures.p99_of("x", "y", 0), figures.rate_of("x", "z", 0)),
            (Some(1.5), Some(1.5), None)
        );
        assert_eq!(figures.rate_of("x", "y", 1), None);
    }

    #[test]
    fn the_quick_plan_is_meant_for_ninety_seconds() {
        let estimate = Plan::quick().estimate(&chosen(&[], true));
        assert!(estimate < Duration::from_secs(85), "{estimate:?}");
        assert!(Plan::full(1).requests * Plan::full(1).rounds == 120);
    }
}
