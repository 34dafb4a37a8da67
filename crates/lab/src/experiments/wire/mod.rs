//! `wire`: what it costs a flow that the kernel takes it over, and when it pays (docs/wire.md).

mod curve;
mod handover;
mod hosts;
mod stream;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::kit::{self, Bar, Page};
use crate::machine::Machine;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// How long a flow stands still at its hand-over, and many hand-overs under load with loss.
    Handover,
    /// From which length on a flow is worth a hand-over.
    Curve,
}

/// Options of `sidetrack-lab wire`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// What to measure.
    #[arg(long)]
    pub part: Part,
    /// Hand-overs under load.
    #[arg(long, default_value_t = 10_000)]
    pub flows: usize,
    /// Steady streams that are handed over.
    #[arg(long, default_value_t = 200)]
    pub steady: usize,
    /// Rounds of the curve.
    #[arg(long, default_value_t = 3)]
    pub rounds: u32,
    /// Write the page into this file, too.
    #[arg(long, value_name = "FILE")]
    pub page: Option<PathBuf>,
}

/// Measures, prints the tables, and says whether all bars hold.
///
/// # Errors
/// Not root, a program is missing, or a host cannot be made.
pub fn run(options: &Options) -> Result<ExitCode> {
    let (mut page, mut bars) = (Page::default(), Vec::new());
    let machine = Machine::probe();
    page.line(format_args!("# Flows that go to the wire, measured\n\n{}. {machine}.\n", machine.date));
    match options.part {
        Part::Handover => handover::measure(options, &mut page, &mut bars)?,
        Part::Curve => curve::measure(options, &mut page)?,
    }
    if !bars.is_empty() {
        page.line(format_args!("## Bars\n"));
        Bar::table(&mut page, &bars);
    }
    page.publish(options.page.as_deref())?;
    Ok(kit::exit(!bars.iter().any(Bar::is_failure)))
}
