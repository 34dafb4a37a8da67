//! The figures as text, CSV and plots.

use anyhow::Result;

use super::clients::Rate;
use super::measure::{Figures, Plan};
use super::paper::{TABLE_I, Topology};
use super::rows::{NO_PROXY, Row};
use super::table_ii;
use crate::chart::{self, Series, Titles};
use crate::kit::{Bar, Page};
use crate::output::Output;

/// Writes everything as Markdown.
pub(super) fn write(page: &mut Page, figures: &Figures, plan: &Plan, rows: &[Row], bars: &[Bar]) {
    if !figures.times.is_empty() {
        page.line(format_args!(
            "### Set-up times (Figs. 11 and 12, Eqs. 6 to 9)\n\nMilliseconds from before connect to the end \
             of the answer. Δt is the median over that of no proxy; \"model\" what the equations say of it, \
             processing left out; \"paper\" what its text says."
        ));
        for (number, topology) in TABLE_I.iter().enumerate() {
            times_table(page, figures, rows, number, topology);
        }
    }
    if !figures.rates.is_empty() {
        rates_table(page, figures, plan, rows);
    }
    page.line(format_args!("\n### Comparison (Table II)\n"));
    table_ii::render(page, figures, plan, bars);
    page.blank();
    for (row, why) in &figures.missing {
        page.line(format_args!("No or not all figures of {row}: {why}"));
    }
    bar_table(page, bars);
}

fn times_table(page: &mut Page, figures: &Figures, rows: &[Row], number: usize, topology: &Topology) {
    let place = if topology.is_in_between() { "in between" } else { "triangle" };
    page.line(format_args!("\n{} ({}, {place})\n", topology.name, topology.distances()));
    page.columns(["", "median:", "mean:", "±:", "p90:", "p99:", "Δt:", "model:", "paper:", "failed:"]);
    for row in rows.iter().filter(|row| row.has_times) {
        let Some(times) = figures.times(row.name, number) else { continue };
        let (mean, deviation) = times.mean_and_deviation().unzip();
        let is_base = row.name == NO_PROXY;
        let overhead = if is_base { None } else { figures.overhead_ms(row.name, number) };
        let model = if is_base { row.model.time_ms(topology) } else { row.model.overhead_ms(topology) };
        let paper = row.paper.get(number).copied().unwrap_or_default();
        page.row(format_args!(
            "{} | {} | {} | {} | {} | {} | {} | {} | {paper} | {}",
            row.name,
            figure(times.median()),
            figure(mean),
            figure(deviation),
            figure(times.quantile(0.9)),
            figure(times.quantile(0.99)),
            signed(overhead),
            if is_base { format!("{model:.1}") } else { signed(Some(model)) },
            times.failed
        ));
    }
}

fn rates_table(page: &mut Page, figures: &Figures, plan: &Plan, rows: &[Row]) {
    page.line(format_args!(
        "\n### Processed requests (Fig. 13)\n\nRequests per second by connections that stay open, in \
         brackets the reduction against no proxy, and the 99th percentile of the times of answers in \
         milliseconds.\n"
    ));
    let connections = plan.connections.iter().map(|connections| format!("{connections}:"));
    page.columns(std::iter::once(String::new()).chain(connections));
    for row in rows.iter().filter(|row| row.has_rate) {
        let cells: Vec<String> = (0..plan.connections.len())
            .map(|at| {
                let p99 = figures.p99_ms(row.name, at).map_or_else(String::new, |ms| format!(", {ms:.2}"));
                match (figures.rate(row.name, at), figures.rate(NO_PROXY, at)) {
                    (Some(rate), Some(base)) if row.name != NO_PROXY => {
                        format!("{rate:.0} ({:.0} %){p99}", 100.0 * (1.0 - rate / base))
                    }
                    (Some(rate), _) => format!("{rate:.0}{p99}"),
                    (None, _) => "-".into(),
                }
            })
            .collect();
        page.row(format_args!("{} | {}", row.name, cells.join(" | ")));
    }
}

fn bar_table(page: &mut Page, bars: &[Bar]) {
    // The figure of the smallest program stands beside ours: a bar above it is out of reach on this machine.
    page.line(format_args!("\n### Bars\n"));
    page.columns(["bar", "reached:", "", "its limit:"]);
    for bar in bars {
        let limit = bar.limit.map_or_else(String::new, |limit| format!("{limit:.2}"));
        page.row(format_args!("{} | {} | {} | {limit}", bar.what, figure(bar.reached()), bar.result()));
    }
}

