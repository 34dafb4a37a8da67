//! `overlay`: the in-lab evaluation of Seamless Overlays, Sec. 4.1, with its figures, ours, and plain
//! TCP over the same links.
//!
//! ```text
//!   source --10 ms-- near --10 ms, loss-- far --10 ms-- target        200 Mb/s each; plain TCP is routed along the same
//!      \________________ 17 ms __ spare __ 17 ms _______/            links, the spare way is the overlay's alone
//! ```
//! The applications are not changed: our node redirects connections to the overlay's address, [`scene::TARGET`].

mod bars;
mod bought;
mod flow;
mod gap;
mod measure;
mod proofs;
mod report;
mod scene;
mod scp;
mod shape;
mod wide;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use crate::kit::{self, Bar, Missing};
use crate::launch;
use crate::link::{Kind, Lateness};
use crate::machine::{Disturbance, DisturbanceMeter, Machine};
use crate::output::Output;
use crate::progress::Progress;

use measure::{Figures, Plan};
use scene::Scene;
use shape::{ONE_HOP, THREE_HOPS};

/// Options of `sidetrack-lab overlay`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Fewer and shorter runs: within 90 seconds.
    #[arg(long)]
    pub quick: bool,
    /// Only these parts; may be given several times.
    #[arg(long, value_enum, value_name = "PART")]
    pub only: Vec<Part>,
    /// What the links are made of.
    #[arg(long, value_enum, default_value = "auto")]
    pub links: Kind,
    /// Decides which frames are lost on links of our own.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where results go.
    #[command(flatten)]
    pub output: Output,
}

/// A part of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// The goodput at full speed, and its CPU cost.
    Flood,
    /// The same over one long and fast hop that loses frames.
    Fast,
    /// Floods as whole packets on both kinds of links; not with `--quick`, unless requested.
    Packets,
    /// The delay of every write of a steady stream.
    Delay,
    /// Files by scp.
    Scp,
    /// How long a transfer stalls when a relay is killed, and when a link is cut.
    Failure,
    /// The bandwidth of an idle link.
    Idle,
    /// Hops whose bandwidth is bought: goodput with losses, and two flows; not with `--quick`, unless requested.
    Bought,
    /// Twelve nodes at wide-area distances, many flows, and cut links.
    Wide,
    /// Twelve cities in bad weather: bulk data, voice by each kind of link and dissemination, and an uplink that is pulled out.
    Area,
    /// A stream with a deadline over three hops, one of which loses bursts.
    Stream,
    /// What a proof of the source costs, on one core; not with `--quick`, unless requested.
    Proofs,
    /// How much of the gap between one path and flooding the ways of dissemination close, in simulation.
    Gap,
}

impl Part {
    /// The parts on the three hops; the others have separate networks, and come after them.
    const THREE_HOPS: [Self; 6] =
        [Self::Idle, Self::Flood, Self::Packets, Self::Delay, Self::Scp, Self::Failure];
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
    disturbance: Disturbance,
    /// Duration of the run.
    seconds: u64,
    #[serde(rename = "verdicts")]
    bars: Vec<Bar>,
    /// Parts that have no figures, and why.
    #[serde(flatten)]
    missing: Missing,
}

