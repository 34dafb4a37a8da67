//! Packets over subgraphs, from node to node under loss, repetition and disorder: each is delivered at most once, and over
//! two paths one of which loses everything exactly once.

use crate::random::{Random, each_seed};
use crate::redundancy::graph;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Protocol, Spread, Subgraph};
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service};
use sidetrack_core::overlay::spread::{Dropped, Relay, Source, Step};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const DUPLICATE: Service =
    Service { dissemination: Dissemination::Duplicate, ..Service::new(LinkKind::BestEffort) };

fn diamond() -> Subgraph {
    let graph = graph(&[(1, 2, 5), (2, 4, 5), (1, 3, 6), (3, 4, 6)], &BTreeSet::new());
    graph.subgraph(NodeId(1), NodeId(4), &DUPLICATE).expect("two paths")
}

fn members(nodes: u64) -> BTreeSet<NodeId> {
    (0..=nodes).map(NodeId).collect()
}

fn packet(source: &mut Source, subgraph: &Subgraph) -> Spread {
    source.packet(&DUPLICATE, subgraph.clone(), Protocol::Ip, vec![1])
}

#[test]
fn the_first_copy_wins_and_a_relay_forwards_on_the_links_that_the_frame_names() {
    let mut source = Source::new(7);
    let subgraph = diamond();
    let sent = packet(&mut source, &subgraph);
    let mut relay = Relay::new(NodeId(2), members(4));
    let step = relay.handle(NodeId(1), &mut sent.clone(), 0);
    assert_eq!(step, Ok(Step { deliver: false, next: vec![NodeId(4)] }));
    assert_eq!(relay.handle(NodeId(1), &mut sent.clone(), 0), Err(Dropped::Duplicate));
    let mut end = Relay::new(NodeId(4), members(4));
    assert_eq!(end.handle(NodeId(3), &mut sent.clone(), 0), Ok(Step { deliver: true, next: Vec::new() }));
    assert_eq!(end.handle(NodeId(2), &mut sent.clone(), 0), Err(Dropped::Duplicate));
    let counts = end.counts();
    assert_eq!((counts.delivered, counts.relayed, counts.duplicates), ([0, 1, 0, 0], 0, 1));
}

#[test]
fn copies_that_may_not_come_that_way_are_dropped() {
    let mut source = Source::new(7);
    let subgraph = diamond();
    let mut relay = Relay::new(NodeId(2), members(4));
    let sent = packet(&mut source, &subgraph);
    // From a node without a link to us, and from one that is not in the subgraph.
    for from in [3, 4, 9] {
        assert_eq!(relay.handle(NodeId(from), &mut sent.clone(), 0), Err(Dropped::OffGraph), "{from}");
    }
    // A packet of our own that comes back, over a link into its source that its frame names.
    let looped = Subgraph::new(NodeId(2), NodeId(4), [(NodeId(2), NodeId(3)), (NodeId(3), NodeId(2))]);
    let looped = packet(&mut source, &looped.expect("a subgraph"));
    assert_eq!(relay.handle(NodeId(3), &mut looped.clone(), 0), Err(Dropped::OffGraph));
    // A source that is not a member costs no memory.
    let stranger = Subgraph::new(NodeId(77), NodeId(4), [(NodeId(77), NodeId(2)), (NodeId(2), NodeId(4))]);
    let stranger = packet(&mut source, &stranger.expect("a subgraph"));
    assert_eq!(relay.handle(NodeId(77), &mut stranger.clone(), 0), Err(Dropped::OffGraph));
    // Links that do not exist anywhere: the relay forwards on them, and its driver finds no such neighbour.
    let invented = Subgraph::new(NodeId(1), NodeId(4), [(NodeId(1), NodeId(2)), (NodeId(2), NodeId(99))]);
    let invented = packet(&mut source, &invented.expect("a subgraph"));
    let step = relay.handle(NodeId(1), &mut invented.clone(), 0).expect("new");
    assert_eq!(step, Step { deliver: false, next: vec![NodeId(99)] });
    assert_eq!(relay.counts().off_graph, 5);
}

#[test]
fn an_age_grows_by_links_and_never_wraps() {
    let service = Service { deadline: Some(Duration::from_millis(65)), ..DUPLICATE };
    let mut source = Source::new(7);
    let mut packet = source.packet(&service, diamond(), Protocol::Ip, vec![1]);
    assert_eq!(packet.budget_us, 65_000);
    let mut relay = Relay::new(NodeId(2), members(4));
    assert!(relay.handle(NodeId(1), &mut packet, 65_000).is_ok(), "just in time");
    assert_eq!(packet.age_us, 65_000);
    let mut end = Relay::new(NodeId(4), members(4));
    assert_eq!(end.handle(NodeId(2), &mut packet.clone(), 1), Err(Dropped::Late));
    assert_eq!(end.handle(NodeId(2), &mut packet.clone(), u32::MAX), Err(Dropped::Late));
    // A late copy is not remembered: another one may come in time.
    packet.age_us = 10;
    assert!(end.handle(NodeId(2), &mut packet, 1).is_ok());
    assert_eq!((end.counts().late, end.counts().duplicates), (2, 0));
    // Without a budget nothing is late.
    let mut packet = source.packet(&DUPLICATE, diamond(), Protocol::Ip, vec![1]);
    packet.age_us = u32::MAX;
    assert!(end.handle(NodeId(2), &mut packet, u32::MAX).is_ok());
}

