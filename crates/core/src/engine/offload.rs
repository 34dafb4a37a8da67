//! Offloads connections whose packets need only translation: a program in the kernel may do that. The engine keeps the
//! connection. Before it decides anything it reads what the program has passed on. A packet that reaches the engine
//! all the same is handled as for any other connection.
//!
//! Both may translate packets of the same connection, because numbers only move forward: each copies the other's numbers when
//! those are ahead.
//!
//! ```text
//!                   plain(): only translation is left        offload()
//!   user space only ------------------------> may be offloaded ------------> offloaded
//!        ^                                                                   |  ^
//!        |   reclaim(): the kernel has let go of it (again later)            |  | progress(): numbers, bytes, FINs
//!        +<------------------------------------------------------------------+--+
//!        |   closing(): a FIN or a RST came here                             |
//!        |                                                                   v
//!   TimeWait <----------- over(): both FINs are acknowledged in the kernel --+
//!
//!   Writers of an offloaded connection:
//!     the kernel's program   `Moved`: numbers, bytes, packets, FINs of what it has passed on
//!     the engine             `Translation` once, when it offloads it; `Standing` after each packet that came to user space
//! ```

use super::config::{Callbacks, ConnectionId, Hop};
use super::connection::{Hot, Leg, NEVER, Phase};
use super::handshake::SynAck;
use super::machine::Engine;
use super::seq::Seq;
use super::slot::{Pair, Slot};
use crate::flow::Side;
use crate::time::Instant;
use std::net::SocketAddr;
use std::num::NonZeroU32;

/// The number that the kernel's side gives to an offloaded connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OffloadId(pub NonZeroU32);

/// Where one side stands, in its own numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// After the last byte it sent.
    pub sent: u32,
    /// The highest number it acknowledged.
    pub acknowledged: u32,
    /// The highest number its window ever allowed.
    pub edge: u32,
    /// Its last time stamp.
    pub stamp: u32,
}

/// How packets of one side come, how it is reached, and what becomes of their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// The host on this side.
    pub remote: SocketAddr,
    /// The address that it talks to.
    pub local: SocketAddr,
    /// How it is reached.
    pub hop: Hop,
    /// What is added to its sequence numbers, and taken from the acknowledgements (SACK too) that it is sent.
    pub add: u32,
    /// What is added to its time stamps, and taken from those that it is shown to have sent.
    pub stamp_add: u32,
    /// It is never shown an earlier one.
    pub stamp_first: u32,
    /// Largest payload it takes, options included, bytes.
    pub mss: u16,
    /// Shift of the windows it sends.
    pub shift: u8,
    /// Shift of the windows it is shown.
    pub shown_shift: u8,
    /// It has sent its FIN, and that was acknowledged.
    pub finished: bool,
    /// Where it stands.
    pub standing: Standing,
}

/// A FIN that the kernel has passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fin {
    /// After it, as `Standing::sent`.
    pub end: u32,
    /// True if the other side's FIN was passed on first.
    pub is_second: bool,
}

/// What the kernel has passed on of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Where it stands now.
    pub standing: Standing,
    /// Payload since the last time, bytes, each once. Negative (-1) if a FIN's number was counted as a byte last time.
    pub bytes: i64,
    /// Packets since the last time.
    pub packets: u32,
    /// Its FIN, if the kernel has passed it on.
    pub fin: Option<Fin>,
}

/// The progress of an offloaded connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Both sides, the client first.
    pub sides: Pair<Moved>,
    /// The time of the last packet that the kernel passed on; none if it passed on no packet.
    pub active: Option<Instant>,
    /// The server's SYN-ACK, if the kernel waited for it ([`Callbacks::offload_handshake`]). It is told once, with the first progress.
    pub syn_ack: Option<SynAck>,
}

impl Hot {
    /// Whether its packets need only translation, now and until one of the hosts closes.
    pub(super) fn may_be_offloaded(&self) -> bool {
        self.plain && self.is_untouched()
    }

