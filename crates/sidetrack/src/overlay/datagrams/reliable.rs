//! Reliable flooding: intrusion-tolerant packets that all arrive. The core decides
//! ([`sidetrack_core::overlay::tolerant::reliable`]). The receiving thread does all of it. Other threads leave their packets in
//! a queue for each destination; a full queue is the back-pressure that a sender feels.

use super::Datagrams;
use super::link::Link;
use super::tolerant;
use crate::overlay::shared::Shared;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Features, Frame, Holding, Protocol, Spread, Subgraph, Vouched};
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::tolerant::reliable::{Counts, Input, Machine, Output};
use sidetrack_core::overlay::tolerant::store::Rate;
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

/// Most packets that wait for room in the flow to one node.
const UNSENT_MAX: usize = 256;

/// Echo requests are sent only while fewer packets than these are on their way: later ones would only wait behind them, and
/// each confirmation shows that packets arrive.
const ECHO_BELOW: usize = 4;

/// Packets that wait for room in a flow.
type Unsent = VecDeque<(Protocol, Vec<u8>)>;

/// What the machine was told last.
#[derive(Default)]
struct Told {
    graph: Option<Arc<Graph>>,
    /// The neighbours that take part, with the numbers of their links.
    links: BTreeMap<NodeId, u64>,
}

/// The reliable flows of intrusion-tolerant packets.
pub(super) struct Flows {
    machine: Mutex<Machine>,
    unsent: Mutex<BTreeMap<NodeId, Unsent>>,
    told: Mutex<Told>,
    rate: u64,
}

impl Flows {
    /// Makes the state. `rate` is the rate of these packets on each link, bits per second.
    pub(super) fn new(own: NodeId, epoch: u32, members: BTreeSet<NodeId>, rate: u64) -> Self {
        let (unsent, told) = (Mutex::default(), Mutex::default());
        Self { machine: Mutex::new(Machine::new(own, epoch, members)), unsent, told, rate }
    }

    /// Returns the counts, and how many packets are kept with how many bytes.
    pub(super) fn counts(&self) -> (Counts, (usize, usize)) {
        let machine = lock(&self.machine);
        (machine.counts(), machine.kept())
    }

    /// Leaves a packet for the receiving thread. Returns false if too many wait.
    fn leave(&self, to: NodeId, protocol: Protocol, payload: Vec<u8>) -> bool {
        let under_way = lock(&self.machine).unconfirmed(to);
        let mut unsent = lock(&self.unsent);
        let unsent = unsent.entry(to).or_default();
        let is_echo = protocol == Protocol::EchoRequest;
        let has_room = unsent.len() < UNSENT_MAX && !(is_echo && under_way + unsent.len() >= ECHO_BELOW);
        if has_room {
            unsent.push_back((protocol, payload));
        }
        has_room
    }
}

/// Sends a packet of this node. Returns the number of copies: one for each neighbour; 0: it is dropped.
pub(super) fn send(shared: &Shared, to: NodeId, protocol: Protocol, payload: Vec<u8>) -> u64 {
    let datagrams = &shared.datagrams;
    let left = datagrams.flows.leave(to, protocol, payload);
    datagrams.bell.ring();
    if left { copies(shared) } else { 0 }
}

/// Returns the number of copies of a packet: one for each neighbour.
pub(crate) fn copies(shared: &Shared) -> u64 {
    shared.links.borrow().len() as u64
}

/// Returns the most bytes of a packet to a node that travels in one datagram on each of this node's links.
pub(super) fn room(shared: &Shared, to: NodeId) -> usize {
    let around = Subgraph::new(shared.identity.own(), to, []).map_or(0, |ends| Spread::overhead(&ends));
    let rooms = shared.datagrams.all().into_iter().map(|link| link.frame_bytes());
    rooms.min().unwrap_or(0).saturating_sub(Vouched::OVERHEAD_BYTES + around)
}

/// Handles a packet that a neighbour has sent.
pub(super) fn came(shared: &Shared, link: &Link, packet: Vouched) {
    handle(shared, shared.clock.now(), Input::Message(link.neighbour, packet));
}

