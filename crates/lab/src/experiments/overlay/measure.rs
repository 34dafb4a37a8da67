//! What is measured, and how often.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;
use sidetrack_core::overlay::frame::LinkKind;

use super::flow::{self, Way};
use super::scene::{Scene, TARGET};
use super::scp::Copies;
use super::wide::Wide;
use crate::progress::Progress;

/// Losses on the middle link of three, in percent.
pub const LOSSES: [f64; 3] = [0.5, 2.0, 5.0];
/// Loss of the delay's rows, percent.
pub const DELAY_LOSS: f64 = 1.0;
/// Loss of scp's rows, percent: the seed's.
pub const SCP_LOSS: f64 = 0.5;

/// How much is done.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Losses of the flood, percent.
    pub losses: Vec<f64>,
    /// Interleaved rounds of the flood.
    pub rounds: u32,
    /// Before a flood is measured, and how long it is, milliseconds.
    pub warm_ms: u64,
    /// See `warm_ms`.
    pub window_ms: u64,
    /// Messages of each delay row.
    pub messages: usize,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Relays killed, and links cut.
    pub failures: u32,
    /// Links cut among twelve nodes.
    pub cuts: u32,
    /// Flows over them.
    pub flows: usize,
}

impl Plan {
    /// Within 90 seconds.
    pub fn quick() -> Self {
        Self {
            losses: vec![0.5, 5.0],
            rounds: 1,
            warm_ms: 1500,
            window_ms: 2000,
            messages: 3000,
            file_bytes: 40_000_000,
            failures: 3,
            cuts: 2,
            flows: 200,
        }
    }

    /// Some minutes.
    pub fn full() -> Self {
        Self {
            losses: LOSSES.to_vec(),
            rounds: 3,
            warm_ms: 2000,
            window_ms: 4000,
            messages: 6000,
            file_bytes: 100_000_000,
            failures: 10,
            cuts: 9,
            flows: 1000,
        }
    }
}

/// Floods of one way at one loss.
#[derive(Debug, Clone, Serialize)]
pub struct FloodRow {
    /// [`Way::name`].
    pub way: String,
    /// Percent.
    pub loss: f64,
    /// Mb/s, one a round.
    pub mbit: Vec<f64>,
    /// CPU of the nodes, seconds per GB, one a round; empty for plain TCP.
    pub cpu_s_per_gb: Vec<f64>,
}

/// Delays of one way at one loss.
#[derive(Debug, Clone, Serialize)]
pub struct DelayRow {
    /// [`Way::name`].
    pub way: String,
    /// Percent.
    pub loss: f64,
    /// Milliseconds: median, 90, 99 and 99.9 of 100.
    pub percentiles_ms: [f64; 4],
}

/// Copies of one way at one loss.
#[derive(Debug, Clone, Serialize)]
pub struct CopyRow {
    /// [`Way::name`].
    pub way: String,
    /// Percent.
    pub loss: f64,
    /// Mb/s; none: it did not end in time.
    pub mbit: Option<f64>,
}

/// Everything measured.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Figures {
    /// See [`FloodRow`].
    pub floods: Vec<FloodRow>,
    /// See [`DelayRow`].
    pub delays: Vec<DelayRow>,
    /// See [`CopyRow`].
    pub copies: Vec<CopyRow>,
    /// Stalls after a relay was killed, milliseconds, rising.
    pub killed_ms: Vec<f64>,
    /// Stalls after a link was cut, milliseconds, rising.
    pub cut_ms: Vec<f64>,
    /// Of the middle link while nobody speaks, kbit/s, both ways together.
    pub idle_kbit: Option<f64>,
    /// Links that were lost while nothing had failed.
    pub lost_under_load: Option<usize>,
    /// Links that were lost in all.
    pub links_lost: usize,
    /// Twelve nodes.
    pub wide: Option<Wide>,
}

/// Nobody speaks.
pub fn idle(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    progress.say("idle links");
    let (since, before) = (Instant::now(), scene.middle_bits()?);
    std::thread::sleep(Duration::from_millis(plan.window_ms));
    let bits = scene.middle_bits()? - before;
    figures.idle_kbit = Some(bits as f64 / since.elapsed().as_secs_f64() / 1e3);
    Ok(())
}

