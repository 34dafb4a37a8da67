//! A stream with a deadline over three hops of 10 ms, the middle one of which loses 1 % in bursts.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::super::measure::Plan;
use super::area::Offer;
use super::stream::{self, Figures};
use super::world::{Map, World};
use crate::link::{Conditions, Kind, Loss};
use crate::progress::Progress;
use crate::statistics::median;

/// The middle link loses this share, in bursts of this mean length in frames.
const LOSS: f64 = 0.01;
const BURST: f64 = 4.0;
const LOSSY: usize = 1;

/// The services, with the time between two packets: a stream of video, and voice.
const OFFERS: [Offer; 2] = [Offer::BEST_EFFORT, Offer::REAL_TIME];
const PACES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];

/// One service at one pace.
#[derive(Debug, Clone, Serialize)]
pub(in super::super) struct Row {
    /// [`Offer::name`].
    pub service: String,
    /// Packets per second.
    pub per_second: u64,
    /// One for each round.
    pub rounds: Vec<Figures>,
    /// Copies on real-time links for each packet on them, over all rounds; `None`: it uses none.
    pub copies: Option<f64>,
}

/// The measurements.
#[derive(Debug, Clone, Default, Serialize)]
pub(in super::super) struct Chain {
    /// All services at all paces.
    pub rows: Vec<Row>,
}

impl Chain {
    /// The row of the bars: share in time in the median of the rounds, percent, and copies.
    pub(in super::super) fn real_time(&self) -> Option<(f64, f64)> {
        let row = self.rows.iter().find(|row| row.copies.is_some() && row.per_second == 1000)?;
        let shares: Vec<_> = row.rounds.iter().map(|round| round.in_time).collect();
        Some((median(&shares)?, row.copies?))
    }
}

/// Measures.
///
/// # Errors The network cannot be built, or a socket fails.
pub(super) fn run(kind: Kind, seed: u64, plan: &Plan, progress: &Progress) -> Result<Chain> {
    let services = OFFERS.map(|offer| offer.entry()).to_vec();
    let links = vec![(0, 1, 10), (1, 2, 10), (2, 3, 10)];
    let map = Map { names: &["source", "near", "far", "target"], links, ends: [0, 3], services };
    let world = World::new(map, kind, seed, progress)?;
    let leave = 1.0 / BURST;
    let loss = Loss::Burst { enter: leave * LOSS / (1.0 - LOSS), leave };
    world.wires[LOSSY].set_both(Conditions { loss, ..Conditions::delayed(world.delay(LOSSY)) })?;
    let mut chain = Chain::default();
    // A quick run takes only the faster one.
    for every in PACES.into_iter().take(if plan.is_full { PACES.len() } else { 1 }) {
        let per_second = u64::try_from(Duration::from_secs(1).as_nanos() / every.as_nanos())?;
        for (service, offer) in (0..).zip(OFFERS) {
            progress.say(&format!(
                "three hops, bursts of losses: {}, {per_second} packets per second",
                offer.name()
            ));
            chain.rows.push(row(&world, service, offer, every, per_second, plan)?);
        }
    }
    Ok(chain)
}

fn row(
    world: &World,
    service: u16,
    offer: Offer,
    every: Duration,
    per_second: u64,
    plan: &Plan,
) -> Result<Row> {
    let count = u32::try_from(plan.stream_ms * per_second / 1000)?;
    let (_, before) = world.copies()?;
    let mut rounds = Vec::new();
    for _ in 0..plan.area_rounds {
        let delays = stream::run(world, &[service], every, count, || Ok(()))?;
        rounds.extend(delays.iter().map(|delays| delays.figures(every)));
    }
    let (_, after) = world.copies()?;
    let (sent, repeated) = (after.sent - before.sent, after.repeated - before.repeated);
    let copies = (offer == Offer::REAL_TIME).then(|| (sent + repeated) as f64 / sent.max(1) as f64);
    Ok(Row { service: offer.name(), per_second, rounds, copies })
}
