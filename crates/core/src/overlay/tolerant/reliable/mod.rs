//! Reliable flooding: messages that arrive all, once and in order, although some members lie (after Obenshain and others,
//! "Practical intrusion-tolerant networks", ICDCS 2016, Sec. IV, and reliable messaging of Spines).
//!
//! All messages of a source to a destination are a flow. Each node passes each message to each neighbour that has not got it,
//! and keeps it until the destination has confirmed it. So a relay that drops, or that says it has what it has not, stops
//! nothing while honest nodes connect the two.
//!
//! ```text
//!  source: next number <= confirmed + window?  no ---> refused: the sender waits (back-pressure)
//!             | yes: signed
//!             v
//!         +--------+  a neighbour says it has it        +----------------+
//!   new-->| kept   |----------------------------------->| kept, not sent |
//!         |        |<-----------------------------------| to it          |
//!         +--------+  no answer in time, a gap, restart +----------------+
//!             |                                                |
//!             +------------- confirmed by the destination -----+---> removed
//!
//!  a message comes from a neighbour:
//!    wrong flow or epoch, outside the window, kept already, wrong proof ---> dropped and counted
//!    else kept; the neighbours are told within 10 ms; the destination delivers what is in order and signs how far it got
//! ```
//!
//! The paper frees a message as soon as all neighbours have acknowledged it. Here it is kept until the destination confirms
//! it: a neighbour that restarts forgets what it has acknowledged.
//!
//! | bound | value |
//! |---|---|
//! | messages of a flow on their way | [`FLOW_WINDOW`] |
//! | their bytes at each node | [`FLOW_BYTES`] |
//! | flows with messages at each node | [`FLOWS_MAX`], divided equally among the members as sources |
//!
//! A flow begins anew when its source or its destination restarts. Messages that were not confirmed by then are dropped:
//! the source cannot know whether they were delivered.

mod flow;
mod peer;

use super::super::frame::{
    Confirmed, Dissemination, FLOW_WINDOW, FlowName, Holding, LinkKind, Protocol, Spread, Subgraph, Vouched,
};
use super::batch::{self, BATCH_MAX, Unsigned};
use super::store::Rate;
use super::verify::{Allowance, Batches, Refused};
use super::{Epoch, Vouch};
use crate::overlay::NodeId;
use crate::overlay::service::PRIORITY;
use crate::time::Instant;
use flow::Flow;
use peer::ACK_DELAY;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of the messages of a flow that a node keeps.
pub const FLOW_BYTES: usize = 768 << 10;

/// Most flows with messages that a node keeps. Each source has an equal part of them, and at least one.
pub const FLOWS_MAX: usize = 256;

/// Shortest time between two statements of a destination about one flow.
const CONFIRM_EVERY: Duration = Duration::from_millis(20);

/// How far sending may be ahead of the rate, as time.
const BURST: Duration = Duration::from_millis(5);

/// An event that the driver reports.
#[derive(Clone, Debug)]
pub enum Input {
    /// Messages can be sent to this neighbour, at this rate. The round trip of the link is the last value, µs.
    Up(NodeId, Rate, u32),
    /// Messages can no longer be sent to this neighbour.
    Down(NodeId),
    /// Under which epochs the proofs of nodes count.
    Epochs(BTreeMap<NodeId, Epoch>),
    /// Messages of this node to another one, in order: at most [`Machine::room`] of them.
    Send(NodeId, Vec<(Protocol, Vec<u8>)>),
    /// A message came from a neighbour.
    Message(NodeId, Vouched),
    /// A neighbour says what it has.
    Holding(NodeId, Holding),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a message to this neighbour.
    Message(NodeId, Arc<Vouched>),
    /// Tell this neighbour what this node has.
    Holding(NodeId, Holding),
    /// The next message of a flow to this node.
    Deliver(Arc<Vouched>),
    /// The node has confirmed further messages of this node: they arrive there.
    Confirmed(NodeId),
}

