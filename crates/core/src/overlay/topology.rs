//! The links that nodes may announce, and their lowest costs (the maximal topology with minimal weights of Obenshain and others,
//! "Practical intrusion-tolerant networks", ICDCS 2016).
//!
//! A node can only say that an allowed link is down or costs more. So no node draws paths to itself with links that do not
//! exist, or that cost less than they can. Without a topology, two nodes that lie together can announce a link between them
//! that costs nothing.
//!
//! The topology stands in the configuration of each node, beside the keys of all members. The file that holds the keys has to
//! be right anyway: who can change it can also change the keys. So the topology needs no signature of its own.

use super::NodeId;
use super::frame::Record;
use std::collections::BTreeMap;

/// The lowest cost of any link, µs.
const LEAST_US: u32 = 1;

/// The links that nodes may announce.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// The allowed links with their lowest costs, µs. `None`: all links are allowed.
    links: Option<BTreeMap<(NodeId, NodeId), u32>>,
}

impl Topology {
    /// Makes a topology of these links: their two ends, and the lowest cost, µs. All other links are forbidden.
    pub fn new(links: impl IntoIterator<Item = (NodeId, NodeId, u32)>) -> Self {
        let link = |(one, other, least): (NodeId, NodeId, u32)| {
            ((one.min(other), one.max(other)), least.max(LEAST_US))
        };
        Self { links: Some(links.into_iter().map(link).collect()) }
    }

    /// Whether the topology forbids any link.
    pub fn is_limited(&self) -> bool {
        self.links.is_some()
    }

    /// Returns the lowest cost of a link, µs. `None`: the link is not allowed.
    pub fn least_us(&self, one: NodeId, other: NodeId) -> Option<u32> {
        match &self.links {
            Some(links) => links.get(&(one.min(other), one.max(other))).copied(),
            None => Some(LEAST_US),
        }
    }

    /// Returns how many links a record announces beyond the topology: not allowed, or at a lower cost.
    pub fn beyond(&self, record: &Record) -> u64 {
        let is_beyond = |neighbour, cost_us| {
            self.links.is_some()
                && self.least_us(record.origin, neighbour).is_none_or(|least| cost_us < least)
        };
        let beyond = record.links.iter().filter(|link| is_beyond(link.neighbour, link.cost_us));
        u64::try_from(beyond.count()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::super::route::Graph;
    use super::super::route::tests::record;
    use super::*;
    use std::collections::BTreeSet;

    /// 8 and 9 lie together: a link between them that costs nothing, from one end of the network to the other.
    #[test]
    fn two_nodes_that_lie_together_draw_no_path_to_themselves() {
        let records = [
            record(1, &[(2, 10_000), (8, 9000)]),
            record(2, &[(1, 10_000), (3, 10_000)]),
            record(3, &[(2, 10_000), (9, 9000)]),
            record(8, &[(1, 1), (9, 1)]),
            record(9, &[(3, 1), (8, 1)]),
        ];
        let path = |graph: &Graph| {
            let route = graph.route(NodeId(1), NodeId(3), &BTreeSet::new()).unwrap();
            route.path.nodes().iter().map(|node| node.0).collect::<Vec<_>>()
        };
        assert_eq!(path(&Graph::new(records.iter())), [1, 8, 9, 3], "without a topology they do");
        let links = [(1, 2, 5000), (2, 3, 5000), (1, 8, 5000), (3, 9, 5000)];
        let allowed = |links: &[(u64, u64, u32)]| {
            Topology::new(links.iter().map(|(one, other, least)| (NodeId(*one), NodeId(*other), *least)))
        };
        let topology = allowed(&links);
        let graph = Graph::within(records.iter(), &topology);
        assert_eq!(path(&graph), [1, 2, 3]);
        let beyond: Vec<_> = records.iter().map(|record| topology.beyond(record)).collect();
        assert_eq!(beyond, [0, 0, 0, 2, 2], "a forbidden link and a cost that is too low, each");
        // The link is allowed, but it is long: it costs what it must at least.
        let long = allowed(&[&links[..], &[(9, 8, 80_000)]].concat());
        let graph = Graph::within(records.iter(), &long);
        assert_eq!((path(&graph), graph.cost_us(NodeId(8), NodeId(9))), (vec![1, 2, 3], Some(80_000)));
        // A higher cost counts as it is said.
        assert_eq!(graph.cost_us(NodeId(1), NodeId(2)), Some(10_000));
        assert!(!Topology::default().is_limited() && Topology::default().beyond(&records[3]) == 0);
    }
}
