//! The network of the simulation: twelve cities, their links, and what nodes know about them.

use sidetrack_core::overlay::frame::{Features, LinkEntry, Record};
use sidetrack_core::overlay::hello::Quality;
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::trouble::Troubles;
use sidetrack_core::overlay::{NodeId, Signature};
use sidetrack_core::time::Instant;

/// New York, Baltimore, Washington, Atlanta, Miami, Chicago, Dallas, Denver, Phoenix, Los Angeles, San Jose, Seattle.
pub(super) const NODES: usize = 12;

/// The sources and the destinations of the flows: four cities on each coast.
pub(super) const EAST: [usize; 4] = [0, 1, 2, 3];
pub(super) const WEST: [usize; 4] = [10, 9, 11, 8];

/// Links and their one-way delays, ms, at about the distances of the cities by fibre.
pub(in super::super) const LINKS: [(usize, usize, u32); 34] = [
    (0, 1, 3),
    (0, 2, 4),
    (0, 5, 10),
    (0, 3, 11),
    (0, 7, 22),
    (1, 2, 1),
    (1, 5, 9),
    (1, 3, 8),
    (2, 3, 8),
    (2, 5, 9),
    (2, 6, 16),
    (2, 7, 21),
    (3, 4, 8),
    (3, 6, 10),
    (3, 5, 9),
    (3, 9, 26),
    (4, 6, 14),
    (5, 7, 12),
    (5, 6, 11),
    (5, 11, 23),
    (5, 10, 25),
    (6, 7, 9),
    (6, 8, 11),
    (6, 9, 16),
    (6, 10, 20),
    (7, 11, 14),
    (7, 10, 13),
    (7, 9, 12),
    (7, 8, 8),
    (8, 9, 5),
    (8, 10, 9),
    (9, 10, 5),
    (9, 11, 14),
    (10, 11, 10),
];

/// Links in both directions.
pub(super) const DIRECTED: usize = 2 * LINKS.len();

/// Returns the two ends of a directed link: those with odd numbers lead back.
pub(super) const fn ends(link: usize) -> (usize, usize) {
    let (one, other, _) = LINKS[link / 2];
    if link.is_multiple_of(2) { (one, other) } else { (other, one) }
}

/// Returns the delay of a directed link, µs.
pub(super) const fn delay_us(link: usize) -> u32 {
    LINKS[link / 2].2 * 1000
}

/// Returns the directed link between two nodes.
pub(super) fn link_between(from: NodeId, to: NodeId) -> Option<usize> {
    let node = |node: NodeId| usize::try_from(node.0).unwrap_or(usize::MAX);
    (0..DIRECTED).find(|link| ends(*link) == (node(from), node(to)))
}

/// The name of a node.
pub(super) const fn id(node: usize) -> NodeId {
    NodeId(node as u64)
}

/// What happens to packets on one directed link in one second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct State {
    /// Share that is lost.
    pub loss: f64,
    /// Delay in addition to the usual one, µs.
    pub more_us: u32,
}

/// What all nodes measure and announce, as our nodes do it: loss is averaged over some seconds, costs are announced every
/// two seconds, and a link that passes nothing is gone.
#[derive(Debug)]
pub(super) struct Announced {
    loss: [f64; DIRECTED],
    more_us: [u32; DIRECTED],
    troubles: Troubles,
    /// The losses have changed since the last graph, although all is quiet.
    has_news: bool,
}

/// The weight of the latest second in the average of the loss.
const LATEST: f64 = 0.25;

/// A link that loses more than this in a second is down.
const DOWN: f64 = 0.9;

impl Announced {
    pub(super) fn new() -> Self {
        Self { loss: [0.0; DIRECTED], more_us: [0; DIRECTED], troubles: Troubles::default(), has_news: false }
    }

    /// Measures during one second.
    pub(super) fn measure(&mut self, states: &[State; DIRECTED]) {
        for (link, state) in states.iter().enumerate() {
            self.loss[link] += LATEST * (state.loss - self.loss[link]);
            self.more_us[link] = state.more_us;
        }
    }

    /// True if nothing is left of any trouble.
    pub(super) fn is_quiet(&self) -> bool {
        self.loss.iter().all(|loss| *loss < 0.001) && self.more_us.iter().all(|more| *more == 0)
    }

    /// True if no link counts as one in trouble.
    pub(super) fn is_well(&self) -> bool {
        self.troubles.deadline().is_none()
    }

    /// True if a trouble may be over in this second, or if the last loss was announced.
    pub(super) fn is_due(&self, second: u64) -> bool {
        let due = self.troubles.deadline();
        due.is_some_and(|at| at <= Instant::from_millis(second * 1000 + 1000)) || self.has_news
    }

    /// Forgets losses that are too small to matter.
    pub(super) fn rest(&mut self) {
        self.has_news |= self.loss != [0.0; DIRECTED];
        self.loss = [0.0; DIRECTED];
    }

    /// Returns the network that all nodes know then.
    pub(super) fn graph(&mut self, second: u64, states: &[State; DIRECTED]) -> Graph {
        self.has_news = false;
        let records: Vec<_> = (0..NODES).map(|node| self.record(node, states)).collect();
        let features = (0..NODES).map(|node| (id(node), Features::ALL)).collect();
        let graph = Graph::new(records.iter()).with_features(features);
        let troubled = self.troubles.look(Instant::from_millis(second * 1000), &graph);
        graph.with_troubled(troubled)
    }

    /// The record of a node: the round trip of each link, and the loss towards this node.
    fn record(&self, node: usize, states: &[State; DIRECTED]) -> Record {
        let comes = (0..DIRECTED).filter(|link| ends(*link).1 == node);
        let is_up = |link: &usize| states[*link].loss < DOWN && states[*link ^ 1].loss < DOWN;
        let mut links: Vec<_> = comes
            .filter(is_up)
            .map(|link| {
                let rtt_us = 2 * delay_us(link) + self.more_us[link] + self.more_us[link ^ 1];
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to a million")]
                let loss_ppm = (self.loss[link] * 1e6) as u32;
                let quality = Quality { rtt_us, jitter_us: 0, loss_ppm };
                LinkEntry { neighbour: id(ends(link).0), cost_us: quality.cost_us() }
            })
            .collect();
        links.sort_unstable();
        Record { origin: id(node), sequence: 1, links, signature: Signature::NONE }
    }
}
