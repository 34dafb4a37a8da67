//! The state machine of an overlay node: the detectors of its links, the link state, the paths, and the forwarding of
//! packets.

mod groups;

use super::disseminate::{self, Disseminator, Drops};
use super::features::{Book, Sent};
use super::frame::{Features, Frame, Hello, LinkEntry, Packet, Path, Protocol, Standing};
use super::group::GroupName;
use super::hello::{self, Detector, Lane, Lanes, Quality};
use super::route::{Graph, Route};
use super::tolerant::Epoch;
use super::topology::Topology;
use super::trouble::Troubles;
use super::{Keys, NodeId, Signature};
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The configuration of a node.
#[derive(Clone, Debug)]
pub struct Config {
    /// The pace of hellos.
    pub hello: hello::Config,
    /// This node and the other members.
    pub disseminate: disseminate::Config,
    /// Shortest time between two announcements of changed costs. A link that comes up or goes down is announced at
    /// once. Default: 2 s.
    pub cost_interval: Duration,
    /// What this node understands beyond version 1 ([`Features`]). 0: it behaves as version 1 did.
    pub features: u32,
    /// The epoch of this node's packets with proofs, drawn at random.
    pub epoch: u32,
    /// The links that nodes may announce.
    pub topology: Topology,
}

impl Config {
    /// Makes a configuration with the default times and without limits of the topology.
    pub fn new(disseminate: disseminate::Config) -> Self {
        let (cost_interval, topology) = (Duration::from_secs(2), Topology::default());
        let hello = hello::Config::default();
        Self { hello, disseminate, cost_interval, features: Features::ALL, epoch: 0, topology }
    }
}

/// An event that the driver reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Frames can be sent to this neighbour.
    LinkOpened(NodeId),
    /// Frames can no longer be sent to this neighbour.
    LinkClosed(NodeId),
    /// A frame came from this neighbour.
    Frame(NodeId, Frame),
    /// A hello came from this neighbour in a datagram.
    Datagram(NodeId, Hello),
    /// The loss on the link to this neighbour before retransmission, in parts per million, as the driver measures it.
    Loss(NodeId, u32),
    /// This neighbour gave a sign of life other than a hello this long ago.
    Alive(NodeId, Duration),
    /// Sets the cost of the link to this neighbour, in microseconds. `None`: the measured cost. The higher cost of the two ends
    /// counts.
    Cost(NodeId, Option<u32>),
    /// Send a packet along its path, which begins at this node.
    Packet(Packet),
    /// The groups that this node is a member of now.
    Groups(BTreeSet<GroupName>),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to do or to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send this to a neighbour.
    Send(NodeId, Frame),
    /// Send a hello to a neighbour on these lanes.
    Hello(NodeId, Hello, Lanes),
    /// The link to this neighbour is up.
    LinkUp(NodeId),
    /// The link to this neighbour is down.
    LinkDown(NodeId),
    /// [`Node::graph`] has changed.
    RoutesChanged,
    /// [`Node::groups`] has changed.
    GroupsChanged,
    /// A packet for this node that is not an echo request.
    Deliver(Packet),
}

/// How many packets were dropped, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketDrops {
    /// The next node of the path is not a neighbour, or its link is down.
    pub no_link: u64,
    /// The neighbour that sent the packet, or this node, is not where the path says.
    pub off_path: u64,
}

/// The state machine of one node: links, link state, paths and forwarding.
#[derive(Clone, Debug)]
pub struct Node<K> {
    config: Config,
    own: NodeId,
    keys: K,
    links: BTreeMap<NodeId, Detector>,
    /// The costs that were set for links ([`Input::Cost`]).
    costs: BTreeMap<NodeId, u32>,
    state: Disseminator,
    members: groups::Members,
    features: Book<Features>,
    /// Under which epochs the proofs of nodes count.
    standings: Book<Standing>,
    /// The number of this node's next packet with a proof.
    next_packet: u64,
    /// A statement has changed since the graph was made.
    features_changed: bool,
    announced: BTreeMap<NodeId, u32>,
    announced_at: Instant,
    graph: Arc<Graph>,
    troubles: Troubles,
    drops: PacketDrops,
    outputs: VecDeque<Output>,
}

