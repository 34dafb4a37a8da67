//! Groups: whose memberships nodes know whatever went wrong, and packets to groups, each of which every member delivers once.

use crate::network::{heal, mischief, wild};
use crate::random::{Random, each_seed};
use crate::redundancy::graph;
use crate::world::{SimKeys, Wire, World, key};
use sidetrack_core::overlay::frame::{Features, Frame, Membership, Protocol, Spread};
use sidetrack_core::overlay::group::head::Head;
use sidetrack_core::overlay::group::{GROUPS_MAX, GroupName};
use sidetrack_core::overlay::node::Input;
use sidetrack_core::overlay::service::{Delivery, Dissemination, LinkKind, Service};
use sidetrack_core::overlay::spread::{Dropped, Relay, Source};
use sidetrack_core::overlay::{Keys, NodeId, Signature};
use std::collections::{BTreeMap, BTreeSet};

fn name(text: &str) -> GroupName {
    text.parse().expect("a name")
}

fn service(dissemination: Dissemination) -> Service {
    Service { dissemination, ..Service::new(LinkKind::BestEffort) }
}

fn wires(links: &[(u64, u64)]) -> BTreeMap<(NodeId, NodeId), Wire> {
    links.iter().map(|(a, b)| (key(NodeId(*a), NodeId(*b)), Wire::clean(5000))).collect()
}

/// A world whose nodes join and leave groups, and the machines that pass packets on.
struct Scene {
    world: World,
    joined: BTreeMap<NodeId, BTreeSet<GroupName>>,
    relays: BTreeMap<NodeId, Relay>,
    sources: BTreeMap<NodeId, Source>,
}

impl Scene {
    fn new(world: World) -> Self {
        let names: BTreeSet<_> = world.nodes.keys().copied().collect();
        let relays = names.iter().map(|node| (*node, Relay::new(*node, names.clone()))).collect();
        let sources = names.iter().map(|node| (*node, Source::new(node.0 as u32))).collect();
        Self { world, joined: BTreeMap::new(), relays, sources }
    }

    fn set(&mut self, node: u64, group: &str, is_member: bool) {
        let joined = self.joined.entry(NodeId(node)).or_default();
        if is_member {
            joined.insert(name(group))
        } else {
            joined.remove(&name(group))
        };
        let joined = joined.clone();
        self.world.tell(NodeId(node), Input::Groups(joined));
    }

    fn members(&self, at: u64, group: &str) -> Vec<u64> {
        let groups = self.world.node(NodeId(at)).groups();
        groups.members(&name(group)).map(|node| node.0).collect()
    }

    /// Sends a packet by what its source knows, over the wires that are up. Gives how often each node delivered it.
    fn send(&mut self, from: NodeId, group: &GroupName, service: &Service) -> BTreeMap<NodeId, u32> {
        let node = self.world.node(from);
        let network = node.graph().of_groups();
        let branches = network.branches(from, node.groups().members(group), service);
        let mut under_way: Vec<(NodeId, NodeId, Spread)> = Vec::new();
        let source = self.sources.get_mut(&from).expect("a source");
        for branch in branches {
            let head =
                Head { delivery: Delivery::Group, deliverers: branch.deliverers, group: group.clone() };
            let packet = source.packet(service, branch.subgraph, Protocol::Group, head.payload(b"ip"));
            under_way.extend(packet.subgraph.next(from).map(|to| (from, to, packet.clone())));
        }
        let mut delivered = BTreeMap::new();
        while let Some((from, to, mut packet)) = under_way.pop() {
            let is_up = self.world.wires.get(&key(from, to)).is_some_and(|wire| wire.up);
            if !is_up || self.world.nodes[&to].is_none() {
                continue;
            }
            let Some(Ok(step)) = self.relays.get_mut(&to).map(|relay| relay.handle(from, &mut packet, 1))
            else {
                continue;
            };
            let is_member = self.joined.get(&to).is_some_and(|joined| joined.contains(group));
            if step.deliver && is_member {
                *delivered.entry(to).or_default() += 1;
            }
            under_way.extend(step.next.into_iter().map(|next| (to, next, packet.clone())));
        }
        delivered
    }
}

