//! Reliable flooding in virtual time: honest nodes, lossy links, and liars that drop, delay, replay, change, claim to have what
//! they have not, confirm in the name of the destination, and flood.

use crate::random::{Random, each_seed};
use crate::redundancy::graph;
use crate::world::SimKeys;
use sidetrack_core::overlay::frame::{
    Confirmed, Dissemination, FLOW_WINDOW, FlowName, Frame, Holding, LinkKind, Protocol, Spread, Subgraph,
    Vouched,
};
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::tolerant::Epoch;
use sidetrack_core::overlay::tolerant::batch::{self, Unsigned};
use sidetrack_core::overlay::tolerant::reliable::{Counts, FLOW_BYTES, FLOWS_MAX, Input, Machine, Output};
use sidetrack_core::overlay::tolerant::store::Rate;
use sidetrack_core::overlay::{Keys as _, NodeId, Signature};
use sidetrack_core::time::Instant;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

/// 100 Mb/s.
const FAST: Rate = Rate(12_500_000);

const LINK_US: u64 = 10_000;

/// What a liar does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    Drop,
    Delay,
    Replay,
    Change,
    /// It says that it has everything, and passes nothing on.
    Claim,
    /// It confirms in the name of the destination, and says that it has nothing.
    Confirm,
    /// It sends messages of its own as fast as it can, and what it has heard again and again.
    Flood,
}

const LIES: [Lie; 7] =
    [Lie::Drop, Lie::Delay, Lie::Replay, Lie::Change, Lie::Claim, Lie::Confirm, Lie::Flood];

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// To, from, the bytes of a frame.
    Arrive(NodeId, NodeId, Vec<u8>),
    Wake(NodeId),
}

struct World {
    now: Instant,
    graph: Graph,
    machines: BTreeMap<NodeId, Machine>,
    epochs: BTreeMap<NodeId, u32>,
    liars: BTreeMap<NodeId, Lie>,
    recorded: Vec<Frame>,
    random: Random,
    /// Of a thousand frames.
    loss: u64,
    heap: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    serial: u64,
    woken: BTreeMap<NodeId, Instant>,
    /// What was delivered, in order, by source and destination.
    delivered: BTreeMap<(NodeId, NodeId), Vec<Vec<u8>>>,
    most_kept: (usize, usize),
    down: BTreeSet<(NodeId, NodeId)>,
    flooded: Option<Instant>,
}

impl World {
    fn new(seed: u64, graph: Graph, liars: BTreeMap<NodeId, Lie>, loss: u64) -> Self {
        let names: BTreeSet<_> = graph.links().flat_map(|(a, b, _)| [a, b]).collect();
        let epochs = names.iter().map(|node| (*node, 100 + node.0 as u32)).collect();
        let mut world = Self {
            now: Instant::from_millis(1000),
            graph,
            machines: BTreeMap::new(),
            epochs,
            liars,
            recorded: Vec::new(),
            random: Random::new(seed),
            loss,
            heap: BinaryHeap::new(),
            serial: 0,
            woken: BTreeMap::new(),
            delivered: BTreeMap::new(),
            most_kept: (0, 0),
            down: BTreeSet::new(),
            flooded: None,
        };
        names.iter().for_each(|name| world.start(*name));
        world
    }

    /// Starts a node with nothing, or starts it again.
    fn start(&mut self, name: NodeId) {
        let members = self.epochs.keys().copied().collect();
        self.machines.insert(name, Machine::new(name, self.epochs[&name], members));
        self.tell_epochs(name);
        for neighbour in self.neighbours(name) {
            self.tell(name, Input::Up(neighbour, FAST, 2 * LINK_US as u32));
        }
    }

    fn tell_epochs(&mut self, name: NodeId) {
        let epochs = self.epochs.iter().map(|(node, number)| (*node, Epoch { number: *number, next: 0 }));
        let epochs = epochs.collect();
        self.tell(name, Input::Epochs(epochs));
    }

    /// A node has crashed and is back.
    fn restart(&mut self, name: NodeId) {
        *self.epochs.entry(name).or_default() += 1000;
        self.start(name);
        let others: Vec<_> = self.machines.keys().copied().filter(|other| *other != name).collect();
        others.into_iter().for_each(|other| self.tell_epochs(other));
    }

