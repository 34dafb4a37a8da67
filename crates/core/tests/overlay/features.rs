//! Old and new nodes in one overlay: what the new ones know of each other.

use crate::network::{mischief, wild};
use crate::random::{Random, each_seed};
use crate::world::{Wire, World, key};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Features, Frame, Protocol};
use sidetrack_core::overlay::node::Input;
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service, Trust};
use sidetrack_core::overlay::spread::{Relay, Source};
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
        restart(&mut world, *node, 0, 1);
    }
    world
}

/// Starts a node again, as a version with these features.
fn restart(world: &mut World, node: u64, features: u32, wall: u64) {
    let node = NodeId(node);
    world.crash(node);
    world.old.insert(node, features);
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
    restart(&mut world, 5, Features::ALL, 1_000_000);
    world.run_ms(3000);
    let graph = world.node(NodeId(1)).graph().clone();
    assert_eq!((known(&world, 1, 5), known(&world, 1, 6)), (Features::ALL, Features::ALL));
    let three = Service { paths: 3, ..DUPLICATE };
    assert_eq!(graph.subgraph(NodeId(1), NodeId(4), &three).expect("three paths").links().count(), 6);
    // And taken back to version 1: the statement of its earlier run holds no longer.
    restart(&mut world, 5, 0, 2_000_000);
    world.run_ms(3000);
    assert_eq!((known(&world, 1, 5), known(&world, 4, 5)), (0, 0));
    let graph = world.node(NodeId(1)).graph().clone();
    assert_eq!(graph.subgraph(NodeId(1), NodeId(6), &DUPLICATE), None);
}

/// ```text
/// 1 -- 2 -- 4      5 runs version 1; 6 knows proofs, but no reliable flooding
/// |---- 5 --|
/// |---- 6 --|
/// ```
#[test]
fn packets_with_proofs_and_reliable_flows_pass_only_nodes_that_know_them() {
    let links = [(1, 2), (2, 4), (1, 5), (5, 4), (1, 6), (6, 4)];
    let mut world = with_old(1, wires(&links), &[5]);
    let proofs = Features::ALL & !Features::RELIABLE_FLOODS;
    restart(&mut world, 6, proofs, 1);
    world.run_ms(3000);
    let relays = |world: &World, trust: Trust, kind: LinkKind| {
        let graph = world.node(NodeId(1)).graph().clone();
        let dissemination = Dissemination::Flood;
        let service = Service { dissemination, trust, ..Service::new(kind) };
        let subgraph = graph.subgraph(NodeId(1), NodeId(4), &service)?;
        Some(subgraph.nodes()[2..].iter().map(|node| node.0).collect::<Vec<_>>())
    };
    assert_eq!((known(&world, 1, 5), known(&world, 1, 6)), (0, proofs));
    assert_eq!(relays(&world, Trust::Tolerant, LinkKind::BestEffort), Some(vec![2, 6]));
    assert_eq!(relays(&world, Trust::Tolerant, LinkKind::Reliable), Some(vec![2]));
    assert_eq!(relays(&world, Trust::Members, LinkKind::BestEffort), Some(vec![2, 6]));
    // Each new node knows the epochs of the others, and none of the old one. The old one goes on: paths lead over it and to it.
    let epochs = world.node(NodeId(1)).graph().epochs().keys().map(|node| node.0).collect::<Vec<_>>();
    assert_eq!(epochs, [1, 2, 4, 6]);
    for (from, to) in [(1, 5), (5, 1), (5, 2), (4, 5)] {
        assert!(world.node(NodeId(from)).route(NodeId(to), &BTreeSet::new()).is_some(), "{from} to {to}");
    }
    // The destination is taken back to a version without reliable flows: there is no way for them any more, and one for proofs.
    restart(&mut world, 4, proofs, 1_000_000);
    world.run_ms(3000);
    assert_eq!(relays(&world, Trust::Tolerant, LinkKind::Reliable), None);
    assert_eq!(relays(&world, Trust::Tolerant, LinkKind::BestEffort), Some(vec![2, 6]));
}

