//! Whole overlays on a virtual clock: nodes, links that do what they like, and flows between nodes.

use crate::random::Random;
use sidetrack_core::overlay::frame::{
    Decoder, Frame, HASH_BYTES, Hash, LinkEntry, Packet, Path, Protocol, Record, SessionFrame,
};
use sidetrack_core::overlay::node::{Config, Input, Node, Output};
use sidetrack_core::overlay::session::{self, Session};
use sidetrack_core::overlay::tolerant::Vouch;
use sidetrack_core::overlay::{Keys, NodeId, SIGNATURE_BYTES, Signature, disseminate};
use sidetrack_core::time::Instant;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

/// A keyed sum: stands for Ed25519 and for the seal of a datagram. No node here knows the key of another.
fn keyed_sum(key: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(key ^ 0xCBF2_9CE4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// The keys of all members, as the simulation has them.
#[derive(Clone, Debug)]
pub(crate) struct SimKeys(NodeId);

impl SimKeys {
    /// The keys as this node has them.
    pub(crate) const fn of(node: NodeId) -> Self {
        Self(node)
    }
}

impl Vouch for SimKeys {
    fn digest(&self, bytes: &[u8]) -> Hash {
        let mut hash = [0; HASH_BYTES];
        for (at, part) in hash.chunks_mut(8).enumerate() {
            let sum = keyed_sum(at as u64, bytes).to_be_bytes();
            part.copy_from_slice(&sum[..part.len()]);
        }
        hash
    }
}

const fn secret(node: NodeId) -> u64 {
    node.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xA5A5
}

impl Keys for SimKeys {
    fn sign(&self, bytes: &[u8]) -> Signature {
        let mut signature = [0; SIGNATURE_BYTES];
        signature[..8].copy_from_slice(&keyed_sum(secret(self.0), bytes).to_be_bytes());
        Signature(signature)
    }

    fn verify(&self, node: NodeId, bytes: &[u8], signature: &Signature) -> bool {
        SimKeys(node).sign(bytes) == *signature
    }
}

/// How a link treats what travels on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    pub up: bool,
    pub delay_us: u64,
    pub jitter_us: u64,
    /// Of a thousand.
    pub loss: u64,
    pub duplicate: u64,
    pub corrupt: u64,
}

impl Wire {
    pub(crate) const fn clean(delay_us: u64) -> Self {
        Self { up: true, delay_us, jitter_us: 0, loss: 0, duplicate: 0, corrupt: 0 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A sealed datagram arrives: to, from, bytes.
    Arrive(NodeId, NodeId, Vec<u8>),
    /// A node has something to do.
    Wake(NodeId),
    /// A flow has something to do.
    Flow(usize),
}

/// A flow between two nodes.
pub(crate) struct Flow {
    pub nodes: [NodeId; 2],
    pub ends: [Session; 2],
    pub total: [u64; 2],
    pub read: [u64; 2],
    pub got: [u64; 2],
    pub fin: [bool; 2],
    pub closed: [Option<bool>; 2],
}

/// Nodes and links on a virtual clock, with faults.
pub(crate) struct World {
    pub now: Instant,
    pub nodes: BTreeMap<NodeId, Option<Node<SimKeys>>>,
    /// By both ends, the lower first.
    pub wires: BTreeMap<(NodeId, NodeId), Wire>,
    pub flows: Vec<Flow>,
    pub random: Random,
    pub liar: Option<NodeId>,
    /// What nodes of older versions understand, 0 in version 1. Nodes that are not listed are new.
    pub old: BTreeMap<NodeId, u32>,
    /// When each node last learned of other routes.
    pub changed_at: BTreeMap<NodeId, Instant>,
    /// Datagrams whose seal was broken.
    pub broken_seals: u64,
    /// Bytes sent on each link, both ways.
    pub carried: BTreeMap<(NodeId, NodeId), u64>,
    /// How far the clock of each node is ahead of the world's.
    pub ahead: BTreeMap<NodeId, Duration>,
    /// Nodes that are suspended, and until when: what comes for them waits.
    asleep: BTreeMap<NodeId, Instant>,
    /// How often a node has said that a link is down.
    pub downs: u64,
    /// A sum over everything that happened.
    pub trace: u64,
    heap: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    serial: u64,
    woken: BTreeMap<NodeId, Instant>,
    echoes: BTreeSet<Vec<u8>>,
}

pub(crate) const fn key(a: NodeId, b: NodeId) -> (NodeId, NodeId) {
    if a.0 < b.0 { (a, b) } else { (b, a) }
}

impl World {
    /// A world of these links; every node starts at once.
    pub(crate) fn new(seed: u64, wires: BTreeMap<(NodeId, NodeId), Wire>) -> Self {
        let names: BTreeSet<_> = wires.keys().flat_map(|(a, b)| [*a, *b]).collect();
        let mut world = Self {
            now: Instant::ZERO,
            nodes: names.iter().map(|name| (*name, None)).collect(),
            wires,
            flows: Vec::new(),
            random: Random::new(seed),
            liar: None,
            old: BTreeMap::new(),
            changed_at: BTreeMap::new(),
            broken_seals: 0,
            carried: BTreeMap::new(),
            ahead: BTreeMap::new(),
            asleep: BTreeMap::new(),
            downs: 0,
            trace: seed,
            heap: BinaryHeap::new(),
            serial: 0,
            woken: BTreeMap::new(),
            echoes: BTreeSet::new(),
        };
        names.into_iter().for_each(|name| world.start(name));
        world
    }

    /// A connected random network: a ring, and chords.
    pub(crate) fn topology(
        random: &mut Random,
        nodes: u64,
        mut wire: impl FnMut(&mut Random) -> Wire,
    ) -> BTreeMap<(NodeId, NodeId), Wire> {
        let mut wires = BTreeMap::new();
        for at in 0..nodes {
            wires.insert(key(NodeId(at + 1), NodeId((at + 1) % nodes + 1)), wire(random));
            let far = random.below(nodes);
            if far != at {
                wires.insert(key(NodeId(at + 1), NodeId(far + 1)), wire(random));
            }
        }
        wires
    }

    /// Starts a node that remembers nothing, as after a crash: its first sequence is the same every time.
    pub(crate) fn start(&mut self, name: NodeId) {
        self.start_at(name, 1);
    }

    /// The same, where the wall clock, and so the first sequence, is this.
    pub(crate) fn start_at(&mut self, name: NodeId, wall: u64) {
        let members = self.nodes.keys().copied().collect();
        let mut config = Config::new(disseminate::Config::new(name, members, wall));
        config.features = self.old.get(&name).copied().unwrap_or(config.features);
        let now = self.time(name);
        let mut node = Node::new(config, SimKeys(name), now);
        let neighbours: Vec<_> = self.neighbours(name);
        for neighbour in neighbours {
            node.handle(now, Input::LinkOpened(neighbour));
        }
        self.nodes.insert(name, Some(node));
        self.drain(name);
    }

    pub(crate) fn crash(&mut self, name: NodeId) {
        self.nodes.insert(name, None);
        self.woken.remove(&name);
    }

    pub(crate) fn neighbours(&self, name: NodeId) -> Vec<NodeId> {
        let pairs = self.wires.keys();
        pairs.filter_map(|(a, b)| if *a == name { Some(*b) } else { (*b == name).then_some(*a) }).collect()
    }

    pub(crate) fn node(&self, name: NodeId) -> &Node<SimKeys> {
        self.nodes[&name].as_ref().expect("alive")
    }

    /// What a node's clock shows.
    pub(crate) fn time(&self, name: NodeId) -> Instant {
        self.now + self.ahead.get(&name).copied().unwrap_or_default()
    }

    /// A node's clock leaps to be so far ahead of the world's; less than before: it goes back.
    pub(crate) fn leap(&mut self, name: NodeId, ahead: Duration) {
        self.ahead.insert(name, ahead);
        // A node that waits for a time waits for one of the new clock.
        self.drain(name);
    }

    /// Suspends a node: it does nothing, and what comes waits. Its clock goes on or, as `CLOCK_MONOTONIC` does, stands.
    pub(crate) fn suspend(&mut self, name: NodeId, for_so_long: Duration, clock_stands: bool) {
        self.asleep.insert(name, self.now + for_so_long);
        if clock_stands {
            let ahead = self.ahead.entry(name).or_default();
            *ahead = ahead.saturating_sub(for_so_long);
        }
    }

    /// When this node will be awake; none: it is.
    fn wakes_at(&self, name: NodeId) -> Option<Instant> {
        self.asleep.get(&name).copied().filter(|at| *at > self.now)
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.serial += 1;
        self.heap.push(Reverse((at, self.serial, event)));
    }

    /// Runs until this time.
    pub(crate) fn run(&mut self, until: Instant) {
        while let Some(Reverse((at, ..))) = self.heap.peek()
            && *at <= until
        {
            let Some(Reverse((at, _, event))) = self.heap.pop() else { break };
            self.now = at;
            self.trace = keyed_sum(self.trace, &at.as_nanos().to_be_bytes());
            let sleeper = match &event {
                Event::Arrive(name, ..) | Event::Wake(name) => Some(*name),
                Event::Flow(_) => None,
            };
            if let Some(until) = sleeper.and_then(|name| self.wakes_at(name)) {
                if matches!(event, Event::Wake(name) if self.woken.get(&name) == Some(&at)) {
                    self.woken.extend(sleeper.map(|name| (name, until)));
                }
                self.schedule(until, event);
                continue;
            }
            match event {
                Event::Arrive(to, from, bytes) => self.arrive(to, from, &bytes),
                Event::Wake(name) => {
                    if self.woken.get(&name) == Some(&at) {
                        self.woken.remove(&name);
                        self.tell(name, Input::Tick);
                    }
                }
                Event::Flow(flow) => self.flow(flow),
            }
        }
        self.now = until;
    }

    pub(crate) fn run_ms(&mut self, ms: u64) {
        self.run(self.now + Duration::from_millis(ms));
    }

    pub(crate) fn tell(&mut self, name: NodeId, input: Input) {
        let now = self.time(name);
        if let Some(Some(node)) = self.nodes.get_mut(&name) {
            node.handle(now, input);
            self.drain(name);
        }
    }

    fn drain(&mut self, name: NodeId) {
        loop {
            let Some(Some(node)) = self.nodes.get_mut(&name) else { return };
            match node.poll() {
                Some(Output::Send(to, frame)) => {
                    let frame = if self.liar == Some(name) { self.lie(name, to, frame) } else { frame };
                    self.transmit(name, to, &frame);
                }
                Some(Output::Hello(to, hello, _)) => self.transmit(name, to, &Frame::Hello(hello)),
                Some(Output::RoutesChanged) => {
                    self.changed_at.insert(name, self.now);
                }
                Some(Output::Deliver(packet)) => self.deliver(packet),
                Some(Output::LinkDown(_)) => self.downs += 1,
                Some(Output::LinkUp(_) | Output::GroupsChanged) => {}
                None => break,
            }
        }
        let Some(Some(node)) = self.nodes.get(&name) else { return };
        if let Some(at) = node.deadline() {
            let at = self.now + at.since(self.time(name)).max(Duration::from_micros(1));
            if self.woken.get(&name).is_none_or(|woken| *woken > at || *woken <= self.now) {
                self.woken.insert(name, at);
                self.schedule(at, Event::Wake(name));
            }
        }
    }

    /// What the liar says instead of its own record: links to all nodes that cost nothing. It also changes other nodes' records
    /// with links of its choice, whose signature then fits no more.
    fn lie(&mut self, name: NodeId, to: NodeId, frame: Frame) -> Frame {
        let Frame::Record(record) = frame else { return frame };
        let others = self.nodes.keys().copied().filter(|other| *other != record.origin);
        let links: Vec<_> = others.map(|neighbour| LinkEntry { neighbour, cost_us: 1 }).collect();
        let false_record = Record { links, ..record.clone() };
        if record.origin == name {
            return Frame::Record(self.resigned(name, false_record));
        }
        let forged = Frame::Record(Record { sequence: record.sequence + 1000, ..false_record });
        self.transmit(name, to, &forged);
        Frame::Record(record)
    }

    fn resigned(&self, name: NodeId, record: Record) -> Record {
        let signature = SimKeys(name).sign(&record.signed_bytes());
        Record { signature, ..record }
    }

    fn transmit(&mut self, from: NodeId, to: NodeId, frame: &Frame) {
        let Some(wire) = self.wires.get(&key(from, to)).copied().filter(|wire| wire.up) else { return };
        let mut bytes = frame.to_bytes();
        *self.carried.entry(key(from, to)).or_default() += bytes.len() as u64 + 60;
        let seal = keyed_sum(secret(from) ^ to.0, &bytes);
        bytes.extend_from_slice(&seal.to_be_bytes());
        if self.random.permille(wire.loss) {
            return;
        }
        let copies = 1 + u64::from(self.random.permille(wire.duplicate));
        for _ in 0..copies {
            let mut bytes = bytes.clone();
            if self.random.permille(wire.corrupt) {
                let at = self.random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.random.below(8);
            }
            let delay = wire.delay_us + self.random.below(wire.jitter_us + 1);
            self.schedule(self.now + Duration::from_micros(delay), Event::Arrive(to, from, bytes));
        }
    }

    fn arrive(&mut self, to: NodeId, from: NodeId, bytes: &[u8]) {
        if self.wires.get(&key(from, to)).is_none_or(|wire| !wire.up) {
            return;
        }
        let Some((bytes, seal)) = bytes.split_last_chunk::<8>() else { return };
        if u64::from_be_bytes(*seal) != keyed_sum(secret(from) ^ to.0, bytes) {
            self.broken_seals += 1;
            return;
        }
        let mut decoder = Decoder::new();
        decoder.push(bytes);
        while let Ok(Some(frame)) = decoder.next_frame() {
            self.tell(to, Input::Frame(from, frame));
        }
    }

    fn deliver(&mut self, packet: Packet) {
        match packet.protocol {
            Protocol::EchoReply => {
                self.echoes.insert(packet.payload);
            }
            Protocol::Session => self.session_frame(&packet),
            Protocol::EchoRequest | Protocol::Ip | Protocol::Group => {
                unreachable!("nodes answer the one, and the others travel on no path")
            }
        }
    }

    /// Whether an echo with this payload came back.
    pub(crate) fn echoed(&self, payload: &[u8]) -> bool {
        self.echoes.contains(payload)
    }

    /// Begins a flow of this number of bytes each way.
    pub(crate) fn begin(&mut self, nodes: [NodeId; 2], total: [u64; 2]) {
        let config = session::Config {
            window_bytes: 32_768,
            window_max_bytes: 65_536,
            keep_max_bytes: 65_536,
            retransmit: Some(Duration::from_millis(300)),
            ..session::Config::default()
        };
        let ends = nodes.map(|name| {
            let now = self.time(name);
            let mut end = Session::new(config, now);
            let (next, limit) = end.expects();
            end.handle(now, session::Input::PathUp { path: 0, next, limit });
            end
        });
        let zero = [0; 2];
        self.flows.push(Flow {
            nodes,
            ends,
            total,
            read: zero,
            got: zero,
            fin: [false; 2],
            closed: [None; 2],
        });
        self.schedule(self.now, Event::Flow(self.flows.len() - 1));
    }

    fn flow(&mut self, index: usize) {
        for end in 0..2 {
            if self.wakes_at(self.flows[index].nodes[end]).is_none() {
                self.applications(index, end);
                self.flow_outputs(index, end);
            }
        }
        if self.flows[index].closed.iter().any(Option::is_none) {
            self.schedule(self.now + Duration::from_millis(10), Event::Flow(index));
        }
    }

    fn applications(&mut self, index: usize, end: usize) {
        let now = self.time(self.flows[index].nodes[end]);
        let flow = &mut self.flows[index];
        let session = &mut flow.ends[end];
        let n = (session.room() as u64).min(flow.total[end] - flow.read[end]).min(4000);
        if n > 0 {
            let bytes = (flow.read[end]..flow.read[end] + n).map(|at| (at * 7 + end as u64) as u8).collect();
            session.handle(now, session::Input::Read(bytes));
            flow.read[end] += n;
        }
        if flow.read[end] == flow.total[end] {
            session.handle(now, session::Input::Eof);
        }
        loop {
            let piece = session.deliverable();
            if piece.is_empty() {
                break;
            }
            for byte in piece {
                assert_eq!(
                    *byte,
                    (flow.got[end] * 7 + 1 - end as u64) as u8,
                    "flow {index}, byte {}",
                    flow.got[end]
                );
                flow.got[end] += 1;
            }
            let n = piece.len();
            session.handle(now, session::Input::Written(n));
        }
        session.handle(now, session::Input::Confirmed(flow.got[end]));
        session.handle(now, session::Input::Tick);
    }

    fn flow_outputs(&mut self, index: usize, end: usize) {
        for _ in 0..6 {
            let flow = &mut self.flows[index];
            let frame = match flow.ends[end].poll(session::PathSet::ALL) {
                None => break,
                Some(session::Output::Send(_, frame)) => frame,
                Some(session::Output::SendData { offset, .. }) => {
                    SessionFrame::Data { offset, bytes: flow.ends[end].data(offset).to_vec() }
                }
                Some(session::Output::Fin) => {
                    flow.fin[end] = true;
                    continue;
                }
                Some(session::Output::Closed(reason)) => {
                    assert_eq!(flow.closed[end].replace(reason.is_none()), None);
                    continue;
                }
            };
            self.send_session(index, end, frame);
        }
    }

    fn send_session(&mut self, index: usize, end: usize, frame: SessionFrame) {
        let (from, to) = (self.flows[index].nodes[end], self.flows[index].nodes[1 - end]);
        let Some(Some(node)) = self.nodes.get(&from) else { return };
        let Some(route) = node.route(to, &BTreeSet::new()) else { return };
        let mut payload = (index as u32).to_be_bytes().to_vec();
        Frame::Session(frame).encode(&mut payload);
        let packet = Packet { path: route.path, position: 0, protocol: Protocol::Session, payload };
        self.tell(from, Input::Packet(packet));
    }

    fn session_frame(&mut self, packet: &Packet) {
        let Some((index, bytes)) = packet.payload.split_first_chunk::<4>() else { return };
        let index = u32::from_be_bytes(*index) as usize;
        let mut decoder = Decoder::new();
        decoder.push(bytes);
        let Ok(Some(Frame::Session(frame))) = decoder.next_frame() else { return };
        let now = self.time(packet.path.last());
        let flow = &mut self.flows[index];
        let end = usize::from(packet.path.last() == flow.nodes[1]);
        flow.ends[end].handle(now, session::Input::Frame(0, frame));
        self.flow_outputs(index, end);
    }

    /// Sends an echo request.
    pub(crate) fn ping(&mut self, path: Path, payload: &[u8]) {
        let from = path.first();
        self.tell(from, Input::Packet(sidetrack_core::overlay::node::echo_request(path, payload.to_vec())));
    }

    /// The links that are there: the wire is up and both ends are alive.
    pub(crate) fn truth(&self) -> BTreeSet<(NodeId, NodeId)> {
        let alive = |name: &NodeId| self.nodes[name].is_some();
        self.wires
            .iter()
            .filter(|((a, b), wire)| wire.up && alive(a) && alive(b))
            .map(|(key, _)| *key)
            .collect()
    }

    pub(crate) fn alive(&self) -> Vec<NodeId> {
        self.nodes.iter().filter(|(_, node)| node.is_some()).map(|(name, _)| *name).collect()
    }
}