    fn neighbours(&self, name: NodeId) -> Vec<NodeId> {
        self.graph.neighbours(name).collect()
    }

    fn flow(&self, source: NodeId, destination: NodeId) -> FlowName {
        FlowName { source, destination, epoch: self.epochs[&source], target: self.epochs[&destination] }
    }

    fn tell(&mut self, name: NodeId, input: Input) {
        let Some(machine) = self.machines.get_mut(&name) else { return };
        machine.handle(self.now, input, &SimKeys::of(name));
        let outputs: Vec<_> = std::iter::from_fn(|| machine.poll()).collect();
        if !self.liars.contains_key(&name) {
            let (messages, bytes) = machine.kept();
            self.most_kept = (self.most_kept.0.max(messages), self.most_kept.1.max(bytes));
        }
        let due = machine.deadline();
        for output in outputs {
            match output {
                Output::Message(to, message) => {
                    self.transmit(name, to, Frame::Vouched(Box::new((*message).clone())), 0);
                }
                Output::Holding(to, holding) => self.transmit(name, to, Frame::Holding(Box::new(holding)), 0),
                Output::Deliver(message) => {
                    let source = message.packet.subgraph.source();
                    let payload = message.packet.payload.clone();
                    self.delivered.entry((source, name)).or_default().push(payload);
                }
                Output::Confirmed(_) => {}
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

    fn transmit(&mut self, from: NodeId, to: NodeId, frame: Frame, more_us: u64) {
        if self.random.permille(self.loss) || self.down.contains(&(from.min(to), from.max(to))) {
            return;
        }
        let delay = Duration::from_micros(LINK_US + more_us);
        self.schedule(self.now + delay, Event::Arrive(to, from, frame.to_datagram()));
    }

    fn run_ms(&mut self, ms: u64) {
        let until = self.now + Duration::from_millis(ms);
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
                    let Ok(Some(frame)) = Frame::from_datagram(&bytes) else { continue };
                    match self.liars.get(&to) {
                        Some(lie) => self.lie(to, from, *lie, frame),
                        None => self.came(to, from, frame),
                    }
                }
            }
        }
        self.now = until;
    }

    fn came(&mut self, to: NodeId, from: NodeId, frame: Frame) {
        match frame {
            Frame::Vouched(message) => self.tell(to, Input::Message(from, *message)),
            Frame::Holding(holding) => self.tell(to, Input::Holding(from, *holding)),
            _ => {}
        }
    }

    /// What a liar does with a frame that comes to it.
    fn lie(&mut self, own: NodeId, from: NodeId, lie: Lie, frame: Frame) {
        // Two liars would send each other more and more.
        if self.liars.contains_key(&from) {
            return;
        }
        if self.recorded.len() < 2000 {
            self.recorded.push(frame.clone());
        }
        let neighbours: Vec<_> = self.neighbours(own).into_iter().filter(|next| *next != from).collect();
        let flow = self.flow(NodeId(0), NodeId(1));
        match lie {
            Lie::Drop => {}
            Lie::Delay => {
                let delay = self.random.below(3_000_000);
                neighbours.iter().for_each(|next| self.transmit(own, *next, frame.clone(), delay));
            }
            Lie::Replay => {
                for next in neighbours {
                    let at = self.random.below(self.recorded.len() as u64) as usize;
                    (0..3).for_each(|_| self.transmit(own, next, self.recorded[at].clone(), 0));
                }
            }
            Lie::Change => {
                for next in neighbours {
                    let changed = self.changed(own, frame.clone());
                    self.transmit(own, next, changed, 0);
                }
            }
            Lie::Claim => {
                let holding =
                    Holding { flow, asks: true, confirmed: None, next: u64::MAX, beyond: vec![0xff; 64] };
                self.transmit(own, from, Frame::Holding(Box::new(holding)), 0);
            }
            Lie::Confirm => {
                let next = 1 + self.random.below(u64::MAX - 1);
                let signature = SimKeys::of(own).sign(&flow.confirmed_bytes(next));
                let confirmed = Some(Confirmed { next, signature });
                let holding = Holding { flow, asks: true, confirmed, next, beyond: Vec::new() };
                let nothing = Holding { confirmed: None, next: 0, ..holding.clone() };
                for next in self.neighbours(own) {
                    self.transmit(own, next, Frame::Holding(Box::new(holding.clone())), 0);
                    self.transmit(own, next, Frame::Holding(Box::new(nothing.clone())), 0);
                }
            }
            Lie::Flood => self.flood(own),
        }
    }

