//! Packets that arrive although some members lie (after Obenshain and others, "Practical intrusion-tolerant networks", ICDCS
//! 2016, and priority flooding of Spines).
//!
//! Each relay checks the proof of the source before it stores a packet. It stores packets for each neighbour apart, and gives
//! each source an equal share of the store and of the rate:
//!
//! ```text
//!        a copy comes from a neighbour
//!                    |
//!     the verifier: may it come that way, is it in time, new, and its proof right? ---> dropped and counted
//!                    |
//!     deliver it if it is for us
//!                    |
//!     for each link of the subgraph that leaves us, except back to the neighbour:
//!        a store for that neighbour, bounded
//!           full: the source that holds most loses its oldest packet of the lowest priority
//!           the neighbour sends us the packet: it is removed, the neighbour has it
//!           older than its budget: it is removed
//!                    |
//!        at the rate of the link: the source that was served least, its highest priority, the newest packet
//! ```
//!
//! | part | does |
//! |---|---|
//! | [`batch`] | proofs: one signature for up to 32 packets |
//! | [`verify`] | accepts each packet of each source once, and bounds the work that liars cause |
//! | [`store`] | the packets that wait for one neighbour, and the share of each source |
//! | [`reliable`] | flows whose messages all arrive: each node keeps them until the destination has confirmed them |

pub mod batch;
pub mod reliable;
pub mod store;
pub mod verify;

use super::frame::{Dissemination, Hash, Vouched};
use super::{Keys, NodeId};
use crate::time::Instant;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use store::{Rate, Store};
use verify::{Refused, Verifier};

/// Under which epoch the proofs of a node count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch {
    /// The epoch, drawn at random when the node started.
    pub number: u32,
    /// The number of its next packet when it said so.
    pub next: u64,
}

/// What proofs need beyond signatures. The function is pure.
pub trait Vouch: Keys {
    /// Returns the first bytes of the SHA-256 of these bytes.
    fn digest(&self, bytes: &[u8]) -> Hash;
}

/// An event that the driver reports.
#[derive(Clone, Debug)]
pub enum Input {
    /// Packets can be sent to this neighbour, at this rate.
    Up(NodeId, Rate),
    /// Packets can no longer be sent to this neighbour. Those that wait for it are dropped.
    Down(NodeId),
    /// Under which epochs the proofs of nodes count.
    Epochs(BTreeMap<NodeId, Epoch>),
    /// A packet of this node, with its proof.
    Send(Vouched),
    /// A copy came from a neighbour, over a link that takes this long one way, µs.
    Came(NodeId, Vouched, u32),
    /// The deadline may have passed.
    Tick,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a copy to this neighbour.
    Send(NodeId, Vouched),
    /// The packet is for this node.
    Deliver(Arc<Vouched>),
}

/// Counts of copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Copies that were sent of this node's own packets.
    pub copies: u64,
    /// First copies for this node, by [`Dissemination::ALL`].
    pub delivered: [u64; Dissemination::ALL.len()],
    /// First copies that were for other nodes.
    pub relayed: u64,
    /// Further copies.
    pub duplicates: u64,
    /// Copies that were older than their budget when they came.
    pub late: u64,
    /// Copies on a link that their subgraph does not have, or of a source that is not a member.
    pub off_graph: u64,
    /// Copies with a wrong proof.
    pub forged: u64,
    /// Copies of an earlier epoch of their source, or for an earlier epoch of this node.
    pub replayed: u64,
    /// Copies of a source whose epoch is unknown.
    pub unknown: u64,
    /// Copies of a source or neighbour that has used up its share of signature checks, unchecked.
    pub unchecked: u64,
    /// Stored packets that lost their place because their source held most.
    pub over_share: u64,
    /// Stored packets that became older than their budget.
    pub expired: u64,
}

/// The relaying part of a node, for packets with proofs.
#[derive(Clone, Debug)]
pub struct Relay {
    own: NodeId,
    verifier: Verifier,
    stores: BTreeMap<NodeId, Store>,
    counts: Counts,
    outputs: VecDeque<Output>,
}

