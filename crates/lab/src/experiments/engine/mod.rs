//! `engine`: what the packet engine costs: its core alone, in memory; over AF_XDP, with a generator that plays both ends;
//! and beside other proxies, with clients and a server of the kernel.

mod alone;
mod clients;
mod exact;
mod flood;
mod overload;
mod wire;

use std::hint::black_box;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::chart::{self, Series, Titles};
use crate::kit::{self, Bar, Bound, Missing, Page};
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
    pub rounds: Option<u32>,
    /// Only this part; may be given several times.
    #[arg(long, value_name = "PART", value_parser = ["core", "wire", "overload", "flood", "clients", "exact"])]
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

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 5 }).max(1)
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
    overload: Vec<overload::Row>,
    flood: Vec<flood::Row>,
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
        overload: Vec::new(),
        flood: Vec::new(),
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
            row.bar.map(|most| Bar::single(what, Some(row.nanos), Bound::AtMost(most)))
        }));
    }
    if options.wants("wire") {
        results.wire = wire::run(options.quick, options.rounds(), &progress, &mut results.missing);
        results.bars.extend(wire::bars(&results.wire));
    }
    if options.wants("overload") {
        results.overload = overload::run(options.quick, options.rounds(), &progress, &mut results.missing);
        results.bars.extend(overload::bar(&results.overload));
    }
    if options.wants("flood") {
        results.flood = flood::run(options.quick, options.rounds(), &progress, &mut results.missing);
        results.bars.extend(flood::bars(&results.flood));
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
    render(&results).publish(options.markdown.as_deref())?;
    options.output.json(&results)?;
    options.output.svg("engine", || plot(&results))?;
    let held = options.quick || results.bars.iter().all(Bar::holds);
    // Exactness does not depend on speed: a wrong byte fails even a quick run.
    let well = held && !results.missing.is_failure() && results.exact.iter().all(exact::Row::holds);
    Ok(kit::exit(well))
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

fn render(results: &Results) -> Page {
    let mut page = Page::default();
    let machine = &results.machine;
    page.text(format_args!(
        "## The packet engine, {}\n\nKernel {}, {}, {:.2} GHz by a chain of multiplications, congestion \
         control {}, load {:.1} before and {:.1} after.\n\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        results.gigahertz,
        machine.congestion_control,
        machine.load,
        machine::load_average()
    ));
    if !results.core.is_empty() {
        page.line(format_args!(
            "### The core alone, in memory, seven packets in for each connection, records on\n"
        ));
        page.columns([
            "open connections:",
            "ns a packet:",
            "cycles a packet:",
            "ns a connection:",
            "batches left out:",
        ]);
        for row in &results.core {
            page.row(format_args!(
                "{} | {:.1} | {:.0} | {:.0} | {:.1} %",
                row.open,
                row.nanos,
                row.nanos * results.gigahertz,
                row.connection_nanos(),
                row.left_out
            ));
        }
        page.blank();
    }
    wire::render(&mut page, &results.wire, results.gigahertz);
    overload::render(&mut page, &results.overload);
    flood::render(&mut page, &results.flood);
    clients::render(&mut page, &results.clients);
    exact::render(&mut page, &results.exact);
    results.missing.render(&mut page);
    if !results.bars.is_empty() {
        Bar::table(&mut page, &results.bars);
    }
    page
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
    fn the_clock_is_one_that_a_cpu_may_have() {
        let found = gigahertz();
        assert!((0.01..20.0).contains(&found), "{found}");
    }
}
