//! The tables.

use anyhow::Result;

use super::gap::Gap;
use super::measure::{Figures, FloodRow, LOSSES, SCP_LOSS};
use super::proofs::ProofRow;
use super::{Results, wide};
use crate::kit::Page;
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
pub(super) fn page(results: &Results) -> Page {
    let mut page = Page::default();
    heading(&mut page, results);
    let figures = &results.figures;
    seed(&mut page, figures);
    floods(&mut page, "flood", &figures.floods);
    if let Some((mbit, lost)) = figures.overload {
        page.line(format_args!(
            "\nFour floods at a time, none lost on the way: {mbit:.1} Mb/s together; {lost:.2} % of the \
             hellos did not arrive."
        ));
    }
    floods(&mut page, "flood, one hop of 30 ms and 500 Mb/s", &figures.fast);
    delays(&mut page, figures);
    copies(&mut page, figures);
    failures(&mut page, figures);
    if let Some(bought) = &figures.bought {
        bought.render(&mut page);
    }
    wide::pages(&mut page, figures);
    proofs(&mut page, &figures.proofs);
    page.text(format_args!("{}", figures.gap.as_ref().map_or_else(String::new, Gap::text)));
    page.blank();
    page.columns(["bar", "reached:", ""]);
    for bar in &results.bars {
        let reached = bar.reached().unwrap_or(f64::NAN);
        page.row(format_args!("{} | {reached:.3} | {}", bar.what, bar.result()));
    }
    page.blank();
    results.missing.render(&mut page);
    page
}

fn heading(page: &mut Page, results: &Results) {
    let machine = &results.machine;
    let late = results.lateness.map_or_else(String::new, |late| format!(" {late}"));
    page.text(format_args!(
        "## The overlay\n\n{}, Linux {}, {}, load {:.1} to {:.1}, steal {:.1} %. Three hops of 10 ms and 200 \
         Mb/s (queues of 60 ms) between source and target, loss on wire frames of the middle one, both ways; \
         links: {}.{late} Ours is TLS on every hop; our node redirects an unmodified application. Plain TCP \
         is routed along the same hops. Applications, nodes and links share the machine's cores. The run \
         took {} s.\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        machine.load,
        machine::load_average(),
        results.disturbance.steal_percent,
        results.links,
        results.seconds
    ));
}

fn flood(figures: &Figures, way: &str, loss: f64) -> Option<f64> {
    figures.floods.iter().find(|row| row.way == way && row.loss == loss).and_then(|row| median(&row.mbit))
}

pub(super) fn cell(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1}"))
}

/// Its table beside ours. It does not name the congestion control of its plain TCP; ours has both.
fn seed(page: &mut Page, figures: &Figures) {
    if figures.floods.is_empty() && figures.copies.is_empty() {
        return;
    }
    let copy = |way: &str| {
        figures.copies.iter().find(|row| row.way == way && row.loss == SCP_LOSS).and_then(|row| row.mbit)
    };
    page.line(format_args!("\nAt 0.5 % beside the seed's Table 1, Mb/s:\n"));
    page.columns(["", "seed: TCP:", "seed: overlay:", "TCP cubic:", "TCP bbr:", "ours:"]);
    for (name, tcp, overlay) in SEED {
        let ours = |way: &str| if name == "scp" { copy(way) } else { flood(figures, way, LOSSES[0]) };
        page.row(format_args!(
            "{name} | {tcp} | {overlay} | {} | {} | {}",
            cell(ours("TCP cubic")),
            cell(ours("TCP bbr")),
            cell(ours("ours"))
        ));
    }
    page.text(format_args!(
        "\nBoth t_flooder rows of ours are one flood at full speed into links of 200 Mb/s.\n"
    ));
}

fn floods(page: &mut Page, name: &str, rows: &[FloodRow]) {
    if rows.is_empty() {
        return;
    }
    page.blank();
    page.columns([name, "loss:", "Mb/s, median:", "each", "CPU s/GB:"]);
    for row in rows {
        let each: Vec<_> = row.mbit.iter().map(|mbit| format!("{mbit:.1}")).collect();
        let (mbit, cpu) = (cell(median(&row.mbit)), cell(median(&row.cpu_s_per_gb)));
        page.row(format_args!("{} | {} % | {mbit} | {} | {cpu}", row.way, row.loss, each.join(", ")));
    }
}

fn delays(page: &mut Page, figures: &Figures) {
    if figures.delays.is_empty() {
        return;
    }
    page.line(format_args!("\n1000 bytes every millisecond, ms from when a write was due to its arrival:\n"));
    page.columns(["delay", "loss:", "p50:", "p90:", "p99:", "p99.9:"]);
    for row in &figures.delays {
        let [p50, p90, p99, p999] = row.percentiles_ms;
        page.row(format_args!("{} | {} % | {p50:.1} | {p90:.1} | {p99:.1} | {p999:.1}", row.way, row.loss));
    }
}

fn copies(page: &mut Page, figures: &Figures) {
    if figures.copies.is_empty() {
        return;
    }
    page.blank();
    page.columns(["scp", "loss:", "Mb/s:"]);
    for row in &figures.copies {
        page.row(format_args!("{} | {} % | {}", row.way, row.loss, cell(row.mbit)));
    }
}

fn failures(page: &mut Page, figures: &Figures) {
    if let Some(kbit) = figures.idle_kbit {
        page.line(format_args!("\nAn idle link carries {kbit:.1} kbit/s, both ways and headers counted."));
    }
    if figures.killed_ms.is_empty() {
        return;
    }
    page.blank();
    page.columns(["longest stall of a transfer, ms", "median:", "worst:", "each"]);
    for (name, stalls) in [
        ("relay killed", &figures.killed_ms),
        ("link cut", &figures.cut_ms),
        ("relay killed, messages on two paths", &figures.copied_ms),
    ] {
        let each: Vec<_> = stalls.iter().map(|ms| format!("{ms:.0}")).collect();
        let (middle, worst) = (cell(median(stalls)), cell(stalls.last().copied()));
        page.row(format_args!("{name} | {middle} | {worst} | {}", each.join(", ")));
    }
}

fn proofs(page: &mut Page, rows: &[ProofRow]) {
    if rows.is_empty() {
        return;
    }
    page.line(format_args!("\nWhat a proof of the source costs, µs of one core for each packet:\n"));
    page.columns(["bytes", "packets in a batch:", "the source signs:", "each node checks:"]);
    for ProofRow { bytes, batch, sign_us, check_us } in rows {
        page.row(format_args!("{bytes} | {batch} | {sign_us:.1} | {check_us:.1}"));
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
    output.csv("delay", &["way", "loss_percent", "p50_ms", "p90_ms", "p99_ms", "p999_ms"], &delays)?;
    wide::files(output, figures)
}
