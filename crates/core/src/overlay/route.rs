//! Paths over the links that both of their ends announce.
//!
//! A link counts only if the records of both ends list it, and the higher of the two costs is used. So a malicious
//! node cannot invent a link to an honest node. It also cannot make a link look better than its honest end has
//! measured.

use super::frame::{Path, Record};
use super::tolerant::Epoch;
use super::topology::Topology;
use super::trouble::Ends;
use super::{NodeId, PATH_MAX};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// The network as the records describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    edges: BTreeMap<NodeId, BTreeMap<NodeId, u32>>,
    /// What nodes understand beyond version 1 ([`super::frame::Features`]).
    features: BTreeMap<NodeId, u32>,
    /// The links in trouble, with their usual costs in µs.
    troubled: BTreeMap<Ends, u32>,
    /// Under which epochs the proofs of nodes count.
    epochs: BTreeMap<NodeId, Epoch>,
}

/// A path and its cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The nodes.
    pub path: Path,
    /// The sum of the costs of its links, µs.
    pub cost_us: u64,
}

/// The best known way to a node during the search: the lowest cost in µs, then the fewest hops, then the lowest
/// previous node.
type Way = (u64, u8, NodeId);

impl Graph {
    /// Makes a graph of the links that both of their ends list.
    pub fn new<'a>(records: impl Iterator<Item = &'a Record>) -> Self {
        Self::within(records, &Topology::default())
    }

    /// Makes a graph of the links that both of their ends list and that the topology allows. No link costs less than the topology
    /// says.
    pub fn within<'a>(records: impl Iterator<Item = &'a Record>, topology: &Topology) -> Self {
        let said: BTreeMap<NodeId, &Record> = records.map(|record| (record.origin, record)).collect();
        let mut edges: BTreeMap<NodeId, BTreeMap<NodeId, u32>> = BTreeMap::new();
        for (origin, record) in &said {
            for link in &record.links {
                let back = said.get(&link.neighbour).and_then(|other| other.cost_to(*origin));
                if let (Some(back), Some(least)) = (back, topology.least_us(*origin, link.neighbour)) {
                    let cost = link.cost_us.max(back).max(least);
                    edges.entry(*origin).or_default().insert(link.neighbour, cost);
                }
            }
        }
        Self { edges, ..Self::default() }
    }

    /// Sets which links are in trouble, with their usual costs in µs ([`super::trouble`]).
    #[must_use]
    pub fn with_troubled(self, troubled: BTreeMap<Ends, u32>) -> Self {
        Self { troubled, ..self }
    }

    /// Returns the links in trouble. Some of them may be gone.
    pub fn troubled(&self) -> impl Iterator<Item = Ends> {
        self.troubled.keys().copied()
    }

    /// Whether a link is in trouble.
    pub fn is_troubled(&self, one: NodeId, other: NodeId) -> bool {
        self.troubled.contains_key(&(one.min(other), one.max(other)))
    }

    /// Returns the usual cost of a link, µs: its cost if it is not in trouble.
    pub fn usual_us(&self, one: NodeId, other: NodeId) -> u32 {
        let troubled = self.troubled.get(&(one.min(other), one.max(other))).copied();
        troubled.or_else(|| self.cost_us(one, other)).unwrap_or(u32::MAX)
    }

    /// Sets under which epochs the proofs of nodes count.
    #[must_use]
    pub fn with_epochs(self, epochs: BTreeMap<NodeId, Epoch>) -> Self {
        Self { epochs, ..self }
    }

    /// Returns under which epochs the proofs of nodes count.
    pub fn epochs(&self) -> &BTreeMap<NodeId, Epoch> {
        &self.epochs
    }

    /// Sets what the nodes understand beyond version 1.
    #[must_use]
    pub fn with_features(self, features: BTreeMap<NodeId, u32>) -> Self {
        Self { features, ..self }
    }

    /// Returns the network of the nodes that announce all of these features.
    #[must_use]
    pub fn with_only(&self, features: u32) -> Self {
        let fits = |node: &NodeId| self.features(*node) & features == features;
        let mut only = self.clone();
        only.features.retain(|node, _| fits(node));
        only.edges.retain(|node, _| fits(node));
        for links in only.edges.values_mut() {
            links.retain(|node, _| fits(node));
        }
        only
    }

    /// Returns the features that this node announces.
    pub fn features(&self, node: NodeId) -> u32 {
        self.features.get(&node).copied().unwrap_or(0)
    }

    /// Returns the neighbours of a node.
    pub fn neighbours(&self, node: NodeId) -> impl Iterator<Item = NodeId> {
        self.edges.get(&node).into_iter().flat_map(|links| links.keys().copied())
    }

    /// Returns the cost of a link, µs.
    pub fn cost_us(&self, from: NodeId, to: NodeId) -> Option<u32> {
        self.edges.get(&from)?.get(&to).copied()
    }

    /// Returns all links, each once, with their costs in µs.
    pub fn links(&self) -> impl Iterator<Item = (NodeId, NodeId, u32)> {
        let all = self.edges.iter();
        all.flat_map(|(from, to)| to.iter().map(move |(to, cost)| (*from, *to, *cost)))
            .filter(|(from, to, _)| from < to)
    }

    /// Whether all links of this path exist.
    pub fn has(&self, path: &Path) -> bool {
        let is_there = |from, to| self.edges.get(from).is_some_and(|links| links.contains_key(to));
        path.nodes().windows(2).all(|link| is_there(&link[0], &link[1]))
    }

    /// Returns the cheapest path between two nodes that does not pass a node of `avoid`. `None` if there is none with
    /// at most [`PATH_MAX`] nodes.
    pub fn route(&self, from: NodeId, to: NodeId, avoid: &BTreeSet<NodeId>) -> Option<Route> {
        if from == to {
            return None;
        }
        let tree = Tree { from, ways: self.ways(from, Some(to), avoid) };
        Some(Route { path: Path::new(tree.path(to)?)?, cost_us: tree.cost_us(to)? })
    }

    /// Returns the cheapest paths from a node to all others, with at most [`PATH_MAX`] nodes each.
    pub fn cheapest_paths(&self, from: NodeId) -> Tree {
        Tree { from, ways: self.ways(from, None, &BTreeSet::new()) }
    }

    /// Runs Dijkstra's search until it reaches `to`, or all nodes.
    fn ways(&self, from: NodeId, to: Option<NodeId>, avoid: &BTreeSet<NodeId>) -> BTreeMap<NodeId, Way> {
        let mut ways = BTreeMap::from([(from, (0, 0, from))]);
        let mut done = BTreeSet::new();
        let mut heap = BinaryHeap::from([Reverse((0_u64, 0_u8, from))]);
        while let Some(Reverse((cost, hops, node))) = heap.pop() {
            if Some(node) == to {
                break;
            }
            // Do not relay through nodes to avoid, and do not make the path longer than allowed.
            let is_relay = node != from;
            if !done.insert(node) || (is_relay && avoid.contains(&node)) || usize::from(hops) + 1 >= PATH_MAX
            {
                continue;
            }
            for (next, link) in self.edges.get(&node).into_iter().flatten() {
                let way = (cost + u64::from(*link), hops + 1, node);
                if !done.contains(next) && ways.get(next).is_none_or(|known| way < *known) {
                    ways.insert(*next, way);
                    heap.push(Reverse((way.0, way.1, *next)));
                }
            }
        }
        ways
    }
}

