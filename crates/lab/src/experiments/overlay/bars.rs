//! The bars for ours (`make bench-overlay`).

use super::bought::Bought;
use super::gap::{Gap, Way};
use super::measure::{DELAY_LOSS, DelayRow, FAST_LOSS, Figures, FloodRow, SCP_LOSS};
use super::shape::{ONE_HOP, Shape, THREE_HOPS};
use super::wide::{Chain, Routes};
use crate::kit::{Bar, Bound, Need};
use crate::statistics::{median, percentile};

/// Minimum goodput at each loss (percent), as a share of the link's rate.
const GOODPUT: [(f64, f64); 3] = [(0.5, 0.92), (2.0, 0.90), (5.0, 0.84)];
/// Minimum share over one fast hop.
const FAST_GOODPUT: f64 = 0.88;
/// Maximum CPU of all nodes of the path, in seconds per GB, at the lowest loss.
const CPU_S_PER_GB: f64 = 14.0;
/// The goal for it.
const CPU_STRETCH_S_PER_GB: f64 = 10.0;
/// Maximum addition of loss to the 99th percentile: a round trip of the lossy hop and 3 ms.
const DELAY_ADDED_MS: f64 = 23.0;
/// Minimum ratio of scp with loss to scp without.
const SCP_SHARE: f64 = 0.9;
/// Maximum stall after a relay was killed, for 99 of 100.
const STALL_MS: f64 = 300.0;
/// Maximum pause of a flow with a copy on each of two paths, after a relay of one was killed: the round trip of the longer path.
const COPIED_MS: f64 = 68.0;
/// Time limit until the last of twelve nodes has the new routes after a cut, for 99 of 100 cuts.
const CONVERGED_MS: f64 = 250.0;
/// Minimum share of packets in time over three hops, one of which loses 1 % in bursts, percent; and maximum of copies.
const IN_TIME_PERCENT: f64 = 99.9;
const COPIES: f64 = 1.05;
/// Maximum bandwidth of an idle link.
const IDLE_KBIT: f64 = 64.0;
/// Minimum share of the gap between one path and flooding that dissemination graphs close, and their maximum cost in those of
/// two disjoint paths.
pub(super) const GAP_SHARE: f64 = 0.98;
pub(super) const GAP_COST: f64 = 1.03;

fn at_least(bar: String, reached: f64, bound: f64) -> Bar {
    Bar::single(bar, Some(reached), Bound::AtLeast(bound))
}

fn at_most(bar: String, reached: f64, bound: f64) -> Bar {
    Bar::single(bar, Some(reached), Bound::AtMost(bound))
}

/// Returns all bars of the measured parts.
pub(super) fn judge(figures: &Figures) -> Vec<Bar> {
    let mut bars = floods(figures);
    bars.extend(delays(figures));
    let copy = |loss: f64| {
        figures.copies.iter().find(|row| row.way == "ours" && row.loss == loss).and_then(|row| row.mbit)
    };
    if let (Some(clean), Some(lossy)) = (copy(0.0), copy(SCP_LOSS)) {
        let bar = format!("scp at {SCP_LOSS} % against itself without loss, at least {SCP_SHARE}");
        bars.push(at_least(bar, lossy / clean, SCP_SHARE));
    }
    if !figures.killed_ms.is_empty() {
        let bar = format!("stall after a relay was killed, 99 of 100, at most {STALL_MS} ms");
        bars.push(at_most(bar, percentile(&figures.killed_ms, 0.99), STALL_MS));
    }
    if let Some(worst) = figures.copied_ms.last() {
        let bar =
            format!("pause of a duplicated flow after a relay was killed, the worst, at most {COPIED_MS} ms");
        bars.push(at_most(bar, *worst, COPIED_MS));
    }
    if !figures.cut_ms.is_empty() {
        let bar = format!("stall after a link was cut, 99 of 100, at most {STALL_MS} ms");
        bars.push(at_most(bar, percentile(&figures.cut_ms, 0.99), STALL_MS));
    }
    if let Some(kbit) = figures.idle_kbit {
        bars.push(at_most(format!("an idle link, at most {IDLE_KBIT} kbit/s"), kbit, IDLE_KBIT));
    }
    if let Some(lost) = figures.lost_under_load {
        bars.push(at_most("links lost while flooding, none".to_owned(), lost as f64, 0.0));
    }
    if let Some((_, lost)) = figures.overload {
        bars.push(at_most("hellos lost under overload, percent, none".to_owned(), lost, 0.0));
    }
    bars.extend(figures.bought.iter().flat_map(Bought::bars));
    bars.extend(figures.routes.iter().flat_map(routes));
    bars.extend(figures.chain.iter().flat_map(chain));
    bars.extend(figures.gap.iter().flat_map(gap));
    bars
}