impl<K: Keys> Node<K> {
    /// Makes a node without links.
    pub fn new(config: Config, keys: K, now: Instant) -> Self {
        let own = config.disseminate.own;
        let mut state = Disseminator::new(config.disseminate.clone());
        state.handle(now, disseminate::Input::Own(Vec::new()), &keys);
        let mut node = Self {
            features: Book::new(own, config.features != 0),
            standings: Book::new(own, config.features & Features::TOLERANT != 0),
            next_packet: 0,
            features_changed: false,
            config,
            own,
            members: groups::Members::default(),
            keys,
            links: BTreeMap::new(),
            costs: BTreeMap::new(),
            state,
            announced: BTreeMap::new(),
            announced_at: now,
            graph: Arc::default(),
            troubles: Troubles::default(),
            drops: PacketDrops::default(),
            outputs: VecDeque::new(),
        };
        node.begin_groups(now);
        node.settle(now);
        node
    }

    /// Returns the name of this node.
    pub fn own(&self) -> NodeId {
        self.own
    }

    /// Returns the network as this node knows it.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// Returns the cheapest path from this node to `to` that does not pass a node of `avoid`.
    pub fn route(&self, to: NodeId, avoid: &BTreeSet<NodeId>) -> Option<Route> {
        self.graph.route(self.own, to, avoid)
    }

    /// Returns the neighbours that have been silent for longer than usual. The driver looks for other signs of life and reports them
    /// as [`Input::Alive`].
    pub fn suspects(&self, now: Instant) -> impl Iterator<Item = NodeId> {
        self.links.iter().filter(move |(_, link)| link.is_suspect(now)).map(|(node, _)| *node)
    }

    /// Whether this neighbour hears our datagrams.
    pub fn reaches_by_datagram(&self, neighbour: NodeId, now: Instant) -> bool {
        self.links.get(&neighbour).is_some_and(|link| link.reaches_by_datagram(now))
    }

    /// Returns the cost that this node announces for the link to this neighbour, in µs.
    pub fn cost_us(&self, neighbour: NodeId) -> Option<u32> {
        let link = self.links.get(&neighbour)?;
        Some(self.costs.get(&neighbour).copied().unwrap_or_else(|| link.quality().cost_us()))
    }

    /// Returns the quality of the link to this neighbour.
    pub fn quality(&self, neighbour: NodeId) -> Option<Quality> {
        self.links.get(&neighbour).map(Detector::quality)
    }

    /// Returns the links of this node: the neighbour, whether the link is up, and its quality.
    pub fn links(&self) -> impl Iterator<Item = (NodeId, bool, Quality)> {
        self.links.iter().map(|(node, link)| (*node, link.is_up(), link.quality()))
    }

    /// Whether the link to this neighbour is up.
    pub fn is_up(&self, neighbour: NodeId) -> bool {
        self.links.get(&neighbour).is_some_and(Detector::is_up)
    }

