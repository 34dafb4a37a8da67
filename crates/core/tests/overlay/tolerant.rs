//! Packets that arrive although some members lie, in virtual time: relays of honest nodes, and liars that drop, delay, replay,
//! forge, change and flood.

use crate::random::{Random, each_seed};
use crate::redundancy::graph;
use crate::world::SimKeys;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Frame, Protocol, Subgraph, Vouched};
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service, Trust};
use sidetrack_core::overlay::spread::Source;
use sidetrack_core::overlay::tolerant::batch::{self, BATCH_MAX, Unsigned};
use sidetrack_core::overlay::tolerant::store::{BYTES_MAX, PACKETS_MAX, Rate, Store};
use sidetrack_core::overlay::tolerant::{Counts, Epoch, Input, Output, Relay};
use sidetrack_core::time::Instant;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

const FLOOD: Service = Service {
    dissemination: Dissemination::Flood,
    trust: Trust::Tolerant,
    hops: 8,
    ..Service::new(LinkKind::BestEffort)
};

/// 100 Mb/s.
const FAST: Rate = Rate(12_500_000);

const fn epoch_of(node: NodeId) -> u32 {
    100 + node.0 as u32
}

fn sign(own: NodeId, packets: Vec<Unsigned>) -> Vec<Vouched> {
    batch::sign(own, packets, &SimKeys::of(own))
}

/// A node that sends packets.
struct Sender {
    own: NodeId,
    source: Source,
}

impl Sender {
    fn new(own: NodeId) -> Self {
        Self { own, source: Source::new(epoch_of(own)) }
    }

    fn packet(&mut self, subgraph: &Subgraph, priority: u8, payload: Vec<u8>) -> Unsigned {
        let target = epoch_of(subgraph.destination());
        let packet = self.source.packet(&FLOOD, subgraph.clone(), Protocol::Ip, payload);
        Unsigned { priority, target, packet }
    }

    fn vouched(&mut self, subgraph: &Subgraph, payload: Vec<u8>) -> Vouched {
        let packet = self.packet(subgraph, 5, payload);
        sign(self.own, vec![packet]).remove(0)
    }
}

/// What a liar does with the copies that come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    Drop,
    Delay,
    Replay,
    Change,
    Age,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// To, from, the bytes of a frame.
    Arrive(NodeId, NodeId, Vec<u8>),
    Wake(NodeId),
}

/// Honest nodes, liars, and links of 10 ms.
struct World {
    now: Instant,
    graph: Graph,
    relays: BTreeMap<NodeId, Relay>,
    liars: BTreeMap<NodeId, Lie>,
    recorded: Vec<Vouched>,
    random: Random,
    heap: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    serial: u64,
    woken: BTreeMap<NodeId, Instant>,
    /// How often each packet was delivered, by source and payload.
    delivered: BTreeMap<(NodeId, Vec<u8>), u64>,
    most_waiting: usize,
}

impl World {
    fn new(seed: u64, graph: Graph, liars: BTreeMap<NodeId, Lie>, rate: impl Fn(NodeId) -> Rate) -> Self {
        let names: BTreeSet<_> = graph.links().flat_map(|(a, b, _)| [a, b]).collect();
        let mut world = Self {
            now: Instant::from_millis(1000),
            graph,
            relays: BTreeMap::new(),
            liars,
            recorded: Vec::new(),
            random: Random::new(seed),
            heap: BinaryHeap::new(),
            serial: 0,
            woken: BTreeMap::new(),
            delivered: BTreeMap::new(),
            most_waiting: 0,
        };
        for name in &names {
            let relay = Relay::new(*name, epoch_of(*name), names.clone());
            world.relays.insert(*name, relay);
            let epochs = names.iter().map(|node| (*node, Epoch { number: epoch_of(*node), next: 0 }));
            world.tell(*name, Input::Epochs(epochs.collect()));
            let neighbours: Vec<_> = world.graph.neighbours(*name).collect();
            for neighbour in neighbours {
                world.tell(*name, Input::Up(neighbour, rate(*name)));
            }
        }
        world
    }

