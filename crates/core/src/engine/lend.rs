//! Connections whose packets need nothing but translation: somebody nearer to the interfaces, such as a program in the
//! kernel, may do that. The connection stays ours: what was passed on there is told here before anything is decided, and a
//! packet that comes here all the same is handled as ever.
//!
//! Numbers only move forward, so both may translate packets of the same connection: each takes what the other has seen when
//! it is ahead.

use super::ask::Answered;
use super::config::{Callbacks, ConnectionId, Hop};
use super::connection::{CLIENT, Hot, Leg, NEVER, Phase, SERVER};
use super::machine::Engine;
use super::seq::Seq;
use crate::time::Instant;
use std::net::SocketAddr;
use std::num::NonZeroU32;

/// Whom a connection is lent to: the borrower's own number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LentTo(pub NonZeroU32);

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
    /// Whom it talks to.
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

/// A FIN that the borrower passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fin {
    /// After it, as `Standing::sent`.
    pub end: u32,
    /// The other side's had come before.
    pub is_second: bool,
}

/// What one side has sent by way of the borrower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Where it stands now.
    pub standing: Standing,
    /// Payload since the last time, bytes, each once.
    pub bytes: u64,
    /// Packets since the last time.
    pub packets: u32,
    /// Its FIN, if it was ever passed on there.
    pub fin: Option<Fin>,
}

/// What has become of a lent connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Both sides, the client first.
    pub sides: [Moved; 2],
    /// When the last packet passed there; none: none did.
    pub active: Option<Instant>,
    /// What the server answered, if whoever has it waited for that ([`Callbacks::ask`]); told once, and with the first progress that is
    /// told at all.
    pub answered: Option<Answered>,
}

impl Hot {
    /// Whether nobody but the hosts themselves has a say in what becomes of its packets, and whether it stays so until one
    /// of them closes.
    pub(super) fn may_be_lent(&self) -> bool {
        self.plain && self.is_untouched()
    }

    /// The same but for first bytes that are ours to deliver.
    fn is_untouched(&self) -> bool {
        let open = |leg: &Leg| !leg.has_fin || leg.fin_acked;
        self.phase == Phase::Bound && !self.edited && self.lent.is_none() && self.leg.iter().all(open)
    }
}

impl Leg {
    pub(super) const fn standing(&self) -> Standing {
        Standing { sent: self.next.0, acknowledged: self.acked.0, edge: self.edge.0, stamp: self.stamp }
    }