    /// Own messages far beyond the window to every node, and old frames again.
    fn flood(&mut self, own: NodeId) {
        // 4 MB/s to each neighbour: a third of what a link carries.
        if self.flooded.is_some_and(|at| self.now.since(at) < Duration::from_millis(2)) {
            return;
        }
        self.flooded = Some(self.now);
        let nodes: Vec<_> = self.machines.keys().copied().filter(|node| *node != own).collect();
        let to = nodes[self.random.below(nodes.len() as u64) as usize];
        let first = self.random.below(2 * FLOW_WINDOW);
        let own_flow = self.flow(own, to);
        let messages = sign(own_flow, first..first + 8, &[0xEE; 900]);
        for next in self.neighbours(own) {
            for message in &messages {
                self.transmit(own, next, Frame::Vouched(Box::new(message.clone())), 0);
            }
            let at = self.random.below(self.recorded.len() as u64) as usize;
            self.transmit(own, next, self.recorded[at].clone(), 0);
        }
    }

    fn changed(&mut self, own: NodeId, frame: Frame) -> Frame {
        match frame {
            Frame::Vouched(mut message) => {
                match self.random.below(4) {
                    0 => message.packet.payload.push(0),
                    1 => {
                        message.packet.sequence =
                            message.packet.sequence.wrapping_add(1 + self.random.below(600))
                    }
                    2 => message.proof.signature.0[self.random.below(64) as usize] ^= 1,
                    // The liar signs in the name of the source.
                    _ => {
                        let packet = (*message.packet).clone();
                        let forged = Unsigned { priority: message.priority, target: message.target, packet };
                        *message = batch::sign(own, [forged], &SimKeys::of(own)).remove(0);
                    }
                }
                Frame::Vouched(message)
            }
            Frame::Holding(mut holding) => {
                match self.random.below(3) {
                    0 => holding.next = self.random.next().max(holding.next),
                    1 => holding.confirmed = None,
                    _ => holding.flow.epoch ^= 1,
                }
                Frame::Holding(holding)
            }
            other => other,
        }
    }

    /// Sends messages 0 to `count` - 1 as the window allows. Returns after all were accepted, or after `limit_ms`.
    fn send_all(&mut self, (source, to): (NodeId, NodeId), count: u32, limit_ms: u64) -> u32 {
        let mut sent = 0;
        let until = self.now + Duration::from_millis(limit_ms);
        while sent < count && self.now < until {
            let room = self.machines[&source].room(to, 4).min(1 + self.random.below(40) as usize);
            let room = u32::try_from(room).unwrap_or(0).min(count - sent);
            let messages = (sent..sent + room).map(|at| (Protocol::Ip, at.to_be_bytes().to_vec())).collect();
            self.tell(source, Input::Send(to, messages));
            sent += room;
            self.run_ms(5);
        }
        sent
    }

    fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        for (_, machine) in self.machines.iter().filter(|(name, _)| !self.liars.contains_key(name)) {
            let counts = machine.counts();
            sum.forged += counts.forged;
            sum.duplicates += counts.duplicates;
            sum.resent += counts.resent;
            sum.blocked += counts.blocked;
            sum.beyond += counts.beyond;
            sum.copies += counts.copies;
        }
        sum
    }

    fn assert_bounded(&self) {
        let nodes = self.machines.len();
        let flows = nodes + FLOWS_MAX;
        assert!(self.most_kept.0 <= flows * FLOW_WINDOW as usize && self.most_kept.1 <= flows * FLOW_BYTES);
    }
}