/// Floods, round by round, way by way.
pub fn flood(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    let lost = scene.links_lost();
    for loss in &plan.losses {
        scene.set_loss(loss / 100.0)?;
        let mut rows = Way::ALL.map(|way| FloodRow {
            way: way.name(),
            loss: *loss,
            mbit: Vec::new(),
            cpu_s_per_gb: Vec::new(),
        });
        for round in 0..plan.rounds {
            for (way, row) in Way::ALL.into_iter().zip(&mut rows) {
                progress.say(&format!("flood: {} at {loss} %, round {}", way.name(), round + 1));
                let [warm, window] = [plan.warm_ms, plan.window_ms].map(Duration::from_millis);
                let flood = flow::flood(scene, way, warm, window)?;
                row.mbit.push(flood.mbit);
                if way == Way::Overlay {
                    row.cpu_s_per_gb.push(flood.cpu_s_per_gb);
                }
            }
        }
        figures.floods.extend(rows);
    }
    scene.set_loss(0.0)?;
    figures.lost_under_load = Some(scene.links_lost() - lost);
    Ok(())
}

/// Messages, way by way, without loss and with it.
pub fn delay(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    for (way, loss) in [
        (Way::Overlay, 0.0),
        (Way::Overlay, DELAY_LOSS),
        (Way::Plain("bbr"), 0.0),
        (Way::Plain("bbr"), DELAY_LOSS),
        (Way::Packets(LinkKind::Reliable), DELAY_LOSS),
        (Way::Packets(LinkKind::BestEffort), DELAY_LOSS),
    ] {
        if matches!(way, Way::Packets(_)) {
            scene.wait_for_packets()?;
        }
        progress.say(&format!("delay: {} at {loss} %", way.name()));
        scene.set_loss(loss / 100.0)?;
        let delays = flow::messages(scene, way, plan.messages / 5, plan.messages)?;
        let percentiles_ms = [0.5, 0.9, 0.99, 0.999].map(|share| percentile(&delays, share));
        figures.delays.push(DelayRow { way: way.name(), loss, percentiles_ms });
    }
    // Two flows at a time: does one wait for what the other has lost?
    for kind in [LinkKind::Reliable, LinkKind::BestEffort] {
        let way = Way::Packets(kind);
        progress.say(&format!("delay: {} at {DELAY_LOSS} %, two flows", way.name()));
        scene.wait_for_packets()?;
        let delays = flow::messages_beside(scene, way, plan.messages / 5, plan.messages)?;
        let percentiles_ms = [0.5, 0.9, 0.99, 0.999].map(|share| percentile(&delays, share));
        figures.delays.push(DelayRow { way: way.name() + ", two flows", loss: DELAY_LOSS, percentiles_ms });
    }
    scene.set_loss(0.0)
}

/// Copies: ours with loss and without, plain TCP beside them.
pub fn scp(scene: &Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    let copies = Copies::new(scene, plan.file_bytes)?;
    for (way, loss) in [
        (Way::Overlay, 0.0),
        (Way::Overlay, SCP_LOSS),
        (Way::Plain("bbr"), 0.0),
        (Way::Plain("bbr"), SCP_LOSS),
    ] {
        progress.say(&format!("scp: {} at {loss} %", way.name()));
        scene.set_loss(loss / 100.0)?;
        let to = if way == Way::Overlay { TARGET } else { way.address() };
        if let Way::Plain(congestion) = way {
            scene.route_plain(congestion)?;
        }
        figures.copies.push(CopyRow { way: way.name(), loss, mbit: Some(copies.copy(to)?) });
    }
    scene.set_loss(0.0)
}

/// A relay is killed in mid transfer, then a link is cut, again and again.
pub fn failure(scene: &mut Scene, plan: &Plan, figures: &mut Figures, progress: &Progress) -> Result<()> {
    let (warm, watch) = (Duration::from_millis(plan.warm_ms), Duration::from_millis(1500));
    for round in 0..plan.failures {
        progress.say(&format!("failure {} of {}", round + 1, plan.failures));
        figures.killed_ms.push(flow::stall(scene, warm, watch, Scene::kill_relay)?);
        scene.revive_relay()?;
        figures.cut_ms.push(flow::stall(scene, warm, watch, |scene| scene.set_cut(true))?);
        scene.set_cut(false)?;
        scene.wait_for_path("near")?;
    }
    figures.killed_ms.sort_by(f64::total_cmp);
    figures.cut_ms.sort_by(f64::total_cmp);
    Ok(())
}

/// The value that this share of the rising `values` does not exceed.
pub fn percentile(values: &[f64], share: f64) -> f64 {
    let at = (values.len() as f64 * share).ceil().max(1.0) as usize - 1;
    values.get(at).or(values.last()).copied().unwrap_or(f64::NAN)
}

/// The middle one.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    (!values.is_empty()).then(|| percentile(&values, 0.5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_rising_values() {
        let values: Vec<f64> = (1..=1000).map(f64::from).collect();
        assert_eq!(
            [0.5, 0.99, 0.999, 1.0].map(|share| percentile(&values, share)),
            [500.0, 990.0, 999.0, 1000.0]
        );
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[]), None);
    }
}