    fn moved(&mut self, moved: &Moved) {
        let Standing { sent, acknowledged, edge, stamp } = moved.standing;
        self.bytes += moved.bytes;
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
    /// What a borrower needs to know of the connection in this slot, the client's side first; none: it is not to be lent
    /// now.
    pub fn translation(&self, slot: u32) -> Option<[Translation; 2]> {
        let hot = self.hot.get(slot as usize)?;
        (hot.may_be_lent() || self.only_delivers(slot as usize)).then(|| {
            [CLIENT, SERVER].map(|at| {
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

    /// Whether all that is left to do for it is to see that the server gets its first bytes, which were sent as they came:
    /// they are sent again here if they must be, whoever else translates.
    pub(super) fn only_delivers(&self, slot: usize) -> bool {
        let Some(hot) = self.hot.get(slot).filter(|hot| hot.is_untouched()) else { return false };
        let Some(slow) = self.slow.get(hot.slow as usize) else { return false };
        let [client, server] = &slow.edits;
        hot.same_options
            && hot.same_family
            && slow.inspect == [false; 2]
            && server.is_empty()
            && client.only_owned().is_some_and(|end| slow.sent == end)
    }

    /// The connection in this slot is lent from now on.
    pub fn lend(&mut self, slot: u32, to: LentTo) {
        if let Some(hot) = self.hot.get_mut(slot as usize) {
            hot.lent = Some(to);
        }
        if let Some(cold) = self.cold.get_mut(slot as usize) {
            cold.was_lent = true;
        }
    }

    /// It is lent no more. The borrower tells for the last time what became of it.
    pub fn reclaim(&mut self, now: Instant, slot: u32) {
        self.catch_up(now, slot as usize);
        if let Some(hot) = self.hot.get_mut(slot as usize) {
            hot.lent = None;
        }
    }

    /// Both sides of a connection have closed where it is lent.
    pub fn over(&mut self, now: Instant, slot: u32, to: LentTo) {
        if self.hot.get(slot as usize).is_some_and(|hot| hot.lent == Some(to)) {
            self.catch_up(now, slot as usize);
            if self.hot.get(slot as usize).is_some_and(|hot| hot.phase == Phase::TimeWait) {
                self.ended(slot as usize);
            }
        }
    }

    /// Where both sides of a lent connection stand by what was told and what came here, and the first time stamps that
    /// they may be shown; none if it is not lent to this borrower, or its server's answer is still waited for.
    pub fn standing(&self, slot: u32, to: LentTo) -> Option<[(Standing, u32); 2]> {
        let is_known = |hot: &&Hot| hot.lent == Some(to) && hot.phase != Phase::Connecting;
        let hot = self.hot.get(slot as usize).filter(is_known)?;
        Some([CLIENT, SERVER].map(|at| (hot.leg[at].standing(), hot.leg[at].stamp_first)))
    }

    /// Asks for news of every lent connection.
    pub fn refresh(&mut self, now: Instant) {
        for slot in 0..self.hot.len() {
            self.catch_up(now, slot);
        }
    }

    /// Connections of which packets were passed on by whom they are lent to.
    pub fn passed_elsewhere(&self) -> impl Iterator<Item = ConnectionId> {
        let both = self.hot.iter().zip(&self.cold);
        both.filter(|(hot, cold)| hot.phase == Phase::Bound && cold.passed_elsewhere).map(|(_, cold)| cold.id)
    }

    /// Learns what became of a connection while it was lent.
    pub(super) fn catch_up(&mut self, now: Instant, slot: usize) {
        let Some(lent) = self.hot.get(slot).and_then(|hot| hot.lent) else { return };
        let Some(progress) = self.callbacks.progress(lent) else { return };
        if self.hot.get(slot).is_some_and(|hot| hot.phase == Phase::Connecting) {
            let Some(answered) = &progress.answered else { return };
            self.bound_elsewhere(slot, answered);
        }
        let Some(hot) = self.hot.get_mut(slot) else { return };
        let before = hot.leg[SERVER].acked;
        for (leg, moved) in hot.leg.iter_mut().zip(&progress.sides) {
            leg.moved(moved);
        }
        if progress.sides.iter().any(|moved| moved.packets > 0)
            && let Some(cold) = self.cold.get_mut(slot)
        {
            cold.passed_elsewhere = true;
        }
        if let Some(active) = progress.active
            && hot.phase == Phase::Bound
        {
            hot.active = hot.active.max(active);
        }
        self.delivered_elsewhere(now, slot, before);
        // It may be told late.
        let at = progress.active.map_or(now, |active| active.min(now));
        let connected = self.cold.get(slot).map(|cold| cold.connected).filter(|at| *at != NEVER);
        let at = connected.map_or(at, |connected| at.max(connected));
        self.closed_elsewhere(at, slot, &progress.sides);
    }

    /// The server may have acknowledged there what was ours to deliver; it had acknowledged `before`.
    fn delivered_elsewhere(&mut self, now: Instant, slot: usize, before: Seq) {
        if self.slow_of(slot).is_none() {
            return;
        }
        self.forget_acknowledged(slot, CLIENT);
        self.forget_acknowledged(slot, SERVER);
        if let Some(acked) = self.hot.get(slot).map(|hot| hot.leg[SERVER].acked) {
            self.owned_acknowledged(now, slot, before, acked);
        }
        self.settle(slot);
    }

    /// FINs may have been passed on there, and those that were handled here acknowledged. They are followed in the order
    /// in which they came.
    fn closed_elsewhere(&mut self, now: Instant, slot: usize, sides: &[Moved; 2]) {
        let client_is_second = sides[CLIENT].fin.is_some_and(|fin| fin.is_second);
        let order = if client_is_second { [SERVER, CLIENT] } else { [CLIENT, SERVER] };
        for from in order {
            let new = |leg: &Leg| sides[from].fin.filter(|_| !leg.has_fin);
            let Some(fin) = self.hot.get(slot).and_then(|hot| new(&hot.leg[from])) else { continue };
            self.heard_elsewhere(now, slot, from);
            let Some(leg) = self.hot.get_mut(slot).map(|hot| &mut hot.leg[from]) else { return };
            (leg.has_fin, leg.fin) = (true, Seq(fin.end));
            let state = leg.state.fin_sent();
            self.state(now, slot, from, state);
        }
        for from in order {
            self.heard_elsewhere(now, slot, from);
        }
    }

    /// A lent connection ends.
    pub(super) fn ended(&mut self, slot: usize) {
        if let Some(lent) = self.hot.get_mut(slot).and_then(|hot| hot.lent.take()) {
            self.callbacks.ended(lent);
        }
    }
}