    fn tell(&mut self, name: NodeId, input: Input) {
        let Some(relay) = self.relays.get_mut(&name) else { return };
        relay.handle(self.now, input, &SimKeys::of(name));
        let outputs: Vec<_> = std::iter::from_fn(|| relay.poll()).collect();
        self.most_waiting = self.most_waiting.max(relay.waiting().0);
        let due = relay.deadline();
        for output in outputs {
            match output {
                Output::Send(to, packet) => self.transmit(name, to, packet, Duration::from_millis(10)),
                Output::Deliver(packet) => {
                    let key = (packet.packet.subgraph.source(), packet.packet.payload.clone());
                    *self.delivered.entry(key).or_default() += 1;
                }
            }
        }
        if let Some(due) = due {
            let due = due.max(self.now + Duration::from_micros(1));
            if self.woken.get(&name).is_none_or(|woken| *woken > due || *woken <= self.now) {
                self.woken.insert(name, due);
                self.schedule(due, Event::Wake(name));
            }
        }
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.serial += 1;
        self.heap.push(Reverse((at, self.serial, event)));
    }

    fn transmit(&mut self, from: NodeId, to: NodeId, packet: Vouched, delay: Duration) {
        let bytes = Frame::Vouched(Box::new(packet)).to_datagram();
        self.schedule(self.now + delay, Event::Arrive(to, from, bytes));
    }

    fn run(&mut self, until: Instant) {
        while let Some(Reverse((at, ..))) = self.heap.peek()
            && *at <= until
        {
            let Some(Reverse((at, _, event))) = self.heap.pop() else { break };
            self.now = at;
            match event {
                Event::Wake(name) => {
                    if self.woken.get(&name) == Some(&at) {
                        self.woken.remove(&name);
                        self.tell(name, Input::Tick);
                    }
                }
                Event::Arrive(to, from, bytes) => {
                    let Ok(Some(Frame::Vouched(packet))) = Frame::from_datagram(&bytes) else { continue };
                    match self.liars.get(&to) {
                        Some(lie) => self.lie(to, from, *lie, *packet),
                        None => self.tell(to, Input::Came(from, *packet, 10_000)),
                    }
                }
            }
        }
        self.now = until;
    }

    fn run_ms(&mut self, ms: u64) {
        self.run(self.now + Duration::from_millis(ms));
    }

    /// What a liar does with a copy, to all of its neighbours.
    fn lie(&mut self, own: NodeId, from: NodeId, lie: Lie, packet: Vouched) {
        // Two liars would send each other more and more.
        if self.liars.contains_key(&from) {
            return;
        }
        self.recorded.push(packet.clone());
        let neighbours: Vec<_> = self.graph.neighbours(own).filter(|next| *next != from).collect();
        for next in neighbours {
            let mut delay = Duration::from_millis(1);
            let mut said = packet.clone();
            match lie {
                Lie::Drop => continue,
                Lie::Delay => delay = Duration::from_millis(self.random.below(3000)),
                Lie::Replay => {
                    let at = self.random.below(self.recorded.len() as u64) as usize;
                    for _ in 0..3 {
                        self.transmit(own, next, self.recorded[at].clone(), delay);
                    }
                }
                Lie::Change => self.change(own, &mut said),
                Lie::Age => said.packet.age_us = self.random.next() as u32,
            }
            self.transmit(own, next, said, delay);
        }
    }

    /// Changes something that the source has vouched for, or its proof, or speaks in the name of another node.
    fn change(&mut self, own: NodeId, said: &mut Vouched) {
        match self.random.below(6) {
            0 => said.packet.payload.push(0),
            1 => said.packet.sequence = said.packet.sequence.wrapping_add(1 + self.random.below(5000)),
            2 => said.priority = said.priority % 10 + 1,
            3 => said.proof.signature.0[self.random.below(64) as usize] ^= 1,
            4 => match said.proof.steps.first_mut() {
                Some(step) => step[0] ^= 1,
                None => said.proof.steps.push([7; 20]),
            },
            // A packet of the source that the liar has signed itself.
            _ => {
                let packet = (*said.packet).clone();
                let forged = Unsigned { priority: said.priority, target: said.target, packet };
                *said = batch::sign(own, [forged], &SimKeys::of(own)).remove(0);
                said.packet.payload = vec![0xEE];
            }
        }
    }

    fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for counts in self.relays.values().map(Relay::counts) {
            sum.forged += counts.forged;
            sum.unchecked += counts.unchecked;
            sum.duplicates += counts.duplicates;
            sum.replayed += counts.replayed;
        }
        sum
    }
}