/// Handles what a neighbour says that it has.
pub(super) fn heard(shared: &Shared, link: &Link, holding: Holding) {
    handle(shared, shared.clock.now(), Input::Holding(link.neighbour, holding));
}

/// Sends what waits and what is due.
pub(super) fn tick(shared: &Shared) {
    let (flows, now) = (&shared.datagrams.flows, shared.clock.now());
    tell(shared, now);
    let mut inputs = Vec::new();
    {
        let machine = lock(&flows.machine);
        let mut unsent = lock(&flows.unsent);
        for (to, unsent) in unsent.iter_mut().filter(|(_, unsent)| !unsent.is_empty()) {
            let largest = unsent.iter().map(|(_, payload)| payload.len()).max().unwrap_or(0);
            let count = unsent.len().min(machine.room(*to, largest));
            if count > 0 {
                inputs.push(Input::Send(*to, unsent.drain(..count).collect()));
            }
        }
        if machine.deadline().is_some_and(|due| due <= now) {
            inputs.push(Input::Tick);
        }
    }
    for input in inputs {
        handle(shared, now, input);
    }
}

/// Returns when [`tick`] has something to do.
pub(super) fn deadline(datagrams: &Datagrams) -> Option<Instant> {
    lock(&datagrams.flows.machine).deadline()
}

/// Tells the machine which neighbours take part, and which epochs there are now.
fn tell(shared: &Shared, now: Instant) {
    let flows = &shared.datagrams.flows;
    let (graph, links) = (shared.graph.load_full(), shared.links.borrow().clone());
    let takes_part = |node: NodeId| graph.features(node) & Features::RELIABLE_FLOODS != 0;
    let links = links.iter().filter(|(neighbour, _)| takes_part(**neighbour));
    let links: BTreeMap<_, _> = links.map(|(neighbour, number)| (*neighbour, *number)).collect();
    let mut inputs = Vec::new();
    {
        let mut told = lock(&flows.told);
        // A link with another number is a new one: its other end may have restarted.
        let gone = told.links.iter().filter(|(neighbour, number)| links.get(neighbour) != Some(number));
        inputs.extend(gone.map(|(neighbour, _)| Input::Down(*neighbour)));
        if told.graph.as_ref().is_none_or(|known| !Arc::ptr_eq(known, &graph)) {
            inputs.push(Input::Epochs(graph.epochs().clone()));
            told.graph = Some(graph);
        }
        told.links.clone_from(&links);
    }
    for neighbour in links.keys() {
        let set = shared.shapers.of(*neighbour).rate().unwrap_or(u64::MAX);
        let one_way = shared.datagrams.link(*neighbour).map_or(0, |link| link.one_way_us.load(Relaxed));
        let rate = Rate(flows.rate.min(set) / 8);
        inputs.push(Input::Up(*neighbour, rate, one_way.saturating_mul(2)));
    }
    for input in inputs {
        handle(shared, now, input);
    }
}

fn handle(shared: &Shared, now: Instant, input: Input) {
    let mut outputs = Vec::new();
    {
        let mut machine = lock(&shared.datagrams.flows.machine);
        machine.handle(now, input, &shared.identity);
        outputs.extend(std::iter::from_fn(|| machine.poll()));
    }
    for output in outputs {
        match output {
            Output::Message(to, packet) => {
                transmit(shared, to, &Frame::Vouched(Box::new(Vouched::clone(&packet))));
            }
            Output::Holding(to, holding) => transmit(shared, to, &Frame::Holding(Box::new(holding))),
            // The confirmation of an echo request is its answer.
            Output::Deliver(packet) => tolerant::deliver_proven(shared, &packet.packet),
            Output::Confirmed(to) => shared.datagrams.paths.confirmed(to, now),
        }
    }
}

fn transmit(shared: &Shared, to: NodeId, frame: &Frame) {
    let datagrams = &shared.datagrams;
    let Some(link) = datagrams.link(to) else {
        datagrams.counters.no_link.fetch_add(1, Relaxed);
        return;
    };
    if let Frame::Vouched(packet) = frame {
        shared.shapers.of(to).spend(packet.packet.payload.len());
    }
    datagrams.send_on(&link, frame);
}