    /// The same, but the engine may still have first bytes to deliver.
    fn is_untouched(&self) -> bool {
        let open = |leg: &Leg| !leg.has_fin || leg.fin_acked;
        self.phase == Phase::Bound && !self.edited && self.offloaded.is_none() && self.leg.0.iter().all(open)
    }
}

impl Leg {
    pub(super) const fn standing(&self) -> Standing {
        Standing { sent: self.next.0, acknowledged: self.acked.0, edge: self.edge.0, stamp: self.stamp }
    }

    fn moved(&mut self, moved: &Moved) {
        let Standing { sent, acknowledged, edge, stamp } = moved.standing;
        self.bytes = self.bytes.saturating_add_signed(moved.bytes);
        self.packets = self.packets.wrapping_add(moved.packets);
        if moved.packets > 0 && !Seq(sent).before(self.next) {
            self.stamp = stamp;
        }
        self.next = self.next.max(Seq(sent));
        self.acked = self.acked.max(Seq(acknowledged));
        self.edge = self.edge.max(Seq(edge));
    }
}

impl<C: Callbacks> Engine<C> {
    /// Returns what the kernel needs to translate the connection in this slot, the client's side first; none if it cannot be
    /// offloaded now.
    pub fn translation(&self, slot: Slot) -> Option<[Translation; 2]> {
        let hot = self.tables.hot.at(slot);
        (hot.may_be_offloaded() || self.only_delivers(slot)).then(|| {
            Side::BOTH.map(|at| {
                let (leg, tuple) = (&hot.leg[at], &hot.tuple[at]);
                Translation {
                    remote: tuple.remote_addr(),
                    local: tuple.local_addr(),
                    hop: leg.hop,
                    add: leg.add,
                    stamp_add: leg.stamp_add,
                    stamp_first: leg.stamp_first,
                    mss: leg.mss,
                    shift: leg.shift,
                    shown_shift: leg.shown_shift,
                    finished: leg.has_fin,
                    standing: leg.standing(),
                }
            })
        })
    }

    /// Whether only the delivery of the first bytes is left, which were sent unchanged. The engine retransmits them if it must,
    /// also while the kernel translates.
    pub(super) fn only_delivers(&self, slot: Slot) -> bool {
        let hot = self.tables.hot.at(slot);
        let Some(slow) = self.tables.slow.get(hot.slow) else { return false };
        let Pair([client, server]) = &slow.edits;
        hot.is_untouched()
            && hot.same_options
            && hot.same_family
            && slow.inspect == Pair([false; 2])
            && server.is_empty()
            && client.only_owned().is_some_and(|end| slow.sent == end)
    }

    /// Marks the connection in this slot as offloaded.
    pub fn offload(&mut self, slot: Slot, to: OffloadId) {
        self.tables.hot.at_mut(slot).offloaded = Some(to);
        self.tables.cold.at_mut(slot).was_offloaded = true;
    }

    /// Takes the connection back: copies its state from the kernel for the last time.
    pub fn reclaim(&mut self, now: Instant, slot: Slot) {
        self.catch_up(now, slot);
        self.tables.hot.at_mut(slot).offloaded = None;
    }

    /// Ends an offloaded connection whose two FINs were acknowledged in the kernel.
    pub fn over(&mut self, now: Instant, slot: Slot, to: OffloadId) {
        if self.tables.hot.at(slot).offloaded == Some(to) {
            self.catch_up(now, slot);
            if self.tables.hot.at(slot).phase == Phase::TimeWait {
                self.ended(slot);
            }
        }
    }

    /// Returns the numbers of both sides by what the kernel told and what came to user space, and the first time stamps that they
    /// may be shown. None if the connection is not offloaded under this number, or the SYN-ACK has not come.
    pub fn standing(&self, slot: Slot, to: OffloadId) -> Option<[(Standing, u32); 2]> {
        let hot = self.tables.hot.at(slot);
        let is_known = hot.offloaded == Some(to) && hot.phase != Phase::Connecting;
        is_known.then(|| Side::BOTH.map(|at| (hot.leg[at].standing(), hot.leg[at].stamp_first)))
    }

