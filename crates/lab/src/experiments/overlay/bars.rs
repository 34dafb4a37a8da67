//! What ours must reach (`make bench-overlay`).

use serde::Serialize;

use super::measure::{DELAY_LOSS, DelayRow, Figures, SCP_LOSS, median, percentile};
use super::scene::RATE;

/// Goodput at each loss (percent), as a share of the link's rate.
const GOODPUT: [(f64, f64); 3] = [(0.5, 0.92), (2.0, 0.90), (5.0, 0.84)];
/// CPU of all nodes of the path, seconds per GB, at the least loss.
const CPU_S_PER_GB: f64 = 14.0;
/// What loss may add to the 99th percentile: a round trip of the lossy hop and 3 ms.
const DELAY_ADDED_MS: f64 = 23.0;
/// scp with loss against itself without.
const SCP_SHARE: f64 = 0.9;
/// The longest stall after a relay was killed, 99 of 100.
const STALL_MS: f64 = 300.0;
/// Until the last of twelve nodes has the new routes after a cut.
const CONVERGED_MS: f64 = 200.0;
/// What a link says when nobody speaks.
const IDLE_KBIT: f64 = 64.0;

/// One demand and how it came out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// What is demanded.
    pub bar: String,
    /// The figure it is about.
    pub reached: f64,
    /// Whether it holds.
    pub holds: bool,
}

fn at_least(bar: String, reached: f64, bound: f64) -> Verdict {
    Verdict { bar, reached, holds: reached >= bound }
}

fn at_most(bar: String, reached: f64, bound: f64) -> Verdict {
    Verdict { bar, reached, holds: reached <= bound }
}

/// All bars of what was measured.
pub fn judge(figures: &Figures) -> Vec<Verdict> {
    let mut verdicts = floods(figures);
    verdicts.extend(delays(figures));
    let copy = |loss: f64| {
        figures.copies.iter().find(|row| row.way == "ours" && row.loss == loss).and_then(|row| row.mbit)
    };
    if let (Some(clean), Some(lossy)) = (copy(0.0), copy(SCP_LOSS)) {
        let bar = format!("scp at {SCP_LOSS} % against itself without loss, at least {SCP_SHARE}");
        verdicts.push(at_least(bar, lossy / clean, SCP_SHARE));
    }
    if !figures.killed_ms.is_empty() {
        let bar = format!("stall after a relay was killed, 99 of 100, at most {STALL_MS} ms");
        verdicts.push(at_most(bar, percentile(&figures.killed_ms, 0.99), STALL_MS));
    }
    if !figures.cut_ms.is_empty() {
        let bar = format!("stall after a link was cut, 99 of 100, at most {STALL_MS} ms");
        verdicts.push(at_most(bar, percentile(&figures.cut_ms, 0.99), STALL_MS));
    }
    if let Some(wide) = &figures.wide {
        let bar = format!("routes of twelve nodes after a cut, the worst, at most {CONVERGED_MS} ms");
        verdicts.push(at_most(bar, wide.converged_ms.last().copied().unwrap_or(f64::NAN), CONVERGED_MS));
    }
    if let Some(kbit) = figures.idle_kbit {
        verdicts.push(at_most(format!("an idle link, at most {IDLE_KBIT} kbit/s"), kbit, IDLE_KBIT));
    }
    if let Some(lost) = figures.lost_under_load {
        verdicts.push(at_most("links lost while flooding, none".to_owned(), lost as f64, 0.0));
    }
    verdicts
}

fn floods(figures: &Figures) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let ours = |loss: f64| figures.floods.iter().find(move |row| row.way == "ours" && row.loss == loss);
    for (loss, bound) in GOODPUT {
        if let Some(mbit) = ours(loss).and_then(|row| median(&row.mbit)) {
            let bar = format!("goodput at {loss} % as a share of the link's rate, at least {bound}");
            verdicts.push(at_least(bar, mbit * 1e6 / RATE as f64, bound));
        }
    }
    if let Some(cpu) = ours(GOODPUT[0].0).and_then(|row| median(&row.cpu_s_per_gb)) {
        let bar = format!("CPU of all nodes at {} %, at most {CPU_S_PER_GB} s/GB", GOODPUT[0].0);
        verdicts.push(at_most(bar, cpu, CPU_S_PER_GB));
    }
    verdicts
}

fn delays(figures: &Figures) -> Vec<Verdict> {
    let p99 = |way: &str, loss: f64| {
        let row: Option<&DelayRow> = figures.delays.iter().find(|row| row.way == way && row.loss == loss);
        row.map(|row| row.percentiles_ms[2])
    };
    let mut verdicts = Vec::new();
    if let (Some(clean), Some(lossy)) = (p99("ours", 0.0), p99("ours", DELAY_LOSS)) {
        let bar = format!("what {DELAY_LOSS} % loss adds to the p99 of a write, at most {DELAY_ADDED_MS} ms");
        verdicts.push(at_most(bar, lossy - clean, DELAY_ADDED_MS));
        if let Some(bbr) = p99("TCP bbr", DELAY_LOSS) {
            let bar = format!("p99 of a write at {DELAY_LOSS} % against TCP bbr's, below 1");
            verdicts.push(at_most(bar, lossy / bbr, 1.0));
        }
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::super::measure::{CopyRow, FloodRow};
    use super::super::wide::Wide;
    use super::*;

    fn figures(mbit: f64, p99: f64, scp: f64, stall: f64) -> Figures {
        let delay = |way: &str, loss: f64, p99: f64| DelayRow {
            way: way.into(),
            loss,
            percentiles_ms: [30.0, 31.0, p99, 60.0],
        };
        let copy = |loss, mbit| CopyRow { way: "ours".into(), loss, mbit: Some(mbit) };
        Figures {
            floods: vec![FloodRow {
                way: "ours".into(),
                loss: 0.5,
                mbit: vec![mbit, 1.0, 500.0],
                cpu_s_per_gb: vec![13.0],
            }],
            delays: vec![
                delay("ours", 0.0, 32.0),
                delay("ours", DELAY_LOSS, p99),
                delay("TCP bbr", DELAY_LOSS, 110.0),
            ],
            copies: vec![copy(0.0, 150.0), copy(SCP_LOSS, scp)],
            killed_ms: vec![10.0, stall],
            idle_kbit: Some(60.0),
            lost_under_load: Some(0),
            ..Figures::default()
        }
    }

    #[test]
    fn a_missed_bar_fails_and_a_held_one_does_not() {
        let failed = |figures: &Figures| judge(figures).iter().filter(|verdict| !verdict.holds).count();
        assert_eq!(failed(&figures(185.0, 54.0, 140.0, 250.0)), 0);
        assert_eq!(judge(&figures(185.0, 54.0, 140.0, 250.0)).len(), 8);
        assert_eq!(failed(&figures(183.0, 56.0, 134.0, 301.0)), 4, "each a little beyond its bar");
        assert_eq!(failed(&figures(185.0, 111.0, 140.0, 250.0)), 2, "also behind TCP");
        let lost = Figures { lost_under_load: Some(1), idle_kbit: Some(65.0), ..Figures::default() };
        assert_eq!((judge(&lost).len(), failed(&lost)), (2, 2));
        for (converged, stall, misses) in [(199.0, 299.0, 0), (201.0, 301.0, 2)] {
            let converged_ms = vec![100.0, converged];
            let wide = Some(Wide { flows: 10, converged_ms, answered_ms: vec![1.0] });
            let cut = Figures { cut_ms: vec![stall], wide, ..Figures::default() };
            assert_eq!((judge(&cut).len(), failed(&cut)), (2, misses));
        }
    }
}