const LIES: [Lie; 5] = [Lie::Drop, Lie::Delay, Lie::Replay, Lie::Change, Lie::Age];

/// A random network, two ends of it, and liars that leave one honest way between them.
fn among_liars(
    random: &mut Random,
    is_enough: impl Fn(&Graph, &BTreeSet<NodeId>) -> bool,
) -> (Graph, BTreeMap<NodeId, Lie>) {
    loop {
        let nodes = 5 + random.below(6);
        let links: Vec<_> = (0..nodes * 2).map(|_| (random.below(nodes), random.below(nodes), 10)).collect();
        let links: Vec<_> = links.into_iter().filter(|(a, b, _)| a != b && a + b != 1).collect();
        let graph = graph(&links, &BTreeSet::new());
        let mut liars = BTreeMap::new();
        for node in 2..nodes {
            if random.permille(400) {
                liars.insert(NodeId(node), LIES[random.below(5) as usize]);
            }
        }
        let names = liars.keys().copied().collect();
        if !liars.is_empty() && is_enough(&graph, &names) {
            return (graph, liars);
        }
    }
}

/// Sends packets over these links among liars; each must be delivered once, and nothing that the source has not sent.
fn all_arrive(seed: u64, graph: Graph, liars: BTreeMap<NodeId, Lie>, subgraph: &Subgraph) -> Counts {
    const COUNT: u64 = 60;
    let mut world = World::new(seed, graph, liars, |_| FAST);
    let mut sender = Sender::new(NodeId(0));
    let mut sent = 0;
    while sent < COUNT {
        let count = (1 + world.random.below(BATCH_MAX as u64)).min(COUNT - sent);
        let packets = (sent..sent + count).map(|at| sender.packet(subgraph, 5, at.to_be_bytes().to_vec()));
        for packet in sign(NodeId(0), packets.collect()) {
            world.tell(NodeId(0), Input::Send(packet));
        }
        sent += count;
        world.run_ms(30);
    }
    world.run_ms(5000);
    for at in 0..COUNT {
        let times = world.delivered.remove(&(NodeId(0), at.to_be_bytes().to_vec()));
        assert_eq!(times, Some(1), "packet {at}; liars: {:?}", world.liars);
    }
    assert!(world.delivered.is_empty(), "delivered, but never sent: {:?}", world.delivered);
    assert!(world.most_waiting <= 12 * PACKETS_MAX);
    world.counts()
}

#[test]
fn a_flood_arrives_once_while_one_honest_way_exists() {
    let (mut forged, mut duplicates) = (0, 0);
    let counts = std::cell::RefCell::new((&mut forged, &mut duplicates));
    let counts = std::panic::AssertUnwindSafe(&counts);
    each_seed(300, |seed| {
        let mut random = Random::new(seed);
        let honest =
            |graph: &Graph, liars: &BTreeSet<NodeId>| graph.route(NodeId(0), NodeId(1), liars).is_some();
        let (graph, liars) = among_liars(&mut random, honest);
        let subgraph = graph.subgraph(NodeId(0), NodeId(1), &FLOOD).expect("a way");
        let seen = all_arrive(seed, graph, liars, &subgraph);
        let mut counts = counts.borrow_mut();
        *counts.0 += seen.forged;
        *counts.1 += seen.duplicates;
    });
    assert!(forged > 300 && duplicates > 300, "the liars were at work: {forged}, {duplicates}");
}

#[test]
fn packets_on_disjoint_paths_arrive_although_one_node_fewer_lies() {
    each_seed(300, |seed| {
        let mut random = Random::new(seed);
        let three = Service { dissemination: Dissemination::Duplicate, paths: 3, ..FLOOD };
        let subgraph = |graph: &Graph| graph.subgraph(NodeId(0), NodeId(1), &three);
        let (graph, liars) = among_liars(&mut random, |graph, liars| {
            liars.len() <= 2
                && subgraph(graph).is_some_and(|paths| paths.next(NodeId(0)).count() > liars.len())
        });
        let subgraph = subgraph(&graph).expect("paths");
        all_arrive(seed, graph, liars, &subgraph);
    });
}

