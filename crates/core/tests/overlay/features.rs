//! Old and new nodes in one overlay: what the new ones know of each other.

use crate::network::{mischief, wild};
use crate::random::{Random, each_seed};
use crate::world::{Wire, World, key};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Features, Frame};
use sidetrack_core::overlay::node::Input;
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service};
use std::collections::{BTreeMap, BTreeSet};

const DUPLICATE: Service =
    Service { dissemination: Dissemination::Duplicate, ..Service::new(LinkKind::BestEffort) };

fn wires(links: &[(u64, u64)]) -> BTreeMap<(NodeId, NodeId), Wire> {
    links.iter().map(|(a, b)| (key(NodeId(*a), NodeId(*b)), Wire::clean(5000))).collect()
}

/// What `from` thinks that `of` understands.
fn known(world: &World, from: u64, of: u64) -> u32 {
    world.node(NodeId(from)).graph().features(NodeId(of))
}

/// A world in which these nodes run version 1 from the start.
fn with_old(seed: u64, wires: BTreeMap<(NodeId, NodeId), Wire>, old: &[u64]) -> World {
    let mut world = World::new(seed, wires);
    for node in old {
        restart(&mut world, *node, true, 1);
    }
    world
}

fn restart(world: &mut World, node: u64, is_old: bool, wall: u64) {
    let node = NodeId(node);
    world.crash(node);
    if is_old {
        world.old.insert(node)
    } else {
        world.old.remove(&node)
    };
    world.start_at(node, wall);
}

#[test]
fn packets_over_subgraphs_avoid_nodes_that_do_not_understand_them() {
    // Two ways from 1 to 4, and a third by 5, which is old; 6 is new, but only an old node leads to it.
    let links = [(1, 2), (2, 4), (1, 3), (3, 4), (1, 5), (5, 4), (5, 6)];
    let mut world = with_old(1, wires(&links), &[5]);
    world.run_ms(3000);
    for new in [1, 2, 3, 4] {
        assert_eq!(known(&world, 1, new), Features::ALL, "{new}");
    }
    assert_eq!((known(&world, 1, 5), known(&world, 1, 6)), (0, 0));
    let graph = world.node(NodeId(1)).graph().clone();
    let recovers = |one, other| graph.recovers(NodeId(one), NodeId(other));
    assert!(recovers(1, 2) && !recovers(1, 5) && !recovers(5, 4), "old nodes do not recover packets");
    let subgraph = graph.subgraph(NodeId(1), NodeId(4), &DUPLICATE).expect("two paths");
    assert_eq!(subgraph.nodes(), [1, 4, 2, 3].map(NodeId));
    assert_eq!(graph.subgraph(NodeId(1), NodeId(6), &DUPLICATE), None, "one path, as version 1 does it");
    assert!(world.node(NodeId(1)).route(NodeId(6), &BTreeSet::new()).is_some());
    // 5 is updated: it is used, and so is 6 behind it.
    restart(&mut world, 5, false, 1_000_000);
    world.run_ms(3000);
    let graph = world.node(NodeId(1)).graph().clone();
    assert_eq!((known(&world, 1, 5), known(&world, 1, 6)), (Features::ALL, Features::ALL));
    let three = Service { paths: 3, ..DUPLICATE };
    assert_eq!(graph.subgraph(NodeId(1), NodeId(4), &three).expect("three paths").links().count(), 6);
    // And taken back to version 1: the statement of its earlier run holds no longer.
    restart(&mut world, 5, true, 2_000_000);
    world.run_ms(3000);
    assert_eq!((known(&world, 1, 5), known(&world, 4, 5)), (0, 0));
    let graph = world.node(NodeId(1)).graph().clone();
    assert_eq!(graph.subgraph(NodeId(1), NodeId(6), &DUPLICATE), None);
}

#[test]
fn new_nodes_know_each_other_whatever_went_wrong_before() {
    each_seed(12, |seed| {
        let mut random = Random::new(seed);
        let nodes = 4 + seed % 7;
        let mut world = World::new(seed, World::topology(&mut random, nodes, wild));
        let names: Vec<_> = world.nodes.keys().copied().collect();
        let old: Vec<_> = names.iter().filter(|_| random.permille(250)).copied().collect();
        for node in &old {
            restart(&mut world, node.0, true, 1);
        }
        world.run_ms(1000);
        for _ in 0..8 {
            world.run_ms(20 + random.below(300));
            mischief(&mut world, &BTreeSet::new());
        }
        crate::network::heal(&mut world);
        // A refresh of all records.
        world.run_ms(45_000);
        let truth = world.truth();
        for from in names.iter().filter(|name| !old.contains(name)) {
            let mut reached = BTreeSet::from([*from]);
            for _ in 0..nodes {
                let more: Vec<_> = truth
                    .iter()
                    .flat_map(|(a, b)| [(*a, *b), (*b, *a)])
                    .filter(|(a, b)| reached.contains(a) && !old.contains(b))
                    .map(|(_, b)| b)
                    .collect();
                reached.extend(more);
            }
            for of in &names {
                let features = world.node(*from).graph().features(*of);
                assert_eq!(features != 0, reached.contains(of), "{from} about {of}; old: {old:?}");
            }
        }
    });
}

#[test]
fn a_statement_of_another_is_not_believed() {
    let mut world = with_old(1, wires(&[(1, 2), (2, 3), (1, 3)]), &[3]);
    world.run_ms(2000);
    let own = world.node(NodeId(2)).graph().features(NodeId(2));
    assert_eq!(own, Features::ALL);
    for sequence in [1, 1 << 40, u64::MAX] {
        let signature = sidetrack_core::overlay::Signature([7; 64]);
        let forged = Features { origin: NodeId(3), sequence, bits: u32::MAX, signature };
        world.tell(NodeId(1), Input::Frame(NodeId(2), Frame::Features(forged)));
        let stranger = Features { origin: NodeId(99), ..forged };
        world.tell(NodeId(1), Input::Frame(NodeId(2), Frame::Features(stranger)));
    }
    world.run_ms(500);
    assert_eq!((known(&world, 1, 3), known(&world, 1, 99)), (0, 0));
    assert_eq!(known(&world, 1, 2), Features::ALL);
}