/// Measures, prints the tables and returns whether all bars hold.
///
/// # Errors
/// The results cannot be written. Parts that fail, and parts whose programs are absent, are named in the report.
pub fn run(options: &Options) -> Result<ExitCode> {
    let plan = if options.quick { Plan::quick() } else { Plan::full() };
    let progress = Progress::new();
    let machine = Machine::probe();
    let (meter, began) = (DisturbanceMeter::start(), Instant::now());
    let mut figures = Figures::default();
    let usual = |part: Part| plan.is_full || !matches!(part, Part::Packets | Part::Bought | Part::Proofs);
    let wanted = |part: &Part| options.only.contains(part) || options.only.is_empty() && usual(*part);
    let kind = options.links.resolved(&launch::launcher()?)?;
    let mut lateness = None;
    // A failed part does not discard the figures of the others.
    let mut missing = Missing::default();
    let three: Vec<_> = Part::THREE_HOPS.into_iter().filter(wanted).collect();
    let scene = (!three.is_empty()).then(|| Scene::new(&THREE_HOPS, kind, options.seed));
    if let Some(mut scene) = scene.and_then(|scene| missing.note("Three hops", scene, &progress)) {
        for part in three {
            let done = three_hops(part, &mut scene, &plan, &mut figures, &progress);
            missing.note(&format!("{part:?}"), done, &progress);
        }
        figures.links_lost = scene.links_lost();
        lateness = scene.network().lateness()?;
    }
    let scene = wanted(&Part::Fast).then(|| Scene::new(&ONE_HOP, kind, options.seed));
    if let Some(scene) = scene.and_then(|scene| missing.note("Fast", scene, &progress)) {
        missing.note("Fast", measure::fast(&scene, &plan, &mut figures, &progress), &progress);
        lateness = lateness.or(scene.network().lateness()?);
    }
    if wanted(&Part::Bought) {
        let bought = bought::measure(kind, options.seed, &plan, &progress);
        figures.bought = missing.note("Bought", bought, &progress);
    }
    if wanted(&Part::Wide) {
        let routes = wide::routes(kind, options.seed, &plan, &progress);
        figures.routes = missing.note("Wide", routes, &progress);
    }
    if wanted(&Part::Area) {
        figures.area = missing.note("Area", wide::area(kind, options.seed, &plan, &progress), &progress);
        missing.absent.extend(figures.area.iter().flat_map(|area| area.absent.clone()));
    }
    if wanted(&Part::Stream) {
        figures.chain = missing.note("Stream", wide::chain(kind, options.seed, &plan, &progress), &progress);
    }
    if wanted(&Part::Proofs) {
        progress.say("proofs of the source");
        figures.proofs = missing.note("Proofs", proofs::measure(), &progress).unwrap_or_default();
    }
    if wanted(&Part::Gap) {
        progress.say("ways of dissemination, simulated");
        figures.gap = Some(gap::measure(options.seed, plan.traces));
    }
    progress.end();
    let bars = bars::judge(&figures);
    let results = Results {
        machine,
        links: format!("{kind:?}").to_lowercase(),
        lateness,
        disturbance: meter.stop(),
        seconds: began.elapsed().as_secs(),
        plan,
        figures,
        bars,
        missing,
    };
    report::page(&results).publish(None)?;
    options.output.json(&results)?;
    report::files(&options.output, &results.figures)?;
    Ok(kit::exit(!results.missing.is_failure() && !results.bars.iter().any(Bar::is_failure)))
}

fn three_hops(
    part: Part,
    scene: &mut Scene,
    plan: &Plan,
    figures: &mut Figures,
    progress: &Progress,
) -> Result<()> {
    match part {
        Part::Idle => measure::idle(scene, plan, figures, progress),
        Part::Flood => measure::flood(scene, plan, figures, progress),
        Part::Packets => measure::packets(scene, plan, figures, progress),
        Part::Delay => measure::delay(scene, plan, figures, progress),
        Part::Scp => measure::scp(scene, plan, figures, progress),
        Part::Failure => measure::failure(scene, plan, figures, progress),
        // These parts have separate networks.
        Part::Fast | Part::Bought | Part::Wide | Part::Area | Part::Stream | Part::Proofs | Part::Gap => {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::Unavailable;
    use anyhow::{Context as _, anyhow};

    #[test]
    fn an_absent_program_is_a_row_and_a_failure_is_one() {
        let (mut missing, progress) = (Missing::default(), Progress::new());
        assert_eq!(missing.note("Flood", Ok(7), &progress), Some(7));
        let absent = || Err::<(), _>(Unavailable::Absent("sidetrack is not built".to_owned()).into_error());
        assert_eq!(missing.note("Wide", absent(), &progress), None);
        // Also if other functions have added context to the error.
        assert_eq!(missing.note("Scp", absent().context("no copy"), &progress), None);
        assert!(missing.troubles.is_empty(), "what is absent fails nothing");
        let row = |part: &str| format!("{part}: absent: sidetrack is not built");
        assert_eq!(missing.absent, [row("Wide"), row("Scp")]);
        assert_eq!(missing.note("Idle", Err::<(), _>(anyhow!("it broke")), &progress), None);
        assert_eq!(missing.troubles, ["Idle: it broke"]);
        // A bar without a figure is not judged.
        assert!(bars::judge(&Figures::default()).iter().all(|bar| !bar.is_failure()));
    }
}