/// Five sources and a relay that sends to one destination at a tenth of their rate.
///
/// ```text
/// 1 .. 5 --> 6 --> 7
/// ```
#[test]
fn a_source_that_floods_takes_its_share_and_the_others_lose_nothing() {
    let links: Vec<_> = (1..=5).map(|node| (node, 6, 10)).chain([(6, 7, 10)]).collect();
    let graph = graph(&links, &BTreeSet::new());
    // 1 Mb/s.
    let slow = Rate(125_000);
    let mut world = World::new(1, graph, BTreeMap::new(), |node| if node.0 == 6 { slow } else { FAST });
    let mut senders: Vec<_> = (1..=5).map(|node| Sender::new(NodeId(node))).collect();
    let ways: Vec<_> = (1..=5)
        .map(|node| {
            let links = [(NodeId(node), NodeId(6)), (NodeId(6), NodeId(7))];
            Subgraph::new(NodeId(node), NodeId(7), links).expect("a path")
        })
        .collect();
    // With its frame a packet counts 1,000 bytes: 125 each second, 25 for each source. Four sources send 22, and the fifth 250.
    let payload = |number: u32| [&number.to_be_bytes()[..], &[0; 696]].concat();
    let (mut sent, seconds) = ([0; 5], 40);
    for ms in 0..seconds * 1000 {
        for (at, sender) in senders.iter_mut().enumerate() {
            let every = if at == 4 { 4 } else { 45 };
            if (ms + 7 * at as u64).is_multiple_of(every) {
                let packet = sender.vouched(&ways[at], payload(sent[at]));
                sent[at] += 1;
                world.tell(NodeId(at as u64 + 1), Input::Send(packet));
            }
        }
        world.run_ms(1);
    }
    world.run_ms(10_000);
    let mut got = [0; 5];
    for ((source, _), times) in &world.delivered {
        assert_eq!(*times, 1);
        got[source.0 as usize - 1] += 1;
    }
    for at in 0..4 {
        let share = f64::from(got[at]) / f64::from(sent[at]);
        assert!(share >= 0.9, "source {}: {share} of its packets", at + 1);
    }
    // What the others leave is its own, and no more: 125 - 4 x 22.2 each second.
    let flooder = f64::from(got[4]) / seconds as f64;
    assert!((25.0..=50.0).contains(&flooder), "{flooder} packets per second of {}", sent[4]);
    let relay = &world.relays[&NodeId(6)];
    assert!(relay.counts().over_share > 1000, "{:?}", relay.counts());
    assert!(world.most_waiting <= PACKETS_MAX, "{}", world.most_waiting);
}

/// One relay, 2, between 1 and 3.
fn line() -> Subgraph {
    let links = [(1, 2), (2, 3)].map(|(from, to)| (NodeId(from), NodeId(to)));
    Subgraph::new(NodeId(1), NodeId(3), links).expect("a path")
}

fn relay(own: u64, epoch: u32, known: &[(u64, u32, u64)]) -> Relay {
    let mut relay = Relay::new(NodeId(own), epoch, (1..=4).map(NodeId).collect());
    let epochs =
        known.iter().map(|(node, number, next)| (NodeId(*node), Epoch { number: *number, next: *next }));
    relay.handle(Instant::ZERO, Input::Epochs(epochs.collect()), &SimKeys::of(NodeId(own)));
    relay
}

fn came(relay: &mut Relay, now: Instant, from: u64, packet: &Vouched) -> Counts {
    let before = relay.counts();
    relay.handle(now, Input::Came(NodeId(from), packet.clone(), 0), &SimKeys::of(NodeId(9)));
    while relay.poll().is_some() {}
    let after = relay.counts();
    Counts {
        delivered: [after.delivered.iter().sum::<u64>() - before.delivered.iter().sum::<u64>(), 0, 0, 0],
        relayed: after.relayed - before.relayed,
        duplicates: after.duplicates - before.duplicates,
        forged: after.forged - before.forged,
        replayed: after.replayed - before.replayed,
        unknown: after.unknown - before.unknown,
        unchecked: after.unchecked - before.unchecked,
        late: after.late - before.late,
        off_graph: after.off_graph - before.off_graph,
        ..Counts::default()
    }
}

const NOTHING: Counts = Counts {
    copies: 0,
    delivered: [0; 4],
    relayed: 0,
    duplicates: 0,
    late: 0,
    off_graph: 0,
    forged: 0,
    replayed: 0,
    unknown: 0,
    unchecked: 0,
    over_share: 0,
    expired: 0,
};