#[test]
fn a_source_that_restarts_is_heard_at_once_and_memory_is_bounded() {
    let mut end = Relay::new(NodeId(4), members(4));
    let subgraph = diamond();
    let mut old = Source::new(1);
    let before: Vec<_> = (0..100).map(|_| packet(&mut old, &subgraph)).collect();
    for sent in &before[..99] {
        assert!(end.handle(NodeId(2), &mut sent.clone(), 0).is_ok());
    }
    let mut new = Source::new(2);
    assert!(end.handle(NodeId(2), &mut packet(&mut new, &subgraph), 0).is_ok(), "number 0 again");
    // What was on its way arrives, once.
    assert!(end.handle(NodeId(3), &mut before[99].clone(), 0).is_ok());
    assert_eq!(end.handle(NodeId(3), &mut before[5].clone(), 0), Err(Dropped::Duplicate));
    // A thousand epochs later, the windows are still two; the highest number wraps nothing.
    for epoch in 3..1000 {
        let mut source = Source::new(epoch);
        let mut sent = packet(&mut source, &subgraph);
        sent.sequence = u64::MAX - u64::from(epoch % 3);
        assert!(end.handle(NodeId(2), &mut sent.clone(), 0).is_ok());
        assert_eq!(end.handle(NodeId(2), &mut sent, 0), Err(Dropped::Duplicate));
    }
    assert!(format!("{end:?}").matches("Window").count() <= 2);
}

/// Sends packets through relays over links that lose, repeat and reorder; gives how often each was delivered.
fn run(
    seed: u64,
    subgraph: &Subgraph,
    loss: impl Fn(NodeId, NodeId) -> u64,
    count: u64,
) -> BTreeMap<u64, u64> {
    let mut random = Random::new(seed);
    let mut relays: BTreeMap<_, _> =
        subgraph.nodes().iter().map(|node| (*node, Relay::new(*node, members(9)))).collect();
    let mut source = Source::new(random.next() as u32);
    let mut ways: Vec<(NodeId, NodeId, Spread)> = Vec::new();
    let mut delivered = BTreeMap::new();
    let mut begun = 0;
    while begun < count || !ways.is_empty() {
        let mut sent = Vec::new();
        if begun < count && (ways.is_empty() || random.permille(400)) {
            begun += 1;
            let packet = packet(&mut source, subgraph);
            sent.extend(subgraph.next(subgraph.source()).map(|to| (subgraph.source(), to, packet.clone())));
        } else {
            // Any of the last hundred arrives next.
            let at = ways.len() - 1 - random.below((ways.len() as u64).min(100)) as usize;
            let (from, to, mut packet) = ways.swap_remove(at);
            let Some(relay) = relays.get_mut(&to) else { continue };
            if let Ok(step) = relay.handle(from, &mut packet, 1000) {
                *delivered.entry(packet.sequence).or_default() += u64::from(step.deliver);
                sent.extend(step.next.into_iter().map(|next| (to, next, packet.clone())));
            }
        }
        for (from, to, packet) in sent {
            let copies = if random.permille(loss(from, to)) { 0 } else { 1 + random.below(8) / 7 };
            ways.extend((0..copies).map(|_| (from, to, packet.clone())));
        }
    }
    delivered.retain(|_, times| *times > 0);
    delivered
}

#[test]
fn each_packet_is_delivered_once_over_two_paths_one_of_which_is_dead() {
    each_seed(200, |seed| {
        let dead = NodeId(2 + seed % 2);
        let delivered =
            run(seed, &diamond(), |from, to| if from == dead || to == dead { 1000 } else { 0 }, 300);
        assert_eq!(delivered.len(), 300);
        assert!(delivered.values().all(|times| *times == 1));
    });
}

#[test]
fn no_packet_is_delivered_twice_or_goes_round_in_any_flood() {
    each_seed(200, |seed| {
        let mut random = Random::new(seed);
        let links: Vec<_> = (0..14).map(|_| (random.below(7), random.below(7), 5)).collect();
        let service =
            Service { dissemination: Dissemination::Flood, hops: 6, ..Service::new(LinkKind::BestEffort) };
        let graph = graph(&links, &BTreeSet::new());
        let Some(subgraph) = graph.subgraph(NodeId(0), NodeId(1), &service) else { return };
        // `run` ends only if nothing goes round.
        let delivered = run(seed, &subgraph, |_, _| 100, 100);
        assert!(delivered.values().all(|times| *times == 1));
        assert!(!delivered.is_empty());
    });
}
