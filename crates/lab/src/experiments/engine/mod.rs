//! `engine`: what the packet engine costs: its core alone, in memory; over AF_XDP, with a generator that plays both ends;
//! and beside other proxies, with clients and a server of the kernel.

mod alone;
mod clients;
mod exact;
mod wire;

use std::fmt::Write as _;
use std::fs;
use std::hint::black_box;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use serde::Serialize;

use super::missing::Missing;
use crate::chart::{self, Series, Titles};
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::progress::Progress;

/// Options of `sidetrack-lab engine`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Within 90 seconds: fewer connections and rounds; bars are shown and not held.
    #[arg(long)]
    pub quick: bool,
    /// Connections of each kind that are compared byte for byte [default: 10000, with --quick 300].
    #[arg(long)]
    pub connections: Option<u64>,
    /// Rounds; the median counts [default: 5, with --quick 1].
    #[arg(long)]
    pub rounds: Option<usize>,
    /// Only this part; may be given several times.
    #[arg(long, value_name = "PART", value_parser = ["core", "wire", "clients", "exact"])]
    pub part: Vec<String>,
    /// Have the core verify every checksum, as it must where no network card has done so.
    #[arg(long)]
    pub verify: bool,
    /// Write the table there, too.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Where the figures go.
    #[command(flatten)]
    pub output: Output,
}

impl Options {
    fn wants(&self, part: &str) -> bool {
        super::is_wanted(&self.part, part)
    }

    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 }).max(1)
    }
}

/// One bar and its result.
#[derive(Debug, Clone, Serialize)]
pub struct Bar {
    /// The text of the bar.
    pub what: String,
    /// The measured value; `None` if it could not be measured.
    pub measured: Option<f64>,
    /// The bound.
    pub bound: f64,
    /// Whether a higher value is better.
    pub at_least: bool,
}

impl Bar {
    /// Returns true if it was measured and is on the right side.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.measured
            .is_some_and(|value| if self.at_least { value >= self.bound } else { value <= self.bound })
    }
}

/// All measurements.
#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    /// Cycles per nanosecond of the measuring CPU.
    gigahertz: f64,
    core: Vec<alone::Row>,
    wire: Vec<wire::Row>,
    clients: Vec<clients::Row>,
    exact: Vec<exact::Row>,
    bars: Vec<Bar>,
    missing: Missing,
}

