//! Which links a packet uses: pure functions from the network to a [`Subgraph`].
//!
//! | dissemination | links |
//! |---|---|
//! | shortest | the cheapest path |
//! | duplicate | the cheapest set of k node-disjoint paths ([`disjoint`]) |
//! | graph | two disjoint paths, and more links around a node in trouble ([`targeted`]) |
//! | flood | all links on ways with at most the given number of hops |
//!
//! Only nodes that understand such packets are used ([`Features`]).

mod disjoint;
mod flows;
mod targeted;

pub use flows::openings;

use super::NodeId;
use super::frame::{Dissemination, Features, Subgraph};
use super::route::Graph;
use super::service::{Service, Trust};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A link in one direction.
pub(super) type Link = (NodeId, NodeId);

impl Graph {
    /// Returns the subgraph for packets of this service. `None` if the source or the destination does not understand such
    /// packets, or if the nodes that do understand them do not connect the two.
    pub fn subgraph(&self, from: NodeId, to: NodeId, service: &Service) -> Option<Subgraph> {
        if service.trust == Trust::Tolerant {
            let keeps = if service.is_reliable_flood() { Features::RELIABLE_FLOODS } else { 0 };
            let tolerant = self.with_only(Features::SPREAD | Features::TOLERANT | keeps);
            return tolerant.subgraph(from, to, &Service { trust: Trust::Members, ..*service });
        }
        let links = match service.dissemination {
            Dissemination::Shortest => links_of(&self.disjoint(from, to, 1)),
            Dissemination::Duplicate => links_of(&self.disjoint(from, to, service.paths)),
            Dissemination::Graph => self.targeted(from, to, service.deadline),
            Dissemination::Flood => self.flood(from, to, service.hops),
        };
        if links.is_empty() {
            return None;
        }
        // A flood or a graph over more nodes than a frame can name becomes two disjoint paths.
        Subgraph::new(from, to, links)
            .or_else(|| Subgraph::new(from, to, links_of(&self.disjoint(from, to, 2))))
    }

    /// Returns the dissemination that packets over this subgraph name. Links and copies do not depend on the name, which is
    /// for counts. But an older node cannot read the code of graphs, so packets that pass one are named duplicates.
    pub fn named(&self, subgraph: &Subgraph, chosen: Dissemination) -> Dissemination {
        let is_known = |node: &NodeId| self.features(*node) & Features::GRAPH != 0;
        match chosen {
            Dissemination::Graph if !subgraph.nodes().iter().all(is_known) => Dissemination::Duplicate,
            chosen => chosen,
        }
    }

    /// Whether packets over subgraphs may pass this node.
    fn spreads(&self, node: NodeId) -> bool {
        self.features(node) & Features::SPREAD != 0
    }

    /// Whether the link between two nodes is a real-time link: both ends recover its losses.
    pub fn recovers(&self, one: NodeId, other: NodeId) -> bool {
        [one, other].iter().all(|node| self.features(*node) & Features::REAL_TIME != 0)
    }

    /// Returns the links on all ways from one node to another with at most `hops` links, none into the source and none out
    /// of the destination.
    pub fn flood(&self, from: NodeId, to: NodeId, hops: u8) -> BTreeSet<Link> {
        let (after, before) = (self.hops(from, to), self.hops(to, from));
        let mut links = BTreeSet::new();
        for (a, b, _) in self.links() {
            for (one, other) in [(a, b), (b, a)] {
                let (Some(there), Some(back)) = (after.get(&one), before.get(&other)) else { continue };
                let fits = there + back < usize::from(hops);
                if fits && one != to && other != from {
                    links.insert((one, other));
                }
            }
        }
        links
    }

    /// Returns the number of links from `from` to each node, over nodes that understand such packets and not over `end`.
    fn hops(&self, from: NodeId, end: NodeId) -> BTreeMap<NodeId, usize> {
        let mut found = BTreeMap::new();
        if !self.spreads(from) {
            return found;
        }
        found.insert(from, 0);
        let mut todo = VecDeque::from([from]);
        while let Some(node) = todo.pop_front() {
            let next = found[&node] + 1;
            for neighbour in self.neighbours(node) {
                if node != end && self.spreads(neighbour) && !found.contains_key(&neighbour) {
                    found.insert(neighbour, next);
                    todo.push_back(neighbour);
                }
            }
        }
        found
    }
}

/// Returns the links of these paths.
pub(super) fn links_of(paths: &[Vec<NodeId>]) -> BTreeSet<Link> {
    paths.iter().flat_map(|path| path.windows(2).map(|link| (link[0], link[1]))).collect()
}