    /// Copies the state of every offloaded connection from the kernel.
    pub fn refresh(&mut self, now: Instant) {
        for slot in self.tables.hot.places() {
            self.catch_up(now, slot);
        }
    }

    /// Returns the connections of which the kernel has passed on packets.
    pub fn passed_elsewhere(&self) -> impl Iterator<Item = ConnectionId> {
        let both = self.tables.hot.iter().zip(self.tables.cold.iter());
        both.filter(|(hot, cold)| hot.phase == Phase::Bound && cold.passed_elsewhere).map(|(_, cold)| cold.id)
    }

    /// Copies a connection's state from the kernel.
    pub(super) fn catch_up(&mut self, now: Instant, slot: Slot) {
        let Some(offloaded) = self.tables.hot.at(slot).offloaded else { return };
        let Some(progress) = self.callbacks.progress(offloaded) else { return };
        if self.tables.hot.at(slot).phase == Phase::Connecting {
            let Some(syn_ack) = &progress.syn_ack else { return };
            self.bound_elsewhere(slot, syn_ack);
        }
        let hot = self.tables.hot.at_mut(slot);
        let before = hot.leg[Side::Server].acked;
        for (leg, moved) in hot.leg.0.iter_mut().zip(&progress.sides.0) {
            leg.moved(moved);
        }
        if progress.sides.0.iter().any(|moved| moved.packets > 0) {
            self.tables.cold.at_mut(slot).passed_elsewhere = true;
        }
        if let Some(active) = progress.active
            && hot.phase == Phase::Bound
        {
            hot.active = hot.active.max(active);
        }
        self.delivered_elsewhere(now, slot, before);
        // The kernel may report it late: the time of the last packet counts, but never a time before the server answered.
        let at = progress.active.map_or(now, |active| active.min(now));
        let connected = self.tables.cold.at(slot).connected;
        let at = if connected == NEVER { at } else { at.max(connected) };
        self.closed_elsewhere(at, slot, &progress.sides);
    }

    /// Drops first bytes that the server has acknowledged through the kernel since `before`.
    fn delivered_elsewhere(&mut self, now: Instant, slot: Slot, before: Seq) {
        if self.slow_of(slot).is_none() {
            return;
        }
        self.forget_acknowledged(slot, Side::Client);
        self.forget_acknowledged(slot, Side::Server);
        let acked = self.tables.hot.at(slot).leg[Side::Server].acked;
        self.owned_acknowledged(now, slot, before, acked);
        self.settle(slot);
    }

    /// Follows FINs that the kernel has passed on, and acknowledgements of those that user space handled. The order in which the
    /// FINs came decides the states, so the first one is followed first.
    fn closed_elsewhere(&mut self, now: Instant, slot: Slot, sides: &Pair<Moved>) {
        let client_is_second = sides[Side::Client].fin.is_some_and(|fin| fin.is_second);
        let order =
            if client_is_second { [Side::Server, Side::Client] } else { [Side::Client, Side::Server] };
        for from in order {
            let is_known = self.tables.hot.at(slot).leg[from].has_fin;
            let Some(fin) = sides[from].fin.filter(|_| !is_known) else { continue };
            self.heard_elsewhere(now, slot, from);
            let leg = &mut self.tables.hot.at_mut(slot).leg[from];
            (leg.has_fin, leg.fin) = (true, Seq(fin.end));
            let state = leg.state.fin_sent();
            self.state(now, slot, from, state);
        }
        for from in order {
            self.heard_elsewhere(now, slot, from);
        }
    }

    /// Tells the kernel's side that an offloaded connection has ended.
    pub(super) fn ended(&mut self, slot: Slot) {
        if let Some(offloaded) = self.tables.hot.at_mut(slot).offloaded.take() {
            self.callbacks.ended(offloaded);
        }
    }
}
