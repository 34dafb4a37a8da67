//! `crash`: SIGKILL of `sidetrack up` at random points of start, reload and stop. What it has changed must be taken back,
//! or traffic blocked if the configuration says so, and a start after it must serve.

mod point;
mod report;
mod setups;
mod stand;
mod traces;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::kit::{self, Missing};
use crate::link::random::Random;
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::progress::Progress;

use point::{Lengths, Outcome, Phase};
use setups::Setup;
use stand::Stand;

/// Longest time for anything that is awaited.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval between two looks at it.
const POLL: Duration = Duration::from_millis(1);

/// Options of `sidetrack-lab crash`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// How often the program is killed [default: 200, with --quick 12].
    #[arg(long)]
    pub points: Option<usize>,
    /// Decides at which times.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Twelve points, and one run to measure how long the phases take.
    #[arg(long)]
    pub quick: bool,
    /// Only configurations whose name contains this; may be given several times.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Where every point goes.
    #[command(flatten)]
    pub output: Output,
}

/// A point before it is made.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Planned {
    number: usize,
    setup: Setup,
    phase: Phase,
    /// When, as a share of the phase's length.
    share: f64,
}

/// A point and what came of it.
#[derive(Debug, Serialize)]
struct Made {
    number: usize,
    setup: Setup,
    phase: Phase,
    /// When it was killed, in milliseconds from the beginning of the phase.
    delay_ms: f64,
    outcome: Outcome,
}

/// The points of a configuration.
#[derive(Debug, Serialize)]
struct Group {
    setup: Setup,
    lengths: Lengths,
    /// Cells: tables, rules, routes, settings, programs, processes.
    in_force: String,
    points: Vec<Made>,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    program: String,
    seed: u64,
    groups: Vec<Group>,
    missing: Missing,
}

/// The same points for the same seed: configurations and phases take turns.
fn plan(points: usize, seed: u64) -> Vec<Planned> {
    let mut random = Random::new(seed);
    let planned = |number: usize| Planned {
        number,
        setup: Setup::ALL[number % Setup::ALL.len()],
        phase: Phase::ALL[number / Setup::ALL.len() % Phase::ALL.len()],
        share: random.unit(),
    };
    (0..points).map(planned).collect()
}

/// Kills, prints the table and says whether nothing was left and every start succeeded.
///
/// # Errors
/// No mount namespace (root is needed), or a file cannot be written.
pub fn run(options: &Options) -> Result<ExitCode> {
    super::own_mounts()?;
    let progress = Progress::new();
    let points = options.points.unwrap_or(if options.quick { 12 } else { 200 });
    let planned = plan(points, options.seed);
    let mut results = Results {
        machine: Machine::probe(),
        program: String::new(),
        seed: options.seed,
        groups: Vec::new(),
        missing: Missing::default(),
    };
    progress.say(&format!("{points} points, seed {}", options.seed));
    for setup in Setup::ALL.into_iter().filter(|setup| super::is_named(&options.only, setup.name())) {
        let planned: Vec<_> = planned.iter().filter(|planned| planned.setup == setup).copied().collect();
        let runs = if options.quick { 1 } else { 3 };
        let made = group(setup, &planned, runs, &progress, &mut results.program);
        let made = results.missing.note(setup.name(), made, &progress);
        results.groups.extend(made);
    }
    let load = machine::load_average();
    let (page, is_well) = report::page(&results, load);
    page.publish(None)?;
    options.output.json(&results)?;
    Ok(kit::exit(is_well))
}

/// Makes the points of one configuration.
fn group(
    setup: Setup,
    planned: &[Planned],
    runs: u32,
    progress: &Progress,
    program: &mut String,
) -> Result<Group> {
    let mut stand = Stand::new(setup)?;
    *program = stand.program().display().to_string();
    let (lengths, in_force) = Lengths::measure(&stand, runs)?;
    let mut points = Vec::new();
    for planned in planned {
        let (phase, length) = (planned.phase, lengths.of(planned.phase));
        let delay = length.mul_f64(planned.share);
        let must_block = setup.is_closed() && phase == Phase::Reload;
        // The number says nothing about the phase.
        let cleans = (planned.number / (Setup::ALL.len() * Phase::ALL.len())).is_multiple_of(2);
        let outcome = point::make(&stand, phase, delay, must_block, cleans)
            .unwrap_or_else(|error| Outcome { failed: Some(format!("{error:#}")), ..Outcome::default() });
        progress.say(&line(planned, delay, length, &outcome));
        if !outcome.is_well() {
            // What is left must not count again.
            stand = Stand::new(setup)?;
        }
        let (number, delay_ms) = (planned.number, delay.as_secs_f64() * 1000.0);
        points.push(Made { number, setup, phase, delay_ms, outcome });
    }
    Ok(Group { setup, lengths, in_force, points })
}

fn line(planned: &Planned, delay: Duration, length: Duration, outcome: &Outcome) -> String {
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    let end = match (outcome.settled_ms, outcome.was_blocked) {
        (Some(after), false) => format!("as before after {after:.1} ms"),
        (Some(after), true) => format!("blocked after {after:.1} ms"),
        (None, _) => "not as before".to_owned(),
    };
    let troubles: String =
        outcome.left.iter().chain(&outcome.failed).map(|trouble| format!("\n  {trouble}")).collect();
    format!(
        "point {}: {}, {} at {:.1} of {:.1} ms: {end}{troubles}",
        planned.number,
        planned.setup.name(),
        planned.phase.name(),
        ms(delay),
        ms(length)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_points_and_each_phase_of_each_configuration_has_its_share() {
        let all = plan(24, 7);
        assert_eq!(all, plan(24, 7));
        assert_ne!(all, plan(24, 8));
        for (setup, phase) in Setup::ALL.into_iter().flat_map(|setup| Phase::ALL.map(|phase| (setup, phase)))
        {
            let of = all.iter().filter(|planned| (planned.setup, planned.phase) == (setup, phase)).count();
            assert_eq!(of, 2, "{setup:?} {phase:?}");
        }
        assert!(all.iter().all(|planned| (0.0..1.0).contains(&planned.share)));
    }
}
