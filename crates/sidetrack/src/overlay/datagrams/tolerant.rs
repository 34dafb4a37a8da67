//! Intrusion-tolerant packets: signs this node's own packets, and relays and delivers those of others. The core decides
//! ([`sidetrack_core::overlay::tolerant`]). The receiving thread does all of it; other threads leave their packets in a
//! queue, so under load one signature covers several.

use super::Datagrams;
use super::link::Link;
use crate::overlay::groups;
use crate::overlay::shared::{Links, Shared};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Frame, Protocol, Spread, Subgraph, Vouched};
use sidetrack_core::overlay::packet::Origin;
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::service::Service;
use sidetrack_core::overlay::spread::Source;
use sidetrack_core::overlay::tolerant::batch::{self, BATCH_MAX, Unsigned};
use sidetrack_core::overlay::tolerant::store::Rate;
use sidetrack_core::overlay::tolerant::{Counts, Input, Output, Relay};
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

/// Most packets of this node that wait for their proof.
const UNSIGNED_MAX: usize = 512;

/// Echo requests are answered only while fewer packets than these wait: answers must not displace this node's own packets.
const ANSWER_BELOW: usize = 32;

/// Most bytes of an echo request that is answered.
const ECHO_MAX: usize = 64;

/// What the relay was told last.
#[derive(Default)]
struct Told {
    graph: Option<Arc<Graph>>,
    links: Links,
}

/// The relay of intrusion-tolerant packets.
pub(super) struct Tolerant {
    relay: Mutex<Relay>,
    unsigned: Mutex<VecDeque<Unsigned>>,
    told: Mutex<Told>,
    rate: u64,
}

impl Tolerant {
    /// Makes a relay. `rate` is the rate of these packets on each link, bits per second.
    pub(super) fn new(own: NodeId, epoch: u32, members: BTreeSet<NodeId>, rate: u64) -> Self {
        let (unsigned, told) = (Mutex::default(), Mutex::default());
        Self { relay: Mutex::new(Relay::new(own, epoch, members)), unsigned, told, rate }
    }

    /// Returns the counts, and how many packets wait with how many bytes.
    pub(super) fn counts(&self) -> (Counts, (usize, usize)) {
        let relay = lock(&self.relay);
        (relay.counts(), relay.waiting())
    }

    /// Leaves a packet to be signed and sent. Returns false if too many wait.
    fn leave(&self, packet: Unsigned) -> bool {
        let mut unsigned = lock(&self.unsigned);
        let has_room = unsigned.len() < UNSIGNED_MAX;
        if has_room {
            unsigned.push_back(packet);
        }
        has_room
    }
}

/// Sends a packet of this node. Returns false if it is dropped.
pub(super) fn send(
    shared: &Shared,
    service: &Service,
    subgraph: Subgraph,
    protocol: Protocol,
    payload: Vec<u8>,
) -> bool {
    let make = |source: &mut Source| source.packet(service, subgraph, protocol, payload);
    leave(shared, service.priority, make)
}

/// Numbers a packet and leaves it for the receiving thread.
fn leave(shared: &Shared, priority: u8, make: impl FnOnce(&mut Source) -> Spread) -> bool {
    let datagrams = &shared.datagrams;
    let packet = make(&mut lock(&datagrams.source));
    let to = packet.subgraph.destination();
    let Some(target) = shared.graph.load().epochs().get(&to).map(|epoch| epoch.number) else { return false };
    let left = datagrams.tolerant.leave(Unsigned { priority, target, packet });
    datagrams.bell.ring();
    left
}

/// Handles a copy that a neighbour has sent.
pub(super) fn came(shared: &Shared, link: &Link, packet: Vouched) {
    let one_way_us = link.one_way_us.load(Relaxed);
    handle(shared, shared.clock.now(), Input::Came(link.neighbour, packet, one_way_us));
}

