//! The tables.

use std::fmt::Write as _;

use anyhow::Result;

use super::Results;
use super::bars::Verdict;
use super::gap::Gap;
use super::measure::{Figures, FloodRow, LOSSES, SCP_LOSS};
use crate::machine;
use crate::output::Output;
use crate::statistics::median;

/// Table 1 of Seamless Overlays, in Mb/s: plain TCP, and interceptor with overlay.
const SEED: [(&str, f64, f64); 3] = [
    ("t_flooder, unlimited", 18.0, 76.0),
    ("t_flooder, limited to 200 Mb/s", 18.0, 200.0),
    ("scp", 8.0, 193.0),
];

/// Formats everything as Markdown.
pub(super) fn text(results: &Results) -> String {
    let mut text = heading(results);
    let figures = &results.figures;
    seed(&mut text, figures);
    floods(&mut text, "flood", &figures.floods);
    if let Some((mbit, lost)) = figures.overload {
        let _ = writeln!(
            text,
            "\nFour floods at a time, none lost on the way: {mbit:.1} Mb/s together; {lost:.2} % of the hellos did not arrive."
        );
    }
    floods(&mut text, "flood, one hop of 30 ms and 500 Mb/s", &figures.fast);
    delays(&mut text, figures);
    copies(&mut text, figures);
    failures(&mut text, figures);
    wide(&mut text, figures);
    text += &figures.gap.as_ref().map_or_else(String::new, Gap::text);
    text.push_str("\n| bar | reached | |\n|---|---:|---|\n");
    for verdict in &results.verdicts {
        let word = match verdict {
            Verdict { holds: true, .. } => "ok",
            Verdict { is_stretch: true, .. } => "missed",
            _ => "**FAIL**",
        };
        let _ = writeln!(text, "| {} | {:.3} | {word} |", verdict.bar, verdict.reached);
    }
    for absent in &results.missing.absent {
        let _ = writeln!(text, "\n{absent}.");
    }
    for trouble in &results.missing.troubles {
        let _ = writeln!(text, "\nNot measured: {trouble}.");
    }
    text
}

fn heading(results: &Results) -> String {
    let machine = &results.machine;
    let late = results.lateness.map_or_else(String::new, |late| format!(" {late}"));
    format!(
        "## The overlay\n\n{}, Linux {}, {}, load {:.1} to {:.1}, steal {:.1} %. Three hops of 10 ms and 200 Mb/s (queues of 60 ms) \
         between source and target, loss on wire frames of the middle one, both ways; links: {}.{late} Ours is TLS on every hop; \
         our node redirects an unmodified application. Plain TCP is routed along the same hops. Applications, nodes and links \
         share the machine's cores. The run took {} s.\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        machine.load,
        machine::load_average(),
        results.disturbance.steal_percent,
        results.links,
        results.seconds
    )
}

fn flood(figures: &Figures, way: &str, loss: f64) -> Option<f64> {
    figures.floods.iter().find(|row| row.way == way && row.loss == loss).and_then(|row| median(&row.mbit))
}

fn cell(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"))
}

/// Its table beside ours. It does not name the congestion control of its plain TCP; ours has both.
fn seed(text: &mut String, figures: &Figures) {
    if figures.floods.is_empty() && figures.copies.is_empty() {
        return;
    }
    let copy = |way: &str| {
        figures.copies.iter().find(|row| row.way == way && row.loss == SCP_LOSS).and_then(|row| row.mbit)
    };
    text.push_str(
        "\nAt 0.5 % beside the seed's Table 1, Mb/s:\n\n| | seed: TCP | seed: overlay | TCP cubic | TCP bbr | ours |\n\
         |---|---:|---:|---:|---:|---:|\n",
    );
    for (name, tcp, overlay) in SEED {
        let ours = |way: &str| if name == "scp" { copy(way) } else { flood(figures, way, LOSSES[0]) };
        let _ = writeln!(
            text,
            "| {name} | {tcp} | {overlay} | {} | {} | {} |",
            cell(ours("TCP cubic")),
            cell(ours("TCP bbr")),
            cell(ours("ours"))
        );
    }
    text.push_str("\nBoth t_flooder rows of ours are one flood at full speed into links of 200 Mb/s.\n");
}

