//! The wide-area evaluation of Seamless Overlays, Sec. 4.2: twelve cities, at about their distances by fibre, in bad weather.
//! The flows go from San Jose to Baltimore, as in the seed.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;

use super::super::gap::CITIES;
use super::super::measure::Plan;
use super::bulk::{self, Bulk};
use super::stream::{self, BUDGET, Figures};
use super::weather::Weather;
use super::world::{Counts, Map, World};
use crate::link::{Kind, Lateness};
use crate::progress::Progress;

const NAMES: [&str; 12] = [
    "newyork",
    "baltimore",
    "washington",
    "atlanta",
    "miami",
    "chicago",
    "dallas",
    "denver",
    "phoenix",
    "losangeles",
    "sanjose",
    "seattle",
];
/// San Jose and Baltimore.
const ENDS: [usize; 2] = [10, 1];
/// Voice: 50 packets per second.
const VOICE: Duration = Duration::from_millis(20);
/// The uplink is pulled out after this share of the packets.
const PULLED_AFTER: f64 = 0.25;
/// Hops of a flood.
const HOPS: u8 = 4;

/// A service for packets, as the configuration names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    /// The kind of links.
    pub kind: &'static str,
    /// The dissemination.
    pub dissemination: &'static str,
}

impl Offer {
    /// The flows' kind of links.
    const RELIABLE: Self = Self { kind: "reliable", dissemination: "shortest" };
    /// Over the cheapest path, without recovery.
    pub(super) const BEST_EFFORT: Self = Self { kind: "best-effort", dissemination: "shortest" };
    /// Over the cheapest path, with recovery while there is time.
    pub(super) const REAL_TIME: Self = Self { kind: "real-time", dissemination: "shortest" };

    /// All services: the reliable kind takes one path only.
    fn all() -> Vec<Self> {
        let ways = ["shortest", "duplicate", "graph", "flood"];
        let kinds = ["best-effort", "real-time"];
        let spread = kinds.iter().flat_map(|kind| ways.map(|dissemination| Self { kind, dissemination }));
        [Self::RELIABLE].into_iter().chain(spread).collect()
    }

    /// Returns its name in the tables.
    pub(super) fn name(self) -> String {
        format!("{}, {}", self.kind, self.dissemination)
    }

    /// Returns its lines of `[[overlay.packets]]`.
    pub(super) fn entry(self) -> String {
        let mut entry = format!("link = \"{}\"\n", self.kind);
        if self.dissemination != "shortest" {
            entry += &format!("dissemination = \"{}\"\n", self.dissemination);
        }
        if self.dissemination == "flood" {
            entry += &format!("hops = {HOPS}\n");
        }
        if self.dissemination != "shortest" || self.kind == "real-time" {
            entry += &format!("deadline_ms = {}\n", BUDGET.as_millis());
        }
        entry
    }
}

/// Voice in one service.
#[derive(Debug, Clone, Serialize)]
pub(in super::super) struct Voice {
    /// [`Offer::name`].
    pub service: String,
    /// In bad weather, one for each round.
    pub weather: Vec<Figures>,
    /// While an uplink is pulled out, one for each round.
    pub pulled: Vec<Figures>,
    /// Links that carried a copy of a packet, on average over all rounds.
    pub copies: f64,
}

/// The measurements.
#[derive(Debug, Clone, Serialize)]
pub(in super::super) struct Area {
    /// The best way at the beginning.
    pub route: Vec<String>,
    /// Its delay, milliseconds one way.
    pub route_ms: u64,
    /// The city at the other end of the uplink that is pulled out.
    pub pulled: String,
    /// Bulk data.
    pub bulk: Vec<Bulk>,
    /// Bulk rows without figures, and why.
    pub absent: Vec<String>,
    /// Voice.
    pub voice: Vec<Voice>,
    /// Real-time links: copies sent again for each copy that was sent.
    pub repeated: f64,
    /// How punctual our own links were.
    pub lateness: Option<Lateness>,
}

