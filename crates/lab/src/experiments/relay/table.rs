//! The table as markdown, for `bench/RESULTS.md`.

use std::fmt::Write as _;

use super::bars::Verdict;
use super::{Cell, Results};
use crate::peers::Peer;
use crate::statistics::Spread;

/// Renders figures, bars and missing rows.
#[must_use]
pub(super) fn render(results: &Results, peers: &[Peer], verdicts: &[Verdict]) -> String {
    let mut text = heading(results);
    figures(&mut text, results, peers);
    missing(&mut text, results);
    bars(&mut text, verdicts);
    text
}

fn heading(results: &Results) -> String {
    let machine = &results.machine;
    format!(
        "## Relays, {}\n\nKernel {}, {}, congestion control {}, load {:.1} before and {:.1} after, tasks waited for a CPU \
         {:.0} % of a sample (median). {} rounds of {} ms after {} ms of warm-up, peers in turn, order reversed every \
         round; medians. Samples dropped for more than 2 % steal: {}. Answers of 130 bytes; bulk is a 1 GiB file whose \
         bytes the client discards in the kernel. Client and server share one core, the proxy (both programs of a pair) \
         has the other. CPU is that of the proxy's programs; lost: connections a sample that failed (third quartile). Bare: the least \
         program that could do the same (`sidetrack-lab bare`), which is the limit of a bar.\n\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        machine.congestion_control,
        machine.load,
        results.load_at_end,
        results.median_pressure_percent(),
        results.rounds,
        results.timing.window_ms,
        results.timing.warmup_ms,
        results.dropped,
    )
}

fn figures(text: &mut String, results: &Results, peers: &[Peer]) {
    let cells = results.cells();
    let _ = write!(text, "| |");
    for cell in &cells {
        let _ = match cell {
            Cell::New(count) => write!(text, " new/s at {count} | CPU us | p99 ms |"),
            Cell::KeepAlive(count) => write!(text, " kept, req/s at {count} | CPU us | p99 ms |"),
            Cell::Bulk(count) => write!(text, " Gbit/s, {count} | CPU s/GB |"),
        };
    }
    let columns: usize = cells.iter().map(|cell| if cell.is_bulk() { 2 } else { 3 }).sum();
    let _ = writeln!(text, "\n|---|{}", "---:|".repeat(columns));
    for peer in peers {
        let _ = write!(text, "| {} |", peer.name);
        for cell in &cells {
            row(text, results, peer.name, *cell);
        }
        text.push('\n');
    }
    text.push('\n');
}

fn row(text: &mut String, results: &Results, peer: &str, cell: Cell) {
    let Some(speed) = results.spread(cell, peer, |sample| Some(sample.speed(cell))) else {
        let _ = write!(text, "{}", " - |".repeat(if cell.is_bulk() { 2 } else { 3 }));
        return;
    };
    let cost = results.spread(cell, peer, |sample| sample.cost(cell)).map(|cost| cost.median);
    if cell.is_bulk() {
        let cost = cost.map_or_else(String::new, |cost| format!("{cost:.2}"));
        let _ = write!(text, " {:.2} | {cost} |", speed.median);
    } else {
        let cost = cost.map_or_else(String::new, |cost| format!("{cost:.1}"));
        let p99 = results.spread(cell, peer, |sample| Some(sample.report.p99_ns as f64 / 1e6));
        let lost = results
            .spread(cell, peer, |sample| Some(sample.report.error_count() as f64))
            .map(|lost| lost.high);
        let lost =
            lost.filter(|lost| *lost >= 1.0).map_or_else(String::new, |lost| format!(" (lost {lost:.0})"));
        let p99 = p99.map_or(0.0, |p99| p99.median);
        let _ = write!(text, " {:.0}{lost} | {cost} | {p99:.1} |", speed.median);
    }
}

fn missing(text: &mut String, results: &Results) {
    for missing in results.missing() {
        let _ = writeln!(text, "- {missing}");
    }
    if !results.missing().is_empty() {
        text.push('\n');
    }
}

fn spread(ratio: Spread) -> String {
    format!("{:.2} ({:.2} to {:.2})", ratio.median, ratio.low, ratio.high)
}

fn bars(text: &mut String, verdicts: &[Verdict]) {
    if verdicts.is_empty() {
        return;
    }
    let _ = writeln!(
        text,
        "| bar | against | | ratio (quartiles) | wanted | | limit / other | ours / limit |\n|---|---|---|---|---|---|---|---|"
    );
    for verdict in verdicts {
        let ratio = verdict.ratio.map_or_else(|| "-".to_owned(), spread);
        let limit = verdict.limit.map_or_else(
            || " | ".to_owned(),
            |limit| format!("{} | {}", spread(limit.best), spread(limit.reached)),
        );
        let _ = writeln!(
            text,
            "| {}, {} | {} | {} | {ratio} | {} {:.2} | {} | {limit} |",
            verdict.ours,
            verdict.what,
            verdict.other,
            verdict.cell,
            if verdict.at_least { "at least" } else { "at most" },
            verdict.bound,
            verdict.result(),
        );
    }
    let failed = verdicts.iter().filter(|verdict| verdict.is_failure()).count();
    let unmeasured = verdicts.iter().filter(|verdict| verdict.ratio.is_none()).count();
    let _ = writeln!(text, "\n{} bars, {failed} failed, {unmeasured} not measured.", verdicts.len());
}