/// Counts of messages and statements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages of this node that were accepted.
    pub sent: u64,
    /// Messages of this node that were refused: the window was full, or the destination's epoch is unknown.
    pub blocked: u64,
    /// Messages of this node that were dropped unconfirmed because their destination restarted.
    pub given_up: u64,
    /// Messages sent to neighbours, also again.
    pub copies: u64,
    /// Of these, those that were sent to the same neighbour before.
    pub resent: u64,
    /// Messages delivered here.
    pub delivered: u64,
    /// Messages kept for other nodes.
    pub relayed: u64,
    /// Messages that came again.
    pub duplicates: u64,
    /// Messages outside the window of their flow, or beyond the flows of their source.
    pub beyond: u64,
    /// Frames that name no flow between two members, or a flow that the neighbour cannot have.
    pub off_flow: u64,
    /// Messages and statements with a wrong proof.
    pub forged: u64,
    /// Frames of an earlier epoch of the source or destination.
    pub replayed: u64,
    /// Frames whose source or destination has no known epoch.
    pub unknown: u64,
    /// Frames whose source or neighbour has used up its share of signature checks, unchecked.
    pub unchecked: u64,
}

/// A neighbour that takes part.
#[derive(Clone, Debug)]
struct Neighbour {
    rate: Rate,
    round_trip: Duration,
    /// When all that was sent is paid off at the rate.
    paid: Instant,
    /// More waits for the rate.
    waits: bool,
    /// The virtual time: where the message that was sent last began.
    time: u64,
    /// The virtual time at which the last message of each source ended.
    served: BTreeMap<NodeId, u64>,
}

/// The key of a flow: source and destination.
type Key = (NodeId, NodeId);

/// The reliable flows at one node.
#[derive(Clone, Debug)]
pub struct Machine {
    own: NodeId,
    epoch: u32,
    members: BTreeSet<NodeId>,
    epochs: BTreeMap<NodeId, u32>,
    flows: BTreeMap<Key, Flow>,
    neighbours: BTreeMap<NodeId, Neighbour>,
    batches: BTreeMap<NodeId, Batches>,
    faults: BTreeMap<NodeId, Allowance>,
    counts: Counts,
    outputs: VecDeque<Output>,
}