/// Measures.
///
/// # Errors The network cannot be built, or a flow breaks.
pub(super) fn run(kind: Kind, seed: u64, plan: &Plan, progress: &Progress) -> Result<Area> {
    let offers = Offer::all();
    let links = CITIES.iter().map(|(a, b, ms)| (*a, *b, u64::from(*ms))).collect();
    let services = offers.iter().map(|offer| offer.entry()).collect();
    let world = World::new(Map { names: &NAMES, links, ends: ENDS, services }, kind, seed, progress)?;
    let route = world.route()?;
    let path = world.path()?;
    Weather::calm(&world)?;
    let mut area = Area {
        route: route.iter().map(|at| world.map.names[*at].to_owned()).collect(),
        route_ms: path.iter().map(|link| world.map.links[*link].2).sum(),
        pulled: world.map.names[*route.get(1).context("no path")?].to_owned(),
        bulk: Vec::new(),
        absent: Vec::new(),
        voice: Vec::new(),
        repeated: 0.0,
        lateness: None,
    };
    voice(&world, &offers, seed, plan, &mut area, progress)?;
    bulk::run(&world, &route, seed, plan, &mut area, progress)?;
    area.lateness = world.network().lateness()?;
    Ok(area)
}

/// All services at a time, so that all have the same weather.
fn voice(
    world: &World,
    offers: &[Offer],
    seed: u64,
    plan: &Plan,
    area: &mut Area,
    progress: &Progress,
) -> Result<()> {
    let services: Vec<u16> = (0..).take(offers.len()).collect();
    let (count, length) = (u32::try_from(plan.voice_ms / 20)?, Duration::from_millis(plan.voice_ms));
    let path = world.path()?;
    let uplink = *path.first().context("no path")?;
    let row = |offer: &Offer| Voice {
        service: offer.name(),
        weather: Vec::new(),
        pulled: Vec::new(),
        copies: path.len() as f64,
    };
    let mut rows: Vec<_> = offers.iter().map(row).collect();
    let (before, links) = world.copies()?;
    for round in 0..plan.area_rounds {
        progress.say(&format!("voice in bad weather, round {}", round + 1));
        world.wait_for_packets()?;
        let weather = Weather::draw(seed.wrapping_add(round.into()), &world.map, length);
        let delays = weather.play(world, &path, || stream::run(world, &services, VOICE, count, || Ok(())))?;
        for (row, delays) in rows.iter_mut().zip(&delays) {
            row.weather.push(delays.figures(VOICE));
        }
        progress.say(&format!("voice while an uplink is pulled out, round {}", round + 1));
        world.wait_for_packets()?;
        let pull = || {
            std::thread::sleep(length.mul_f64(PULLED_AFTER));
            Weather::pull(world, uplink)
        };
        let delays = stream::run(world, &services, VOICE, count, pull)?;
        for (row, delays) in rows.iter_mut().zip(&delays) {
            row.pulled.push(delays.figures(VOICE));
        }
        Weather::calm(world)?;
        world
            .wait("the uplink is back", |status| status.links.iter().all(|link| link.up && link.datagrams))?;
    }
    let (after, repaired) = world.copies()?;
    let packets = f64::from(2 * plan.area_rounds * count);
    for (row, offer) in rows.iter_mut().zip(offers) {
        let sum = |counts: &[Counts]| {
            let of = |one: &&Counts| one.kind == offer.kind && one.dissemination == offer.dissemination;
            counts.iter().filter(of).map(|one| one.copies).sum::<u64>()
        };
        // The frames of the first version, and the reliable kind, travel on one path and are not counted.
        let copies = sum(&after) - sum(&before);
        if copies > 0 {
            row.copies = copies as f64 / packets;
        }
    }
    let sent = repaired.sent - links.sent;
    area.repeated = (repaired.repeated - links.repeated) as f64 / sent.max(1) as f64;
    area.voice = rows;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_names_and_entries_of_their_own() {
        let all = Offer::all();
        let names: std::collections::BTreeSet<_> = all.iter().map(|offer| offer.name()).collect();
        assert_eq!((all.len(), names.len()), (9, 9));
        assert_eq!(Offer::RELIABLE.entry(), "link = \"reliable\"\n");
        assert_eq!(Offer::REAL_TIME.entry(), "link = \"real-time\"\ndeadline_ms = 65\n");
        let flood = Offer { kind: "best-effort", dissemination: "flood" };
        let wanted = "link = \"best-effort\"\ndissemination = \"flood\"\nhops = 4\ndeadline_ms = 65\n";
        assert_eq!(flood.entry(), wanted);
    }

    #[test]
    fn each_city_has_a_name_and_the_lower_one_dials() {
        assert!(CITIES.iter().all(|(a, b, _)| a < b && *b < NAMES.len()));
    }
}
