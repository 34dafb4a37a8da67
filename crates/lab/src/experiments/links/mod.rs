//! `links`: whether emulated links behave as configured, ours and the kernel's netem, and whether both agree.

mod checks;

use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::kit::{self, Missing, Page};
use crate::launch;
use crate::link::{Conditions, Kind, Lateness, Network, netem};
use crate::machine::{self, Machine};
use crate::output::Output;
use crate::progress::Progress;
use crate::topology::Node;

use checks::{CHECKS, Check, Ends};

/// Attempts for a check: a busy machine delays any link.
const ATTEMPTS: usize = 3;

/// Options of `sidetrack-lab links`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// The kind of the links.
    #[arg(long, value_enum, default_value = "auto")]
    pub links: Choice,
    /// Fewer frames: about 10 s for each kind.
    #[arg(long)]
    pub quick: bool,
    /// Leave out the checks that depend on the speed of the machine.
    #[arg(long)]
    pub untimed: bool,
    /// Only checks whose name contains this; may be given several times.
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Decides which frames our own links lose.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where results go.
    #[command(flatten)]
    pub output: Output,
}

/// The checked kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// netem if this kernel has it, otherwise ours.
    Auto,
    /// The kernel's.
    Netem,
    /// Ours.
    Builtin,
    /// Both, one after the other; fails also if they do not agree.
    Both,
}

/// A check that was made.
#[derive(Debug, Serialize)]
struct Done {
    kind: &'static str,
    check: &'static str,
    nominal: f64,
    tolerance: f64,
    reached: f64,
    unit: &'static str,
    remark: String,
    holds: bool,
}

#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    /// How punctual our own links were, over all checks.
    lateness: Vec<(&'static str, Lateness)>,
    checks: Vec<Done>,
    /// Checks without a figure.
    missing: Missing,
}

/// Checks, prints the table and returns whether all checks hold.
///
/// # Errors No nodes (root is needed), or no link of the requested kind.
pub fn run(options: &Options) -> Result<ExitCode> {
    let launcher = launch::launcher()?;
    let kinds = match options.links {
        Choice::Auto => vec![Kind::Auto.resolved(&launcher)?],
        Choice::Netem => vec![Kind::Netem],
        Choice::Builtin => vec![Kind::Builtin],
        Choice::Both => vec![Kind::Builtin, Kind::Netem],
    };
    let progress = Progress::new();
    let mut results = Results {
        machine: Machine::probe(),
        lateness: Vec::new(),
        checks: Vec::new(),
        missing: Missing::default(),
    };
    let named = |check: &Check| options.only.iter().any(|part| check.name.contains(part.as_str()));
    let chosen =
        |check: &Check| (options.only.is_empty() || named(check)) && !(options.untimed && check.is_timed);
    heading(&results.machine, options).publish(None)?;
    let chosen: Vec<&Check> = CHECKS.iter().filter(|check| chosen(check)).collect();
    for (at, kind) in kinds.iter().enumerate() {
        let network = Network::new(*kind, &launcher, options.seed)?;
        let (a, b) = (Node::new("a", &launcher)?, Node::new("b", &launcher)?);
        let wire = network.join(&a, &b, 1, [Conditions::default(); 2])?;
        let ends = Ends { a: &a, b: &b, wire: &wire, quick: options.quick };
        for (number, check) in chosen.iter().enumerate() {
            let done = at * chosen.len() + number;
            progress.bar(done, chosen.len() * kinds.len(), &format!("{}: {}", name(*kind), check.name));
            let made = make(check, &ends, name(network.kind()));
            progress.end();
            let name_of_row = format!("{} links, {}", name(*kind), check.name);
            if let Some(made) = results.missing.note(&name_of_row, made, &progress) {
                row(&made).publish(None)?;
                results.checks.push(made);
            }
        }
        results.lateness.extend(network.lateness()?.map(|lateness| (name(*kind), lateness)));
    }
    progress.end();
    let mut without = Page::default();
    without.blank();
    results.missing.render(&mut without);
    without.publish(None)?;
    println!("Load at the end: {:.1}.", machine::load_average());
    for (kind, lateness) in &results.lateness {
        println!(
            "{kind}: frames left {:.3} ms late in the median, {:.3} ms at most for 99 of 100; a wake-up took \
             {:.3} ms; {} refused.",
            lateness.median_ns as f64 / 1e6,
            lateness.p99_ns as f64 / 1e6,
            lateness.wake_up_ns as f64 / 1e6,
            lateness.refused
        );
    }
    options.output.json(&results)?;
    let disagree = disagreements(&results.checks);
    for line in &disagree {
        println!("{line}");
    }
    if options.links == Choice::Auto && !netem::is_available(&launcher)? {
        println!("This kernel has no netem: links are our own.");
    }
    let holds =
        disagree.is_empty() && !results.missing.is_failure() && results.checks.iter().all(|done| done.holds);
    Ok(kit::exit(holds))
}