#[test]
fn all_nodes_know_all_members_and_who_left() {
    let mut scene = Scene::new(World::new(1, wires(&[(1, 2), (2, 3), (3, 4)])));
    scene.world.run_ms(1000);
    scene.set(1, "tv", true);
    scene.set(4, "tv", true);
    scene.set(4, "ops", true);
    scene.world.run_ms(200);
    for node in 1..=4 {
        assert_eq!((scene.members(node, "tv"), scene.members(node, "ops")), (vec![1, 4], vec![4]), "{node}");
    }
    scene.set(4, "tv", false);
    scene.world.run_ms(200);
    for node in 1..=4 {
        assert_eq!((scene.members(node, "tv"), scene.members(node, "ops")), (vec![1], vec![4]), "{node}");
    }
    // A member that dies is known until its record expires, and gets nothing. One that starts again is in no group.
    scene.world.crash(NodeId(4));
    scene.world.run_ms(5000);
    assert_eq!(scene.members(1, "ops"), [4]);
    assert_eq!(scene.send(NodeId(1), &name("ops"), &service(Dissemination::Shortest)).len(), 0);
    scene.world.start(NodeId(4));
    scene.world.run_ms(5000);
    assert_eq!(scene.members(1, "ops"), [0; 0]);
    scene.set(4, "ops", true);
    scene.world.run_ms(500);
    assert_eq!(scene.members(1, "ops"), [4]);
    scene.world.crash(NodeId(4));
    scene.world.run_ms(110_000);
    assert_eq!(scene.members(1, "ops"), [0; 0], "expired");
}

#[test]
fn memberships_are_the_same_everywhere_whatever_went_wrong_before() {
    each_seed(16, |seed| {
        let mut random = Random::new(seed);
        let nodes = 4 + seed % 7;
        let mut scene = Scene::new(World::new(seed, World::topology(&mut random, nodes, wild)));
        scene.world.run_ms(1000);
        for _ in 0..30 {
            let node = 1 + random.below(nodes);
            let group = ["a", "b", "c"][random.below(3) as usize];
            if scene.world.nodes[&NodeId(node)].is_some() {
                scene.set(node, group, random.permille(600));
            }
            scene.world.run_ms(20 + random.below(200));
            mischief(&mut scene.world, &BTreeSet::new());
            // A node that restarts is in no group until it joins again.
            let dead: Vec<_> = scene.world.nodes.iter().filter(|(_, node)| node.is_none()).collect();
            let dead: Vec<_> = dead.into_iter().map(|(node, _)| *node).collect();
            for node in dead {
                scene.joined.remove(&node);
            }
        }
        heal(&mut scene.world);
        scene.world.run_ms(40_000);
        let truth: Vec<_> =
            scene.joined.iter().flat_map(|(node, groups)| groups.iter().map(|g| (g, *node))).collect();
        for node in scene.world.alive() {
            let groups = scene.world.node(node).groups().clone();
            let known: BTreeSet<_> =
                groups.all().flat_map(|(group, members)| members.iter().map(move |m| (group, *m))).collect();
            assert_eq!(known, truth.iter().copied().collect(), "{node}");
        }
    });
}

#[test]
fn each_packet_to_a_stable_member_arrives_once_while_others_join_and_leave() {
    each_seed(60, |seed| {
        let mut random = Random::new(seed);
        let nodes = 4 + seed % 9;
        let jittery =
            |random: &mut Random| Wire { jitter_us: 3000, ..Wire::clean(1000 + random.below(20_000)) };
        let mut scene = Scene::new(World::new(seed, World::topology(&mut random, nodes, jittery)));
        let group = name("tv");
        let stable: BTreeSet<_> = (1..=nodes).filter(|node| *node == 2 || random.permille(300)).collect();
        scene.world.run_ms(1500);
        for node in &stable {
            scene.set(*node, "tv", true);
        }
        scene.world.run_ms(1000);
        for _ in 0..60 {
            let node = 1 + random.below(nodes);
            if !stable.contains(&node) {
                scene.set(node, "tv", random.permille(500));
            }
            // A change may be anywhere between nothing and all nodes when a packet is sent.
            scene.world.run_ms(random.below(40));
            let from = NodeId(1 + random.below(nodes));
            let way = Dissemination::ALL[random.below(4) as usize];
            let delivered = scene.send(from, &group, &service(way));
            assert!(delivered.values().all(|times| *times == 1), "{from} {way:?}: {delivered:?}");
            for member in stable.iter().filter(|member| NodeId(**member) != from) {
                assert!(
                    delivered.contains_key(&NodeId(*member)),
                    "{from} {way:?} to {member}: {delivered:?}"
                );
            }
        }
    });
}

