//! The capacity rule: if entries are scarce, the flows with the highest rates have them ("elephants" first).
//!
//! NFShunt's switch has a table of limited size. A few large flows carry most bytes, so an entry is worth what its flow
//! sends. If there is no room, the rates of all flows are measured. A waiting flow takes the entry of the slowest flow
//! that has one, if it is more than [`FACTOR`] times as fast: flows of similar rates do not take turns.

use super::Tuple;
use super::times::Moment;
use crate::time::Instant;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

/// A waiting flow must be more than this many times as fast as the flow whose entry it takes.
const FACTOR: u64 = 2;

/// Most entries that change hands at one time: each of them sends a flow through the slow path.
const EXCHANGES_MAX: usize = 256;

/// Most waiting flows that are looked at: each is compared with flows that have an entry.
const WAITING_MAX: usize = 4 * EXCHANGES_MAX;

/// The time between two measurements.
pub(super) const SURVEY: Duration = Duration::from_secs(2);

/// What happens to a flow for which there is no entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenFull {
    /// It takes the entry of a much slower flow.
    #[default]
    Fastest,
    /// It waits on the slow path until an entry is free.
    Wait,
}

/// The rate of a flow between the last two measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    measured: Moment,
    bytes: u64,
    /// [`Self::UNKNOWN`] before the second measurement.
    bytes_per_s: u64,
}

impl Default for Rate {
    fn default() -> Self {
        Self { measured: Moment::NEVER, bytes: 0, bytes_per_s: Self::UNKNOWN }
    }
}

impl Rate {
    const UNKNOWN: u64 = u64::MAX;

    /// Takes the bytes of a flow until now. The first measurement, and one after a long pause, gives no rate.
    pub(super) fn measure(&mut self, now: Instant, bytes: u64) {
        let rate = self.measured.get().and_then(|at| {
            let passed = u64::try_from((now - at).as_millis()).ok().filter(|ms| *ms > 0)?;
            let is_recent = now - at <= SURVEY * 2;
            is_recent.then(|| bytes.saturating_sub(self.bytes).saturating_mul(1000) / passed)
        });
        self.bytes_per_s = rate.map_or(Self::UNKNOWN, |rate| rate.min(Self::UNKNOWN - 1));
        (self.measured, self.bytes) = (now.into(), bytes);
    }

    /// Returns the rate, if it was measured.
    pub(super) const fn bytes_per_s(self) -> Option<u64> {
        if self.bytes_per_s == Self::UNKNOWN { None } else { Some(self.bytes_per_s) }
    }
}

/// A flow that has an entry, or waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Contender {
    pub(super) tuple: Tuple,
    pub(super) bytes_per_s: u64,
}

/// An entry that changes hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    /// The flow that loses it.
    pub(super) from: Tuple,
    /// The flow that gets it.
    pub(super) to: Tuple,
}

