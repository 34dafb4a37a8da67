//! Which links packets use: disjoint paths are disjoint and cheapest, floods are bounded, and all lead to the destination.

use crate::random::seeds;
use proptest::prelude::*;
use sidetrack_core::overlay::frame::{Features, LinkEntry, Record, Subgraph};
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service};
use sidetrack_core::overlay::{NodeId, Signature};
use std::collections::{BTreeMap, BTreeSet};

const SOURCE: NodeId = NodeId(0);
const DESTINATION: NodeId = NodeId(1);

/// A graph of these links, in which `old` nodes understand no packets over subgraphs.
pub(crate) fn graph(links: &[(u64, u64, u32)], old: &BTreeSet<u64>) -> Graph {
    let mut costs: BTreeMap<u64, BTreeMap<u64, u32>> = BTreeMap::new();
    for (a, b, cost) in links.iter().filter(|(a, b, _)| a != b) {
        costs.entry(*a).or_default().insert(*b, *cost);
        costs.entry(*b).or_default().insert(*a, *cost);
    }
    let records: Vec<_> = costs
        .iter()
        .map(|(origin, links)| {
            let links = links.iter().map(|(to, cost)| LinkEntry { neighbour: NodeId(*to), cost_us: *cost });
            let signature = Signature::NONE;
            Record { origin: NodeId(*origin), sequence: 1, links: links.collect(), signature }
        })
        .collect();
    let new = costs.keys().filter(|node| !old.contains(node));
    Graph::new(records.iter()).with_features(new.map(|node| (NodeId(*node), Features::ALL)).collect())
}

/// The number of networks: 300, or what `SIDETRACK_SEEDS` says.
fn cases() -> u32 {
    u32::try_from(seeds(300).count()).unwrap_or(u32::MAX)
}

fn networks() -> impl Strategy<Value = (Vec<(u64, u64, u32)>, BTreeSet<u64>)> {
    let link = (0..9_u64, 0..9_u64, 1..40_u32);
    (prop::collection::vec(link, 1..24), prop::collection::btree_set(2..9_u64, 0..3))
}

/// The lowest total cost of `count` disjoint paths, by trying all combinations of simple paths.
fn cheapest(graph: &Graph, count: usize) -> Option<u64> {
    fn paths(graph: &Graph, path: &mut Vec<NodeId>, found: &mut Vec<(u64, Vec<NodeId>)>) {
        let at = path[path.len() - 1];
        if at == DESTINATION {
            let cost =
                path.windows(2).map(|link| u64::from(graph.cost_us(link[0], link[1]).expect("a link")));
            found.push((cost.sum(), path[1..path.len() - 1].to_vec()));
            return;
        }
        for next in graph.neighbours(at).collect::<Vec<_>>() {
            if graph.features(next) != 0 && !path.contains(&next) {
                path.push(next);
                paths(graph, path, found);
                path.pop();
            }
        }
    }
    fn best(all: &[(u64, Vec<NodeId>)], used: &BTreeSet<NodeId>, left: usize) -> Option<u64> {
        if left == 0 {
            return Some(0);
        }
        let mut lowest = None;
        for (at, (cost, relays)) in all.iter().enumerate() {
            if relays.iter().all(|relay| !used.contains(relay)) {
                let used = used.iter().chain(relays).copied().collect();
                let more = best(&all[at + 1..], &used, left - 1).map(|more| more + cost);
                lowest = lowest.into_iter().chain(more).min();
            }
        }
        lowest
    }
    let mut all = Vec::new();
    paths(graph, &mut vec![SOURCE], &mut all);
    best(&all, &BTreeSet::new(), count)
}

