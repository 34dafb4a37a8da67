//! The paths of a flow that uses several: which there are, and which to open when some are missing.

use super::super::NodeId;
use super::super::frame::Path;
use super::super::route::Graph;
use std::collections::BTreeSet;

impl Graph {
    /// Returns at most `most` paths for a flow, none of which share a relay or pass a node of `avoid`; the cheapest one is
    /// first. Relays of every version carry such a flow: for each of them it is one path.
    pub fn flow_paths(&self, from: NodeId, to: NodeId, most: u8, avoid: &BTreeSet<NodeId>) -> Vec<Path> {
        let may_use = |node: NodeId| node == from || node == to || !avoid.contains(&node);
        let paths = self.disjoint_over(from, to, most, may_use);
        let mut paths: Vec<_> = paths.into_iter().filter_map(Path::new).collect();
        paths.sort_by_cached_key(|path| self.path_cost_us(path));
        paths
    }

    fn path_cost_us(&self, path: &Path) -> u64 {
        let costs = path.nodes().windows(2).map(|link| self.cost_us(link[0], link[1]));
        costs.map(|cost| u64::from(cost.unwrap_or(u32::MAX))).sum()
    }
}

/// Returns the paths to open, each with its number. `wanted`: disjoint paths of the network. `lanes`: the paths of the flow by
/// number, those that exist or are being opened.
///
/// While the flow has as many paths as are wanted, nothing changes: a flow does not move because costs change. With fewer, a path
/// that is not wanted makes room, because it may share relays with those that are missing.
pub fn openings(wanted: &[Path], lanes: &[Option<Path>]) -> Vec<(u8, Path)> {
    if wanted.len() <= lanes.iter().flatten().count() {
        return Vec::new();
    }
    let is_used = |path: &&Path| lanes.iter().flatten().any(|used| used == *path);
    let missing = wanted.iter().filter(|path| !is_used(path));
    let numbered = || (0_u8..).zip(lanes);
    let free = numbered().filter(|(_, lane)| lane.is_none());
    let astray = numbered().filter(|(_, lane)| lane.as_ref().is_some_and(|path| !wanted.contains(path)));
    free.chain(astray).map(|(number, _)| number).zip(missing.cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::Signature;
    use super::super::super::frame::{LinkEntry, Record};
    use super::*;

    fn graph(links: &[(u64, u64, u32)]) -> Graph {
        let nodes: BTreeSet<u64> = links.iter().flat_map(|(a, b, _)| [*a, *b]).collect();
        let record = |origin: &u64| {
            let ends = links.iter().flat_map(|(a, b, cost)| [(*a, *b, *cost), (*b, *a, *cost)]);
            let mut links: Vec<_> = ends
                .filter(|(a, ..)| a == origin)
                .map(|(_, b, cost_us)| LinkEntry { neighbour: NodeId(b), cost_us })
                .collect();
            links.sort_by_key(|link| link.neighbour);
            Record { origin: NodeId(*origin), sequence: 1, links, signature: Signature::NONE }
        };
        let records: Vec<_> = nodes.iter().map(record).collect();
        Graph::new(records.iter())
    }

    fn path(nodes: &[u64]) -> Path {
        Path::new(nodes.iter().copied().map(NodeId).collect()).expect("a path")
    }

    #[test]
    fn flows_use_disjoint_paths_over_nodes_of_every_version() {
        let graph = graph(&[(1, 2, 9), (2, 4, 9), (1, 3, 5), (3, 4, 5), (1, 4, 50)]);
        let paths = |most, avoid: &[u64]| {
            graph.flow_paths(NodeId(1), NodeId(4), most, &avoid.iter().copied().map(NodeId).collect())
        };
        assert_eq!(paths(5, &[]), [path(&[1, 3, 4]), path(&[1, 2, 4]), path(&[1, 4])]);
        assert_eq!(paths(2, &[3]), [path(&[1, 2, 4]), path(&[1, 4])]);
        assert_eq!(paths(2, &[1, 2, 3, 4]), [path(&[1, 4])]);
    }

    #[test]
    fn missing_paths_are_opened_and_only_then_others_move() {
        let (a, b, c) = (path(&[1, 2, 4]), path(&[1, 3, 4]), path(&[1, 2, 3, 4]));
        let wanted = [a.clone(), b.clone()];
        assert_eq!(openings(&wanted, &[None, None]), [(0, a.clone()), (1, b.clone())]);
        assert_eq!(openings(&wanted, &[Some(b.clone()), None]), [(1, a.clone())]);
        assert_eq!(openings(&wanted, &[Some(a.clone()), Some(b.clone())]), []);
        assert_eq!(openings(&wanted, &[Some(c.clone()), None]), [(1, a.clone()), (0, b.clone())], "it moves");
        assert_eq!(openings(&wanted, &[Some(c.clone()), Some(a.clone())]), [], "no other cost moves a flow");
        assert_eq!(openings(&wanted[..1], &[None, Some(c)]), [], "there is one path, and it has one");
        assert_eq!(openings(&[], &[None, None]), []);
    }
}