/// A frame as a node with these features sees it: without [`Features::GRAPH`], the code of graphs is unknown.
fn reads(features: u32, frame: &[u8]) -> bool {
    const DISSEMINATION: usize = 2;
    let known = if features & Features::GRAPH != 0 { 3 } else { 2 };
    frame[DISSEMINATION] <= known && Frame::from_datagram(frame).is_ok()
}

/// Sends a packet of a graph from 1 to 6, and returns the dissemination that it names, and the nodes that relayed or
/// received it. Every node on its way can read it.
fn graphed(world: &World) -> (Dissemination, BTreeSet<u64>) {
    let (from, to) = (NodeId(1), NodeId(6));
    let service = Service { dissemination: Dissemination::Graph, ..Service::new(LinkKind::BestEffort) };
    let graph = world.node(from).graph();
    let subgraph = graph.subgraph(from, to, &service).expect("a way");
    let named = Service { dissemination: graph.named(&subgraph, service.dissemination), ..service };
    let mut relays: BTreeMap<_, _> = world.nodes.keys().map(|node| (*node, relay(world, *node))).collect();
    let packet = Source::new(1).packet(&named, subgraph, Protocol::Ip, vec![1]);
    let mut copies: Vec<_> = packet.subgraph.next(from).map(|next| (from, next, packet.clone())).collect();
    let mut reached = BTreeSet::new();
    while let Some((from, at, mut packet)) = copies.pop() {
        let features = world.old.get(&at).copied().unwrap_or(Features::ALL);
        let bytes = Frame::Spread(Box::new(packet.clone())).to_datagram();
        assert!(reads(features, &bytes), "{at} cannot read {packet:?}");
        let Ok(step) = relays.get_mut(&at).expect("a node").handle(from, &mut packet, 0) else { continue };
        reached.insert(at.0);
        copies.extend(step.next.into_iter().map(|next| (at, next, packet.clone())));
    }
    (named.dissemination, reached)
}

fn relay(world: &World, node: NodeId) -> Relay {
    Relay::new(node, world.nodes.keys().copied().collect())
}

#[test]
fn a_graph_that_passes_a_node_without_graphs_is_sent_as_a_duplicate() {
    // Two ways from 1 to 6, by 2 and by 3; a dearer one by 4 and 5.
    let links = [(1, 2), (2, 6), (1, 3), (3, 6), (1, 4), (4, 5), (5, 6)];
    let middle = Features::SPREAD | Features::REAL_TIME;
    let mut world = with_old(1, wires(&links), &[]);
    restart(&mut world, 3, middle, 1);
    world.run_ms(3000);
    assert_eq!((known(&world, 1, 3), known(&world, 1, 2)), (middle, Features::ALL));
    assert_eq!(graphed(&world), (Dissemination::Duplicate, BTreeSet::from([2, 3, 6])));
    // The node is updated.
    restart(&mut world, 3, Features::ALL, 1_000_000);
    world.run_ms(3000);
    assert_eq!(graphed(&world), (Dissemination::Graph, BTreeSet::from([2, 3, 6])));
    // The links of the node that restarted are well again. An older node that the packets do not pass changes nothing.
    world.run_ms(60_000);
    restart(&mut world, 4, middle, 1_000_000);
    world.run_ms(3000);
    assert_eq!(graphed(&world).0, Dissemination::Graph);
    // The destination is taken back to an older version.
    restart(&mut world, 6, middle, 1_000_000);
    world.run_ms(3000);
    assert_eq!(graphed(&world).0, Dissemination::Duplicate);
}

#[test]
fn every_feature_has_a_bit_of_its_own_and_a_name() {
    let bits: Vec<_> = Features::NAMES.iter().map(|(bit, _)| *bit).collect();
    assert_eq!(bits.iter().fold(0, |all, bit| all | bit), Features::ALL);
    assert_eq!(bits.iter().map(|bit| bit.count_ones()).sum::<u32>(), Features::ALL.count_ones());
    let names: BTreeSet<_> = Features::NAMES.iter().map(|(_, name)| name).collect();
    assert_eq!(names.len(), bits.len());
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
            restart(&mut world, node.0, 0, 1);
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
