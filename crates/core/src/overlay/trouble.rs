//! Which links are in trouble: they cost clearly more than usual, or they are gone. The source of a packet asks for this when
//! it chooses the links of the packet ([`super::redundancy`]).
//!
//! | a link | when |
//! |---|---|
//! | gets into trouble | its cost is above 5/4 of the usual, and above the usual plus 5 ms; or it was there and is not any more |
//! | is well again | for [`HOLDS`] its cost was below 1.15 of the usual, or below the usual plus 3 ms; or it is gone for [`GONE`] |
//!
//! Losses come in bursts, so a link that was in trouble a moment ago will often be again: the trouble holds for a while.
//! The cost is the one of routing. It grows with the round trip and with the loss ([`super::hello::Quality::cost_us`]).
//! The usual cost is the lowest one so far. It rises towards a higher cost within [`RISES_IN`], so a link that stays slow is
//! not in trouble for ever. All memory is bounded by the links of the network.

use super::NodeId;
use super::route::Graph;
use crate::time::Instant;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a link that is gone counts as one in trouble.
pub const GONE: Duration = Duration::from_secs(60);

/// How long a link counts as one in trouble after it was well again.
pub const HOLDS: Duration = Duration::from_secs(30);

/// How long it takes until the usual cost has reached a higher cost.
pub const RISES_IN: Duration = Duration::from_secs(3600);

/// The two ends of a link, the lower one first.
pub type Ends = (NodeId, NodeId);

/// What is known of one link.
#[derive(Clone, Copy, Debug)]
struct Known {
    usual_us: u64,
    /// When the cost was looked at last while the link was there.
    seen: Instant,
    /// When the link was in trouble last, if that still counts.
    ill: Option<Instant>,
    is_there: bool,
}

/// The usual costs of all links.
#[derive(Clone, Debug, Default)]
pub struct Troubles {
    known: BTreeMap<Ends, Known>,
}

impl Troubles {
    /// Compares a graph with the usual costs. Returns the links in trouble with their usual costs, µs.
    pub fn look(&mut self, now: Instant, graph: &Graph) -> BTreeMap<Ends, u32> {
        self.known.retain(|ends, known| {
            known.is_there = graph.cost_us(ends.0, ends.1).is_some();
            if !known.is_there {
                known.ill = Some(now);
            }
            known.is_there || now.since(known.seen) < GONE
        });
        for (one, other, cost_us) in graph.links() {
            let cost = u64::from(cost_us);
            let fresh = Known { usual_us: cost, seen: now, ill: None, is_there: true };
            self.known.entry((one, other)).or_insert(fresh).look(now, cost);
        }
        let troubled = self.known.iter().filter(|(_, known)| known.ill.is_some());
        troubled.map(|(ends, known)| (*ends, u32::try_from(known.usual_us).unwrap_or(u32::MAX))).collect()
    }

    /// Returns when to look again although nothing has changed: a trouble may be over then.
    pub fn deadline(&self) -> Option<Instant> {
        let over = |known: &Known| {
            let gone = (!known.is_there).then(|| known.seen + GONE);
            gone.or_else(|| known.ill.map(|at| at + HOLDS))
        };
        self.known.values().filter_map(over).min()
    }
}

