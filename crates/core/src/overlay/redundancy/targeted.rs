//! Dissemination graphs with targeted redundancy (Babay, Wagner, Dinitz, Amir: Timely, reliable, and cost-effective Internet
//! transport service using dissemination graphs, ICDCS 2017).
//!
//! | trouble | links |
//! |---|---|
//! | none that matters | the cheapest two disjoint paths |
//! | around the source | from the source to all its neighbours, and their cheapest ways to the destination |
//! | around the destination | the cheapest ways to all its neighbours, and from these to it |
//! | around both, or on both of the paths | all of these |
//!
//! Trouble is *around* a node if at least [`AROUND`] of its links are in trouble. A neighbour is used if the way over it can
//! meet the deadline, by the usual costs of the links: a loss makes a link dear, and does not make it slow. Links of the node that
//! went down a short time ago count, too: they may be back before all nodes know.

use super::super::NodeId;
use super::super::route::Graph;
use super::{Link, links_of};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

/// Links in trouble that make a trouble around a node. A single one is avoided by two disjoint paths.
const AROUND: usize = 2;

/// The way from a node to the root of a tree: its cost and its usual cost, µs, and the next node.
type Way = (u64, u64, NodeId);

impl Graph {
    /// Returns the links for packets that have to arrive within `deadline`. Without a deadline, all ways are fast enough.
    pub fn targeted(&self, from: NodeId, to: NodeId, deadline: Option<Duration>) -> BTreeSet<Link> {
        let paths = self.disjoint(from, to, 2);
        let mut links = links_of(&paths);
        let at_source = self.is_trouble_around(from);
        let at_destination = self.is_trouble_around(to);
        // Trouble of one path is what the other path is for.
        let apart = |link: &[NodeId], node: NodeId| link[0] != node && link[1] != node;
        let is_hit = |path: &Vec<NodeId>| {
            path.windows(2).any(|link| {
                let is_covered = at_source && !apart(link, from) || at_destination && !apart(link, to);
                !is_covered && self.is_troubled(link[0], link[1])
            })
        };
        let everywhere = !paths.is_empty() && paths.iter().all(is_hit);
        let wants_source = at_source || everywhere;
        let wants_destination = at_destination || everywhere;
        let source = if wants_source { self.around_source(from, to, deadline) } else { BTreeSet::new() };
        let destination =
            if wants_destination { self.around_destination(from, to, deadline) } else { BTreeSet::new() };
        let one = wants_source != wants_destination;
        if one && !(source.is_empty() && destination.is_empty()) {
            links.clear();
        }
        links.extend(source);
        links.extend(destination);
        links
    }

    fn is_trouble_around(&self, node: NodeId) -> bool {
        self.troubled().filter(|(one, other)| *one == node || *other == node).count() >= AROUND
    }

    /// The links from the source to its neighbours, and on the cheapest ways from these.
    fn around_source(&self, from: NodeId, to: NodeId, deadline: Option<Duration>) -> BTreeSet<Link> {
        let ways = self.tree(to, from);
        self.around(from, to, deadline, &ways)
    }

    /// The same for the destination: the way back, with all links turned.
    fn around_destination(&self, from: NodeId, to: NodeId, deadline: Option<Duration>) -> BTreeSet<Link> {
        let ways = self.tree(from, to);
        self.around(to, from, deadline, &ways).into_iter().map(|(one, other)| (other, one)).collect()
    }

    fn around(
        &self,
        node: NodeId,
        root: NodeId,
        deadline: Option<Duration>,
        ways: &BTreeMap<NodeId, Way>,
    ) -> BTreeSet<Link> {
        let most = deadline.map_or(u64::MAX, |time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        let mut links = BTreeSet::new();
        let other_end = |(one, other): (NodeId, NodeId)| {
            (one == node).then_some(other).or_else(|| (other == node).then_some(one))
        };
        let lost = self.troubled().filter_map(other_end);
        for neighbour in self.neighbours(node).chain(lost).collect::<BTreeSet<_>>() {
            let Some((_, usual, _)) = ways.get(&neighbour) else { continue };
            if usual + u64::from(self.usual_us(node, neighbour)) > most {
                continue;
            }
            links.insert((node, neighbour));
            let mut at = neighbour;
            while at != root {
                let Some((.., next)) = ways.get(&at) else { break };
                links.insert((at, *next));
                at = *next;
            }
        }
        links
    }

    /// The cheapest ways from all nodes to `root`, over nodes that understand such packets and not over `without`.
    fn tree(&self, root: NodeId, without: NodeId) -> BTreeMap<NodeId, Way> {
        let mut ways = BTreeMap::new();
        if !self.spreads(root) || !self.spreads(without) {
            return ways;
        }
        ways.insert(root, (0, 0, root));
        let mut heap = BinaryHeap::from([Reverse((0_u64, root))]);
        while let Some(Reverse((cost, node))) = heap.pop() {
            let Some((best, usual, _)) = ways.get(&node).copied() else { continue };
            if cost > best {
                continue;
            }
            for next in self.neighbours(node).filter(|next| *next != without && self.spreads(*next)) {
                let link = u64::from(self.cost_us(node, next).unwrap_or(u32::MAX));
                let way = (cost + link, usual + u64::from(self.usual_us(node, next)), node);
                if ways.get(&next).is_none_or(|known| way.0 < known.0) {
                    ways.insert(next, way);
                    heap.push(Reverse((way.0, next)));
                }
            }
        }
        ways
    }
}