#[test]
fn nothing_comes_twice_while_links_and_nodes_fail() {
    each_seed(40, |seed| {
        let mut random = Random::new(seed);
        let nodes = 4 + seed % 7;
        let mut scene = Scene::new(World::new(seed, World::topology(&mut random, nodes, wild)));
        scene.world.run_ms(1000);
        let mut arrived = 0;
        for _ in 0..40 {
            let node = 1 + random.below(nodes);
            if scene.world.nodes[&NodeId(node)].is_some() {
                scene.set(node, "tv", random.permille(700));
            }
            scene.world.run_ms(20 + random.below(200));
            mischief(&mut scene.world, &BTreeSet::from([NodeId(1)]));
            let way = Dissemination::ALL[random.below(4) as usize];
            let delivered = scene.send(NodeId(1), &name("tv"), &service(way));
            assert!(delivered.values().all(|times| *times == 1), "{way:?}: {delivered:?}");
            arrived += delivered.len();
        }
        assert!(arrived > 0);
    });
}

#[test]
fn memberships_that_are_forged_old_or_of_strangers_change_nothing() {
    let mut scene = Scene::new(World::new(1, wires(&[(1, 2), (2, 3), (1, 3)])));
    scene.world.run_ms(2000);
    scene.set(3, "tv", true);
    scene.world.run_ms(200);
    let signed = |origin: u64, sequence: u64, groups: &[&str]| {
        let groups = groups.iter().map(|text| name(text)).collect();
        let mut record = Membership { origin: NodeId(origin), sequence, groups, signature: Signature::NONE };
        record.signature = SimKeys::of(NodeId(origin)).sign(&record.signed_bytes());
        record
    };
    let good = signed(3, 1000, &["radio"]);
    let mut tell = |record: &Membership| {
        scene.world.tell(NodeId(1), Input::Frame(NodeId(2), Frame::Membership(record.clone())));
        scene.world.run_ms(100);
        let groups = scene.world.node(NodeId(1)).groups().clone();
        groups.all().map(|(name, members)| (name.to_string(), members.len())).collect::<Vec<_>>()
    };
    let before = vec![("tv".to_owned(), 1)];
    // Another signature, other content under the same signature, another origin, and an old number.
    for forged in [
        Membership { signature: Signature([7; 64]), ..good.clone() },
        Membership { groups: vec![name("all")], ..good.clone() },
        Membership { origin: NodeId(2), ..good.clone() },
        signed(99, 1000, &["radio"]),
        signed(3, 0, &["radio"]),
    ] {
        assert_eq!(tell(&forged), before, "{forged:?}");
    }
    // What node 3 did not say to node 1 is answered: it says it again with a higher number.
    tell(&good);
    scene.world.run_ms(1000);
    assert_eq!(scene.members(1, "tv"), [3], "its own word counts");
    assert_eq!(scene.members(1, "radio"), [0; 0]);
    let drops = scene.world.node(NodeId(1)).group_drops();
    assert_eq!((drops.forged, drops.strangers), (3, 1));
}

#[test]
fn a_flood_of_signed_memberships_is_limited() {
    let mut scene = Scene::new(World::new(1, wires(&[(1, 2)])));
    scene.world.run_ms(2000);
    for sequence in 1000..2000 {
        let groups = vec![name(&format!("g{}", sequence % 2))];
        let mut record = Membership { origin: NodeId(2), sequence, groups, signature: Signature::NONE };
        record.signature = SimKeys::of(NodeId(2)).sign(&record.signed_bytes());
        scene.world.tell(NodeId(1), Input::Frame(NodeId(2), Frame::Membership(record)));
    }
    assert!(scene.world.node(NodeId(1)).group_drops().too_fast > 900);
}

