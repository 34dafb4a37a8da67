//! `relay`: the cost of a hop through each program, and whether ours meets its bars.
//!
//! Peers take turns in slices of about a second, A B C, C B A, in one run. Ratios are taken within a round, and their
//! median counts, because figures taken minutes apart on a shared machine cannot be compared.

mod bars;
mod cell;
mod foreign;
mod results;
mod sample;
mod table;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::machine::{self, Machine};
use crate::peers::{self, Peer, Unavailable};
use crate::progress::Progress;
use crate::site::{Records, Site};
use foreign::Foreign;

pub use cell::{Cell, Timing};
pub use results::Results;
pub use sample::{Sample, take, take_counting};

/// Attempts for a sample before a disturbed one is given up.
const ATTEMPTS: u32 = 3;
/// A sample with more steal than this, in percent, is dropped.
pub const STEAL_LIMIT_PERCENT: f64 = 2.0;

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
    let mut text = table::render(&results, &chosen, &verdicts);
    if let Some(foreign) = &foreign {
        text.push_str(&foreign.sentence());
    }
    print!("{text}");
    if let Some(path) = &options.markdown {
        fs::write(path, &text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = &options.json {
        let json = serde_json::to_string_pretty(&results)?;
        fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if verdicts.iter().any(bars::Verdict::is_failure) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
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

/// Takes all rounds of one cell: forwards, backwards, forwards...
pub(crate) fn measure_cell(
    site: &Site,
    cell: Cell,
    chosen: &[Peer],
    foreign: Option<&Foreign>,
    results: &mut Results,
    progress: &Progress,
) {
    for round in 0..results.rounds {
        let mut order: Vec<Peer> = chosen.to_vec();
        if round % 2 == 1 {
            order.reverse();
        }
        for peer in order {
            if results.why_missing(cell, peer.name).is_some() {
                continue;
            }
            progress.now(&format!("{cell}, round {} of {}: {}", round + 1, results.rounds, peer.name));
            match measure(site, peer, cell, foreign, results) {
                Ok(sample) => results.add(cell, peer.name, round, sample),
                Err(reason) => progress.say(&results.unavailable(peer.name, cell, &reason)),
            }
        }
    }
    progress.say(&format!("{cell}: done"));
}

/// Takes one sample; repeats a disturbed one.
fn measure(
    site: &Site,
    peer: Peer,
    cell: Cell,
    foreign: Option<&Foreign>,
    results: &mut Results,
) -> Result<Option<Sample>, Unavailable> {
    for _ in 0..ATTEMPTS {
        let take = || sample::take(site, peer, cell, results.timing);
        let sample = match foreign {
            Some(foreign) => {
                foreign.beside(site, results.timing, || site.with_records(Records::File, take))?
            }
            None => take()?,
        };
        if sample.disturbance.steal_percent <= STEAL_LIMIT_PERCENT {
            return Ok(Some(sample));
        }
        results.dropped += 1;
    }
    Ok(None)
}