fn gap(gap: &Gap) -> [Bar; 2] {
    let (share, cost) = (gap.share(Way::Graphs), gap.cost(Way::Graphs));
    let bar = format!("graphs, of the gap between one path and flooding, at least {GAP_SHARE}");
    [
        at_least(bar, share, GAP_SHARE),
        at_most(format!("graphs, cost in two disjoint paths, at most {GAP_COST}"), cost, GAP_COST),
    ]
}

fn routes(routes: &Routes) -> [Bar; 2] {
    let flows = routes.flows;
    let bar = format!(
        "routes of twelve nodes with {flows} flows after a cut, the last node, 99 of 100 cuts, at most \
         {CONVERGED_MS} ms"
    );
    let converged = at_most(bar, percentile(&routes.converged_ms, 0.99), CONVERGED_MS);
    let bar = format!("an idle link of twelve nodes, the worst, at most {IDLE_KBIT} kbit/s");
    [converged, at_most(bar, routes.idle_kbit, IDLE_KBIT)]
}

fn chain(chain: &Chain) -> Vec<Bar> {
    let Some((in_time, copies)) = chain.real_time() else { return Vec::new() };
    let bar = format!(
        "real-time links, 1 % burst loss on one of three hops, in time, at least {IN_TIME_PERCENT} %"
    );
    let cost = format!("real-time links, copies of a packet, at most {COPIES}");
    vec![at_least(bar, in_time, IN_TIME_PERCENT), at_most(cost, copies, COPIES)]
}

fn floods(figures: &Figures) -> Vec<Bar> {
    let mut bars: Vec<_> = GOODPUT
        .iter()
        .filter_map(|(loss, bound)| goodput(&figures.floods, &THREE_HOPS, *loss, *bound))
        .collect();
    bars.extend(goodput(&figures.fast, &ONE_HOP, FAST_LOSS, FAST_GOODPUT));
    if let Some(cpu) = ours(&figures.floods, GOODPUT[0].0).and_then(|row| median(&row.cpu_s_per_gb)) {
        let bar = |bound| format!("CPU of all nodes at {} %, at most {bound} s/GB", GOODPUT[0].0);
        bars.push(at_most(bar(CPU_S_PER_GB), cpu, CPU_S_PER_GB));
        let stretch = at_most(bar(CPU_STRETCH_S_PER_GB) + " (stretch)", cpu, CPU_STRETCH_S_PER_GB);
        bars.push(stretch.need(Need::Goal));
    }
    bars
}

fn ours(rows: &[FloodRow], loss: f64) -> Option<&FloodRow> {
    rows.iter().find(|row| row.way == "ours" && row.loss == loss)
}

fn goodput(rows: &[FloodRow], shape: &Shape, loss: f64, bound: f64) -> Option<Bar> {
    let mbit = ours(rows, loss).and_then(|row| median(&row.mbit))?;
    let (hops, rate) = (shape.hops, shape.rate / 1_000_000);
    let bar = format!("goodput at {loss} % as a share of {rate} Mb/s, hops: {hops}, at least {bound}");
    Some(at_least(bar, mbit * 1e6 / shape.rate as f64, bound))
}

