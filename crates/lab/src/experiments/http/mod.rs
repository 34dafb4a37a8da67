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

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow};

use crate::kit::{self, Bar, Missing, Page, Results, STEAL_LIMIT_PERCENT, Timing};
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::progress::Progress;
use crate::site::Site;
use cells::{Cell, Part};
use origin::Origin;
use rows::{Row, Scene};

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
    let mut page = Page::default();
    heading(&mut page, &machine, options);
    let (mut bars, mut missing) = (Vec::new(), Missing::default());
    let mut results = Results::new(machine, options.rounds(), options.timing());
    if ["hit", "miss", "tunnel", "tls", "records", "idle", "rates"].iter().any(|part| options.wants(part)) {
        let site = Site::new()?;
        let mut scene = Scene { origin: Origin::start(&site)?, site: &site };
        for part in Part::ALL.into_iter().filter(|part| options.wants(part.name())) {
            measure(&scene, part, options, &mut results, &progress);
            bars::figures(&mut page, &results, part);
            bars.extend(bars::judge(&results, part));
        }
        if options.wants("records") {
            bars.extend(recorded::run(&site, options, &mut page, &progress));
        }
        if options.wants("idle") {
            progress.now("idle connections");
            bars.extend(idle::run(&scene, if options.quick { 100 } else { 1000 }, &mut page));
        }
        if options.wants("rates") {
            bars.extend(rates::run(&scene, options.quick, &mut page, &progress, &mut missing));
        }
        let ended = || Err(anyhow!("the origin has ended: no figure means anything"));
        missing.note("HTTP", if scene.origin.is_running() { Ok(()) } else { ended() }, &progress);
    }
    if options.wants("pages") {
        let done = pages::run(options.quick, &mut page, &progress, &mut missing);
        bars.extend(missing.note("pages", done, &progress).unwrap_or_default());
    }
    progress.end();
    results.load_at_end = machine::load_average();
    page.line(format_args!(
        "Load {:.1} after; samples dropped for more than {STEAL_LIMIT_PERCENT} % steal: {}.\n",
        results.load_at_end, results.dropped
    ));
    missing.render(&mut page);
    Bar::table(&mut page, &bars);
    page.publish(options.markdown.as_deref())?;
    options.output.json(&results)?;
    Ok(kit::exit(!missing.is_failure() && !bars.iter().any(Bar::is_failure)))
}

fn heading(page: &mut Page, machine: &Machine, options: &Options) {
    let timing = options.timing();
    page.text(format_args!(
        "## HTTP, {}\n\n{machine}. {} rounds of {} ms after {} ms of warm-up, programs in turn, order \
         reversed every round; medians. Client and origin share one core, the program has the other; one \
         worker each, no log. CPU is that of the program for each answer. The limit is the least program \
         that passes bytes on (`sidetrack-lab bare`) and knows nothing of HTTP. It, nginx, HAProxy, Varnish \
         and Traffic Server stand for the origin, the others are asked as proxies, ours as both.\n\n",
        machine.date,
        options.rounds(),
        timing.window_ms,
        timing.warmup_ms
    ));
}

/// Measures all columns of a part. A disturbed sample is dropped.
fn measure(
    scene: &Scene<'_>,
    part: Part,
    options: &Options,
    results: &mut Results<&'static str>,
    progress: &Progress,
) {
    let rows = Row::of(part, options.quick).filter(|row| options.wants_row(row));
    let rows: Vec<_> = rows.map(|row| (row.name, row)).collect();
    let timing = options.timing();
    for cell in Cell::of(part, options.quick) {
        results.measure(cell.name, &rows, 1, progress, |row| sample::take(scene, row, cell, timing));
    }
}
