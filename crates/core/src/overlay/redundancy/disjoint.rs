//! Node-disjoint paths with the lowest total cost: a flow of minimum cost through a network in which each relay passes
//! one unit (Suurballe 1974; here by successive shortest paths with negative arcs, as Bhandari's algorithm).

use super::super::NodeId;
use super::super::route::Graph;
use std::collections::{BTreeMap, VecDeque};

/// One direction of an arc; the arc with the index `self ^ 1` is its reverse.
struct Arc {
    to: usize,
    room: u8,
    cost: i64,
}

/// A flow network. Each node is two vertices: packets come in at 2i and leave at 2i + 1.
struct Network {
    arcs: Vec<Arc>,
    /// The arcs that leave each vertex.
    out: Vec<Vec<usize>>,
}

impl Network {
    fn join(&mut self, from: usize, to: usize, room: u8, cost: i64) {
        self.out[from].push(self.arcs.len());
        self.arcs.push(Arc { to, room, cost });
        self.out[to].push(self.arcs.len());
        self.arcs.push(Arc { to: from, room: 0, cost: -cost });
    }

    /// Finds the cheapest way with room, and returns its arcs from the end to the start (Bellman-Ford with a queue: the
    /// reverse arcs have negative costs, but there is never a negative cycle).
    fn cheapest(&self, start: usize, end: usize) -> Option<Vec<usize>> {
        let mut best: Vec<Option<(i64, usize)>> = vec![None; self.out.len()];
        let mut queued = vec![false; self.out.len()];
        best[start] = Some((0, usize::MAX));
        let mut todo = VecDeque::from([start]);
        while let Some(at) = todo.pop_front() {
            queued[at] = false;
            let Some((cost, _)) = best[at] else { continue };
            for arc in &self.out[at] {
                let Arc { to, room, cost: more } = &self.arcs[*arc];
                let is_better = best[*to].is_none_or(|(known, _)| cost + more < known);
                if *room > 0 && is_better && *to != start {
                    best[*to] = Some((cost + more, *arc));
                    if !queued[*to] {
                        queued[*to] = true;
                        todo.push_back(*to);
                    }
                }
            }
        }
        let mut way = Vec::new();
        let mut at = end;
        while at != start {
            let (_, arc) = best[at]?;
            way.push(arc);
            at = self.arcs[arc ^ 1].to;
        }
        Some(way)
    }
}

impl Graph {
    /// Returns at most `most` paths between two nodes that share no relay, over nodes that understand packets with a
    /// subgraph. Their total cost is the lowest for their number. Each path has both ends.
    pub fn disjoint(&self, from: NodeId, to: NodeId, most: u8) -> Vec<Vec<NodeId>> {
        self.disjoint_over(from, to, most, |node| self.spreads(node))
    }

    /// Returns at most `most` paths between two nodes that share no relay, over the nodes that may be used.
    pub(super) fn disjoint_over(
        &self,
        from: NodeId,
        to: NodeId,
        most: u8,
        may_use: impl Fn(NodeId) -> bool,
    ) -> Vec<Vec<NodeId>> {
        let mut nodes: Vec<_> = self.links().flat_map(|(a, b, _)| [a, b]).collect();
        nodes.retain(|node| may_use(*node));
        nodes.sort_unstable();
        nodes.dedup();
        let index: BTreeMap<_, _> = nodes.iter().enumerate().map(|(at, node)| (*node, at)).collect();
        let (Some(start), Some(end)) = (index.get(&from), index.get(&to)) else { return Vec::new() };
        if from == to {
            return Vec::new();
        }
        let mut network = Network { arcs: Vec::new(), out: vec![Vec::new(); 2 * nodes.len()] };
        for at in 0..nodes.len() {
            network.join(2 * at, 2 * at + 1, 1, 0);
        }
        for (a, b, cost) in self.links() {
            let (Some(a), Some(b)) = (index.get(&a), index.get(&b)) else { continue };
            network.join(2 * a + 1, 2 * b, 1, i64::from(cost));
            network.join(2 * b + 1, 2 * a, 1, i64::from(cost));
        }
        for _ in 0..most {
            // Paths leave the source and enter the destination, so the two are not limited to one path.
            let Some(way) = network.cheapest(2 * start + 1, 2 * end) else { break };
            for arc in way {
                network.arcs[arc].room -= 1;
                network.arcs[arc ^ 1].room += 1;
            }
        }
        let starts = network.used(2 * start + 1);
        starts.into_iter().map(|first| network.follow(first, *end, &nodes, from)).collect()
    }
}

impl Network {
    /// Returns the vertices that used arcs from this vertex lead to.
    fn used(&self, from: usize) -> Vec<usize> {
        let is_used = |arc: &&usize| arc.is_multiple_of(2) && self.arcs[**arc].room == 0;
        self.out[from].iter().filter(is_used).map(|arc| self.arcs[*arc].to).collect()
    }

    /// Returns the path whose second node comes in at this vertex.
    fn follow(&self, first: usize, end: usize, nodes: &[NodeId], from: NodeId) -> Vec<NodeId> {
        let mut path = vec![from];
        let mut at = Some(first);
        while let Some(vertex) = at {
            path.push(nodes[vertex / 2]);
            // A relay passes one path, so one arc that leaves it is used.
            at = (vertex / 2 != end).then(|| self.used(vertex + 1).first().copied()).flatten();
        }
        path
    }
}
