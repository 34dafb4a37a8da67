//! Hops whose bandwidth is bought: the same path with paced links, beside TCP end to end and TCP on each hop.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::flow::{self, Way};
use super::measure::Plan;
use super::scene::Scene;
use super::shape::{THREE_BOUGHT_HOPS, THREE_HOPS};
use crate::kit::{Bar, Bound, Page};
use crate::link::Kind;
use crate::progress::Progress;
use crate::statistics::median;

/// Loss on the middle link, in percent.
const LOSS: f64 = 2.0;
/// Minimum goodput of one flow, as a share of the declared rate: what headers and repetitions leave of it is 0.92.
const GOODPUT: f64 = 0.88;
/// Minimum share of each of two flows in what both get.
const EACH: f64 = 0.45;

/// Floods of one way.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    /// The name in the table.
    pub way: String,
    /// Mb/s of one flow, one per round.
    pub mbit: Vec<f64>,
    /// CPU of the nodes, in seconds per GB, one per round; empty for plain TCP.
    pub cpu_s_per_gb: Vec<f64>,
    /// Mb/s of two flows at a time; none for plain TCP.
    pub two_mbit: Option<[f64; 2]>,
}

/// The figures of this part.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Bought {
    /// The declared rate, Mb/s.
    pub rate_mbit: f64,
    /// Percent.
    pub loss: f64,
    /// All ways.
    pub rows: Vec<Row>,
}

/// Measures all ways.
///
/// # Errors
/// A flow breaks, or the links are not made.
pub(super) fn measure(kind: Kind, seed: u64, plan: &Plan, progress: &Progress) -> Result<Bought> {
    let rate_mbit = THREE_BOUGHT_HOPS.bought.unwrap_or_default() as f64 / 1e6;
    let mut rows = Vec::new();
    for (shape, name) in [(&THREE_HOPS, "ours, TCP on each hop"), (&THREE_BOUGHT_HOPS, "ours, bought hops")] {
        let scene = Scene::new(shape, kind, seed)?;
        if shape.bought.is_some() {
            scene.wait_for_paced()?;
        } else {
            rows.push(row(&scene, Way::Plain("bbr"), "TCP bbr", plan, progress)?);
        }
        rows.push(row(&scene, Way::Overlay, name, plan, progress)?);
    }
    Ok(Bought { rate_mbit, loss: LOSS, rows })
}

fn row(scene: &Scene, way: Way, name: &str, plan: &Plan, progress: &Progress) -> Result<Row> {
    scene.set_loss(LOSS / 100.0)?;
    let [warm, window] = [plan.warm_ms, plan.window_ms].map(Duration::from_millis);
    let (mut mbit, mut cpu_s_per_gb) = (Vec::new(), Vec::new());
    let is_ours = way == Way::Overlay;
    for round in 1..=plan.rounds {
        progress.say(&format!("bought bandwidth: {name} at {LOSS} %, round {round}"));
        let flood = flow::flood(scene, way, warm, window)?;
        mbit.push(flood.mbit);
        if is_ours {
            cpu_s_per_gb.push(flood.cpu_s_per_gb);
        }
    }
    let two_mbit = if is_ours {
        progress.say(&format!("bought bandwidth: two flows, {name}"));
        flow::together(scene, 2, warm, window)?.try_into().ok()
    } else {
        None
    };
    Ok(Row { way: name.to_owned(), mbit, cpu_s_per_gb, two_mbit })
}

impl Bought {
    fn paced(&self) -> Option<&Row> {
        self.rows.iter().find(|row| row.way == "ours, bought hops")
    }

    /// Adds the table.
    pub(super) fn render(&self, page: &mut Page) {
        page.line(format_args!(
            "\nThree hops of 200 Mb/s, {} % lost on the middle one; bought hops are declared with {} Mb/s:\n",
            self.loss, self.rate_mbit
        ));
        page.columns(["way", "Mb/s:", "of the declared rate:", "CPU s/GB:", "two flows, Mb/s"]);
        for row in &self.rows {
            let mbit = median(&row.mbit).unwrap_or(f64::NAN);
            let cpu = median(&row.cpu_s_per_gb).map_or_else(|| "-".to_owned(), |cpu| format!("{cpu:.1}"));
            let two =
                row.two_mbit.map_or_else(|| "-".to_owned(), |[one, other]| format!("{one:.1}, {other:.1}"));
            let share = mbit / self.rate_mbit;
            page.row(format_args!("{} | {mbit:.1} | {share:.3} | {cpu} | {two}", row.way));
        }
    }

    /// Returns the bars.
    pub(super) fn bars(&self) -> Vec<Bar> {
        let Some(paced) = self.paced() else { return Vec::new() };
        let goodput = median(&paced.mbit).map(|mbit| mbit / self.rate_mbit);
        let bar = format!("bought hops at {} %, share of the declared rate, at least {GOODPUT}", self.loss);
        let mut bars = vec![Bar::single(bar, goodput, Bound::AtLeast(GOODPUT))];
        if let Some([one, other]) = paced.two_mbit {
            let bar = format!("bought hops, the smaller of two flows, at least {EACH} of both");
            bars.push(Bar::single(bar, Some(one.min(other) / (one + other)), Bound::AtLeast(EACH)));
        }
        bars
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_or_unfair_link_misses_its_bar() {
        let missed = |mbit: f64, two: [f64; 2]| {
            let way = "ours, bought hops".to_owned();
            let row = Row { way, mbit: vec![mbit], cpu_s_per_gb: vec![9.0], two_mbit: Some(two) };
            let bought = Bought { rate_mbit: 190.0, loss: LOSS, rows: vec![row] };
            bought.bars().iter().filter(|bar| bar.is_failure()).count()
        };
        assert_eq!(missed(175.0, [85.0, 90.0]), 0);
        assert_eq!(missed(160.0, [85.0, 90.0]), 1);
        assert_eq!(missed(160.0, [60.0, 110.0]), 2);
    }
}