/// The cheapest paths from one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tree {
    from: NodeId,
    ways: BTreeMap<NodeId, Way>,
}

impl Tree {
    /// Returns the nodes of the path to a node, both ends included. `None` if there is no path.
    pub fn path(&self, to: NodeId) -> Option<Vec<NodeId>> {
        let mut nodes = vec![to];
        let mut at = to;
        while at != self.from {
            at = self.ways.get(&at)?.2;
            nodes.push(at);
        }
        nodes.reverse();
        Some(nodes)
    }

    /// Returns the cost of the path to a node, µs.
    pub fn cost_us(&self, to: NodeId) -> Option<u64> {
        self.ways.get(&to).map(|(cost, ..)| *cost)
    }
}

impl Record {
    /// Returns the cost that the origin announces for the link to this neighbour, in µs.
    pub fn cost_to(&self, neighbour: NodeId) -> Option<u32> {
        let at = self.links.binary_search_by_key(&neighbour, |link| link.neighbour).ok()?;
        Some(self.links[at].cost_us)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Signature;
    use super::super::frame::LinkEntry;
    use super::*;

    /// The record of a node with links to these neighbours at these costs, in µs.
    pub(in crate::overlay) fn record(origin: u64, links: &[(u64, u32)]) -> Record {
        let entry = |(neighbour, cost_us): &(u64, u32)| LinkEntry {
            neighbour: NodeId(*neighbour),
            cost_us: *cost_us,
        };
        let links = links.iter().map(entry).collect();
        Record { origin: NodeId(origin), sequence: 1, links, signature: Signature::NONE }
    }

    fn nodes(graph: &Graph, from: u64, to: u64, avoid: &[u64]) -> Option<(Vec<u64>, u64)> {
        let avoid = avoid.iter().copied().map(NodeId).collect();
        let route = graph.route(NodeId(from), NodeId(to), &avoid)?;
        Some((route.path.nodes().iter().map(|node| node.0).collect(), route.cost_us))
    }

    #[test]
    fn the_cheapest_way_over_links_that_both_ends_name() {
        let records = [
            record(1, &[(2, 10), (3, 50), (9, 1)]),
            record(2, &[(1, 12), (4, 10)]),
            record(3, &[(1, 50), (4, 1)]),
            record(4, &[(2, 10), (3, 1)]),
            // 9 claims cheap links to all nodes. Only 1 confirms one, and has measured 500.
            record(9, &[(1, 500), (2, 1), (4, 1)]),
        ];
        let graph = Graph::new(records.iter());
        assert_eq!(nodes(&graph, 1, 4, &[]), Some((vec![1, 2, 4], 22)));
        assert_eq!(nodes(&graph, 1, 4, &[2]), Some((vec![1, 3, 4], 51)));
        assert_eq!(nodes(&graph, 1, 4, &[2, 3]), None);
        assert_eq!(nodes(&graph, 1, 2, &[2]), Some((vec![1, 2], 12)), "an end is no relay");
        assert_eq!(nodes(&graph, 9, 4, &[]).unwrap().0[..2], [9, 1]);
        assert_eq!(nodes(&graph, 1, 1, &[]), None);
        assert_eq!(nodes(&graph, 1, 77, &[]), None);
        assert_eq!(graph.links().count(), 5);
        let has = |nodes: &[u64]| graph.has(&Path::new(nodes.iter().copied().map(NodeId).collect()).unwrap());
        assert!(has(&[1, 2, 4, 3]) && has(&[3, 4]) && !has(&[1, 2, 3]) && !has(&[9, 2]) && !has(&[1, 77]));
    }

    #[test]
    fn a_path_has_no_more_nodes_than_a_frame_can_name() {
        let chain = |count: u64| -> Graph {
            let records: Vec<_> = (0..count)
                .map(|at| {
                    let links: Vec<_> = [at.checked_sub(1), (at + 1 < count).then_some(at + 1)]
                        .into_iter()
                        .flatten()
                        .map(|n| (n, 5))
                        .collect();
                    record(at, &links)
                })
                .collect();
            Graph::new(records.iter())
        };
        let most = PATH_MAX as u64;
        assert_eq!(nodes(&chain(most), 0, most - 1, &[]).unwrap().0.len(), PATH_MAX);
        assert_eq!(nodes(&chain(most + 1), 0, most, &[]), None);
    }
}