#[test]
fn a_replay_is_refused_before_and_after_a_restart_of_any_node() {
    let now = Instant::from_millis(10);
    let mut sender = Sender::new(NodeId(1));
    let old: Vec<_> = (0..6000_u32).map(|at| sender.vouched(&line(), at.to_be_bytes().to_vec())).collect();
    let mut end = relay(3, epoch_of(NodeId(3)), &[(1, epoch_of(NodeId(1)), 0)]);
    let delivered = Counts { delivered: [1, 0, 0, 0], ..NOTHING };
    assert_eq!(came(&mut end, now, 2, &old[0]), delivered);
    assert_eq!(came(&mut end, now, 2, &old[0]), Counts { duplicates: 1, ..NOTHING });
    // The destination has restarted: what was made for its earlier run is refused.
    let mut again = relay(3, 77, &[(1, epoch_of(NodeId(1)), 6000)]);
    for packet in [&old[0], &old[5999]] {
        assert_eq!(came(&mut again, now, 2, packet), Counts { replayed: 1, ..NOTHING });
    }
    // A relay has restarted: it knows from the statement which numbers are old.
    let mut middle = relay(2, 77, &[(1, epoch_of(NodeId(1)), 6000)]);
    assert_eq!(came(&mut middle, now, 1, &old[100]), Counts { duplicates: 1, ..NOTHING });
    assert_eq!(came(&mut middle, now, 1, &old[5998]), Counts { relayed: 1, ..NOTHING });
    // The source has restarted: its earlier epoch does not count.
    let mut source = relay(3, epoch_of(NodeId(3)), &[(1, 4242, 0)]);
    assert_eq!(came(&mut source, now, 2, &old[3]), Counts { replayed: 1, ..NOTHING });
    // Nothing is known of it yet, or it is not a member.
    let mut knows_nothing = relay(3, epoch_of(NodeId(3)), &[]);
    assert_eq!(came(&mut knows_nothing, now, 2, &old[3]), Counts { unknown: 1, ..NOTHING });
    assert_eq!(came(&mut end, now, 1, &old[4]), Counts { off_graph: 1, ..NOTHING }, "not that way");
    // The highest number wraps nothing.
    let mut last = old[7].packet.clone();
    last.sequence = u64::MAX;
    let last = Unsigned { priority: 5, target: epoch_of(NodeId(3)), packet: *last };
    let last = sign(NodeId(1), vec![last]).remove(0);
    assert_eq!(came(&mut end, now, 2, &last), delivered);
    assert_eq!(came(&mut end, now, 2, &last), Counts { duplicates: 1, ..NOTHING });
    assert_eq!(came(&mut end, now, 2, &old[8]), Counts { duplicates: 1, ..NOTHING });
}

#[test]
fn every_packet_of_a_batch_is_proven_alone_and_no_changed_bit_passes() {
    let now = Instant::from_millis(10);
    for count in 1..=BATCH_MAX {
        let mut sender = Sender::new(NodeId(1));
        let packets = (0..count).map(|at| sender.packet(&line(), 5, vec![at as u8])).collect();
        let signed = sign(NodeId(1), packets);
        assert_eq!(signed.len(), count);
        for packet in &signed {
            let mut end = relay(3, epoch_of(NodeId(3)), &[(1, epoch_of(NodeId(1)), 0)]);
            assert_eq!(came(&mut end, now, 2, packet), Counts { delivered: [1, 0, 0, 0], ..NOTHING });
            let bytes = Frame::Vouched(Box::new(packet.clone())).to_datagram();
            assert!(bytes.len() <= Vouched::OVERHEAD_BYTES + 200);
        }
    }
    // Each bit of a frame, but those of the age, which relays change.
    let mut sender = Sender::new(NodeId(1));
    let packets = (0..4).map(|at| sender.packet(&line(), 5, vec![at])).collect();
    let bytes = Frame::Vouched(Box::new(sign(NodeId(1), packets)[2].clone())).to_datagram();
    let age = 8 + 2 * 20 + 64 + 3 + 4 + 8;
    for bit in 8..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let Ok(Some(Frame::Vouched(packet))) = Frame::from_datagram(&changed) else { continue };
        let mut end = relay(3, epoch_of(NodeId(3)), &[(1, epoch_of(NodeId(1)), 0)]);
        let counts = came(&mut end, now, 2, &packet);
        let is_age = (age..age + 4).contains(&(bit / 8));
        assert_eq!(counts.delivered[0], u64::from(is_age), "bit {bit}: {counts:?}");
    }
}

