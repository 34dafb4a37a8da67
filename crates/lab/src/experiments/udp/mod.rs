//! `udp`: what a datagram through each relay costs, beside other programs, the kernel's own translation, and the least program.
//!
//! Rows take turns within a round, forwards and backwards. Ratios are taken within a round, and their median counts.

mod cells;
mod sample;
mod table;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::kit::{self, Bar, Missing, Page, Timing, in_turn};
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::peers::{DATAGRAMS, Peer};
use crate::progress::Progress;
use crate::site::Site;

use cells::Cell;
use sample::Sample;

/// Options of `sidetrack-lab udp`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Within 90 seconds: two rounds of short slices.
    #[arg(long)]
    pub quick: bool,
    /// Rounds [default: 5, with --quick 2].
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Only rows whose name contains this; may be given several times.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Write the tables there, too.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Where every sample goes.
    #[command(flatten)]
    pub output: Output,
}

/// The samples of a run.
#[derive(Debug, Default, Serialize)]
struct Results {
    /// By cell, row and round.
    samples: Vec<Taken>,
}

#[derive(Debug, Serialize)]
struct Taken {
    cell: Cell,
    row: &'static str,
    round: u32,
    sample: Sample,
}

impl Results {
    /// Returns the samples of a row in a cell, by round.
    fn of(&self, cell: Cell, row: &str) -> BTreeMap<u32, &Sample> {
        let taken = self.samples.iter().filter(|taken| taken.cell == cell && taken.row == row);
        taken.map(|taken| (taken.round, &taken.sample)).collect()
    }
}

/// Measures, prints the tables and says whether all bars hold.
///
/// # Errors
/// The site cannot be built (root and nginx are needed), or a file cannot be written.
pub fn run(options: &Options) -> Result<ExitCode> {
    let (machine, progress) = (Machine::probe(), Progress::new());
    let timing = if options.quick { Timing { warmup_ms: 100, window_ms: 300 } } else { Timing::FULL };
    let rounds = options.rounds.unwrap_or(if options.quick { 2 } else { 5 }).max(1);
    let site = Site::new()?;
    let (mut results, mut missing) = (Results::default(), Missing::default());
    for cell in Cell::ALL {
        let wanted = |peer: &Peer| super::is_named(&options.only, peer.name) && cell.has(peer.name);
        let mut rows: Vec<Peer> = DATAGRAMS.iter().copied().filter(wanted).collect();
        for round in 0..rounds {
            for peer in in_turn(&rows, round) {
                progress.now(&format!("{cell}, {}, round {}", peer.name, round + 1));
                let what = format!("{}, {cell}", peer.name);
                let taken = sample::take(&site, peer, cell, timing).map_err(|why| why.into_error());
                match missing.note(&what, taken, &progress) {
                    Some(sample) => results.samples.push(Taken { cell, row: peer.name, round, sample }),
                    // It would fail again.
                    None => rows.retain(|row| row.name != peer.name),
                }
            }
        }
    }
    progress.end();
    let mut page = Page::default();
    page.text(format_args!(
        "## Datagrams, {}\n\n{machine} and {:.1} after. {rounds} rounds of {} ms after {} ms of warm-up, rows in turn, order \
         reversed every round; medians. Client and server share one core, the relay has the other. 32 flows with 4 datagrams each \
         under way; each counts once as it comes back, and passes the relay twice. CPU is that of the relay's programs for one \
         passage. Bare: the least program that could do the same (`sidetrack-lab bare datagrams`).\n",
        machine.date,
        machine::load_average(),
        timing.window_ms,
        timing.warmup_ms,
    ));
    table::render(&mut page, &results);
    missing.render(&mut page);
    let bars = table::bars(&results);
    page.blank();
    Bar::table(&mut page, &bars);
    page.publish(options.markdown.as_deref())?;
    options.output.json(&results)?;
    Ok(kit::exit(!missing.is_failure() && !bars.iter().any(Bar::is_failure)))
}