fn floods(text: &mut String, name: &str, rows: &[FloodRow]) {
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n| {name} | loss | Mb/s, median | each | CPU s/GB |\n|---|---:|---:|---|---:|");
    for row in rows {
        let each: Vec<_> = row.mbit.iter().map(|mbit| format!("{mbit:.1}")).collect();
        let (mbit, cpu) = (cell(median(&row.mbit)), cell(median(&row.cpu_s_per_gb)));
        let _ = writeln!(text, "| {} | {} % | {mbit} | {} | {cpu} |", row.way, row.loss, each.join(", "));
    }
}

fn delays(text: &mut String, figures: &Figures) {
    if figures.delays.is_empty() {
        return;
    }
    text.push_str(
        "\n1000 bytes every millisecond, ms from when a write was due to its arrival:\n\n\
         | delay | loss | p50 | p90 | p99 | p99.9 |\n|---|---:|---:|---:|---:|---:|\n",
    );
    for row in &figures.delays {
        let [p50, p90, p99, p999] = row.percentiles_ms;
        let _ =
            writeln!(text, "| {} | {} % | {p50:.1} | {p90:.1} | {p99:.1} | {p999:.1} |", row.way, row.loss);
    }
}

fn copies(text: &mut String, figures: &Figures) {
    if figures.copies.is_empty() {
        return;
    }
    text.push_str("\n| scp | loss | Mb/s |\n|---|---:|---:|\n");
    for row in &figures.copies {
        let _ = writeln!(text, "| {} | {} % | {} |", row.way, row.loss, cell(row.mbit));
    }
}

fn failures(text: &mut String, figures: &Figures) {
    if let Some(kbit) = figures.idle_kbit {
        let _ = writeln!(text, "\nAn idle link carries {kbit:.1} kbit/s, both ways and headers counted.");
    }
    if figures.killed_ms.is_empty() {
        return;
    }
    text.push_str("\n| longest stall of a transfer, ms | median | worst | each |\n|---|---:|---:|---|\n");
    for (name, stalls) in [("relay killed", &figures.killed_ms), ("link cut", &figures.cut_ms)] {
        let each: Vec<_> = stalls.iter().map(|ms| format!("{ms:.0}")).collect();
        let (middle, worst) = (cell(median(stalls)), cell(stalls.last().copied()));
        let _ = writeln!(text, "| {name} | {middle} | {worst} | {} |", each.join(", "));
    }
}

fn wide(text: &mut String, figures: &Figures) {
    let Some(wide) = &figures.wide else { return };
    let _ = writeln!(
        text,
        "\nTwelve nodes at wide-area distances (links of 4 to 50 ms), {} flows from coast to coast; while these say nothing the \
         busiest link carries {:.1} kbit/s, both ways; then links on their path are cut:\n\n\
         | ms after a cut | median | worst | each |\n|---|---:|---:|---|",
        wide.flows, wide.idle_kbit
    );
    for (name, times) in [
        ("all nodes have the new routes", &wide.converged_ms),
        ("every flow has an answer", &wide.answered_ms),
    ] {
        let each: Vec<_> = times.iter().map(|ms| format!("{ms:.0}")).collect();
        let (middle, worst) = (cell(median(times)), cell(times.last().copied()));
        let _ = writeln!(text, "| {name} | {middle} | {worst} | {} |", each.join(", "));
    }
}

/// Writes the figures as CSV.
///
/// # Errors
/// The files cannot be written.
pub(super) fn files(output: &Output, figures: &Figures) -> Result<()> {
    for (name, rows) in [("flood", &figures.floods), ("fast", &figures.fast)] {
        let row = |row: &FloodRow| {
            let cpu = cell(median(&row.cpu_s_per_gb));
            vec![row.way.clone(), row.loss.to_string(), cell(median(&row.mbit)), cpu]
        };
        let rows: Vec<_> = rows.iter().map(row).collect();
        output.csv(name, &["way", "loss_percent", "mbit_per_s", "cpu_s_per_gb"], &rows)?;
    }
    let delays: Vec<Vec<String>> = figures
        .delays
        .iter()
        .map(|row| {
            let head = [row.way.clone(), row.loss.to_string()];
            head.into_iter().chain(row.percentiles_ms.map(|ms| format!("{ms:.2}"))).collect()
        })
        .collect();
    output.csv("delay", &["way", "loss_percent", "p50_ms", "p90_ms", "p99_ms", "p999_ms"], &delays)
}