/// The nodes that a packet reaches, and the copies that are sent: each node forwards the first copy.
fn reached(subgraph: &Subgraph) -> (BTreeSet<NodeId>, usize) {
    let (mut seen, mut todo, mut copies) = (BTreeSet::new(), vec![subgraph.source()], 0);
    while let Some(node) = todo.pop() {
        if seen.insert(node) {
            copies += subgraph.next(node).count();
            todo.extend(subgraph.next(node));
        }
    }
    (seen, copies)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn disjoint_paths_share_no_relay_and_are_the_cheapest((links, old) in networks(), most in 1..4_u8) {
        let graph = graph(&links, &old);
        let found = graph.disjoint(SOURCE, DESTINATION, most);
        let mut relays = BTreeSet::new();
        let mut cost = 0;
        for path in &found {
            prop_assert_eq!((path[0], path[path.len() - 1]), (SOURCE, DESTINATION));
            for relay in &path[1..path.len() - 1] {
                prop_assert!(relays.insert(*relay), "{} twice in {:?}", relay, found);
                prop_assert!(graph.features(*relay) != 0);
            }
            for link in path.windows(2) {
                cost += u64::from(graph.cost_us(link[0], link[1]).expect("a link of the network"));
            }
        }
        if !found.is_empty() {
            prop_assert_eq!(cheapest(&graph, found.len()), Some(cost));
        }
        if found.len() < usize::from(most) {
            prop_assert_eq!(cheapest(&graph, found.len() + 1), None, "there are more");
        }
    }

    #[test]
    fn a_flood_has_exactly_the_links_of_ways_that_are_short_enough((links, old) in networks(), hops in 1..6_u8) {
        let graph = graph(&links, &old);
        let flooded = graph.flood(SOURCE, DESTINATION, hops);
        // Walk all ways, nodes may repeat, but the source and the destination only begin and end them.
        let mut expected = BTreeSet::new();
        let mut ways = vec![vec![SOURCE]];
        while let Some(way) = ways.pop() {
            let at = way[way.len() - 1];
            if at == DESTINATION {
                expected.extend(way.windows(2).map(|link| (link[0], link[1])));
            } else if way.len() <= usize::from(hops) {
                for next in graph.neighbours(at).filter(|next| *next != SOURCE && graph.features(*next) != 0) {
                    ways.push([&way[..], &[next]].concat());
                }
            }
        }
        if graph.features(SOURCE) == 0 || graph.features(DESTINATION) == 0 {
            expected.clear();
        }
        prop_assert_eq!(flooded, expected);
    }

    #[test]
    fn every_subgraph_leads_to_its_destination_and_each_link_carries_one_copy((links, old) in networks(), seed in 0..12_usize) {
        let graph = graph(&links, &old);
        let dissemination = Dissemination::ALL[seed % Dissemination::ALL.len()];
        let service = Service { dissemination, ..Service::new(LinkKind::BestEffort) };
        // One link in three is in trouble, or none.
        let troubled = graph.links().enumerate().filter(|(at, _)| seed >= 4 && at % 3 == seed % 3);
        let troubled = troubled.map(|(_, (one, other, cost))| ((one, other), cost / 2)).collect();
        let graph = graph.with_troubled(troubled);
        if let Some(subgraph) = graph.subgraph(SOURCE, DESTINATION, &service) {
            let (nodes, copies) = reached(&subgraph);
            prop_assert!(nodes.contains(&DESTINATION));
            prop_assert_eq!(copies, subgraph.links().count(), "no link is useless");
            prop_assert_eq!(subgraph.next(DESTINATION).count(), 0);
            let (nodes, _) = reached(&subgraph.reversed());
            prop_assert!(nodes.contains(&SOURCE));
        } else {
            prop_assert!(graph.disjoint(SOURCE, DESTINATION, 1).is_empty() || dissemination == Dissemination::Flood);
        }
    }
}

#[test]
fn the_cheapest_path_alone_may_have_to_give_way() {
    // 0-2-3-1 is the cheapest path and blocks every second one; the two cheapest disjoint ones avoid the link 2-3.
    let links = [(0, 2, 1), (2, 3, 1), (3, 1, 1), (0, 3, 5), (2, 1, 5)];
    let graph = graph(&links, &BTreeSet::new());
    let paths = graph.disjoint(SOURCE, DESTINATION, 2);
    let paths: BTreeSet<Vec<u64>> =
        paths.into_iter().map(|path| path.into_iter().map(|node| node.0).collect()).collect();
    assert_eq!(paths, BTreeSet::from([vec![0, 2, 1], vec![0, 3, 1]]));
    assert_eq!(graph.disjoint(SOURCE, DESTINATION, 1), [[0, 2, 3, 1].map(NodeId)]);
}

