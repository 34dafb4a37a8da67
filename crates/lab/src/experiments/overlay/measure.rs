//! The measurements, and how often each is made.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use sidetrack_core::overlay::frame::LinkKind;

use super::bought::Bought;
use super::flow::{self, Way};
use super::gap::Gap;
use super::proofs::ProofRow;
use super::scene::Scene;
use super::scp::{Copied, Copies};
use super::shape::ONE_HOP;
use super::wide::{Area, Chain, Routes};
use crate::progress::Progress;
use crate::statistics::percentile;

/// Losses on the middle link of three, in percent.
pub(super) const LOSSES: [f64; 3] = [0.5, 2.0, 5.0];
/// Loss of the delay rows, percent.
pub(super) const DELAY_LOSS: f64 = 1.0;
/// Loss of the scp rows, percent, as in Seamless Overlays.
pub(super) const SCP_LOSS: f64 = 0.5;

/// Loss on the one fast hop, percent.
pub(super) const FAST_LOSS: f64 = 0.5;
/// Number of flows that overload the path together.
const OVERLOADING: usize = 4;

/// Time limit for links to become idle after their start.
const SETTLED: Duration = Duration::from_secs(3);

/// The amount of measurement.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Plan {
    /// All rows of the tables; otherwise only those of the bars and what they are compared with.
    pub is_full: bool,
    /// Interleaved rounds of the flood.
    pub rounds: u32,
    /// Warm-up before a flood is measured, in milliseconds.
    pub warm_ms: u64,
    /// The same where a flow takes longer to find its rate: at the highest loss, and over the fast hop.
    pub slow_warm_ms: u64,
    /// Measured time of a flood, in milliseconds.
    pub window_ms: u64,
    /// Messages of each delay row.
    pub messages: usize,
    /// Size of the file in bytes; cubic gets a tenth of it.
    pub file_bytes: u64,
    /// Number of relays killed, and of links cut.
    pub failures: u32,
    /// Number of links cut among twelve nodes.
    pub cuts: u32,
    /// Number of flows over them.
    pub flows: usize,
    /// Number of simulated traces.
    pub traces: u64,
    /// Rounds of everything across the wide area.
    pub area_rounds: u32,
    /// Duration of a stream of voice there, in milliseconds.
    pub voice_ms: u64,
    /// Measured time of a flood there, in milliseconds.
    pub flood_ms: u64,
    /// Size of a file there, in bytes; cubic gets a tenth of it.
    pub area_file_bytes: u64,
    /// Duration of a stream over three hops with bursts of losses, in milliseconds.
    pub stream_ms: u64,
}

impl Plan {
    /// Within 90 seconds.
    pub(super) fn quick() -> Self {
        Self {
            is_full: false,
            rounds: 1,
            warm_ms: 800,
            slow_warm_ms: 2500,
            window_ms: 1200,
            messages: 1000,
            file_bytes: 8_000_000,
            failures: 1,
            cuts: 1,
            flows: 300,
            traces: 10,
            area_rounds: 1,
            voice_ms: 2000,
            flood_ms: 1200,
            area_file_bytes: 0,
            stream_ms: 1500,
        }
    }

    /// Returns the warm-up of a flood at this loss, in milliseconds.
    fn warm(&self, loss_percent: f64, scene: &Scene) -> u64 {
        let is_slow = loss_percent == LOSSES[2] || scene.rate() == ONE_HOP.rate;
        if is_slow { self.slow_warm_ms } else { self.warm_ms }
    }

    /// Some minutes.
    pub(super) fn full() -> Self {
        Self {
            is_full: true,
            rounds: 3,
            warm_ms: 2000,
            slow_warm_ms: 3000,
            window_ms: 4000,
            messages: 6000,
            file_bytes: 100_000_000,
            failures: 10,
            cuts: 12,
            flows: 1000,
            traces: 300,
            area_rounds: 5,
            voice_ms: 20_000,
            flood_ms: 8000,
            area_file_bytes: 40_000_000,
            stream_ms: 10_000,
        }
    }
}

/// Floods of one way at one loss.
#[derive(Debug, Clone, Serialize)]
pub(super) struct FloodRow {
    /// [`Way::name`].
    pub way: String,
    /// Percent.
    pub loss: f64,
    /// Mb/s, one per round.
    pub mbit: Vec<f64>,
    /// CPU of the nodes, in seconds per GB, one per round; empty for plain TCP.
    pub cpu_s_per_gb: Vec<f64>,
}

/// Delays of one way at one loss.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DelayRow {
    /// [`Way::name`].
    pub way: String,
    /// Percent.
    pub loss: f64,
    /// Milliseconds: median, and 90, 99 and 99.9 of 100.
    pub percentiles_ms: [f64; 4],
}

