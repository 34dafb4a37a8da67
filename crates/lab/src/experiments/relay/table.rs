//! The table as markdown, for `bench/RESULTS.md`.

use super::Cell;
use super::bars::Verdict;
use crate::kit::{Page, Results};
use crate::peers::Peer;

/// Renders figures, bars and missing rows.
#[must_use]
pub(super) fn render(results: &Results<Cell>, peers: &[Peer], verdicts: &[Verdict]) -> Page {
    let mut page = Page::default();
    heading(&mut page, results);
    let cells = results.cells();
    let rows = peers.iter().map(|peer| peer.name);
    Results::table(&mut page, rows, &cells, head, |cell, peer| figures(results, cell, peer));
    results.list_missing(&mut page);
    bars(&mut page, verdicts);
    page
}

fn heading(page: &mut Page, results: &Results<Cell>) {
    let machine = &results.machine;
    page.text(format_args!(
        "## Relays, {}\n\n{machine} and {:.1} after, tasks waited for a CPU {:.0} % of a sample (median). {} \
         rounds of {} ms after {} ms of warm-up, peers in turn, order reversed every round; medians. Samples \
         dropped for more than 2 % steal: {}. Answers of 130 bytes; bulk is a 1 GiB file whose bytes the \
         client discards in the kernel. Client and server share one core, the proxy (both programs of a \
         pair) has the other. CPU is that of the proxy's programs; lost: connections a sample that failed \
         (third quartile). Bare: the least program that could do the same (`sidetrack-lab bare`), which is \
         the limit of a bar.\n\n",
        machine.date,
        results.load_at_end,
        results.median_pressure_percent(),
        results.rounds,
        results.timing.window_ms,
        results.timing.warmup_ms,
        results.dropped
    ));
}

fn head(cell: Cell) -> Vec<String> {
    match cell {
        Cell::New(count) => vec![format!("new/s at {count}:"), "CPU us:".into(), "p99 ms:".into()],
        Cell::KeepAlive(count) => {
            vec![format!("kept, req/s at {count}:"), "CPU us:".into(), "p99 ms:".into()]
        }
        Cell::Bulk(count) => vec![format!("Gbit/s, {count}:"), "CPU s/GB:".into()],
    }
}

fn figures(results: &Results<Cell>, cell: Cell, peer: &str) -> Option<String> {
    let speed = results.median(cell, peer, |sample| Some(sample.speed(cell)))?;
    let digits = if cell.is_bulk() { 2 } else { 1 };
    let cost = results.median(cell, peer, |sample| sample.cost(cell));
    let cost = cost.map_or_else(String::new, |cost| format!("{cost:.digits$}"));
    if cell.is_bulk() {
        return Some(format!("{speed:.2} | {cost}"));
    }
    let p99 = results.median(cell, peer, |sample| Some(sample.p99_ms())).unwrap_or_default();
    let lost = results.spread(cell, peer, |sample| Some(sample.report.error_count() as f64));
    let lost = lost.map(|lost| lost.high).filter(|lost| *lost >= 1.0);
    let lost = lost.map_or_else(String::new, |lost| format!(" (lost {lost:.0})"));
    Some(format!("{speed:.0}{lost} | {cost} | {p99:.1}"))
}

fn bars(page: &mut Page, verdicts: &[Verdict]) {
    if verdicts.is_empty() {
        return;
    }
    page.columns(["bar", "against", "", "ratio (quartiles)", "wanted", "", "limit / other", "ours / limit"]);
    for verdict in verdicts {
        let ratio = verdict.ratio.as_ref().map_or_else(|_| "-".to_owned(), ToString::to_string);
        let limit = verdict
            .limit
            .map_or_else(|| " | ".to_owned(), |limit| format!("{} | {}", limit.best, limit.reached));
        page.row(format_args!(
            "{}, {} | {} | {} | {ratio} | {} | {} | {limit}",
            verdict.ours,
            verdict.what,
            verdict.other,
            verdict.cell,
            verdict.bound,
            verdict.result()
        ));
    }
    let failed = verdicts.iter().filter(|verdict| verdict.is_failure()).count();
    let unmeasured = verdicts.iter().filter(|verdict| verdict.ratio.is_err()).count();
    page.line(format_args!("\n{} bars, {failed} failed, {unmeasured} not measured.", verdicts.len()));
}
