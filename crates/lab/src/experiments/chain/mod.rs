//! `chain`: the cost of functions inside Sidetrack and in containers, their rate against replicas, how fast a chain
//! changes under live flows, and how soon a decision about data holds at three proxies.

mod bars;
mod crypt;
mod enforce;
mod plane;
mod replicas;
mod swap;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use super::relay::{Cell, take};
use crate::kit::{self, Bar, Missing, Page, Results, Timing};
use crate::machine::{self, Machine};
use crate::peers::Peer;
use crate::peers::chains::CHAINS;
use crate::progress::Progress;
use crate::site::Site;

/// Options of `sidetrack-lab chain`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Within 90 seconds: fewer rows, short slices, three rounds.
    #[arg(long)]
    pub quick: bool,
    /// Rounds per cell [default: 5, with --quick 3].
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Only this part; may be given several times.
    #[arg(long, value_name = "PART", value_parser = ["cost", "crypt", "replicas", "swap", "plane"])]
    pub part: Vec<String>,
    /// Write the table there, too.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

impl Options {
    fn wants(&self, part: &str) -> bool {
        super::is_wanted(&self.part, part)
    }
}

/// Measures, prints the tables and says whether all bars hold.
///
/// # Errors
/// The site cannot be built (root and nginx are needed), or a file cannot be written. Parts that fail are named in the
/// report, and make the run fail at its end.
pub fn run(options: &Options) -> Result<ExitCode> {
    let machine = Machine::probe();
    let site = Site::new()?;
    let progress = Progress::new();
    let mut page = Page::default();
    let (mut bars, mut missing) = (Vec::new(), Missing::default());
    if options.wants("cost") {
        let results = costs(options, machine.clone(), &site, &progress);
        heading(&mut page, &results);
        bars::figures(&mut page, &results);
        bars.extend(bars::judge(&results));
    }
    if options.wants("crypt") {
        progress.now("encryption");
        let pair = crypt::measure(&site, if options.quick { 64 } else { 512 } << 20);
        if let Some(pair) = missing.note("encryption", pair, &progress) {
            crypt::render(&mut page, &pair);
        }
    }
    if options.wants("replicas") {
        let rounds = options.rounds.unwrap_or(if options.quick { 1 } else { 3 }).max(1);
        let results = replicas::measure(rounds, machine, &site, &progress);
        bars.extend(replicas::render(&mut page, &results));
    }
    if options.wants("swap") {
        progress.now("a chain changes");
        let swaps = swap::measure(&site, if options.quick { 3 } else { 20 });
        if let Some(swaps) = missing.note("a chain that changes", swaps, &progress) {
            bars.extend(swap::render(&mut page, &swaps));
        }
    }
    if options.wants("plane") {
        progress.now("applications and consent in three domains");
        bars.extend(decisions(&site, options.quick, &mut page, &mut missing, &progress));
    }
    missing.render(&mut page);
    Bar::table(&mut page, &bars);
    page.publish(options.markdown.as_deref())?;
    Ok(kit::exit(!missing.is_failure() && !bars.iter().any(Bar::is_failure)))
}

/// How soon a decision holds.
fn decisions(
    site: &Site,
    quick: bool,
    page: &mut Page,
    missing: &mut Missing,
    progress: &Progress,
) -> Vec<Bar> {
    let mut bars = Vec::new();
    let plane = plane::Plane::start(site);
    let Some(plane) = missing.note("three domains", plane, progress) else { return bars };
    let steps = enforce::steps(&plane, if quick { 5 } else { 30 });
    bars.extend(missing.note("steps of an application", steps, progress).map(|steps| steps.render(page)));
    let changes = enforce::changes(&plane, if quick { 10 } else { 100 });
    let changes = missing.note("consent withdrawn", changes, progress);
    bars.extend(changes.map(|changes| enforce::render(page, &changes)));
    bars
}

fn heading(page: &mut Page, results: &Results<Cell>) {
    let machine = &results.machine;
    page.text(format_args!(
        "## Chains, {}\n\n{machine} and {:.1} after. {} rounds of {} ms after {} ms of warm-up, rows in \
         turn, order reversed every round; medians. Samples dropped for more than 2 % steal: {}. Client and \
         server share one core, the node has the other, and so have containers. CPU is that of the node \
         alone, without what is in containers. Functions in the order in which longer chains have more of \
         them: count, limit, filter (words), replace, and the same again. The first two only count: their \
         flows are spliced. From the third on bytes are read, so the first reading one is held against the \
         least program that reads and writes (bare copy).\n\n",
        machine.date,
        results.load_at_end,
        results.rounds,
        results.timing.window_ms,
        results.timing.warmup_ms,
        results.dropped
    ));
}

fn rows(quick: bool) -> Vec<Peer> {
    let short = [
        "chain of 0",
        "chain of 1",
        "chain of 2",
        "chain of 4",
        "chain of 8",
        "1 container",
        "1 further relay",
        "bare copy, 64 KiB",
    ];
    CHAINS.iter().filter(|peer| !quick || short.contains(&peer.name)).copied().collect()
}

/// Maximum number of attempts until a sample is undisturbed.
const ATTEMPTS: u32 = 3;

fn costs(options: &Options, machine: Machine, site: &Site, progress: &Progress) -> Results<Cell> {
    let quick = options.quick;
    let timing = if quick { Timing { warmup_ms: 100, window_ms: 300 } } else { Timing::FULL };
    let rounds = options.rounds.unwrap_or(if quick { 3 } else { 5 }).max(1);
    let attempts = if quick { 1 } else { ATTEMPTS };
    let mut results = Results::new(machine, rounds, timing);
    let cells = if quick {
        &[Cell::New(32), Cell::Bulk(1)][..]
    } else {
        &[Cell::New(32), Cell::New(64), Cell::Bulk(1), Cell::Bulk(8)]
    };
    let rows: Vec<_> = rows(quick).into_iter().map(|peer| (peer.name, peer)).collect();
    for cell in cells {
        results.measure(*cell, &rows, attempts, progress, |peer| take(site, peer, *cell, timing));
    }
    results.load_at_end = machine::load_average();
    results
}