/// Decides which waiting flows take the entries of which others. `clients` has the number of entries of each client,
/// and no client may have more than `per_client`. A client at its limit takes entries from itself only.
pub(super) fn exchanges(
    mut waiting: Vec<Contender>,
    mut holding: Vec<Contender>,
    clients: &BTreeMap<IpAddr, u32>,
    per_client: usize,
) -> Vec<Exchange> {
    waiting.sort_by_key(|flow| (std::cmp::Reverse(flow.bytes_per_s), flow.tuple));
    holding.sort_by_key(|flow| (flow.bytes_per_s, flow.tuple));
    let mut holding = VecDeque::from(holding);
    let mut counts: BTreeMap<IpAddr, u32> = BTreeMap::new();
    let mut exchanges = Vec::new();
    waiting.truncate(WAITING_MAX);
    for elephant in waiting {
        let client = elephant.tuple.client().ip();
        let count = |counts: &BTreeMap<IpAddr, u32>, ip: &IpAddr| {
            counts.get(ip).or_else(|| clients.get(ip)).copied().unwrap_or(0)
        };
        let is_bound = count(&counts, &client) as usize >= per_client;
        let place = holding.iter().position(|flow| !is_bound || flow.tuple.client().ip() == client);
        let slowest = place.and_then(|place| holding.get(place).map(|flow| (place, *flow)));
        let Some((place, slowest)) = slowest else { continue };
        if elephant.bytes_per_s <= slowest.bytes_per_s.saturating_mul(FACTOR) {
            // The next ones are slower. Only a client at its limit was compared with its own flows alone.
            if is_bound {
                continue;
            }
            break;
        }
        holding.remove(place);
        let loser = slowest.tuple.client().ip();
        let fewer = count(&counts, &loser).saturating_sub(1);
        counts.insert(loser, fewer);
        let more = count(&counts, &client) + 1;
        counts.insert(client, more);
        exchanges.push(Exchange { from: slowest.tuple, to: elephant.tuple });
        if exchanges.len() == EXCHANGES_MAX {
            break;
        }
    }
    exchanges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shunt::Transport;
    use proptest::prelude::*;

    fn flow(client: u8, port: u16, bytes_per_s: u64) -> Contender {
        let (client, server) = (([192, 0, 2, client], port).into(), ([198, 51, 100, 1], 80).into());
        Contender { tuple: Tuple::new(client, server, Transport::Tcp, 0), bytes_per_s }
    }

    fn counts(holding: &[Contender]) -> BTreeMap<IpAddr, u32> {
        holding.iter().fold(BTreeMap::new(), |mut counts, flow| {
            *counts.entry(flow.tuple.client().ip()).or_default() += 1;
            counts
        })
    }

    fn ports(waiting: &[Contender], holding: &[Contender], per_client: usize) -> Vec<(u16, u16)> {
        let all = exchanges(waiting.to_vec(), holding.to_vec(), &counts(holding), per_client);
        all.iter().map(|one| (one.from.client().port(), one.to.client().port())).collect()
    }

    #[test]
    fn the_fastest_that_waits_takes_the_entry_of_the_slowest() {
        let holding = [flow(1, 1, 50), flow(1, 2, 10), flow(1, 3, 1000)];
        let waiting = [flow(1, 4, 30), flow(1, 5, 500), flow(1, 6, 101)];
        assert_eq!(ports(&waiting, &holding, 9), [(2, 5), (1, 6)]);
    }

    #[test]
    fn flows_of_similar_rates_do_not_take_turns() {
        assert_eq!(ports(&[flow(1, 2, 200)], &[flow(1, 1, 100)], 9), []);
        assert_eq!(ports(&[flow(1, 2, 201)], &[flow(1, 1, 100)], 9), [(1, 2)]);
        assert_eq!(ports(&[flow(1, 2, 0)], &[flow(1, 1, 0)], 9), [], "neither sends");
    }

    #[test]
    fn a_client_at_its_limit_takes_entries_from_itself_only() {
        let holding = [flow(1, 1, 1), flow(2, 2, 20), flow(2, 3, 30)];
        assert_eq!(ports(&[flow(2, 4, 1000), flow(2, 5, 70)], &holding, 2), [(2, 4), (3, 5)]);
        // Another client is not held up by it.
        assert_eq!(ports(&[flow(2, 4, 39), flow(3, 5, 30)], &holding, 2), [(1, 5)]);
    }

    #[test]
    fn a_rate_is_of_the_last_interval_and_a_long_pause_gives_none() {
        let at = |ms| Instant::ZERO + Duration::from_millis(ms);
        let mut rate = Rate::default();
        rate.measure(at(0), 5000);
        assert_eq!(rate.bytes_per_s(), None);
        rate.measure(at(2000), 9000);
        assert_eq!(rate.bytes_per_s(), Some(2000));
        rate.measure(at(2000), 9000);
        assert_eq!(rate.bytes_per_s(), None, "no time has passed");
        rate.measure(at(9000), 10_000);
        assert_eq!(rate.bytes_per_s(), None, "too long ago");
    }

    proptest! {
        #[test]
        fn each_exchange_is_worth_it_and_no_client_exceeds_its_limit(
            rates in proptest::collection::vec((0u8..4, 0u64..1000, any::<bool>()), 0..60),
            per_client in 1usize..8,
        ) {
            let (mut waiting, mut holding) = (Vec::new(), Vec::new());
            for (port, (client, rate, holds)) in (1u16..).zip(rates) {
                let flow = flow(client, port, rate);
                let has = counts(&holding).get(&flow.tuple.client().ip()).copied().unwrap_or(0) as usize;
                if holds && has < per_client { holding.push(flow) } else { waiting.push(flow) }
            }
            let all = exchanges(waiting.clone(), holding.clone(), &counts(&holding), per_client);
            let find = |flows: &[Contender], tuple| flows.iter().find(|flow| flow.tuple == tuple).copied();
            let mut after = holding.clone();
            for one in &all {
                let (from, to) = (find(&holding, one.from).unwrap(), find(&waiting, one.to).unwrap());
                prop_assert!(to.bytes_per_s > from.bytes_per_s * FACTOR);
                prop_assert!(find(&after, one.from).is_some(), "an entry changes hands once");
                after.retain(|flow| flow.tuple != one.from);
                after.push(to);
                prop_assert!(counts(&after).values().all(|count| *count as usize <= per_client));
            }
            prop_assert_eq!(after.len(), holding.len());
        }
    }
}
