//! `shunt`: the measurements of NFShunt: how fast a flow is moved (Table II), the rate and loss of one flow (Tables
//! III, V and VI), the cost of a packet, and that entries are removed and installed without loss.

mod counters;
mod cycles;
mod events;
mod latency;
mod load;
mod network;
mod report;
mod setup;
mod small;
mod switch;

use crate::machine::{DisturbanceMeter, Machine};
use crate::output::Output;
use crate::progress::Progress;
use anyhow::Result;
use report::{Section, Table};
use setup::Setup;
use std::process::ExitCode;
use std::time::Duration;

/// Options of `sidetrack-lab shunt`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Fewer flows and rounds: within 90 seconds; the bars are shown and not held.
    #[arg(long)]
    pub quick: bool,
    /// Only these parts; may be given several times.
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Vec<Part>,
    /// Where the results go.
    #[command(flatten)]
    pub output: Output,
}

/// A part of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Table II: from SYN to mark seen, entry confirmed, last packet on the slow path.
    Latency,
    /// One TCP flow at this machine's own round trip, through each set-up.
    Tcp,
    /// Small packets: CPU for each, and packets a second of one processor.
    Small,
    /// Tables III, V and VI: one TCP flow at 0, 100, 200 and 400 ms.
    Rtt,
    /// Table IV: two and four TCP flows at 0, 100 and 200 ms.
    Flows,
    /// What ends a stay on the fast path, and how soon.
    Events,
    /// Entries that come and go under traffic.
    Cycles,
}

impl Part {
    const ALL: [Self; 7] =
        [Self::Latency, Self::Tcp, Self::Small, Self::Rtt, Self::Flows, Self::Events, Self::Cycles];

    const fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Tcp => "tcp",
            Self::Small => "small",
            Self::Rtt => "rtt",
            Self::Flows => "flows",
            Self::Events => "events",
            Self::Cycles => "cycles",
        }
    }
}

/// How much is measured.
struct Plan {
    flows: usize,
    rounds: usize,
    seconds: u64,
    round_trips_ms: &'static [u64],
    /// Several flows: how many at once, at which round trips, and how often.
    several: &'static [usize],
    several_ms: &'static [u64],
    several_rounds: usize,
    /// Duration with a round trip: slow start takes time.
    long_seconds: u64,
    events: usize,
    cycles: usize,
}

impl Plan {
    const FULL: Self = Self {
        flows: 100,
        rounds: 5,
        seconds: 2,
        round_trips_ms: &[0, 100, 200, 400],
        several: &[2, 4],
        several_ms: &[0, 100, 200],
        several_rounds: 3,
        long_seconds: 6,
        events: 10,
        cycles: 10_000,
    };
    const QUICK: Self = Self {
        flows: 20,
        rounds: 1,
        seconds: 1,
        round_trips_ms: &[0, 100],
        several: &[4],
        several_ms: &[100],
        several_rounds: 1,
        long_seconds: 3,
        events: 2,
        cycles: 200,
    };
}

