//! `http`: the HTTP side beside other proxies and caches, and the measurements of "Heigh performance proxy".
//!
//! Programs take turns in slices of about a second, and ratios are taken within a round, as in [`super::relay`].
//! Every sample is compared with the requests that the origin counted: in a column of hits the origin must get none.

mod bars;
mod cells;
mod idle;
mod origin;
mod pages;
mod programs;
mod rates;
mod recorded;
mod rows;
mod sample;

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};

use super::chain::bars::{Bar, render};
use super::missing::Missing;
use super::relay::{STEAL_LIMIT_PERCENT, Timing};
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::progress::Progress;
use crate::site::Site;
use cells::{Cell, Part};
use origin::Origin;
use rows::{Row, Scene};
use sample::Samples;

/// Options of `sidetrack-lab http`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Within 90 seconds: fewer rows and columns, short slices.
    #[arg(long)]
    pub quick: bool,
    /// Rounds per column [default: 5, with --quick 2].
    #[arg(long)]
    pub rounds: Option<u32>,
    /// Only this part; may be given several times.
    #[arg(long, value_name = "PART", value_parser = ["hit", "miss", "tunnel", "tls", "records", "idle", "pages", "rates"])]
    pub part: Vec<String>,
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

impl Options {
    fn wants(&self, part: &str) -> bool {
        super::is_wanted(&self.part, part)
    }

    fn timing(&self) -> Timing {
        if self.quick { Timing { warmup_ms: 100, window_ms: 250 } } else { Timing::FULL }
    }

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 2 } else { 5 }).max(1)
    }

    fn wants_row(&self, row: &Row) -> bool {
        super::is_named(&self.only, row.name)
    }
}

/// Measures, prints the tables and says whether all bars hold.
///
/// # Errors
/// The site cannot be built (root, nginx and openssl are needed), or a file cannot be written.
pub fn run(options: &Options) -> Result<ExitCode> {
    let machine = Machine::probe();
    let progress = Progress::new();
    let mut text = String::new();
    heading(&mut text, &machine, options);
    let (mut bars, mut missing) = (Vec::new(), Missing::default());
    let mut samples = Samples::default();
    if ["hit", "miss", "tunnel", "tls", "records", "idle", "rates"].iter().any(|part| options.wants(part)) {
        let site = Site::new()?;
        let mut scene = Scene { origin: Origin::start(&site)?, site: &site };
        for part in Part::ALL.into_iter().filter(|part| options.wants(part.name())) {
            measure(&scene, part, options, &mut samples, &progress);
            bars::figures(&mut text, &samples, part);
            bars.extend(bars::judge(&samples, part));
        }
        if options.wants("records") {
            bars.extend(recorded::run(&site, options, &mut text, &progress));
        }
        if options.wants("idle") {
            progress.now("idle connections");
            bars.extend(idle::run(&scene, if options.quick { 100 } else { 1000 }, &mut text));
        }
        if options.wants("rates") {
            bars.extend(rates::run(&scene, options.quick, &mut text, &progress, &mut missing));
        }
        let ended = || Err(anyhow!("the origin has ended: no figure means anything"));
        missing.note("HTTP", if scene.origin.is_running() { Ok(()) } else { ended() }, &progress);
    }
    if options.wants("pages") {
        let done = pages::run(options.quick, &mut text, &progress, &mut missing);
        bars.extend(missing.note("pages", done, &progress).unwrap_or_default());
    }
    progress.end();
    let _ = writeln!(
        text,
        "Load {:.1} after; samples dropped for more than {STEAL_LIMIT_PERCENT} % steal: {}.\n",
        machine::load_average(),
        samples.dropped
    );
    missing.render(&mut text);
    render(&mut text, &bars);
    print!("{text}");
    options.output.json(&samples)?;
    if let Some(path) = &options.markdown {
        fs::write(path, &text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let well = !missing.is_failure() && bars.iter().all(Bar::holds);
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn heading(text: &mut String, machine: &Machine, options: &Options) {
    let timing = options.timing();
    // Writing to a String cannot fail.
    let _ = write!(
        text,
        "## HTTP, {}\n\nKernel {}, {}, congestion control {}, load {:.1} before. {} rounds of {} ms after {} ms of warm-up, programs in \
         turn, order reversed every round; medians. Client and origin share one core, the program has the other; one worker each, no log. CPU \
         is that of the program for each answer. The limit is the least program that passes bytes on (`sidetrack-lab bare`) and knows \
         nothing of HTTP. It, nginx, HAProxy, Varnish and Traffic Server stand for the origin, the others are asked as \
         proxies, ours as both.\n\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        machine.congestion_control,
        machine.load,
        options.rounds(),
        timing.window_ms,
        timing.warmup_ms,
    );
}

/// Measures all columns of a part: forwards, backwards, forwards…
fn measure(scene: &Scene<'_>, part: Part, options: &Options, samples: &mut Samples, progress: &Progress) {
    for cell in Cell::of(part, options.quick) {
        for round in 0..options.rounds() {
            let mut order: Vec<&Row> =
                Row::of(part, options.quick).filter(|row| options.wants_row(row)).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for row in order {
                progress.now(&format!(
                    "{}, round {} of {}: {}",
                    cell.name,
                    round + 1,
                    options.rounds(),
                    row.name
                ));
                turn(scene, (row, cell), (round, options.timing()), samples, progress);
            }
        }
        progress.say(&format!("{}: done", cell.name));
    }
}

/// Takes one sample; a disturbed one is dropped, and a row that does not work is not tried again.
fn turn(
    scene: &Scene<'_>,
    (row, cell): (&Row, &Cell),
    (round, timing): (u32, Timing),
    samples: &mut Samples,
    progress: &Progress,
) {
    if samples.why_missing(cell.name, row.name).is_some() {
        return;
    }
    match sample::take(scene, row, cell, timing) {
        Ok(sample) if sample.disturbance.steal_percent <= STEAL_LIMIT_PERCENT => {
            samples.add(cell, row, round, sample);
        }
        Ok(_) => samples.dropped += 1,
        Err(reason) => progress.say(&samples.miss(cell, row, &reason)),
    }
}
