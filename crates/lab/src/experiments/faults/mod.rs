//! `faults`: what a machine does to a program that runs for months. A part each for reloads, memory, disks and the clock.
//! Flows that are open must go on byte-exact, and the program must say what it lacks.

mod browser;
mod clock;
mod disk;
mod flows;
mod group;
mod memory;
mod page;
mod reload;
mod source;
mod stand;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::kit::{self, Missing, Page};
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::peers::{Unavailable, ours};
use crate::progress::Progress;

/// Longest time for anything that is awaited.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval between two looks at it.
const POLL: Duration = Duration::from_millis(10);

/// Options of `sidetrack-lab faults`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Only this part (reload, memory, disk, clock); may be given several times.
    #[arg(long, value_name = "PART")]
    pub part: Vec<String>,
    /// reload: number of reloads [default: 1000, with --quick 40].
    #[arg(long)]
    pub reloads: Option<u32>,
    /// reload: flows that are open meanwhile [default: 500, with --quick 40].
    #[arg(long)]
    pub flows: Option<usize>,
    /// memory: what the control group allows in addition to what the program uses without flows, in MiB [default: 64, with
    /// --quick 24].
    #[arg(long)]
    pub memory_mib: Option<u64>,
    /// A few seconds for each part.
    #[arg(long)]
    pub quick: bool,
    /// Where all figures go.
    #[command(flatten)]
    pub output: Output,
}

/// The parts by name.
const PARTS: [&str; 4] = ["reload", "memory", "disk", "clock"];

#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    program: String,
    reload: Option<reload::Done>,
    memory: Option<memory::Done>,
    disk: Option<disk::Done>,
    clock: Option<clock::Done>,
    missing: Missing,
}

/// Makes the parts, prints their tables and says whether all bars hold.
///
/// # Errors
/// Not root, a program is missing, or there is no such part.
pub fn run(options: &Options) -> Result<ExitCode> {
    let unknown = options.part.iter().find(|part| !PARTS.contains(&part.as_str()));
    ensure!(unknown.is_none(), "there is no part {unknown:?}: use {}", PARTS.join(", "));
    let progress = Progress::new();
    let program = ours::program().map_err(Unavailable::into_error)?;
    let mut missing = Missing::default();
    let is_wanted = |part| super::is_wanted(&options.part, part);
    let reload = is_wanted("reload").then(|| reload::run(options, &progress));
    let reload = reload.and_then(|done| missing.note("reload", done, &progress));
    let memory = is_wanted("memory").then(|| memory::run(options, &progress));
    let memory = memory.and_then(|done| missing.note("memory", done, &progress));
    let disk = is_wanted("disk").then(|| disk::run(options, &progress));
    let disk = disk.and_then(|done| missing.note("disk", done, &progress));
    let clock = is_wanted("clock").then(|| clock::run(options, &progress));
    let clock = clock.and_then(|done| missing.note("clock", done, &progress));
    let program = program.display().to_string();
    let results = Results { machine: Machine::probe(), program, reload, memory, disk, clock, missing };
    let mut page = Page::default();
    let is_well = page::write(&mut page, &results, machine::load_average());
    page.publish(None)?;
    options.output.json(&results)?;
    Ok(kit::exit(is_well))
}

/// Waits until something holds.
fn wait(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = std::time::Instant::now();
    while !holds()? {
        ensure!(begun.elapsed() < LIMIT, "after {LIMIT:?} it is not so that {what}");
        std::thread::sleep(POLL);
    }
    Ok(())
}