#[test]
fn a_thousand_groups_fit_and_no_node_can_fill_more_than_its_place() {
    let mut scene = Scene::new(World::new(1, wires(&[(1, 2), (2, 3), (3, 4), (4, 5)])));
    scene.world.run_ms(2000);
    for node in 1..=4 {
        // Node 1 wants more than it may.
        let most = if node == 1 { 5000 } else { 250 };
        let names = (0..most).map(|number| name(&format!("group-{node}-{number:04}"))).collect();
        scene.world.tell(NodeId(node), Input::Groups(names));
    }
    scene.world.run_ms(2000);
    let groups = scene.world.node(NodeId(5)).groups().clone();
    assert_eq!(groups.all().count(), GROUPS_MAX + 750);
    assert_eq!(groups.all().filter(|(_, members)| members.contains(&NodeId(1))).count(), GROUPS_MAX);
    // They stay while nothing changes, and go when their members leave.
    scene.world.run_ms(130_000);
    assert_eq!(scene.world.node(NodeId(5)).groups().all().count(), GROUPS_MAX + 750);
    for node in 1..=4 {
        scene.world.tell(NodeId(node), Input::Groups(BTreeSet::new()));
    }
    scene.world.run_ms(2000);
    assert_eq!(scene.world.node(NodeId(5)).groups().all().count(), 0);
}

#[test]
fn old_nodes_go_on_and_get_no_memberships() {
    // 3 runs version 1; 4 is new, but only an old node leads to it.
    let mut world = World::new(1, wires(&[(1, 2), (2, 3), (3, 4)]));
    world.crash(NodeId(3));
    world.old.insert(NodeId(3), 0);
    world.start(NodeId(3));
    let mut scene = Scene::new(world);
    scene.world.run_ms(2000);
    scene.set(1, "tv", true);
    scene.set(4, "tv", true);
    scene.world.run_ms(1000);
    assert_eq!((scene.members(2, "tv"), scene.members(4, "tv")), (vec![1], vec![4]));
    assert_eq!(scene.world.node(NodeId(3)).groups().all().count(), 0);
    // Nothing is sent to the old node again and again.
    let before = scene.world.carried[&(NodeId(2), NodeId(3))];
    scene.world.run_ms(2000);
    let hellos = scene.world.carried[&(NodeId(2), NodeId(3))] - before;
    let before = scene.world.carried[&(NodeId(1), NodeId(2))];
    scene.world.run_ms(2000);
    let same = scene.world.carried[&(NodeId(1), NodeId(2))] - before;
    assert!(hellos <= same + 200, "{hellos} bytes in 2 s to the old node, {same} to the new one");
    // It is updated, and both sides know each other.
    scene.world.crash(NodeId(3));
    scene.world.old.clear();
    scene.world.start_at(NodeId(3), 1_000_000);
    scene.world.run_ms(3000);
    assert_eq!((scene.members(1, "tv"), scene.members(4, "tv")), (vec![1, 4], vec![1, 4]));
    assert_eq!(scene.send(NodeId(1), &name("tv"), &service(Dissemination::Shortest)).len(), 1);
}

#[test]
fn a_tree_sends_one_copy_over_each_link_and_a_large_group_gets_several_packets() {
    // A hub 0 with 70 spokes, a ring around, and the source 100 at the hub.
    let spokes = (1..=70).map(|node| (0, node, 10));
    let ring = (1..=70).map(|node| (node, node % 70 + 1, 1000));
    let links: Vec<_> = spokes.chain(ring).chain([(100, 0, 10)]).collect();
    let network = graph(&links, &BTreeSet::new()).of_groups();
    let members: BTreeSet<_> = (1..=70).map(NodeId).collect();
    let branches = network.branches(NodeId(100), members.clone(), &service(Dissemination::Shortest));
    // 32 nodes: the source, the hub and 30 members.
    assert_eq!(branches.len(), 3);
    let mut reached: Vec<_> = Vec::new();
    for branch in &branches {
        let nodes = branch.subgraph.nodes();
        assert_eq!(branch.subgraph.links().count(), nodes.len() - 1, "a tree");
        reached
            .extend(nodes.iter().enumerate().filter(|(at, _)| branch.deliverers.has(*at)).map(|(_, n)| *n));
    }
    assert_eq!(reached.len(), 70, "each once");
    assert_eq!(reached.into_iter().collect::<BTreeSet<_>>(), members);
    // The source gets no packet of its own. Unknown members are ignored.
    let few = [NodeId(100), NodeId(3), NodeId(999)];
    let branches = network.branches(NodeId(100), few, &service(Dissemination::Duplicate));
    assert_eq!(branches.len(), 1);
    assert_eq!(branches[0].subgraph.destination(), NodeId(3));
    assert_eq!(network.branches(NodeId(100), [NodeId(999)], &service(Dissemination::Flood)), []);
}