impl Relay {
    /// Makes a relay of this node, whose epoch this is. Packets of other sources than `members` are dropped.
    pub fn new(own: NodeId, epoch: u32, members: BTreeSet<NodeId>) -> Self {
        let verifier = Verifier::new(own, epoch, members);
        let (stores, counts, outputs) = (BTreeMap::new(), Counts::default(), VecDeque::new());
        Self { own, verifier, stores, counts, outputs }
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns how many packets wait, and their bytes.
    pub fn waiting(&self) -> (usize, usize) {
        let stores = self.stores.values();
        stores.fold((0, 0), |(packets, bytes), store| (packets + store.len(), bytes + store.bytes()))
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, input: Input, keys: &impl Vouch) {
        match input {
            Input::Up(neighbour, rate) => match self.stores.get_mut(&neighbour) {
                Some(store) => store.set_rate(rate),
                None => {
                    self.stores.insert(neighbour, Store::new(rate, now));
                }
            },
            Input::Down(neighbour) => {
                self.stores.remove(&neighbour);
            }
            Input::Epochs(epochs) => self.verifier.set_epochs(epochs, now),
            Input::Send(packet) => self.store(now, None, Arc::new(packet)),
            Input::Came(from, packet, link_us) => self.came(now, from, packet, link_us, keys),
            Input::Tick => {}
        }
        self.pump(now);
    }

    /// Returns the next output, or `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when to call `handle(now, Input::Tick, keys)`.
    pub fn deadline(&self) -> Option<Instant> {
        self.stores.values().filter_map(Store::deadline).min()
    }

    fn came(&mut self, now: Instant, from: NodeId, mut packet: Vouched, link_us: u32, keys: &impl Vouch) {
        packet.packet.grow_older(link_us);
        let (source, sequence) = (packet.packet.subgraph.source(), packet.packet.sequence);
        let verdict = self.verifier.check(now, from, &packet, keys);
        let counts = &mut self.counts;
        match verdict {
            Ok(()) => {}
            Err(refused) => {
                *match refused {
                    Refused::OffGraph => &mut counts.off_graph,
                    Refused::Late => &mut counts.late,
                    Refused::Unknown => &mut counts.unknown,
                    Refused::Replayed => &mut counts.replayed,
                    Refused::Duplicate => &mut counts.duplicates,
                    Refused::Unchecked => &mut counts.unchecked,
                    Refused::Forged => &mut counts.forged,
                } += 1;
                // Its proof is not checked again: at worst, the neighbour gets one packet less from us.
                if let (Refused::Duplicate, Some(store)) = (refused, self.stores.get_mut(&from)) {
                    store.remove(source, sequence);
                }
                return;
            }
        }
        let packet = Arc::new(packet);
        if packet.packet.is_for(self.own) {
            let at = Dissemination::ALL.iter().position(|one| *one == packet.packet.dissemination);
            counts.delivered[at.unwrap_or(0)] += 1;
            self.outputs.push_back(Output::Deliver(packet.clone()));
        } else {
            counts.relayed += 1;
        }
        self.store(now, Some(from), packet);
    }

    /// Stores a packet for the neighbours that its subgraph names.
    fn store(&mut self, now: Instant, from: Option<NodeId>, packet: Arc<Vouched>) {
        let subgraph = &packet.packet.subgraph;
        for next in subgraph.next(self.own).filter(|next| Some(*next) != from && *next != subgraph.source()) {
            if let Some(store) = self.stores.get_mut(&next) {
                self.counts.over_share += store.put(now, packet.clone());
            }
        }
    }

    /// Sends what the rates allow.
    fn pump(&mut self, now: Instant) {
        for (neighbour, store) in &mut self.stores {
            while let Some((packet, waited)) = store.take(now) {
                let mut copy = Vouched::clone(&packet);
                copy.packet.grow_older(micros(waited));
                self.counts.copies += u64::from(copy.packet.subgraph.source() == self.own);
                self.outputs.push_back(Output::Send(*neighbour, copy));
            }
            self.counts.expired += store.take_expired();
        }
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