fn figure(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.2}"))
}

fn signed(value: Option<f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value:+.1}"))
}

/// Writes CSV tables and the plots of Figs. 11 to 13.
///
/// # Errors
/// A file cannot be written.
pub(super) fn files(output: &Output, figures: &Figures, plan: &Plan, rows: &[Row]) -> Result<()> {
    output.csv(
        "times",
        &["row", "topology", "cp_ms", "ps_ms", "cs_ms", "request", "time_ms"],
        &time_rows(figures),
    )?;
    output.csv(
        "rates",
        &["row", "connections", "round", "requests_per_second", "p99_ms"],
        &rate_rows(figures, plan),
    )?;
    let names: Vec<String> =
        TABLE_I.iter().map(|topology| format!("{} ({})", topology.name, topology.distances())).collect();
    let timed = || rows.iter().filter(|row| row.has_times && figures.times.contains_key(row.name));
    let all = 0..TABLE_I.len();
    for (name, title, range, is_overhead) in [
        ("fig11a", "Fig. 11a: request time, proxy in between", 0..3, false),
        ("fig11b", "Fig. 11b: overhead, proxy in between", 0..3, true),
        ("fig12a", "Fig. 12a: request time, triangle", 3..all.end, false),
        ("fig12b", "Fig. 12b: overhead, triangle", 3..all.end, true),
    ] {
        let places = names.get(range.clone()).unwrap_or_default();
        let value = |row: &Row, number: usize| {
            if is_overhead {
                figures.overhead_ms(row.name, number)
            } else {
                figures.times(row.name, number)?.median()
            }
        };
        let series: Vec<Series> = timed()
            .filter(|row| !(is_overhead && row.name == NO_PROXY))
            .map(|row| Series {
                name: row.name.into(),
                values: range.clone().map(|at| value(row, at)).collect(),
            })
            .collect();
        output.svg(name, || chart::bars(&Titles { title, vertical: "ms (medians)", places }, &series))?;
    }
    rate_plots(output, figures, plan, rows)
}

fn rate_plots(output: &Output, figures: &Figures, plan: &Plan, rows: &[Row]) -> Result<()> {
    let places: Vec<String> = plan.connections.iter().map(u32::to_string).collect();
    let rated = || rows.iter().filter(|row| row.has_rate && figures.rates.contains_key(row.name));
    let series = |value: &dyn Fn(&Row, usize) -> Option<f64>| -> Vec<Series> {
        rated()
            .map(|row| Series {
                name: row.name.into(),
                values: (0..places.len()).map(|at| value(row, at)).collect(),
            })
            .collect()
    };
    let rate = |row: &Row, at: usize| figures.rate(row.name, at);
    let reduction = |row: &Row, at: usize| Some(100.0 * (1.0 - rate(row, at)? / figures.rate(NO_PROXY, at)?));
    let titles = |title, vertical| Titles { title, vertical, places: &places };
    let a = titles("Fig. 13a: processed requests by connections", "requests per second");
    output.svg("fig13a", || chart::lines(&a, &series(&rate)))?;
    let b = titles("Fig. 13b: reduction against no proxy by connections", "per cent");
    output.svg("fig13b", || chart::lines(&b, &series(&reduction)))
}

fn time_rows(figures: &Figures) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (row, topologies) in &figures.times {
        for (topology, times) in TABLE_I.iter().zip(topologies) {
            for (request, time) in times.each_ms.iter().enumerate() {
                let Topology { client_proxy_ms, proxy_server_ms, client_server_ms, .. } = topology;
                let distances = [client_proxy_ms, proxy_server_ms, client_server_ms].map(ToString::to_string);
                let mut cells = vec![row.clone(), topology.name.to_owned()];
                cells.extend(distances);
                cells.extend([request.to_string(), time.to_string()]);
                rows.push(cells);
            }
        }
    }
    rows
}

fn rate_rows(figures: &Figures, plan: &Plan) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (row, rounds) in &figures.rates {
        for (round, rates) in rounds.iter().enumerate() {
            for (connections, rate) in plan.connections.iter().zip(rates) {
                let text =
                    |value: fn(Rate) -> f64| rate.map_or_else(String::new, |rate| value(rate).to_string());
                let [per_second, p99] = [text(|rate| rate.per_second), text(|rate| rate.p99_ms)];
                rows.push(vec![row.clone(), connections.to_string(), round.to_string(), per_second, p99]);
            }
        }
    }
    rows
}
