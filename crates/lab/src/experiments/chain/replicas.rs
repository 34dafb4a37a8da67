//! The rate of a container function against the number of its replicas (EPI framework, Secs. II-A and VII-D). Each
//! container may use a small share of a core, so one alone is the bottleneck, and the core is not.

use super::super::relay::{Cell, take};
use crate::kit::{Bar, Bound, Page, Results, Sample, Timing};
use crate::machine::{self, Machine};
use crate::peers::chains::{REPLICA_CPU_PERCENT, REPLICAS};
use crate::progress::Progress;
use crate::site::Site;

/// Requests on connections that stay open: all flows pass a container, and none begins in the window.
const CELL: Cell = Cell::KeepAlive(32);
/// Minimum rate of two replicas against one.
const TWO_AT_LEAST: f64 = 1.6;
/// Length of a sample: many periods of the kernel's CPU limit (100 ms).
const TIMING: Timing = Timing { warmup_ms: 500, window_ms: 2000 };

/// Measures the rows in turn.
pub(super) fn measure(rounds: u32, machine: Machine, site: &Site, progress: &Progress) -> Results<Cell> {
    let mut results = Results::new(machine, rounds, TIMING);
    let rows: Vec<_> = REPLICAS.iter().map(|peer| (peer.name, *peer)).collect();
    results.measure(CELL, &rows, 1, progress, |peer| take(site, peer, CELL, TIMING));
    results.load_at_end = machine::load_average();
    results
}

/// Writes the table and returns the bar.
pub(super) fn render(page: &mut Page, results: &Results<Cell>) -> Vec<Bar> {
    page.line(format_args!(
        "### Replicas\n\nRequests per second on 32 connections that stay open, through a function in containers. Each \
         container may use {REPLICA_CPU_PERCENT} % of a core.\n"
    ));
    page.columns(["", "requests/s:", "against one:", "p99 ms:"]);
    let speed = |sample: &Sample| Some(sample.speed(CELL));
    let first = REPLICAS.first().map_or("", |peer| peer.name);
    for peer in REPLICAS {
        let Some(rate) = results.median(CELL, peer.name, speed) else { continue };
        let ratio = results.ratio(CELL, peer.name, first, speed).map_or(1.0, |spread| spread.median);
        let p99 = results.median(CELL, peer.name, |sample| Some(sample.p99_ms())).unwrap_or_default();
        page.row(format_args!("{} | {rate:.0} | {ratio:.2} | {p99:.1}", peer.name));
    }
    page.blank();
    results.list_missing(page);
    let second = REPLICAS.get(1).map_or("", |peer| peer.name);
    if !results.was_asked(CELL, second) {
        return Vec::new();
    }
    let what = format!("{second} / {first}, {CELL}, speed");
    vec![Bar::new(what, results.ratio(CELL, second, first, speed), Bound::AtLeast(TWO_AT_LEAST))]
}