impl Known {
    fn look(&mut self, now: Instant, cost: u64) {
        let away = u64::try_from(now.since(self.seen).as_micros()).unwrap_or(u64::MAX);
        let most = u64::try_from(RISES_IN.as_micros()).unwrap_or(u64::MAX);
        let rise = cost.saturating_sub(self.usual_us).saturating_mul(away.min(most)) / most;
        let usual = cost.min(self.usual_us + rise);
        let is_above = |percent: u64, more: u64| cost > (usual * percent / 100).max(usual + more);
        if is_above(125, 5_000) || self.ill.is_some() && is_above(115, 3_000) {
            self.ill = Some(now);
        } else if self.ill.is_some_and(|at| at + HOLDS <= now) {
            self.ill = None;
        }
        (self.usual_us, self.seen) = (usual, now);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Signature;
    use super::super::frame::{LinkEntry, Record};
    use super::*;

    /// Links of node 1 with these costs, ms.
    fn graph(links: &[(u64, u32)]) -> Graph {
        let entry = |to: u64, ms: u32| LinkEntry { neighbour: NodeId(to), cost_us: ms * 1000 };
        let record = |origin: u64, links: Vec<LinkEntry>| Record {
            origin: NodeId(origin),
            sequence: 1,
            links,
            signature: Signature::NONE,
        };
        let mut records = vec![record(1, links.iter().map(|(to, ms)| entry(*to, *ms)).collect())];
        records.extend(links.iter().map(|(to, ms)| record(*to, vec![entry(1, *ms)])));
        Graph::new(records.iter())
    }

    /// The neighbours of node 1 whose links are in trouble at this second.
    fn look(troubles: &mut Troubles, second: u64, links: &[(u64, u32)]) -> Vec<u64> {
        let found = troubles.look(Instant::from_millis(second * 1000), &graph(links));
        found.into_iter().map(|((_, other), _)| other.0).collect()
    }

    #[test]
    fn a_link_is_in_trouble_while_it_costs_more_than_usual_and_some_time_after() {
        let mut troubles = Troubles::default();
        let mut at = |second, ms| look(&mut troubles, second, &[(2, ms), (3, 40)]);
        assert_eq!(at(0, 10), []);
        assert_eq!(at(1, 15), [], "5 ms more is not much");
        assert_eq!(at(2, 16), [2]);
        assert_eq!(at(3, 14), [2], "not yet well");
        assert_eq!(at(4, 12), [2], "well, for the first time");
        assert_eq!(at(32, 12), [2]);
        assert_eq!(at(33, 12), [], "for 30 s");
        assert_eq!(at(34, 14), [], "not yet ill again");
        // It stays at 40 ms: at last this is the usual.
        assert_eq!(at(40, 40), [2]);
        assert_eq!(at(300, 40), [2]);
        assert_eq!(at(4000, 40), []);
        assert_eq!(at(4001, 10), []);
        assert_eq!(at(4002, 40), [2]);
    }

    #[test]
    fn the_usual_cost_of_a_link_in_trouble_is_told_and_when_to_look_again() {
        let mut troubles = Troubles::default();
        let at = |second: u64| Instant::from_millis(second * 1000);
        troubles.look(at(0), &graph(&[(2, 10)]));
        assert_eq!(troubles.deadline(), None);
        let found = troubles.look(at(1), &graph(&[(2, 60)]));
        assert!(found.values().all(|usual| (10_000..10_200).contains(usual)), "{found:?}");
        assert_eq!(troubles.deadline(), Some(at(31)));
        troubles.look(at(31), &graph(&[(2, 60)]));
        assert_eq!(troubles.deadline(), Some(at(61)), "it is still ill");
        troubles.look(at(61), &graph(&[(2, 11)]));
        assert_eq!(troubles.deadline(), None);
        troubles.look(at(62), &graph(&[]));
        assert_eq!(troubles.deadline(), Some(at(61) + GONE));
    }

    #[test]
    fn a_link_that_is_gone_is_in_trouble_for_a_minute() {
        let mut troubles = Troubles::default();
        assert_eq!(look(&mut troubles, 0, &[(2, 10), (3, 10)]), []);
        assert_eq!(look(&mut troubles, 10, &[(3, 10)]), [2]);
        assert_eq!(look(&mut troubles, 59, &[(3, 10)]), [2]);
        assert_eq!(look(&mut troubles, 60, &[(3, 10)]), []);
        assert_eq!(look(&mut troubles, 61, &[(2, 90), (3, 10)]), [], "it is new");
        // It comes back before.
        assert_eq!(look(&mut troubles, 70, &[(3, 10)]), [2]);
        assert_eq!(look(&mut troubles, 71, &[(2, 90), (3, 10)]), [2]);
        assert_eq!(look(&mut troubles, 100, &[(2, 90), (3, 10)]), []);
    }
}