/// Copies of one way at one loss.
#[derive(Debug, Clone, Serialize)]
pub(super) struct CopyRow {
    /// [`Way::name`].
    pub way: String,
    /// Percent.
    pub loss: f64,
    /// Mb/s; `None` if it did not end in time.
    pub mbit: Option<f64>,
}

/// All measurements.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Figures {
    /// Floods over three hops.
    pub floods: Vec<FloodRow>,
    /// Floods over one hop of 30 ms and 500 Mb/s.
    pub fast: Vec<FloodRow>,
    /// Mb/s of several floods together without loss, and the percentage of hellos that were missed meanwhile.
    pub overload: Option<(f64, f64)>,
    /// Delays of messages.
    pub delays: Vec<DelayRow>,
    /// Copies by scp.
    pub copies: Vec<CopyRow>,
    /// Stalls after a relay was killed, in milliseconds, ascending.
    pub killed_ms: Vec<f64>,
    /// Pauses of a duplicated flow after a relay of one of its paths was killed, in milliseconds, ascending.
    pub copied_ms: Vec<f64>,
    /// Stalls after a link was cut, in milliseconds, ascending.
    pub cut_ms: Vec<f64>,
    /// Bandwidth of the idle middle link in kbit/s, both directions together.
    pub idle_kbit: Option<f64>,
    /// Links that were lost without a failure.
    pub lost_under_load: Option<usize>,
    /// Links that were lost, in total.
    pub links_lost: usize,
    /// Hops whose bandwidth is bought.
    pub bought: Option<Bought>,
    /// Flows over twelve nodes while links are cut.
    pub routes: Option<Routes>,
    /// Bulk data and voice over twelve nodes in bad weather.
    pub area: Option<Area>,
    /// A stream with a deadline over three hops.
    pub chain: Option<Chain>,
    /// Ways of dissemination, simulated.
    pub gap: Option<Gap>,
    /// What proofs of the source cost.
    pub proofs: Vec<ProofRow>,
}

/// Measures idle links.
pub(super) fn idle(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    progress.say("idle links");
    // Waits until the traffic of a link's start is over: spare connections, and trials of datagram sizes.
    std::thread::sleep(SETTLED);
    let (since, before) = (Instant::now(), scene.middle_bits()?);
    std::thread::sleep(Duration::from_millis(plan.window_ms));
    let bits = scene.middle_bits()? - before;
    figures.idle_kbit = Some(bits as f64 / since.elapsed().as_secs_f64() / 1e3);
    Ok(())
}

/// Overloads the path and counts missed hellos; then floods it at each loss.
///
/// # Errors
/// A flow breaks.
pub(super) fn flood(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    let lost = scene.links_lost();
    progress.say("overload");
    let mbit = flow::overload(scene, OVERLOADING, Duration::from_millis(plan.warm_ms + plan.window_ms))?;
    figures.overload = Some((mbit, scene.hello_loss_percent()?));
    for loss in LOSSES {
        let ways: &[Way] = match (plan.is_full, loss == LOSSES[0]) {
            (true, true) => &Way::ALL,
            (true, false) | (false, true) => &Way::ALL[1..],
            (false, false) => &[Way::Overlay],
        };
        figures.floods.extend(floods(scene, plan, ways, loss, progress)?);
    }
    scene.set_loss(0.0)?;
    figures.lost_under_load = Some(scene.links_lost() - lost);
    Ok(())
}

/// Floods as whole packets on both kinds of links: the cost of each packet.
///
/// # Errors
/// A flow breaks.
pub(super) fn packets(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    scene.wait_for_packets()?;
    let ways = [LinkKind::Reliable, LinkKind::BestEffort].map(Way::Packets);
    figures.floods.extend(floods(scene, plan, &ways, 0.0, progress)?);
    Ok(())
}

/// Floods one fast hop.
///
/// # Errors
/// A flow breaks.
pub(super) fn fast(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    let ways: &[Way] = if plan.is_full { &Way::ALL } else { &[Way::Overlay] };
    figures.fast = floods(scene, plan, ways, FAST_LOSS, progress)?;
    Ok(())
}

