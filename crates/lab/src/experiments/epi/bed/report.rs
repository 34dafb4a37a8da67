//! The figures of a test bed as text and CSV.

use anyhow::Result;

use super::Results;
use super::rows::{NO_PROXY, Row};
use crate::kit::Page;
use crate::output::Output;

/// Writes everything as Markdown.
pub(super) fn write(page: &mut Page, results: &Results, rows: &[Row]) {
    page.line(format_args!("## The EPI measurements on a test bed\n"));
    for member in &results.hosts {
        page.line(format_args!("- {}: {}. {}", member.role, member.ssh, member.machine));
    }
    let distances = &results.distances;
    let place = if distances.is_in_between() { "in between" } else { "beside the path" };
    page.line(format_args!(
        "\nRound trips: client to proxy {:.2} ms, proxy to server {:.2} ms, client to server {:.2} ms. The proxy is {place}.\n",
        distances.client_proxy_ms, distances.proxy_server_ms, distances.client_server_ms
    ));
    if results.figures.values().any(|figures| !figures.medians_ms.is_empty()) {
        times(page, results, rows);
    }
    if results.figures.values().any(|figures| !figures.rates.is_empty()) {
        rates(page, results, rows);
    }
    results.missing.render(page);
}

fn times(page: &mut Page, results: &Results, rows: &[Row]) {
    page.line(format_args!(
        "### Set-up times\n\nMilliseconds from before connect to the end of the answer: medians of {} requests in each of \
         {} rounds. Δt is the time over that of no proxy; \"model\" is what the equations say of it for the round trips \
         above.\n",
        results.plan.requests, results.plan.rounds
    ));
    page.columns(["", "median:", "Δt:", "model:", "failed:"]);
    let time = |name: &str| results.figures.get(name)?.time_ms();
    for row in rows {
        let Some(figures) = results.figures.get(row.name) else { continue };
        let is_base = row.name == NO_PROXY;
        let over = time(row.name).zip(time(NO_PROXY)).filter(|_| !is_base);
        let model = match is_base {
            true => format!("{:.2}", row.model.time_ms(&results.distances)),
            false => format!("{:+.2}", row.model.overhead_ms(&results.distances)),
        };
        page.row(format_args!(
            "{} | {} | {} | {model} | {}",
            row.name,
            time(row.name).map_or_else(|| "-".into(), |ms| format!("{ms:.2}")),
            over.map_or_else(String::new, |(ms, base)| format!("{:+.2}", ms - base)),
            figures.failed
        ));
    }
    page.blank();
}

fn rates(page: &mut Page, results: &Results, rows: &[Row]) {
    page.line(format_args!("### Processed requests\n\nRequests per second by connections that stay open.\n"));
    let connections = &results.plan.connections;
    page.columns(std::iter::once(String::new()).chain(connections.iter().map(|count| format!("{count}:"))));
    for row in rows {
        let Some(figures) = results.figures.get(row.name) else { continue };
        let cell = |at: usize| figures.rate(at).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}"));
        let cells: Vec<String> = (0..connections.len()).map(cell).collect();
        page.row(format_args!("{} | {}", row.name, cells.join(" | ")));
    }
    page.blank();
}

/// Writes CSV tables.
///
/// # Errors
/// A file cannot be written.
pub(super) fn files(output: &Output, results: &Results) -> Result<()> {
    let (mut times, mut rates) = (Vec::new(), Vec::new());
    for (name, figures) in &results.figures {
        for (round, ms) in figures.medians_ms.iter().enumerate() {
            times.push(vec![(*name).to_owned(), round.to_string(), ms.to_string()]);
        }
        for (round, values) in figures.rates.iter().enumerate() {
            for (connections, rate) in results.plan.connections.iter().zip(values) {
                let cells = [connections.to_string(), round.to_string(), rate.to_string()];
                rates.push([&[(*name).to_owned()], &cells[..]].concat());
            }
        }
    }
    output.csv("times", &["row", "round", "median_ms"], &times)?;
    output.csv("rates", &["row", "connections", "round", "requests_per_second"], &rates)
}