/// Signs what waits, and sends what is due.
pub(super) fn tick(shared: &Shared) {
    let (datagrams, now) = (&shared.datagrams, shared.clock.now());
    tell(shared, now);
    loop {
        let mut batch = Vec::new();
        {
            let mut unsigned = lock(&datagrams.tolerant.unsigned);
            let count = unsigned.len().min(BATCH_MAX);
            batch.extend(unsigned.drain(..count));
        }
        if batch.is_empty() {
            break;
        }
        for packet in batch::sign(shared.identity.own(), batch, &shared.identity) {
            handle(shared, now, Input::Send(packet));
        }
    }
    let due = lock(&datagrams.tolerant.relay).deadline();
    if due.is_some_and(|due| due <= now) {
        handle(shared, now, Input::Tick);
    }
}

/// Returns when [`tick`] has something to do.
pub(super) fn deadline(datagrams: &Datagrams) -> Option<Instant> {
    lock(&datagrams.tolerant.relay).deadline()
}

/// Tells the relay which links and epochs there are now.
fn tell(shared: &Shared, now: Instant) {
    let tolerant = &shared.datagrams.tolerant;
    let (graph, links) = (shared.graph.load_full(), shared.links.borrow().clone());
    let mut inputs = Vec::new();
    {
        let mut told = lock(&tolerant.told);
        if told.graph.as_ref().is_none_or(|known| !Arc::ptr_eq(known, &graph)) {
            inputs.push(Input::Epochs(graph.epochs().clone()));
            told.graph = Some(graph);
        }
        let gone = told.links.keys().filter(|neighbour| !links.contains_key(neighbour));
        inputs.extend(gone.map(|neighbour| Input::Down(*neighbour)));
        told.links = links.clone();
    }
    for neighbour in links.keys() {
        let set = shared.shapers.of(*neighbour).rate().unwrap_or(u64::MAX);
        inputs.push(Input::Up(*neighbour, Rate(tolerant.rate.min(set) / 8)));
    }
    for input in inputs {
        handle(shared, now, input);
    }
}

fn handle(shared: &Shared, now: Instant, input: Input) {
    let mut outputs = Vec::new();
    {
        let mut relay = lock(&shared.datagrams.tolerant.relay);
        relay.handle(now, input, &shared.identity);
        outputs.extend(std::iter::from_fn(|| relay.poll()));
    }
    for output in outputs {
        match output {
            Output::Send(to, packet) => transmit(shared, to, packet),
            Output::Deliver(packet) => deliver(shared, &packet),
        }
    }
}

fn transmit(shared: &Shared, to: NodeId, packet: Vouched) {
    let datagrams = &shared.datagrams;
    let Some(link) = datagrams.link(to) else {
        datagrams.counters.no_link.fetch_add(1, Relaxed);
        return;
    };
    shared.shapers.of(to).spend(packet.packet.payload.len());
    datagrams.send_on(&link, &Frame::Vouched(Box::new(packet)));
}

fn deliver(shared: &Shared, vouched: &Vouched) {
    let datagrams = &shared.datagrams;
    let packet = &vouched.packet;
    let source = packet.subgraph.source();
    match packet.protocol {
        Protocol::EchoRequest => {
            let waiting = lock(&datagrams.tolerant.unsigned).len();
            if waiting < ANSWER_BELOW && packet.payload.len() <= ECHO_MAX {
                // An answer that is dropped counts as one that was lost.
                let _ = leave(shared, vouched.priority, |own| own.echo(Spread::clone(packet)));
            }
        }
        Protocol::EchoReply => datagrams.paths.answered(source, &packet.payload, shared.clock.now()),
        Protocol::Ip | Protocol::Session | Protocol::Group => deliver_proven(shared, packet),
    }
}

/// Delivers a packet whose source is proven, unless it is an echo.
pub(super) fn deliver_proven(shared: &Shared, packet: &Spread) {
    let (source, payload) = (packet.subgraph.source(), &packet.payload);
    match packet.protocol {
        Protocol::EchoRequest | Protocol::EchoReply => {}
        Protocol::Ip => {
            if let Some(packets) = &shared.packets {
                packets.deliver_vouched(shared, source, payload);
            }
        }
        Protocol::Session => shared.udp.came_proven(shared, source, payload),
        Protocol::Group => groups::deliver(shared, Origin { node: source, is_proven: true }, payload),
    }
}