/// Messages of a flow, as its source signs them.
fn sign(flow: FlowName, sequences: std::ops::Range<u64>, payload: &[u8]) -> Vec<Vouched> {
    let subgraph = Subgraph::new(flow.source, flow.destination, []).expect("two nodes");
    let unsigned = sequences.map(|sequence| {
        let packet = Spread {
            kind: LinkKind::Reliable,
            dissemination: Dissemination::Flood,
            protocol: Protocol::Ip,
            epoch: flow.epoch,
            sequence,
            age_us: 0,
            budget_us: 0,
            subgraph: subgraph.clone(),
            payload: payload.to_vec(),
        };
        Unsigned { priority: 5, target: flow.target, packet }
    });
    batch::sign(flow.source, unsigned, &SimKeys::of(flow.source))
}

fn expected(count: u32) -> Vec<Vec<u8>> {
    (0..count).map(|at| at.to_be_bytes().to_vec()).collect()
}

/// A random network, nodes 0 and 1 in it without a link between them, and liars that leave one honest way.
fn among_liars(random: &mut Random) -> (Graph, BTreeMap<NodeId, Lie>) {
    loop {
        let nodes = 5 + random.below(6);
        let links: Vec<_> = (0..nodes * 2).map(|_| (random.below(nodes), random.below(nodes), 10)).collect();
        let links: Vec<_> = links.into_iter().filter(|(a, b, _)| a != b && a + b != 1).collect();
        let graph = graph(&links, &BTreeSet::new());
        let lie = |node| (NodeId(node), LIES[random.below(LIES.len() as u64) as usize]);
        let liars: BTreeMap<_, _> = (2..nodes).map(lie).collect();
        let liars: BTreeMap<_, _> = liars.into_iter().filter(|_| random.permille(400)).collect();
        let names = liars.keys().copied().collect();
        if !liars.is_empty() && graph.route(NodeId(0), NodeId(1), &names).is_some() {
            return (graph, liars);
        }
    }
}

const ENDS: (NodeId, NodeId) = (NodeId(0), NodeId(1));

#[test]
fn all_messages_arrive_once_and_in_order_while_the_honest_nodes_are_connected() {
    const COUNT: u32 = 600;
    let seen = std::cell::RefCell::new(Counts::default());
    let counts = std::panic::AssertUnwindSafe(&seen);
    each_seed(60, |seed| {
        let mut random = Random::new(seed);
        let (graph, liars) = among_liars(&mut random);
        let loss = [0, 10, 50][random.below(3) as usize];
        let mut world = World::new(seed, graph, liars, loss);
        let sent = world.send_all(ENDS, COUNT, 120_000);
        assert_eq!(sent, COUNT, "blocked for good; liars: {:?}", world.liars);
        for _ in 0..600 {
            if world.delivered.get(&ENDS).is_some_and(|got| got.len() >= COUNT as usize) {
                break;
            }
            world.run_ms(100);
        }
        world.run_ms(3000);
        let got = world.delivered.remove(&ENDS).unwrap_or_default();
        assert_eq!(got, expected(COUNT), "{} of {COUNT}; liars: {:?}", got.len(), world.liars);
        assert_eq!(world.machines[&NodeId(0)].unconfirmed(NodeId(1)), 0, "liars: {:?}", world.liars);
        world.assert_bounded();
        let more = world.counts();
        let mut sum = counts.borrow_mut();
        sum.forged += more.forged;
        sum.duplicates += more.duplicates;
        sum.beyond += more.beyond;
        sum.resent += more.resent;
    });
    let seen = seen.into_inner();
    assert!(
        seen.forged > 1000 && seen.duplicates > 1000 && seen.beyond > 1000 && seen.resent > 1000,
        "{seen:?}"
    );
}

/// ```text
/// 0 -- 2 -- 3 -- 1
///      |         |
///      4 ------- 5
/// ```
fn ring() -> Graph {
    let links = [(0, 2), (2, 3), (3, 1), (2, 4), (4, 5), (5, 1)].map(|(a, b)| (a, b, 10));
    graph(&links, &BTreeSet::new())
}