/// Measures, prints the tables and says whether all bars hold.
///
/// # Errors
/// A file cannot be written. Rows that fail are named in the report, and make the run fail at its end.
pub fn run(options: &Options) -> Result<ExitCode> {
    let progress = Progress::new();
    let mut results = Results {
        machine: Machine::probe(),
        gigahertz: gigahertz(),
        core: Vec::new(),
        wire: Vec::new(),
        clients: Vec::new(),
        exact: Vec::new(),
        bars: Vec::new(),
        missing: Missing::default(),
    };
    if options.wants("core") {
        progress.now("the core alone");
        let connections = if options.quick { 100_000 } else { 1_000_000 };
        results.core =
            alone::run(options.rounds(), connections, options.verify, &progress, &mut results.missing);
        results.bars.extend(results.core.iter().filter_map(|row| {
            let what = format!("core, ns a packet at {} open", row.open);
            row.bar.map(|bound| Bar { what, measured: Some(row.nanos), bound, at_least: false })
        }));
    }
    if options.wants("wire") {
        results.wire = wire::run(options.quick, options.rounds(), &progress, &mut results.missing);
        results.bars.extend(wire::bars(&results.wire));
    }
    if options.wants("clients") {
        let rows = clients::run(options.quick, options.rounds(), &progress);
        results.clients = results.missing.note("clients", rows, &progress).unwrap_or_default();
        results.bars.extend(clients::bars(&results.clients));
    }
    if options.wants("exact") {
        let connections = options.connections.unwrap_or(if options.quick { 300 } else { 10_000 });
        results.exact = exact::run(connections, &progress, &mut results.missing);
    }
    let text = render(&results);
    print!("{text}");
    if let Some(path) = &options.markdown {
        fs::write(path, &text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    options.output.json(&results)?;
    options.output.svg("engine", || plot(&results))?;
    let held = options.quick || results.bars.iter().all(Bar::holds);
    // Exactness does not depend on speed: a wrong byte fails even a quick run.
    let well = held && !results.missing.is_failure() && results.exact.iter().all(exact::Row::holds);
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Measures the current clock of this CPU, in cycles per nanosecond, with a chain of dependent multiplications. Each
/// factor is derived from the result before; otherwise the compiler would multiply the factors in advance. A
/// multiplication takes three cycles, and deriving the factor one, on every x86-64 and most ARM cores of the last
/// fifteen years.
fn gigahertz() -> f64 {
    const LINKS: u32 = 20_000_000;
    const CYCLES: f64 = 4.0;
    let best = (0..5).map(|_| {
        let start = Instant::now();
        let mut value = black_box(3_u64);
        for _ in 0..LINKS {
            value = value.wrapping_mul(value | 2);
        }
        black_box(value);
        start.elapsed().as_secs_f64()
    });
    f64::from(LINKS) * CYCLES / best.fold(f64::INFINITY, f64::min) / 1e9
}

// Writing to a String cannot fail.
fn render(results: &Results) -> String {
    let mut text = String::new();
    let machine = &results.machine;
    let _ = write!(
        text,
        "## The packet engine, {}\n\nKernel {}, {}, {:.2} GHz by a chain of multiplications, congestion control {}, load {:.1} \
         before and {:.1} after.\n\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        results.gigahertz,
        machine.congestion_control,
        machine.load,
        machine::load_average()
    );
    if !results.core.is_empty() {
        let _ = writeln!(
            text,
            "### The core alone, in memory, seven packets in for each connection, records on\n"
        );
        let _ = writeln!(
            text,
            "| open connections | ns a packet | cycles a packet | ns a connection | batches left out |"
        );
        let _ = writeln!(text, "|---:|---:|---:|---:|---:|");
        for row in &results.core {
            let _ = writeln!(
                text,
                "| {} | {:.1} | {:.0} | {:.0} | {:.1} % |",
                row.open,
                row.nanos,
                row.nanos * results.gigahertz,
                row.connection_nanos(),
                row.left_out
            );
        }
        text.push('\n');
    }
    wire::render(&mut text, &results.wire, results.gigahertz);
    clients::render(&mut text, &results.clients);
    exact::render(&mut text, &results.exact);
    results.missing.render(&mut text);
    for bar in &results.bars {
        let verdict = if bar.holds() { "held" } else { "MISSED" };
        let sign = if bar.at_least { "at least" } else { "at most" };
        let measured = bar.measured.map_or("not measured".to_owned(), |value| format!("{value:.2}"));
        let _ = writeln!(text, "- {}: {measured}, {sign} {:.2}: {verdict}", bar.what, bar.bound);
    }
    text.push('\n');
    text
}

/// CPU time of a connection, of each program in each way of measuring.
fn plot(results: &Results) -> String {
    let wire = results.wire.iter().map(|row| (format!("{}, {} open", row.plane, row.open), row.cpu_us()));
    let clients = results.clients.iter().map(|row| (row.name.clone(), row.cpu_us));
    let series: Vec<Series> =
        wire.chain(clients).map(|(name, value)| Series { name, values: vec![value] }).collect();
    let places = ["one connection".to_owned()];
    let titles = Titles { title: "CPU time of a connection", vertical: "microseconds", places: &places };
    chart::bars(&titles, &series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_that_was_not_measured_does_not_hold() {
        let bar = |measured, at_least| Bar { what: String::new(), measured, bound: 10.0, at_least };
        assert!(!bar(None, true).holds() && !bar(None, false).holds());
        assert!(bar(Some(10.0), true).holds() && !bar(Some(9.0), true).holds());
        assert!(bar(Some(9.0), false).holds() && !bar(Some(11.0), false).holds());
    }

    #[test]
    fn the_clock_is_one_that_a_cpu_may_have() {
        let found = gigahertz();
        assert!((0.01..20.0).contains(&found), "{found}");
    }
}