    /// Returns how many records and packets were dropped.
    pub fn drops(&self) -> (Drops, PacketDrops) {
        (self.state.drops(), self.drops)
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input) {
        // Hellos wake this process many times a second. If it is this late, it did not run in between.
        let late = self.deadline().map_or(Duration::ZERO, |at| now.since(at));
        if late > self.config.disseminate.retransmit {
            self.state.handle(now, disseminate::Input::Away(late), &self.keys);
            self.tell_groups(now, disseminate::Input::Away(late));
        }
        match input {
            Input::LinkOpened(neighbour) => self.opened(now, neighbour),
            Input::LinkClosed(neighbour) => self.closed(now, neighbour),
            Input::Frame(from, frame) => self.frame(now, from, frame),
            Input::Loss(neighbour, ppm) => self.watch(now, neighbour, hello::Input::Loss(ppm)),
            Input::Datagram(neighbour, hello) => {
                self.watch(now, neighbour, hello::Input::Hello(hello, Lane::Datagram));
            }
            Input::Alive(neighbour, ago) => self.watch(now, neighbour, hello::Input::Alive(ago)),
            Input::Cost(neighbour, cost) => self.set_cost(neighbour, cost),
            Input::Packet(packet) => self.originate(packet),
            Input::Groups(names) => {
                self.tell_groups(now, disseminate::Input::Own(names.into_iter().collect()));
            }
            Input::Tick => {
                let due = self.links.iter().filter(|(_, link)| link.deadline() <= now);
                for neighbour in due.map(|(node, _)| *node).collect::<Vec<_>>() {
                    self.watch(now, neighbour, hello::Input::Tick);
                }
                self.state.handle(now, disseminate::Input::Tick, &self.keys);
                self.tell_groups(now, disseminate::Input::Tick);
            }
        }
        // The event may have changed links and costs: announce them first, then send what the link state answers.
        self.announce(now);
        self.settle(now);
    }

    /// Sets the number of this node's next packet with a proof. Its next statement names it.
    pub fn set_next_packet(&mut self, number: u64) {
        self.next_packet = number;
    }

