//! `shunt`: the measurements of NFShunt: how fast a flow is moved (Table II), the rate and loss of one flow (Tables
//! III, V and VI), the cost of a packet, and that entries are removed and installed without loss.

mod counters;
mod cycles;
mod events;
mod latency;
mod load;
mod network;
mod report;
mod samples;
mod setup;
mod small;
mod switch;
mod validate;

use crate::kit::{self, Missing};
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
    #[arg(long, visible_alias = "part", value_enum, value_name = "PART")]
    pub only: Vec<Part>,
    /// Where the results go.
    #[command(flatten)]
    pub output: Output,
}

/// A part of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Sec. IV-A: the hosts' tuning of Table I, and the rate of one flow without a firewall at 0 to 400 ms.
    Validate,
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
    /// The events that end a flow's time on the fast path, and how soon.
    Events,
    /// Entries that come and go under traffic.
    Cycles,
}

impl Part {
    const ALL: [Self; 8] = [
        Self::Validate,
        Self::Latency,
        Self::Tcp,
        Self::Small,
        Self::Rtt,
        Self::Flows,
        Self::Events,
        Self::Cycles,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Validate => "validate",
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
/// # Errors
/// The results cannot be written. Rows that could not be measured are named in the report, and make the run fail at its end.
pub fn run(options: &Options) -> Result<ExitCode> {
    let plan = if options.quick { Plan::QUICK } else { Plan::FULL };
    let wanted = |part: &Part| options.only.is_empty() || options.only.contains(part);
    let (mut held, mut failed) = (true, false);
    for part in Part::ALL.into_iter().filter(wanted) {
        let (machine, meter) = (Machine::probe(), DisturbanceMeter::start());
        let mut missing = Missing::default();
        let mut section = measure(part, &plan, options, &mut missing)?;
        missing.render(&mut section.page);
        failed |= missing.is_failure();
        section.page.publish(None)?;
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
    let well = !failed && (held || options.quick);
    Ok(kit::exit(well))
}

fn measure(part: Part, plan: &Plan, options: &Options, missing: &mut Missing) -> Result<Section> {
    let (output, progress) = (&options.output, Progress::new());
    let mut turns = Turns { part, progress: &progress, missing };
    let section = match part {
        Part::Validate => {
            let found: Vec<_> =
                plan.round_trips_ms.iter().filter_map(|ms| turns.validated(*ms, plan)).collect();
            output.json_named(part.name(), &found)?;
            report::validate(&found)
        }
        Part::Latency => {
            let rows = turns.each(&Setup::SHUNTED, 1, "", |setup| latency::measure(setup, plan.flows));
            output.json_named(part.name(), &report::by_name(&rows))?;
            output.svg("shunt-latency", || report::histogram(&rows))?;
            report::latency(&rows)
        }
        Part::Tcp => {
            let run = |setup| load::measure(setup, 1, plan.seconds, Duration::ZERO);
            let rows = turns.each(&Setup::ALL, plan.rounds, "", run);
            output.json_named(part.name(), &report::by_name(&rows))?;
            report::tcp(&rows)
        }
        Part::Small => {
            let rows = turns.each(&Setup::ALL, plan.rounds, "", |setup| small::measure(setup, plan.seconds));
            output.json_named(part.name(), &report::by_name(&rows))?;
            report::small(&rows)
        }
        Part::Rtt => {
            let run = |ms: &u64| (*ms, at_round_trip(plan, (*ms, 1), &Setup::SEED, plan.rounds, &mut turns));
            let tables: Vec<_> = plan.round_trips_ms.iter().map(run).collect();
            let named: Vec<_> = tables.iter().map(|(ms, rows)| (ms, report::by_name(rows))).collect();
            output.json_named(part.name(), &named)?;
            output.svg("shunt-rtt", || report::rates(&tables))?;
            output.svg("shunt-tcp", || report::windows(&tables))?;
            report::rtt(&tables)
        }
        Part::Flows => {
            let mut tables = Vec::new();
            for (ms, connections) in
                plan.several_ms.iter().flat_map(|ms| plan.several.iter().map(move |n| (*ms, *n)))
            {
                let setups = [Setup::Slow, Setup::Tc];
                let rows = at_round_trip(plan, (ms, connections), &setups, plan.several_rounds, &mut turns);
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
            let rows = turns.each(&Setup::SHUNTED, 1, "", |setup| events::measure(setup, plan.events));
            output.json_named(part.name(), &report::by_name(&rows))?;
            report::events(&rows)
        }
        Part::Cycles => {
            let run = |setup| Ok(vec![cycles::tcp(setup, plan.cycles)?, cycles::small(setup, plan.cycles)?]);
            let rows = turns.each(&[Setup::Tc, Setup::Xdp], 1, "", run);
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
    (ms, connections): (u64, usize),
    setups: &[Setup],
    rounds: usize,
    turns: &mut Turns<'_>,
) -> Table<load::Slice> {
    let seconds = if ms == 0 { plan.seconds } else { plan.long_seconds };
    let run = |setup| load::measure(setup, connections, seconds, Duration::from_millis(ms));
    turns.each(setups, rounds, &format!(", {connections} flows at {ms} ms"), run)
}

/// Measures the rows of a part, in turn.
struct Turns<'a> {
    part: Part,
    progress: &'a Progress,
    missing: &'a mut Missing,
}

impl Turns<'_> {
    /// Tunes the hosts and measures at one round trip. `None` if that fails, which is noted.
    fn validated(&mut self, ms: u64, plan: &Plan) -> Option<validate::Validated> {
        let name = format!("{}, {ms} ms", self.part.name());
        self.progress.now(&name);
        let seconds = if ms == 0 { plan.seconds } else { plan.long_seconds };
        self.missing.note(&name, validate::measure(ms, seconds), self.progress)
    }

    /// Runs every set-up once per round, so that a disturbance of the machine affects all. Returns one row of results of
    /// `run` for each. A set-up that fails is noted and has no further turn: ratios are those of one round.
    fn each<T>(
        &mut self,
        setups: &[Setup],
        rounds: usize,
        what: &str,
        run: impl Fn(Setup) -> Result<T>,
    ) -> Table<T> {
        let mut rows: Vec<_> = setups.iter().map(|setup| (*setup, Vec::new(), true)).collect();
        for round in 0..rounds {
            for (setup, row, works) in rows.iter_mut().filter(|(_, _, works)| *works) {
                let name =
                    format!("{}{what}, round {} of {rounds}: {}", self.part.name(), round + 1, setup.name());
                self.progress.now(&name);
                let done = self.missing.note(&name, run(*setup), self.progress);
                *works = done.is_some();
                row.extend(done);
            }
        }
        rows.into_iter().map(|(setup, row, _)| (setup, row)).filter(|(_, row)| !row.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_up_that_fails_takes_nothing_from_the_others() {
        let (mut missing, progress) = (Missing::default(), Progress::new());
        let mut turns = Turns { part: Part::Tcp, progress: &progress, missing: &mut missing };
        let tried = std::cell::RefCell::new(Vec::new());
        let rows = turns.each(&[Setup::Direct, Setup::Tc, Setup::Xdp], 3, "", |setup| {
            let mut tried = tried.borrow_mut();
            tried.push(setup);
            let turn = tried.iter().filter(|one| **one == setup).count();
            match (setup, turn) {
                (Setup::Tc, _) => anyhow::bail!("only 870 datagrams were sent"),
                (Setup::Xdp, 2) => anyhow::bail!("it broke"),
                _ => Ok(turn),
            }
        });
        assert_eq!(rows, [(Setup::Direct, vec![1, 2, 3]), (Setup::Xdp, vec![1])]);
        assert_eq!(tried.borrow().len(), 3 + 1 + 2);
        assert!(missing.is_failure());
        let [first, second] = &missing.troubles[..] else { panic!("{missing:?}") };
        assert!(
            first.starts_with("tcp, round 1 of 3: ") && first.ends_with("only 870 datagrams were sent"),
            "{first}"
        );
        assert!(second.starts_with("tcp, round 2 of 3: "), "{second}");
    }
}