/// Floods round by round, way by way.
fn floods(scene: &Scene, plan: &Plan, ways: &[Way], loss: f64, progress: &Progress) -> Result<Vec<FloodRow>> {
    scene.set_loss(loss / 100.0)?;
    let row = |way: &Way| FloodRow { way: way.name(), loss, mbit: Vec::new(), cpu_s_per_gb: Vec::new() };
    let mut rows: Vec<_> = ways.iter().map(row).collect();
    for round in 0..plan.rounds {
        for (way, row) in ways.iter().zip(&mut rows) {
            let rate = scene.rate() / 1_000_000;
            progress.say(&format!("flood: {} at {loss} % of {rate} Mb/s, round {}", way.name(), round + 1));
            let [warm, window] = [plan.warm(loss, scene), plan.window_ms].map(Duration::from_millis);
            let flood = flow::flood(scene, *way, warm, window)?;
            row.mbit.push(flood.mbit);
            if !matches!(way, Way::Plain(_)) {
                row.cpu_s_per_gb.push(flood.cpu_s_per_gb);
            }
        }
    }
    Ok(rows)
}

/// Sends messages, way by way, without loss and with it.
///
/// # Errors
/// A flow breaks.
pub(super) fn delay(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    let packets = [LinkKind::Reliable, LinkKind::BestEffort].map(Way::Packets);
    let mut rows = vec![(Way::Overlay, 0.0), (Way::Overlay, DELAY_LOSS), (Way::Plain("bbr"), DELAY_LOSS)];
    if plan.is_full {
        rows.extend([(Way::Plain("bbr"), 0.0), (Way::Plain("cubic"), DELAY_LOSS)]);
        rows.extend(packets.map(|way| (way, DELAY_LOSS)));
    }
    for (way, loss) in rows {
        if packets.contains(&way) {
            scene.wait_for_packets()?;
        }
        progress.say(&format!("delay: {} at {loss} %", way.name()));
        scene.set_loss(loss / 100.0)?;
        let delays = flow::messages(scene, way, plan.messages / 5, plan.messages)?;
        figures.delays.push(delay_row(way.name(), loss, &delays));
    }
    // Two flows at once: does one wait for the other's losses?
    for way in packets.into_iter().filter(|_| plan.is_full) {
        progress.say(&format!("delay: {} at {DELAY_LOSS} %, two flows", way.name()));
        scene.wait_for_packets()?;
        let delays = flow::messages_beside(scene, way, plan.messages / 5, plan.messages)?;
        figures.delays.push(delay_row(way.name() + ", two flows", DELAY_LOSS, &delays));
    }
    scene.set_loss(0.0)
}

fn delay_row(way: String, loss: f64, delays: &[f64]) -> DelayRow {
    let percentiles_ms = [0.5, 0.9, 0.99, 0.999].map(|share| percentile(delays, share));
    DelayRow { way, loss, percentiles_ms }
}

/// Copies files by all three interceptors, with and without loss, and by plain TCP.
///
/// # Errors
/// A copy fails.
pub(super) fn scp(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    let copies = Copies::new(scene)?;
    let mut rows = vec![(Copied::Payload, 0.0), (Copied::Payload, SCP_LOSS)];
    if plan.is_full {
        rows.extend([(Copied::Local, SCP_LOSS), (Copied::Router, SCP_LOSS)]);
        rows.extend([0.0, SCP_LOSS].map(|loss| (Copied::Plain("bbr"), loss)));
        rows.push((Copied::Plain("cubic"), SCP_LOSS));
        rows.extend([(Copied::Local, 0.0), (Copied::Router, 0.0)]);
    }
    for (copied, loss) in rows {
        progress.say(&format!("scp: {} at {loss} %", copied.name()));
        scene.set_loss(loss / 100.0)?;
        let bytes = plan.file_bytes / if copied == Copied::Plain("cubic") { 10 } else { 1 };
        let mbit = Some(copies.copy(copied, bytes)?);
        figures.copies.push(CopyRow { way: copied.name(), loss, mbit });
    }
    scene.set_loss(0.0)
}

/// Kills a relay during a transfer, then cuts a link, repeatedly.
pub(super) fn failure(
    scene: &mut Scene,
    plan: &Plan,
    figures: &mut Figures,
    progress: &Progress,
) -> Result<()> {
    let (warm, watch) = (Duration::from_millis(plan.warm_ms), Duration::from_millis(1500));
    for round in 0..plan.failures {
        progress.say(&format!("failure {} of {}", round + 1, plan.failures));
        figures.killed_ms.push(flow::stall(scene, warm, watch, Scene::kill_relay)?);
        scene.revive_relay()?;
        figures.copied_ms.push(flow::pause(scene, Way::Copies, plan.messages, Scene::kill_relay)?);
        scene.revive_relay()?;
        figures.cut_ms.push(flow::stall(scene, warm, watch, |scene| scene.set_cut(true))?);
        scene.set_cut(false)?;
        scene.wait_for_path("near")?;
    }
    figures.killed_ms.sort_by(f64::total_cmp);
    figures.copied_ms.sort_by(f64::total_cmp);
    figures.cut_ms.sort_by(f64::total_cmp);
    Ok(())
}