#[test]
fn a_partition_blocks_the_source_and_loses_nothing() {
    each_seed(30, |seed| {
        let mut world = World::new(seed, ring(), BTreeMap::new(), 20);
        assert_eq!(world.send_all(ENDS, 100, 10_000), 100);
        let cut = [(3, 1), (5, 1)].map(|(a, b)| (NodeId(a).min(NodeId(b)), NodeId(a).max(NodeId(b))));
        world.down.extend(cut);
        let more = world.send_all(ENDS, 5000, 20_000);
        assert!(more as u64 <= FLOW_WINDOW && world.machines[&NodeId(0)].room(NodeId(1), 4) == 0, "{more}");
        // Beyond the window nothing is accepted.
        let blocked = world.counts().blocked;
        world.tell(NodeId(0), Input::Send(NodeId(1), vec![(Protocol::Ip, vec![9])]));
        assert_eq!(world.counts().blocked, blocked + 1);
        world.assert_bounded();
        world.down.clear();
        world.run_ms(20_000);
        let got = world.delivered.remove(&ENDS).unwrap_or_default();
        assert_eq!(got, [expected(100), expected(more)].concat());
        assert_eq!(world.machines[&NodeId(0)].unconfirmed(NodeId(1)), 0);
    });
}

#[test]
fn relays_that_restart_lose_nothing_and_an_end_that_restarts_begins_a_new_flow() {
    each_seed(30, |seed| {
        let mut world = World::new(seed, ring(), BTreeMap::new(), 20);
        let mut sent = 0;
        for round in 0..8 {
            let room = world.machines[&NodeId(0)].room(NodeId(1), 4).min(200) as u32;
            let messages = (sent..sent + room).map(|at| (Protocol::Ip, at.to_be_bytes().to_vec())).collect();
            world.tell(NodeId(0), Input::Send(NodeId(1), messages));
            sent += room;
            world.run_ms(world.random.clone().below(80));
            // After a link, a node forgets all, in the middle of it.
            world.restart(NodeId(2 + round % 4));
            world.run_ms(300);
        }
        world.run_ms(20_000);
        assert_eq!(world.delivered.remove(&ENDS).unwrap_or_default(), expected(sent));
        assert!(sent > FLOW_WINDOW as u32);
        // The destination restarts while messages are under way: the rest is dropped, and the next flow is whole.
        let messages = (0..100_u32).map(|at| (Protocol::Ip, at.to_be_bytes().to_vec())).collect();
        world.tell(NodeId(0), Input::Send(NodeId(1), messages));
        world.run_ms(5);
        world.restart(NodeId(1));
        assert_eq!(world.machines[&NodeId(0)].counts().given_up, 100);
        world.send_all(ENDS, 300, 20_000);
        world.run_ms(10_000);
        let got = world.delivered.remove(&ENDS).unwrap_or_default();
        assert_eq!(got, expected(300));
        // And the source.
        world.restart(NodeId(0));
        world.send_all(ENDS, 300, 20_000);
        world.run_ms(10_000);
        assert_eq!(world.delivered.remove(&ENDS).unwrap_or_default(), expected(300));
    });
}

/// Sources 0, 2 and 3 share the link from 4 to 1, which has 1 Mb/s. 2 sends to three nodes behind it.
#[test]
fn a_source_with_many_flows_gets_one_share() {
    let links = [(0, 4), (2, 4), (3, 4), (4, 1), (1, 5), (1, 6)].map(|(a, b)| (a, b, 10));
    let mut world = World::new(1, graph(&links, &BTreeSet::new()), BTreeMap::new(), 0);
    world.tell(NodeId(4), Input::Up(NodeId(1), Rate(125_000), 2 * LINK_US as u32));
    let ends = [(0, 1), (2, 1), (2, 5), (2, 6), (3, 1)].map(|(a, b)| (NodeId(a), NodeId(b)));
    for _ in 0..4000 {
        for (source, to) in ends {
            let room = world.machines[&source].room(to, 700).min(4);
            let messages = (0..room).map(|_| (Protocol::Ip, vec![0; 700])).collect();
            world.tell(source, Input::Send(to, messages));
        }
        world.run_ms(5);
    }
    let got = |source: u64| {
        let of_source = world.delivered.iter().filter(|((from, _), _)| from.0 == source);
        of_source.map(|(_, messages)| messages.len()).sum::<usize>()
    };
    // 125 messages each second for 20 s, a third for each source.
    let third = 125 * 20 / 3;
    for source in [0, 2, 3] {
        let got = got(source);
        assert!((third * 8 / 10..=third * 12 / 10).contains(&got), "source {source}: {got} of {third}");
    }
    world.assert_bounded();
}