fn delays(figures: &Figures) -> Vec<Bar> {
    let p99 = |way: &str, loss: f64| {
        let row: Option<&DelayRow> = figures.delays.iter().find(|row| row.way == way && row.loss == loss);
        row.map(|row| row.percentiles_ms[2])
    };
    let mut bars = Vec::new();
    if let (Some(clean), Some(lossy)) = (p99("ours", 0.0), p99("ours", DELAY_LOSS)) {
        let bar = format!("what {DELAY_LOSS} % loss adds to the p99 of a write, at most {DELAY_ADDED_MS} ms");
        bars.push(at_most(bar, lossy - clean, DELAY_ADDED_MS));
        if let Some(bbr) = p99("TCP bbr", DELAY_LOSS) {
            let bar = format!("p99 of a write at {DELAY_LOSS} % against TCP bbr's, below 1");
            bars.push(at_most(bar, lossy / bbr, 1.0));
        }
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::super::measure::CopyRow;
    use super::*;

    fn figures(mbit: f64, p99: f64, scp: f64, stall: f64) -> Figures {
        let delay = |way: &str, loss: f64, p99: f64| DelayRow {
            way: way.into(),
            loss,
            percentiles_ms: [30.0, 31.0, p99, 60.0],
        };
        let copy = |loss, mbit| CopyRow { way: "ours".into(), loss, mbit: Some(mbit) };
        let flood = |mbit: f64| FloodRow {
            way: "ours".into(),
            loss: 0.5,
            mbit: vec![mbit, 1.0, 900.0],
            cpu_s_per_gb: vec![13.0],
        };
        Figures {
            floods: vec![flood(mbit)],
            fast: vec![flood(mbit * 2.4)],
            delays: vec![
                delay("ours", 0.0, 32.0),
                delay("ours", DELAY_LOSS, p99),
                delay("TCP bbr", DELAY_LOSS, 110.0),
            ],
            copies: vec![copy(0.0, 150.0), copy(SCP_LOSS, scp)],
            killed_ms: vec![10.0, stall],
            copied_ms: vec![5.0, stall / 5.0],
            idle_kbit: Some(60.0),
            lost_under_load: Some(0),
            overload: Some((190.0, 0.0)),
            ..Figures::default()
        }
    }

    #[test]
    fn a_missed_bar_fails_and_a_held_one_does_not() {
        let failed = |figures: &Figures| judge(figures).iter().filter(|bar| bar.is_failure()).count();
        let good = figures(185.0, 54.0, 140.0, 250.0);
        assert_eq!((failed(&good), judge(&good).len()), (0, 12));
        let missed: Vec<_> = judge(&good).into_iter().filter(|bar| !bar.holds()).collect();
        assert!(
            missed.len() == 1 && missed[0].need == Need::Goal,
            "13 s/GB are enough, 10 would be better: {missed:?}"
        );
        assert_eq!(failed(&figures(183.0, 56.0, 134.0, 301.0)), 5, "each a little beyond its bar");
        let paused = Figures { copied_ms: vec![5.0, 69.0], ..Figures::default() };
        assert_eq!((judge(&paused).len(), failed(&paused)), (1, 1), "more than a round trip");
        assert_eq!(failed(&figures(185.0, 111.0, 140.0, 250.0)), 2, "also behind TCP");
        let overload = Some((190.0, 0.2));
        let lost =
            Figures { lost_under_load: Some(1), idle_kbit: Some(65.0), overload, ..Figures::default() };
        assert_eq!((judge(&lost).len(), failed(&lost)), (3, 3));
        for (converged, stall, idle_kbit, misses) in [(249.0, 299.0, 63.0, 0), (251.0, 301.0, 65.0, 3)] {
            let converged_ms = vec![100.0, converged];
            let routes = Some(Routes { flows: 10, idle_kbit, converged_ms, ..Routes::default() });
            let cut = Figures { cut_ms: vec![stall], routes, ..Figures::default() };
            assert_eq!((judge(&cut).len(), failed(&cut)), (3, misses));
        }
    }
}