/// Source 0 with the neighbours 2, 3, 4; destination 1 with 5, 6, 7; a full mesh between the two groups.
fn coasts(troubled: &[(u64, u64)]) -> Graph {
    let middle = (2..5_u64).flat_map(|one| (5..8_u64).map(move |other| (one, other, 20_000 + one as u32)));
    let ends = (2..5).map(|one| (0, one, 1_000)).chain((5..8).map(|other| (1, other, 1_000)));
    let links: Vec<_> = ends.chain(middle).collect();
    let troubled = troubled.iter().map(|(one, other)| ((NodeId(*one), NodeId(*other)), 1_000));
    graph(&links, &BTreeSet::new()).with_troubled(troubled.collect())
}

/// The neighbours that the source sends to, those that the destination gets copies from, and the number of links.
fn graphed(graph: &Graph, deadline_ms: Option<u64>) -> (Vec<u64>, Vec<u64>, usize) {
    let deadline = deadline_ms.map(std::time::Duration::from_millis);
    let service =
        Service { dissemination: Dissemination::Graph, deadline, ..Service::new(LinkKind::BestEffort) };
    let subgraph = graph.subgraph(SOURCE, DESTINATION, &service).expect("links");
    let mut first: Vec<_> = subgraph.next(SOURCE).map(|node| node.0).collect();
    let mut last: Vec<_> = subgraph.reversed().next(DESTINATION).map(|node| node.0).collect();
    first.sort_unstable();
    last.sort_unstable();
    (first, last, subgraph.links().count())
}

#[test]
fn graphs_add_links_around_the_end_that_is_in_trouble() {
    // Nothing, one link in trouble, or trouble elsewhere: two disjoint paths.
    for troubled in [&[][..], &[(0, 2)], &[(0, 2), (1, 5)], &[(2, 5), (2, 6), (2, 7)]] {
        let (first, last, links) = graphed(&coasts(troubled), None);
        assert_eq!((first.len(), last.len(), links), (2, 2, 6), "{troubled:?}");
    }
    // Two links of the source, also if they are gone.
    let (first, _, links) = graphed(&coasts(&[(0, 2), (0, 3)]), None);
    assert_eq!((first, links <= 9), (vec![2, 3, 4], true));
    assert_eq!(graphed(&coasts(&[(0, 98), (0, 99)]), None).0, [2, 3, 4]);
    let (_, last, links) = graphed(&coasts(&[(1, 5), (1, 7)]), None);
    assert_eq!((last, links <= 9), (vec![5, 6, 7], true));
    let (first, last, _) = graphed(&coasts(&[(0, 2), (0, 3), (1, 5), (1, 7)]), None);
    assert_eq!((first, last), (vec![2, 3, 4], vec![5, 6, 7]));
    // Both paths meet a link in trouble that lies in the middle: all of it.
    let middle: Vec<_> = (2..5).flat_map(|one| (5..8).map(move |other| (one, other))).collect();
    let (first, last, _) = graphed(&coasts(&middle), None);
    assert_eq!((first, last), (vec![2, 3, 4], vec![5, 6, 7]));
    // Only neighbours that can be in time, by usual costs; and two paths if there are none.
    let slow = coasts(&[(0, 2), (0, 3)]);
    assert_eq!(graphed(&slow, Some(25)).0, [2, 3, 4]);
    assert_eq!(graphed(&slow, Some(1)).0.len(), 2);
}

#[test]
fn a_large_network_is_no_problem() {
    // 256 nodes, each with links to the next eight.
    let links: Vec<_> =
        (0..256_u64).flat_map(|at| (1..9).map(move |by| (at, (at + by) % 256, 10 + by as u32))).collect();
    let graph = graph(&links, &BTreeSet::new());
    let paths = graph.disjoint(NodeId(0), NodeId(128), 5);
    assert_eq!(paths.len(), 5);
    let flood =
        Service { dissemination: Dissemination::Flood, hops: 15, ..Service::new(LinkKind::BestEffort) };
    // Too many nodes for one frame: two paths instead, if they fit.
    let near = graph.subgraph(NodeId(0), NodeId(64), &flood).expect("two paths");
    assert!(near.nodes().len() <= 32 && near.next(NodeId(0)).count() == 2);
    assert_eq!(graph.subgraph(NodeId(0), NodeId(128), &flood), None, "33 nodes");
}