    /// Returns how many links were announced beyond the topology: links that it does not allow, or at lower costs.
    pub fn beyond_topology(&self) -> u64 {
        let records = self.state.records();
        records.map(|record| self.config.topology.beyond(record)).sum()
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to call `handle(now, Input::Tick)`.
    pub fn deadline(&self) -> Option<Instant> {
        let links = self.links.values().map(Detector::deadline);
        links.chain(self.state.deadline()).chain(self.members.deadline()).min()
    }

    fn opened(&mut self, now: Instant, neighbour: NodeId) {
        let is_member = self.config.disseminate.members.contains(&neighbour);
        let is_allowed = self.config.topology.least_us(self.own, neighbour).is_some();
        if neighbour == self.own || !is_member || !is_allowed {
            return;
        }
        self.closed(now, neighbour);
        self.links.insert(neighbour, Detector::new(self.config.hello, now));
        self.watch(now, neighbour, hello::Input::Tick);
    }

    fn closed(&mut self, now: Instant, neighbour: NodeId) {
        if self.links.remove(&neighbour).is_some_and(|link| link.is_up()) {
            self.down(now, neighbour);
        }
    }

    fn down(&mut self, now: Instant, neighbour: NodeId) {
        self.state.handle(now, disseminate::Input::NeighbourDown(neighbour), &self.keys);
        self.features.down(neighbour);
        self.standings.down(neighbour);
        self.outputs.push_back(Output::LinkDown(neighbour));
    }

    fn watch(&mut self, now: Instant, neighbour: NodeId, input: hello::Input) {
        let Some(link) = self.links.get_mut(&neighbour) else { return };
        link.handle(now, input);
        let mut changes = Vec::new();
        while let Some(output) = link.poll() {
            match output {
                hello::Output::Send(hello, lanes) => {
                    self.outputs.push_back(Output::Hello(neighbour, hello, lanes));
                }
                change => changes.push(change),
            }
        }
        // Handle changes after all hellos were queued: `down` and `NeighbourUp` need `self` without the borrowed
        // link.
        for change in changes {
            match change {
                hello::Output::Up => {
                    // First what the nodes understand, then their links: a new path can be used at once.
                    let sent = self.features.up(neighbour);
                    self.say(sent, Frame::Features);
                    let sent = self.standings.up(neighbour);
                    self.say(sent, Frame::Standing);
                    self.state.handle(now, disseminate::Input::NeighbourUp(neighbour), &self.keys);
                    self.outputs.push_back(Output::LinkUp(neighbour));
                }
                hello::Output::Down => self.down(now, neighbour),
                hello::Output::Send(..) => {}
            }
        }
    }

    fn frame(&mut self, now: Instant, from: NodeId, frame: Frame) {
        match frame {
            Frame::Hello(hello) => self.watch(now, from, hello::Input::Hello(hello, Lane::Stream)),
            Frame::Record(record) => {
                self.state.handle(now, disseminate::Input::Record { from, record }, &self.keys);
            }
            Frame::RecordAck { origin, sequence } => {
                self.state.handle(now, disseminate::Input::Ack { from, origin, sequence }, &self.keys);
            }
            Frame::Membership(record) => {
                self.tell_groups(now, disseminate::Input::Record { from, record });
            }
            Frame::MembershipAck { origin, sequence } => {
                self.tell_groups(now, disseminate::Input::Ack { from, origin, sequence });
            }
            Frame::Packet(packet) => self.packet(from, packet),
            Frame::Features(features) => {
                let config = &self.config.disseminate;
                if let Some(sent) = self.features.arrived(now, from, features, config, &self.keys) {
                    self.features_changed = true;
                    self.say(sent, Frame::Features);
                }
            }
            Frame::Standing(standing) => {
                let config = &self.config.disseminate;
                if let Some(sent) = self.standings.arrived(now, from, standing, config, &self.keys) {
                    self.features_changed = true;
                    self.say(sent, Frame::Standing);
                }
            }
            // No other frame is valid on the control connection.
            _ => {}
        }
    }

    fn say<C>(&mut self, sent: Sent<C>, frame: impl Fn(C) -> Frame) {
        self.outputs.extend(sent.into_iter().map(|(to, claim)| Output::Send(to, frame(claim))));
    }

    /// Makes new statements about this node if its record has moved on since the last ones.
    fn state_own(&mut self, now: Instant) {
        let Some(sequence) = self.state.own_sequence() else { return };
        let (origin, signature) = (self.own, Signature::NONE);
        let features = || Features { origin, sequence, bits: self.config.features, signature };
        let sent = self.features.own_record(now, sequence, &self.keys, features);
        self.features_changed |= !sent.is_empty();
        self.say(sent, Frame::Features);
        let (epoch, next) = (self.config.epoch, self.next_packet);
        let standing = || Standing { origin, sequence, epoch, next, signature };
        let sent = self.standings.own_record(now, sequence, &self.keys, standing);
        self.features_changed |= !sent.is_empty();
        self.say(sent, Frame::Standing);
    }

    /// Returns the epochs of all nodes. An epoch keeps the number that was said of it first, so that only a new epoch changes the
    /// graph.
    fn epochs(&self) -> BTreeMap<NodeId, Epoch> {
        let mut epochs = self.standings.epochs();
        for (node, epoch) in &mut epochs {
            let known = self.graph.epochs().get(node).filter(|known| known.number == epoch.number);
            *epoch = known.copied().unwrap_or(*epoch);
        }
        epochs
    }

    fn originate(&mut self, packet: Packet) {
        if packet.path.first() == self.own {
            self.forward(Packet { position: 0, ..packet });
        } else {
            self.drops.off_path += 1;
        }
    }

    fn packet(&mut self, from: NodeId, packet: Packet) {
        let is_on_path = packet.path.at(packet.position) == Some(self.own);
        if !is_on_path || packet.path.before(packet.position) != Some(from) {
            self.drops.off_path += 1;
        } else if packet.path.last() != self.own {
            self.forward(packet);
        } else if packet.protocol == Protocol::EchoRequest {
            let path = packet.path.reversed();
            self.forward(Packet {
                path,
                position: 0,
                protocol: Protocol::EchoReply,
                payload: packet.payload,
            });
        } else {
            self.outputs.push_back(Output::Deliver(packet));
        }
    }

    /// Sends a packet that is at `position` to the next node of its path.
    fn forward(&mut self, mut packet: Packet) {
        packet.position = packet.position.saturating_add(1);
        match packet.path.at(packet.position) {
            Some(next) if self.is_up(next) => {
                self.outputs.push_back(Output::Send(next, Frame::Packet(packet)))
            }
            _ => self.drops.no_link += 1,
        }
    }

    fn set_cost(&mut self, neighbour: NodeId, cost: Option<u32>) {
        match cost {
            Some(cost) => self.costs.insert(neighbour, cost.clamp(1, Quality::COST_MAX_US)),
            None => self.costs.remove(&neighbour),
        };
        // The operator waits for the new cost to take effect, so announce it at once.
        self.announced.remove(&neighbour);
    }

    /// Announces the links of this node if they have changed enough.
    fn announce(&mut self, now: Instant) {
        let up = self.links.iter().filter(|(_, link)| link.is_up());
        let costs: BTreeMap<_, _> = up.filter_map(|(node, _)| Some((*node, self.cost_us(*node)?))).collect();
        let same_links = costs.keys().eq(self.announced.keys());
        let worth = || {
            costs.iter().any(|(node, cost)| {
                // A change counts if it is more than an eighth and more than 1 ms.
                let said = self.announced.get(node).copied().unwrap_or(0);
                said.abs_diff(*cost) > (said / 8).max(1000)
            })
        };
        if same_links && !(self.announced_at + self.config.cost_interval <= now && worth()) {
            return;
        }
        let links =
            costs.iter().map(|(node, cost_us)| LinkEntry { neighbour: *node, cost_us: *cost_us }).collect();
        (self.announced, self.announced_at) = (costs, now);
        self.state.handle(now, disseminate::Input::Own(links), &self.keys);
    }

    /// Turns the outputs of the link state into frames, and updates the graph.
    fn settle(&mut self, now: Instant) {
        self.state_own(now);
        let mut changed = std::mem::take(&mut self.features_changed);
        changed |= self.troubles.deadline().is_some_and(|at| at <= now);
        while let Some(output) = self.state.poll() {
            match output {
                disseminate::Output::Send(to, record) => {
                    let features = self.features.of_origin(record.origin);
                    self.outputs.extend(features.map(|features| Output::Send(to, Frame::Features(features))));
                    let standing = self.standings.of_origin(record.origin);
                    self.outputs.extend(standing.map(|standing| Output::Send(to, Frame::Standing(standing))));
                    self.outputs.push_back(Output::Send(to, Frame::Record((*record).clone())));
                }
                disseminate::Output::Ack { to, origin, sequence } => {
                    // A neighbour that got the record from an old node first has no statement of its origin yet, and no
                    // other record brings it.
                    let features = self.features.of_origin(origin);
                    self.outputs.extend(features.map(|features| Output::Send(to, Frame::Features(features))));
                    let standing = self.standings.of_origin(origin);
                    self.outputs.extend(standing.map(|standing| Output::Send(to, Frame::Standing(standing))));
                    self.outputs.push_back(Output::Send(to, Frame::RecordAck { origin, sequence }));
                }
                disseminate::Output::Changed => changed = true,
            }
        }
        if changed {
            let features = self.features.of(self.state.records());
            let graph = Graph::within(self.state.records(), &self.config.topology).with_features(features);
            let graph = graph.with_epochs(self.epochs());
            let troubled = self.troubles.look(now, &graph);
            let graph = graph.with_troubled(troubled);
            if graph != *self.graph {
                self.graph = Arc::new(graph);
                self.outputs.push_back(Output::RoutesChanged);
            }
        }
        self.settle_groups(now);
    }
}

/// Makes an echo request along `path` with this payload.
pub fn echo_request(path: Path, payload: Vec<u8>) -> Packet {
    Packet { path, position: 0, protocol: Protocol::EchoRequest, payload }
}
