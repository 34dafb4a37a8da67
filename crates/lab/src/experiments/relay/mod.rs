//! `relay`: the cost of a hop through each program, and whether ours meets its bars.
//!
//! Peers take turns in slices of about a second, A B C, C B A, in one run. Ratios are taken within a round, and their
//! median counts, because figures taken minutes apart on a shared machine cannot be compared.

mod bars;
mod cell;
mod foreign;
mod sample;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::kit::{self, Results, Timing};
use crate::machine::{self, Machine};
use crate::peers::{self, Peer};
use crate::progress::Progress;
use crate::site::{Records, Site};
use foreign::Foreign;

pub use cell::Cell;
pub use sample::{take, take_counting};

/// Attempts for a sample before a disturbed one is given up.
const ATTEMPTS: u32 = 3;

/// Options of `sidetrack-lab relay`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// About two minutes: one connection count, short slices, three rounds.
    #[arg(long)]
    pub quick: bool,
    /// Rounds per cell [default: 5, with --quick 3].
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Only peers whose name contains this; may be given several times.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Only this kind of work; may be given several times.
    #[arg(long, value_name = "KIND", value_parser = ["new", "keep-alive", "bulk"])]
    pub work: Vec<String>,
    /// While rows are measured, nginx in the proxy's node serves this number of connections per second to another program there;
    /// ours writes a record line for each flow. Default: none.
    #[arg(long, value_name = "PER SECOND")]
    pub foreign: Option<u32>,
    /// Write every sample there, too.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the table there, too.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

/// Measures, prints the table and returns whether all bars hold.
///
/// # Errors
/// The site cannot be built (root and nginx are needed), or a file cannot be written.
pub fn run(options: &Options) -> Result<ExitCode> {
    let chosen = choose(&options.only)?;
    let cells = Cell::chosen(options.quick, &options.work);
    let timing = if options.quick { Timing::QUICK } else { Timing::FULL };
    let rounds = options.rounds.unwrap_or(if options.quick { 3 } else { 5 }).max(1);
    let machine = Machine::probe();
    let site = Site::new()?;
    let mut results = Results::new(machine, rounds, timing);
    let progress = Progress::new();
    let foreign = options.foreign.map(|rate| Foreign::start(&site, rate)).transpose()?;
    for cell in cells {
        measure_cell(&site, cell, &chosen, foreign.as_ref(), &mut results, &progress);
    }
    results.load_at_end = machine::load_average();
    let verdicts = bars::judge(&results);
    let mut page = table::render(&results, &chosen, &verdicts);
    if let Some(foreign) = &foreign {
        page.text(format_args!("{}", foreign.sentence()));
    }
    page.publish(options.markdown.as_deref())?;
    if let Some(path) = &options.json {
        let json = serde_json::to_string_pretty(&results)?;
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(kit::exit(!verdicts.iter().any(bars::Verdict::is_failure)))
}

fn choose(only: &[String]) -> Result<Vec<Peer>> {
    let wanted = |peer: &Peer| super::is_named(only, peer.name);
    // The rows of event loops answer a question of their own: they are measured only when they are named.
    let named = if only.is_empty() { &[] } else { peers::LOOPS };
    let chosen: Vec<Peer> = peers::ALL.iter().chain(named).copied().filter(wanted).collect();
    if chosen.is_empty() {
        let names: Vec<_> = peers::ALL.iter().chain(peers::LOOPS).map(|peer| peer.name).collect();
        bail!("no peer has {only:?} in its name; there are: {}", names.join(", "));
    }
    Ok(chosen)
}

/// Takes all rounds of one cell.
pub(crate) fn measure_cell(
    site: &Site,
    cell: Cell,
    chosen: &[Peer],
    foreign: Option<&Foreign>,
    results: &mut Results<Cell>,
    progress: &Progress,
) {
    let rows: Vec<_> = chosen.iter().map(|peer| (peer.name, *peer)).collect();
    let timing = results.timing;
    results.measure(cell, &rows, ATTEMPTS, progress, |peer| {
        let take = || sample::take(site, peer, cell, timing);
        match foreign {
            Some(foreign) => foreign.beside(site, timing, || site.with_records(Records::File, take)),
            None => take(),
        }
    });
}