/// What a machine at node 2 makes of a frame, with everything else known.
#[test]
fn frames_that_fit_no_flow_are_counted_and_change_nothing() {
    let members: BTreeSet<_> = (1..=3).map(NodeId).collect();
    let mut machine = Machine::new(NodeId(2), 102, members);
    let (now, keys) = (Instant::from_millis(10), SimKeys::of(NodeId(2)));
    let epochs = [1, 3].map(|node| (NodeId(node), Epoch { number: 100 + node as u32, next: 0 }));
    machine.handle(now, Input::Epochs(epochs.into()), &keys);
    machine.handle(now, Input::Up(NodeId(1), FAST, 20_000), &keys);
    machine.handle(now, Input::Up(NodeId(3), FAST, 20_000), &keys);
    let flow = FlowName { source: NodeId(1), destination: NodeId(3), epoch: 101, target: 103 };
    let mut one = |flow: FlowName, sequence: u64, from: u64, change: fn(&mut Vouched)| {
        let mut message = sign(flow, sequence..sequence + 1, &[1]).remove(0);
        change(&mut message);
        let before = machine.counts();
        machine.handle(now, Input::Message(NodeId(from), message), &keys);
        while machine.poll().is_some() {}
        let after = machine.counts();
        [
            after.relayed - before.relayed,
            after.duplicates - before.duplicates,
            after.beyond - before.beyond,
            after.off_flow - before.off_flow,
            after.forged - before.forged,
            after.replayed - before.replayed,
            after.unknown - before.unknown,
        ]
    };
    let nothing: fn(&mut Vouched) = |_| ();
    assert_eq!(one(flow, 0, 1, nothing), [1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(one(flow, 0, 1, nothing), [0, 1, 0, 0, 0, 0, 0]);
    assert_eq!(one(flow, FLOW_WINDOW, 1, nothing), [0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(one(flow, u64::MAX - 1, 1, nothing), [0, 0, 1, 0, 0, 0, 0], "no number wraps");
    assert_eq!(one(flow, FLOW_WINDOW - 1, 1, nothing), [1, 0, 0, 0, 0, 0, 0], "the last one of the window");
    assert_eq!(one(flow, 1, 9, nothing), [0, 0, 0, 1, 0, 0, 0], "no neighbour");
    let stranger = FlowName { source: NodeId(9), ..flow };
    assert_eq!(one(stranger, 1, 1, nothing), [0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(one(flow, 1, 1, |it| it.packet.kind = LinkKind::BestEffort), [0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(one(flow, 1, 1, |it| it.packet.payload.push(1)), [0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(one(flow, 1, 1, |it| it.proof.signature = Signature::NONE), [0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(one(FlowName { epoch: 100, ..flow }, 1, 1, nothing), [0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(one(FlowName { target: 102, ..flow }, 1, 1, nothing), [0, 0, 0, 0, 0, 1, 0]);
    let own = FlowName { source: NodeId(2), epoch: 102, ..flow };
    assert_eq!(one(own, 1, 1, nothing), [0, 1, 0, 0, 0, 0, 0], "its own comes back");
    assert_eq!(machine.kept(), (2, 2));
    // The destination itself says that it has everything there will ever be: only its own flow suffers.
    let next = u64::MAX;
    let signature = SimKeys::of(NodeId(3)).sign(&flow.confirmed_bytes(next));
    let holding =
        Holding { flow, asks: true, confirmed: Some(Confirmed { next, signature }), next, beyond: vec![1] };
    machine.handle(now, Input::Holding(NodeId(3), holding), &keys);
    let later = now + Duration::from_secs(3600);
    machine.handle(later, Input::Tick, &keys);
    assert_eq!(machine.kept(), (0, 0));
    // A clock that goes back, or far ahead, stops nothing.
    machine.handle(Instant::ZERO, Input::Tick, &keys);
    machine.handle(Instant::from_nanos(u64::MAX), Input::Tick, &keys);
}