impl Machine {
    /// Makes a machine of this node, whose epoch this is. Flows of other nodes than `members` are dropped.
    pub fn new(own: NodeId, epoch: u32, members: BTreeSet<NodeId>) -> Self {
        Self {
            own,
            epoch,
            members,
            epochs: BTreeMap::new(),
            flows: BTreeMap::new(),
            neighbours: BTreeMap::new(),
            batches: BTreeMap::new(),
            faults: BTreeMap::new(),
            counts: Counts::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns how many messages are kept, and their bytes.
    pub fn kept(&self) -> (usize, usize) {
        let flows = self.flows.values();
        flows.fold((0, 0), |(messages, bytes), flow| (messages + flow.kept(), bytes + flow.bytes()))
    }

    /// Returns how many messages to this node [`Input::Send`] accepts now, if none is larger than `bytes`.
    pub fn room(&self, to: NodeId, bytes: usize) -> usize {
        match self.flows.get(&(self.own, to)) {
            Some(flow) => flow.room(bytes),
            None if self.name_to(to).is_some() => (FLOW_BYTES / bytes.max(1)).min(BATCH_MAX),
            None => 0,
        }
    }

    /// Returns how many messages of this node to another one are not confirmed.
    pub fn unconfirmed(&self, to: NodeId) -> usize {
        self.flows.get(&(self.own, to)).map_or(0, Flow::kept)
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input, keys: &impl Vouch) {
        match input {
            Input::Up(neighbour, rate, round_trip_us) => self.up(now, neighbour, rate, round_trip_us),
            Input::Down(neighbour) => {
                self.neighbours.remove(&neighbour);
                self.flows.values_mut().for_each(|flow| flow.forget(neighbour));
            }
            Input::Epochs(epochs) => self.set_epochs(now, &epochs),
            Input::Send(to, messages) => self.send(now, to, messages, keys),
            Input::Message(from, message) => {
                let result = self.message(now, from, message, keys);
                self.count(result);
            }
            Input::Holding(from, holding) => {
                let result = self.holding(now, from, &holding, keys);
                self.count(result);
            }
            Input::Tick => {}
        }
        self.confirm(now, keys);
        self.say(now);
        self.pump(now);
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to call `handle(now, Input::Tick, keys)`.
    pub fn deadline(&self) -> Option<Instant> {
        let rates = self.neighbours.values().filter(|neighbour| neighbour.waits).map(|it| it.paid);
        rates.chain(self.flows.values().filter_map(Flow::deadline)).min()
    }

    fn up(&mut self, now: Instant, neighbour: NodeId, rate: Rate, round_trip_us: u32) {
        let round_trip = Duration::from_micros(round_trip_us.into());
        if let Some(known) = self.neighbours.get_mut(&neighbour) {
            (known.rate, known.round_trip) = (rate, round_trip);
            return;
        }
        let new = Neighbour { rate, round_trip, paid: now, waits: false, time: 0, served: BTreeMap::new() };
        self.neighbours.insert(neighbour, new);
        self.flows.values_mut().for_each(|flow| flow.meet(neighbour, now));
    }

    fn set_epochs(&mut self, now: Instant, epochs: &BTreeMap<NodeId, Epoch>) {
        for (node, epoch) in epochs.iter().filter(|(node, _)| **node != self.own) {
            if !self.members.contains(node) || self.epochs.get(node) == Some(&epoch.number) {
                continue;
            }
            self.epochs.insert(*node, epoch.number);
            let (own, mut lost) = (self.own, 0);
            self.flows.retain(|(source, destination), flow| {
                let has_ended = source == node || destination == node;
                lost += if has_ended && *source == own { flow.kept() } else { 0 };
                !has_ended
            });
            self.counts.given_up += u64::try_from(lost).unwrap_or(0);
            // A neighbour that has restarted has forgotten what it has said.
            if self.neighbours.contains_key(node) {
                for flow in self.flows.values_mut() {
                    flow.forget(*node);
                    flow.meet(*node, now);
                }
            }
        }
    }

    /// Returns the epoch of a node, or an error.
    fn epoch_of(&self, node: NodeId) -> Result<u32, Refused> {
        if node == self.own {
            return Ok(self.epoch);
        }
        self.epochs.get(&node).copied().ok_or(Refused::Unknown)
    }

    /// Returns the name that the flow to a node has now.
    fn name_to(&self, to: NodeId) -> Option<FlowName> {
        let target = self.epochs.get(&to).copied().filter(|_| to != self.own)?;
        Some(FlowName { source: self.own, destination: to, epoch: self.epoch, target })
    }

    /// Numbers and signs messages of this node.
    fn send(&mut self, now: Instant, to: NodeId, mut messages: Vec<(Protocol, Vec<u8>)>, keys: &impl Vouch) {
        let count = messages.len();
        let (name, subgraph) = (self.name_to(to), Subgraph::new(self.own, to, []));
        if let (Some(name), Some(subgraph)) = (name, subgraph) {
            let flow = flow_of(&mut self.flows, (name, self.own), &self.neighbours, now);
            while !messages.is_empty() {
                let mut batch = Vec::new();
                let (mut number, mut bytes) = (flow.end(), 0);
                for (protocol, payload) in &mut messages {
                    bytes += payload.len();
                    if batch.len() == BATCH_MAX || !flow.has_room(number, bytes) {
                        break;
                    }
                    let packet = message(name, number, subgraph.clone(), *protocol, std::mem::take(payload));
                    batch.push(Unsigned { priority: PRIORITY, target: name.target, packet });
                    number += 1;
                }
                if batch.is_empty() {
                    break;
                }
                messages.drain(..batch.len());
                for signed in batch::sign(self.own, batch, keys) {
                    flow.keep(now, None, Arc::new(signed));
                }
            }
        }
        let refused = messages.len();
        self.counts.blocked += u64::try_from(refused).unwrap_or(0);
        self.counts.sent += u64::try_from(count - refused).unwrap_or(0);
    }

    fn count(&mut self, result: Result<(), Refused>) {
        let Err(refused) = result else { return };
        let counts = &mut self.counts;
        *match refused {
            Refused::OffGraph => &mut counts.off_flow,
            Refused::Late => &mut counts.beyond,
            Refused::Unknown => &mut counts.unknown,
            Refused::Replayed => &mut counts.replayed,
            Refused::Duplicate => &mut counts.duplicates,
            Refused::Unchecked => &mut counts.unchecked,
            Refused::Forged => &mut counts.forged,
        } += 1;
    }

    /// Checks that a flow connects two members in their present epochs.
    fn check_name(&self, from: NodeId, name: &FlowName) -> Result<(), Refused> {
        let FlowName { source, destination, epoch, target } = *name;
        let are_members = [source, destination].iter().all(|end| self.members.contains(end));
        if !are_members || source == destination || !self.neighbours.contains_key(&from) {
            return Err(Refused::OffGraph);
        }
        let known = (self.epoch_of(source)?, self.epoch_of(destination)?);
        if known == (epoch, target) { Ok(()) } else { Err(Refused::Replayed) }
    }

    fn message(
        &mut self,
        now: Instant,
        from: NodeId,
        packet: Vouched,
        keys: &impl Vouch,
    ) -> Result<(), Refused> {
        let (spread, target) = (&packet.packet, packet.target);
        let (source, destination) = (spread.subgraph.source(), spread.subgraph.destination());
        let name = FlowName { source, destination, epoch: spread.epoch, target };
        if spread.kind != LinkKind::Reliable || spread.subgraph.links().next().is_some() {
            return Err(Refused::OffGraph);
        }
        self.check_name(from, &name)?;
        if source == self.own {
            return Err(Refused::Duplicate);
        }
        let (sequence, bytes) = (spread.sequence, spread.payload.len());
        match self.flows.get_mut(&(source, destination)) {
            Some(flow) if flow.has(sequence) => {
                // The neighbour does not know yet that this node has it.
                flow.came_again(now, from, sequence);
                return Err(Refused::Duplicate);
            }
            Some(flow) if !flow.has_room(sequence, bytes) => return Err(Refused::Late),
            None if sequence >= FLOW_WINDOW || bytes > FLOW_BYTES => return Err(Refused::Late),
            _ => {}
        }
        if destination != self.own && !self.has_place(source, destination) {
            return Err(Refused::Late);
        }
        let faults = self.faults.entry(from).or_insert(Allowance::of_neighbour(now));
        self.batches.entry(source).or_insert(Batches::new(now)).check(now, faults, &packet, keys)?;
        let flow = flow_of(&mut self.flows, (name, self.own), &self.neighbours, now);
        flow.keep(now, Some(from), Arc::new(packet));
        if destination != self.own {
            self.counts.relayed += 1;
            return Ok(());
        }
        for message in flow.deliver(now) {
            self.counts.delivered += 1;
            self.outputs.push_back(Output::Deliver(message));
        }
        Ok(())
    }

    /// Whether a source may have messages in this flow here: it has, or it does not use up its part of the flows.
    fn has_place(&self, source: NodeId, destination: NodeId) -> bool {
        let is_used = |flow: &Flow| flow.kept() > 0;
        if self.flows.get(&(source, destination)).is_some_and(is_used) {
            return true;
        }
        let of_source = self.flows.range((source, NodeId(0))..=(source, NodeId(u64::MAX)));
        let used = of_source.filter(|(_, flow)| is_used(flow)).count();
        used < (FLOWS_MAX / self.members.len().max(1)).max(1)
    }

    fn holding(
        &mut self,
        now: Instant,
        from: NodeId,
        holding: &Holding,
        keys: &impl Vouch,
    ) -> Result<(), Refused> {
        let name = holding.flow;
        self.check_name(from, &name)?;
        let key = (name.source, name.destination);
        let known = self.flows.get(&key).map_or(0, Flow::confirmed);
        let news = holding.confirmed.filter(|said| said.next > known && name.destination != self.own);
        if let Some(said) = news {
            let faults = self.faults.entry(from).or_insert(Allowance::of_neighbour(now));
            if !faults.may_fail(now) {
                return Err(Refused::Unchecked);
            }
            if !keys.verify(name.destination, &name.confirmed_bytes(said.next), &said.signature) {
                faults.spend();
                return Err(Refused::Forged);
            }
            let flow = flow_of(&mut self.flows, (name, self.own), &self.neighbours, now);
            let is_own = name.source == self.own;
            // No honest destination confirms what was never sent.
            if is_own && said.next > flow.end() {
                return Err(Refused::Forged);
            }
            flow.confirm(now, said);
            if is_own {
                self.outputs.push_back(Output::Confirmed(name.destination));
            }
        }
        let round_trip = self.neighbours.get(&from).map_or(Duration::ZERO, |neighbour| neighbour.round_trip);
        if let Some(flow) = self.flows.get_mut(&key) {
            flow.heard(now, from, holding, round_trip);
        }
        Ok(())
    }

    /// Signs how far the flows to this node have got.
    fn confirm(&mut self, now: Instant, keys: &impl Vouch) {
        for flow in self.flows.values_mut().filter(|flow| flow.name.destination == self.own) {
            let Some(next) = flow.take_due_confirmation(now) else { continue };
            let signature = keys.sign(&flow.name.confirmed_bytes(next));
            flow.confirm(now, Confirmed { next, signature });
        }
    }

    /// Tells neighbours what this node has.
    fn say(&mut self, now: Instant) {
        for flow in self.flows.values_mut() {
            for (neighbour, holding) in flow.take_due_words(now) {
                self.outputs.push_back(Output::Holding(neighbour, holding));
            }
        }
    }

    /// Sends what the rates allow: of the sources that have a message for a neighbour, the one that was served least, and of its
    /// flows the next one in turn.
    fn pump(&mut self, now: Instant) {
        let burst = u64::try_from(BURST.as_nanos()).unwrap_or(0);
        for (name, neighbour) in &mut self.neighbours {
            // Time that was not used is lost, or a link that was idle for long would get all at once.
            neighbour.paid = neighbour.paid.max(Instant::from_nanos(now.as_nanos().saturating_sub(burst)));
            let timeout = neighbour.round_trip * 2 + ACK_DELAY * 3;
            neighbour.waits = false;
            loop {
                let served = &neighbour.served;
                let flows = self.flows.values_mut().filter_map(|flow| {
                    flow.next_for(*name, now, timeout)?;
                    let of_source = served.get(&flow.name.source).copied().unwrap_or(0);
                    Some((of_source.max(neighbour.time), flow.turn(*name), flow))
                });
                let Some((start, _, flow)) = flows.min_by_key(|(of_source, turn, _)| (*of_source, *turn))
                else {
                    break;
                };
                if neighbour.paid > now {
                    neighbour.waits = true;
                    break;
                }
                let source = flow.name.source;
                let Some((message, is_again)) = flow.take_for(*name, now, timeout, self.counts.copies + 1)
                else {
                    break;
                };
                let bytes = flow::size(&message);
                neighbour.time = start;
                neighbour
                    .served
                    .insert(source, start.saturating_add(u64::try_from(bytes).unwrap_or(u64::MAX)));
                neighbour.paid = neighbour.paid + neighbour.rate.time(bytes);
                self.counts.copies += 1;
                self.counts.resent += u64::from(is_again);
                self.outputs.push_back(Output::Message(*name, message));
            }
        }
    }
}

/// Returns the flow with this name. A new one knows all neighbours.
fn flow_of<'a>(
    flows: &'a mut BTreeMap<Key, Flow>,
    (name, own): (FlowName, NodeId),
    neighbours: &BTreeMap<NodeId, Neighbour>,
    now: Instant,
) -> &'a mut Flow {
    flows.entry((name.source, name.destination)).or_insert_with(|| {
        let mut flow = Flow::new(name, own);
        neighbours.keys().for_each(|neighbour| flow.meet(*neighbour, now));
        flow
    })
}

/// Makes a message. It names no links: each node passes it to all of its neighbours.
fn message(
    name: FlowName,
    sequence: u64,
    subgraph: Subgraph,
    protocol: Protocol,
    payload: Vec<u8>,
) -> Spread {
    let (kind, dissemination) = (LinkKind::Reliable, Dissemination::Flood);
    let FlowName { epoch, .. } = name;
    Spread { kind, dissemination, protocol, epoch, sequence, age_us: 0, budget_us: 0, subgraph, payload }
}