#[test]
fn the_nearest_member_is_the_cheapest_one_that_is_there() {
    let network = graph(&[(1, 2, 10), (2, 3, 10), (1, 4, 50), (1, 5, 20)], &BTreeSet::new()).of_groups();
    let nearest = |members: &[u64]| network.nearest(NodeId(1), members.iter().copied().map(NodeId));
    assert_eq!(nearest(&[4, 3, 2]), Some(NodeId(2)));
    assert_eq!(nearest(&[4, 3]), Some(NodeId(3)));
    assert_eq!(nearest(&[5, 3]), Some(NodeId(3)), "of two that cost the same, the lower one");
    let others = [1, 4, 9, 5, 3, 2].map(NodeId);
    let in_order = [2, 3, 5, 4].map(NodeId);
    assert_eq!(network.by_distance(NodeId(1), others), in_order, "without the node itself and the unknown");
    assert_eq!(
        (nearest(&[1, 4]), nearest(&[1]), nearest(&[9]), nearest(&[])),
        (Some(NodeId(4)), None, None, None)
    );
    // A node that does not know groups is neither a member nor a relay.
    let network = graph(&[(1, 2, 10), (2, 3, 10), (1, 4, 50)], &BTreeSet::from([2])).of_groups();
    assert_eq!(network.nearest(NodeId(1), [2, 3, 4].map(NodeId)), Some(NodeId(4)));
    assert_eq!(Features::ALL & Features::GROUPS, Features::GROUPS);
}

#[test]
fn packets_to_groups_that_are_changed_or_said_again_are_not_delivered() {
    let network = graph(&[(1, 2, 10), (2, 3, 10)], &BTreeSet::new()).of_groups();
    let service = service(Dissemination::Shortest);
    let branch = network.branches(NodeId(1), [2, 3].map(NodeId), &service).remove(0);
    let head = Head { delivery: Delivery::Group, deliverers: branch.deliverers, group: name("tv") };
    let members: BTreeSet<_> = (1..=3).map(NodeId).collect();
    let mut source = Source::new(1);
    let mut packet =
        |payload: Vec<u8>| source.packet(&service, branch.subgraph.clone(), Protocol::Group, payload);
    let mut relay = Relay::new(NodeId(2), members.clone());
    let good = packet(head.payload(b"ip"));
    let step = relay.handle(NodeId(1), &mut good.clone(), 1).expect("new");
    assert_eq!((step.deliver, step.next), (true, vec![NodeId(3)]));
    assert_eq!(relay.handle(NodeId(1), &mut good.clone(), 1), Err(Dropped::Duplicate));
    // A head that is cut at any byte, or names other nodes, is not delivered; relays pass it on unread.
    let whole = head.payload(b"");
    for length in 0..whole.len() {
        let step = relay.handle(NodeId(1), &mut packet(whole[..length].to_vec()), 1).expect("new");
        assert_eq!((step.deliver, step.next), (false, vec![NodeId(3)]), "{length}");
    }
    let mut others = head.clone();
    others.deliverers.0 = 0xffff_fff0;
    assert!(!relay.handle(NodeId(1), &mut packet(others.payload(b"ip")), 1).expect("new").deliver);
    // The last numbers of a source.
    let mut end = Relay::new(NodeId(3), members);
    for sequence in [u64::MAX - 1, u64::MAX] {
        let mut last = Spread { sequence, ..packet(head.payload(b"ip")) };
        assert!(end.handle(NodeId(2), &mut last.clone(), 1).expect("new").deliver);
        assert_eq!(end.handle(NodeId(2), &mut last, 1), Err(Dropped::Duplicate));
    }
}