#[test]
fn a_neighbour_that_floods_wrong_proofs_costs_few_checks_and_takes_nothing_from_the_source() {
    let mut sender = Sender::new(NodeId(1));
    let links = [(1, 2), (2, 3), (1, 4), (4, 3)].map(|(from, to)| (NodeId(from), NodeId(to)));
    let ways = Subgraph::new(NodeId(1), NodeId(3), links).expect("two paths");
    let mut end = relay(3, epoch_of(NodeId(3)), &[(1, epoch_of(NodeId(1)), 0)]);
    let mut sum = Counts::default();
    for ms in 0..10_000 {
        let now = Instant::from_millis(ms);
        let packet = sender.vouched(&ways, ms.to_be_bytes().to_vec());
        let mut forged = packet.clone();
        forged.packet.payload.push(1);
        let counts = came(&mut end, now, 2, &forged);
        sum.forged += counts.forged;
        sum.unchecked += counts.unchecked;
        if ms % 10 == 0 {
            sum.delivered[0] += came(&mut end, now, 4, &packet).delivered[0];
        }
    }
    // 20 each second, and 40 at once.
    assert!((200..=245).contains(&sum.forged), "{sum:?}");
    assert_eq!((sum.forged + sum.unchecked, sum.delivered[0]), (10_000, 1000));
}

#[test]
fn a_store_is_bounded_and_keeps_the_order() {
    let mut sender = Sender::new(NodeId(1));
    let mut at = |priority: u8, payload: usize, deadline: Option<Duration>| {
        let service = Service { deadline, priority, ..FLOOD };
        let packet = sender.source.packet(&service, line(), Protocol::Ip, vec![0; payload]);
        let packet = Unsigned { priority, target: 0, packet };
        Arc::new(sign(NodeId(1), vec![packet]).remove(0))
    };
    let now = Instant::from_millis(1000);
    let mut store = Store::new(FAST, now);
    let sequences = |store: &mut Store, now: Instant| {
        let mut taken = Vec::new();
        while let Some((packet, _)) = store.take(now) {
            taken.push(packet.packet.sequence);
        }
        taken
    };
    // 0, 1, 2: the highest priority first, and the newest of equal ones.
    for priority in [3, 9, 3] {
        assert_eq!(store.put(now, at(priority, 10, None)), 0);
    }
    let later = now + Duration::from_millis(10);
    assert_eq!(sequences(&mut store, later), [1, 2, 0]);
    // 3 expires; 4 is taken back, because the neighbour has it.
    store.put(now, at(5, 10, Some(Duration::from_millis(5))));
    store.put(now, at(5, 10, None));
    store.put(now, at(5, 10, None));
    store.remove(NodeId(1), 4);
    assert_eq!(sequences(&mut store, later), [5]);
    assert_eq!((store.take_expired(), store.len(), store.bytes()), (1, 0, 0));
    // A clock that goes back, or far ahead, stops nothing.
    store.put(Instant::ZERO, at(5, 10, None));
    assert!(store.take(Instant::ZERO).is_some() || store.deadline().is_some());
    sequences(&mut store, Instant::from_nanos(u64::MAX));
    assert!(store.is_empty());
    // Full: the oldest of the lowest priority leaves.
    let mut store = Store::new(Rate(1), now);
    let first = at(10, 10, None);
    let kept = first.packet.sequence;
    store.put(now, first);
    let mut lost = 0;
    for _ in 0..3 * PACKETS_MAX {
        lost += store.put(now, at(1, 10, None));
        assert!(store.len() <= PACKETS_MAX && store.bytes() <= BYTES_MAX);
    }
    assert_eq!(lost as usize, 2 * PACKETS_MAX + 1);
    assert_eq!(store.take(now).map(|(packet, _)| packet.packet.sequence), Some(kept));
    for _ in 0..100 {
        store.put(now, at(1, 60_000, None));
        assert!(store.bytes() <= BYTES_MAX);
    }
}