/// Measures, prints tables and says which bars are held.
///
/// # Errors Not root, or something does not work at all.
pub fn run(options: &Options) -> Result<ExitCode> {
    let plan = if options.quick { Plan::QUICK } else { Plan::FULL };
    let wanted = |part: &Part| options.only.is_empty() || options.only.contains(part);
    let mut held = true;
    for part in Part::ALL.into_iter().filter(wanted) {
        let (machine, meter) = (Machine::probe(), DisturbanceMeter::start());
        let section = measure(part, &plan, options)?;
        print!("{}", section.text);
        println!(
            "{}, Linux {}, {}, load {:.1} before, steal {:.1} %.\n",
            machine.date,
            machine.kernel,
            machine.cpu,
            machine.load,
            meter.stop().steal_percent
        );
        held &= section.held;
    }
    Ok(if held || options.quick { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn measure(part: Part, plan: &Plan, options: &Options) -> Result<Section> {
    let (output, progress) = (&options.output, Progress::new());
    let section = match part {
        Part::Latency => {
            let rows =
                each(&Setup::SHUNTED, 1, part, &progress, |setup| latency::measure(setup, plan.flows))?;
            output.json_named(part.name(), &report::by_name(&rows))?;
            output.svg("shunt-latency", || report::histogram(&rows))?;
            report::latency(&rows)
        }
        Part::Tcp => {
            let run = |setup| load::measure(setup, 1, plan.seconds, Duration::ZERO);
            let rows = each(&Setup::ALL, plan.rounds, part, &progress, run)?;
            output.json_named(part.name(), &report::by_name(&rows))?;
            report::tcp(&rows)
        }
        Part::Small => {
            let rows =
                each(&Setup::ALL, plan.rounds, part, &progress, |setup| small::measure(setup, plan.seconds))?;
            output.json_named(part.name(), &report::by_name(&rows))?;
            report::small(&rows)
        }
        Part::Rtt => {
            let run = |ms| at_round_trip(plan, ms, 1, &Setup::SEED, plan.rounds, part, &progress);
            let tables = plan.round_trips_ms.iter().map(|ms| run(*ms)).collect::<Result<Vec<_>>>()?;
            let named: Vec<_> = tables.iter().map(|(ms, rows)| (ms, report::by_name(rows))).collect();
            output.json_named(part.name(), &named)?;
            output.svg("shunt-rtt", || report::rates(&tables))?;
            report::rtt(&tables)
        }
        Part::Flows => {
            let mut tables = Vec::new();
            for (ms, connections) in
                plan.several_ms.iter().flat_map(|ms| plan.several.iter().map(move |n| (*ms, *n)))
            {
                let setups = [Setup::Slow, Setup::Tc];
                let (_, rows) =
                    at_round_trip(plan, ms, connections, &setups, plan.several_rounds, part, &progress)?;
                tables.push((ms, connections, rows));
            }
            let named: Vec<_> = tables
                .iter()
                .map(|(ms, connections, rows)| (ms, connections, report::by_name(rows)))
                .collect();
            output.json_named(part.name(), &named)?;
            report::flows(&tables)
        }
        Part::Events => {
            let rows =
                each(&Setup::SHUNTED, 1, part, &progress, |setup| events::measure(setup, plan.events))?;
            output.json_named(part.name(), &report::by_name(&rows))?;
            report::events(&rows)
        }
        Part::Cycles => {
            let run = |setup| Ok(vec![cycles::tcp(setup, plan.cycles)?, cycles::small(setup, plan.cycles)?]);
            let rows = each(&[Setup::Tc, Setup::Xdp], 1, part, &progress, run)?;
            output.json_named(part.name(), &report::by_name(&rows))?;
            report::cycles(&rows)
        }
    };
    progress.end();
    Ok(section)
}

/// This number of connections at this round trip in milliseconds.
fn at_round_trip(
    plan: &Plan,
    ms: u64,
    connections: usize,
    setups: &[Setup],
    rounds: usize,
    part: Part,
    progress: &Progress,
) -> Result<(u64, Table<load::Slice>)> {
    let seconds = if ms == 0 { plan.seconds } else { plan.long_seconds };
    let run = |setup| load::measure(setup, connections, seconds, Duration::from_millis(ms));
    Ok((ms, each(setups, rounds, part, progress, run)?))
}

/// Runs every set-up once per round, so that a disturbance of the machine affects all. Returns one row of results of
/// `run` for each.
fn each<T>(
    setups: &[Setup],
    rounds: usize,
    part: Part,
    progress: &Progress,
    run: impl Fn(Setup) -> Result<T>,
) -> Result<Table<T>> {
    let mut rows: Table<T> = setups.iter().map(|setup| (*setup, Vec::new())).collect();
    for round in 0..rounds {
        for (setup, row) in &mut rows {
            progress.now(&format!("{}, round {} of {rounds}: {}", part.name(), round + 1, setup.name()));
            row.push(run(*setup)?);
        }
    }
    Ok(rows)
}
