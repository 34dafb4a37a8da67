//! `epi`: the measurements of the EPI framework, Secs. V to VII, with its proxies and ours.
//!
//! It measures set-up times by `httping` in the six topologies of Table I on emulated links, and processed requests
//! by `wrk` on plain links, and prints Table II with the evidence of each tick.

mod bars;
mod bed;
mod clients;
mod measure;
mod paper;
mod report;
mod rows;
mod table_ii;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::kit::{self, Bar, Missing, Page};
use crate::launch;
use crate::link::{Kind, Lateness, Network};
use crate::machine::{self, Disturbance, DisturbanceMeter, Machine};
use crate::output::Output;
use crate::progress::{self, Progress};

use measure::{Figures, Plan};

/// Options of `sidetrack-lab epi`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Fewer requests and one number of connections: within 90 seconds.
    #[arg(long)]
    pub quick: bool,
    /// How often the paper's 120 requests are made for each cell; the paper has 5.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub runs: u32,
    /// How many turns every row gets, of 30 requests (5 with --quick) and of one window for each number of connections.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// How long `wrk` runs for each figure, in seconds. Default 1.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=60))]
    pub window: Option<u64>,
    /// Only rows whose name contains this; may be given several times.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Only set-up times or only rates.
    #[arg(long, value_enum)]
    pub part: Option<Part>,
    /// The kind of the links.
    #[arg(long, value_enum, default_value = "auto")]
    pub links: Kind,
    /// Measure on real hosts that are reached by ssh, instead of namespaces of this machine. docs/lab.md describes the file.
    #[arg(long, value_name = "FILE", conflicts_with = "links")]
    pub testbed: Option<PathBuf>,
    /// Where results go.
    #[command(flatten)]
    pub output: Output,
}

/// A half of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Figs. 11 and 12.
    Times,
    /// Fig. 13.
    Rates,
}

/// The content of `results.json`.
#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    /// `builtin` or `netem`.
    links: String,
    plan: Plan,
    figures: Figures,
    /// How punctual our own links were.
    lateness: Option<Lateness>,
    /// The disturbance by other work.
    disturbance: Disturbance,
    #[serde(rename = "verdicts")]
    bars: Vec<Bar>,
    /// Parts without figures.
    missing: Missing,
}

/// Measures, prints the tables and returns whether all bars hold.
///
/// # Errors
/// The links cannot be built (root is needed), or a file cannot be written.
pub fn run(options: &Options) -> Result<ExitCode> {
    if let Some(file) = &options.testbed {
        return bed::run(options, file);
    }
    let plan = plan(options);
    let rows = measure::chosen(&options.only, options.quick);
    let network = Network::new(options.links, &launch::launcher()?, 1)?;
    let progress = Progress::new();
    progress.say(&format!("This will take about {}.", progress::time(estimate(options, &plan, &rows))));
    let machine = Machine::probe();
    let meter = DisturbanceMeter::start();
    let (mut figures, mut missing) = (Figures::default(), Missing::default());
    let has_times = options.part != Some(Part::Rates);
    if has_times {
        let done = measure::times(&network, &plan, &rows, &mut figures, &progress);
        missing.note("Set-up times", done, &progress);
    }
    if options.part != Some(Part::Times) {
        let progress = Progress::new();
        let done = measure::rates(&plan, &rows, &mut figures, &progress);
        missing.note("Rates", done, &progress);
    }
    progress.end();
    let bars = bars::judge(&figures, &plan);
    let results = Results {
        machine,
        links: format!("{:?}", network.kind()).to_lowercase(),
        lateness: network.lateness()?,
        disturbance: meter.stop(),
        plan,
        figures,
        bars,
        missing,
    };
    let mut page = Page::default();
    heading(&mut page, &results, has_times);
    report::write(&mut page, &results.figures, &results.plan, &rows, &results.bars);
    results.missing.render(&mut page);
    page.publish(None)?;
    options.output.json(&results)?;
    report::files(&options.output, &results.figures, &results.plan, &rows)?;
    Ok(kit::exit(!results.missing.is_failure() && !results.bars.iter().any(Bar::is_failure)))
}

fn plan(options: &Options) -> Plan {
    let plan = if options.quick { Plan::quick() } else { Plan::full(options.runs) };
    Plan {
        rounds: options.rounds.unwrap_or(plan.rounds),
        rate_rounds: options.rounds.unwrap_or(plan.rate_rounds),
        window_seconds: options.window.unwrap_or(plan.window_seconds),
        ..plan
    }
}

fn estimate(options: &Options, plan: &Plan, rows: &[rows::Row]) -> Duration {
    let without = match options.part {
        None => return plan.estimate(rows),
        Some(Part::Times) => Plan { rate_rounds: 0, ..plan.clone() },
        Some(Part::Rates) => Plan { rounds: 0, ..plan.clone() },
    };
    without.estimate(rows)
}

fn heading(page: &mut Page, results: &Results, has_times: bool) {
    let (machine, plan) = (&results.machine, &results.plan);
    let counts = match has_times {
        true => format!("{} requests a cell in {} rounds", plan.requests * plan.rounds, plan.rounds),
        false => format!("{} windows of {} s a cell", plan.rate_rounds, plan.window_seconds),
    };
    let late = results.lateness.map_or_else(String::new, |late| format!(" {late}"));
    page.text(format_args!(
        "## The EPI measurements\n\n{}, Linux {}, {}, {}, load {:.1} to {:.1}, steal {:.1} %. {counts}; links: {}.{late}\n\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        machine.congestion_control,
        machine.load,
        machine::load_average(),
        results.disturbance.steal_percent,
        results.links
    ));
}