/// Makes one check; if none of [`ATTEMPTS`] holds, the last counts.
fn make(check: &Check, ends: &Ends<'_>, kind: &'static str) -> Result<Done> {
    let mut last = None;
    for attempt in 1..=ATTEMPTS {
        ends.wire.set_both((check.conditions)())?;
        let found = (check.measure)(ends, check)?;
        let nominal = check.nominal;
        let holds = (found.value - nominal).abs() <= found.tolerance && found.is_valid;
        let again = if attempt > 1 { format!("{}; attempt {attempt}", found.remark) } else { found.remark };
        last = Some(Done {
            kind,
            check: check.name,
            nominal,
            tolerance: found.tolerance,
            reached: found.value,
            unit: check.unit,
            remark: again,
            holds,
        });
        // Counts are exact; only times may have been disturbed.
        if holds || !check.is_timed {
            break;
        }
    }
    last.ok_or_else(|| anyhow::anyhow!("no attempt was made"))
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Netem => "netem",
        Kind::Builtin => "builtin",
        Kind::Auto => "auto",
    }
}

fn heading(machine: &Machine, options: &Options) -> Page {
    let mut page = Page::default();
    page.line(format_args!(
        "## Emulated links\n\n{}, Linux {}, {}, load {:.1}{}. \"Allowed\" is the bar for times and three standard \
         deviations for what is counted.\n",
        machine.date,
        machine.kernel,
        machine.cpu,
        machine.load,
        if options.quick { ", quick" } else { "" }
    ));
    page.columns(["links", "check", "nominal:", "allowed:", "reached:", "", ""]);
    page
}

/// Formats a row. Rows are printed as they are made: a slow machine takes minutes for all.
fn row(done: &Done) -> Page {
    let mut page = Page::default();
    let result = if done.holds { "ok" } else { "**FAIL**" };
    page.row(format_args!(
        "{} | {} | {} {} | ± {} | {} | {result} | {}",
        done.kind,
        done.check,
        figure(done.nominal),
        done.unit,
        figure(done.tolerance),
        figure(done.reached),
        done.remark
    ));
    page
}

/// Returns the checks of both kinds whose results differ by more than both tolerances.
fn disagreements(checks: &[Done]) -> Vec<String> {
    let mut found = Vec::new();
    for ours in checks.iter().filter(|done| done.kind == "builtin") {
        let theirs = checks.iter().find(|done| done.kind == "netem" && done.check == ours.check);
        let Some(theirs) = theirs else { continue };
        let allowed = ours.tolerance.hypot(theirs.tolerance);
        if (ours.reached - theirs.reached).abs() > allowed {
            found.push(format!(
                "**{}**: builtin {} and netem {} differ by more than {} {}",
                ours.check,
                figure(ours.reached),
                figure(theirs.reached),
                figure(allowed),
                ours.unit
            ));
        }
    }
    found
}

/// Formats at most four digits, without an exponent.
fn figure(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(kind: &'static str, reached: f64) -> Done {
        let (check, unit) = ("loss", "%");
        Done { kind, check, nominal: 1.0, tolerance: 0.3, reached, unit, remark: String::new(), holds: true }
    }

    #[test]
    fn kinds_that_differ_by_more_than_both_may_are_told() {
        assert!(disagreements(&[done("builtin", 0.8), done("netem", 1.2)]).is_empty());
        let told = disagreements(&[done("builtin", 0.7), done("netem", 1.3)]);
        assert_eq!(told, ["**loss**: builtin 0.700 and netem 1.300 differ by more than 0.424 %"]);
        assert!(disagreements(&[done("builtin", 0.7)]).is_empty());
    }
}
