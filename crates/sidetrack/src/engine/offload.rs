//! Offloads connections to the kernel. The engine offers those that need only translation. This module gives them to the kernel,
//! reports their progress, takes them back when a packet comes that the kernel leaves to user space, and offloads them again
//! after a while. `core::engine::offload` draws the states.
//!
//! How the kernel takes over without a packet being lost or overtaken is told in `joining.rs`.

use super::hops;
use super::joining::{Ends, Joining};
use super::open::Interface;
use super::targets::Targets;
use crate::live::Clock;
use sidetrack_core::engine::{
    Handshake, Moved, OffloadId, Pair, Progress, Slot, Standing, SynAck, Translation,
};
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::{OffloadPart, OffloadSide, Offloaded, Seen, monotonic_ns};
use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

/// How long a program may still be at work on a packet of a connection that came back.
const LINGERS: Duration = Duration::from_millis(20);

/// The wait until a connection that came back is offloaded again: the first one, and the longest.
const AGAIN: Duration = Duration::from_millis(20);
const AGAIN_MAX: Duration = Duration::from_secs(10);

/// The wait until a connection is offered again whose interface drops redirected frames.
const WHILE_OFF: Duration = Duration::from_secs(2);

/// How often those that ended in XDP are looked for: after some were found, and else.
const SOON: Duration = Duration::from_millis(2);
const WHILE_OFFLOADED: Duration = Duration::from_millis(50);

/// Most connections that wait to be offloaded. Others stay in user space.
const WAITING_MAX: usize = 65_536;

/// What has become of connections since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// They were offloaded to the kernel.
    pub offloaded: u64,
    /// There was no room.
    pub refused: u64,
    /// The kernel had both sides.
    pub joined: u64,
    /// A packet came that the kernel left to us.
    pub returned: u64,
    /// SYN-ACKs of servers that the kernel handled.
    pub syn_acks: u64,
}

/// The connections of one worker that the kernel has.
#[derive(Debug)]
pub(super) struct Offload {
    part: OffloadPart,
    interfaces: Vec<Interface>,
    /// Which of them send what the programs redirect to them. None: all of them do.
    targets: Option<Arc<Targets>>,
    /// What is to be added to times of ours to have the kernel's, nanoseconds.
    monotonic: u64,
    /// The programs are XDP's: they follow FINs.
    by_xdp: bool,
    /// By the number of the connection in our part.
    known: Vec<Option<Known>>,
    offloaded: usize,
    /// When those that ended are looked for.
    look_at: Instant,
    /// Those that the kernel is taking over.
    pub(super) joining: Joining,
    /// Slots of connections that may be offloaded.
    waiting: VecDeque<Slot>,
    /// Slots of those that may be offloaded before their first bytes are there.
    early: Vec<Slot>,
    /// Slots of those that came back, when they may be offloaded again, and how often they have come back.
    again: BTreeMap<(Instant, Slot), u32>,
    /// The time of each slot in `again`: a slot is there once, whichever connections it has had.
    again_at: BTreeMap<Slot, Instant>,
    /// Those that came back, in this order, and since when.
    lingering: VecDeque<(Instant, OffloadId)>,
    /// Those of which packets came here since [`Offload::touched`].
    touched: Vec<OffloadId>,
    counters: Counters,
}

#[derive(Debug)]
struct Known {
    offloaded: Offloaded,
    /// None: it has ended.
    slot: Option<Slot>,
    /// What the engine has counted: bytes and packets.
    lines: [Line; 2],
    packets: [u32; 2],
    /// How often it has come back before.
    returns: u32,
    back: bool,
    /// The kernel waits for the SYN-ACK of its server.
    awaits_syn_ack: bool,
    /// The interfaces of the client and of the server.
    via: [usize; 2],
}

impl Known {
    /// What is new of a side.
    fn moved(&mut self, side: usize, seen: &Seen) -> Moved {
        let (line, packets) = (&mut self.lines[side], &mut self.packets[side]);
        let moved = Moved {
            standing: seen.standing,
            bytes: line.new_bytes(seen.sent, seen.fin.map(|fin| fin.end)),
            packets: seen.packets.wrapping_sub(*packets),
            fin: seen.fin,
        };
        *packets = seen.packets;
        moved
    }
}

/// How far a side's bytes are counted, as `Seen::sent` counts.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    at: u64,
    /// The end of what was counted here before a FIN was marked.
    counted: Option<u64>,
    /// The FIN's mark was seen.
    has_fin: bool,
}

impl Line {
    const fn from(at: u64) -> Self {
        Self { at, counted: None, has_fin: false }
    }

    /// Counts from here on: the engine has counted what comes before, in packets that it handled itself.
    const fn engine_stands_at(&mut self, sent: u64) {
        self.at = sent;
    }

    /// Bytes of payload up to `sent`. `fin` is the number after the FIN, once the program has marked one. A FIN has a number,
    /// too, and the program counts it before it sets the mark. So a look between the two takes the number for a byte, and the
    /// look that finds the mark gives it back: -1.
    fn new_bytes(&mut self, sent: u64, fin: Option<u32>) -> i64 {
        let grown = i64::try_from(sent.saturating_sub(self.at)).unwrap_or(i64::MAX);
        self.at = self.at.max(sent);
        let Some(end) = fin else {
            if grown > 0 {
                self.counted = Some(sent);
            }
            return grown;
        };
        let was_counted = grown > 0 || self.counted.is_some_and(|counted| counted as u32 == end);
        let is_new = !std::mem::replace(&mut self.has_fin, true);
        grown - i64::from(is_new && was_counted)
    }
}

/// The kernel's number for a connection.
fn offloaded_to(offloaded: Offloaded) -> Option<OffloadId> {
    NonZeroU32::new(offloaded.number().wrapping_add(1)).map(OffloadId)
}

/// The interfaces of both sides.
fn via(translations: &[Translation; 2]) -> [usize; 2] {
    translations.map(|side| hops::neighbour(side.hop).map_or(usize::MAX, |(interface, _)| interface))
}

impl Offload {
    /// None yet. `targets`: it is programs in XDP that have them, and these are the interfaces that send what they redirect.
    pub(super) fn new(
        part: OffloadPart,
        interfaces: Vec<Interface>,
        clock: Clock,
        targets: Option<Arc<Targets>>,
    ) -> Self {
        let by_xdp = targets.is_some();
        let mut new = Self {
            part,
            interfaces,
            targets,
            monotonic: monotonic_ns().saturating_sub(clock.now().as_nanos()),
            by_xdp,
            known: Vec::new(),
            offloaded: 0,
            look_at: Instant::ZERO,
            joining: Joining::default(),
            waiting: VecDeque::new(),
            early: Vec::new(),
            again: BTreeMap::new(),
            again_at: BTreeMap::new(),
            lingering: VecDeque::new(),
            touched: Vec::new(),
            counters: Counters::default(),
        };
        new.look_at_interfaces(Instant::ZERO);
        new
    }

    /// Whether it is programs in XDP that have them.
    pub(super) const fn is_by_xdp(&self) -> bool {
        self.by_xdp
    }

    /// What has become of them.
    pub(super) const fn counters(&self) -> Counters {
        self.counters
    }

    /// Notes that the connection in this slot may be offloaded.
    pub(super) fn offer(&mut self, slot: Slot) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back(slot);
        }
    }

    /// The connection in this slot has its first bytes on their way to its server. Programs in XDP may have it already: there
    /// the answer to these bytes would come to us else.
    pub(super) fn offer_early(&mut self, slot: Slot) {
        if self.by_xdp && self.early.len() < WAITING_MAX {
            self.early.push(slot);
        }
    }

    /// The next slot of those, to be offloaded before what was handled is sent.
    pub(super) fn next_early(&mut self) -> Option<Slot> {
        self.early.pop()
    }

    fn known(&mut self, to: OffloadId) -> Option<&mut Known> {
        let at = (to.0.get() - 1).checked_sub(self.part.first())?;
        self.known.get_mut(at as usize)?.as_mut()
    }

    /// Returns the next slot whose connection may be offloaded now, and how often it has come back.
    pub(super) fn next(&mut self, now: Instant) -> Option<(Slot, u32)> {
        if let Some(slot) = self.waiting.pop_front() {
            return Some((slot, 0));
        }
        let due = self.again.first_entry().filter(|entry| entry.key().0 <= now)?;
        let ((_, slot), returns) = due.remove_entry();
        self.again_at.remove(&slot);
        Some((slot, returns))
    }

    /// Notes that the connection in this slot may be offloaded at this time. If too many wait, it stays in user space.
    fn later(&mut self, at: Instant, slot: Slot, returns: u32) {
        if let Some(before) = self.again_at.get(&slot) {
            self.again.remove(&(*before, slot));
        } else if self.again.len() >= WAITING_MAX {
            return;
        }
        self.again_at.insert(slot, at);
        self.again.insert((at, slot), returns);
    }

    /// Gives a connection to the kernel.
    pub(super) fn offload(
        &mut self,
        slot: Slot,
        returns: u32,
        translations: &[Translation; 2],
        now: Instant,
    ) -> Option<OffloadId> {
        let via = via(translations);
        if !self.take(via) {
            // It is offloaded once the interface sends redirected frames.
            self.later(now + WHILE_OFF, slot, returns);
            return None;
        }
        let Some(sides) = self.sides(translations) else {
            // The neighbour that leads to the server is not known yet.
            self.later(now + AGAIN_MAX, slot, returns);
            return None;
        };
        let Some((offloaded, to)) =
            self.part.offload(&sides).and_then(|offloaded| Some((offloaded, offloaded_to(offloaded)?)))
        else {
            self.counters.refused += 1;
            self.later(now + AGAIN_MAX, slot, returns);
            return None;
        };
        // Count from where the engine stands, not from a look: the kernel may have forwarded segments already.
        let lines = sides.map(|side| Line::from(1 << 32 | u64::from(side.standing.sent)));
        let slot = Some(slot);
        self.know(Known {
            offloaded,
            slot,
            lines,
            packets: [0; 2],
            returns,
            back: false,
            awaits_syn_ack: false,
            via,
        });
        // In XDP there is nothing to wait for until a packet comes here all the same.
        if !self.by_xdp {
            self.joins(to, offloaded);
        }
        Some(to)
    }

    /// Has the kernel handle the SYN-ACK of a server that is about to be sent a SYN, and send the first bytes then.
    pub(super) fn offload_handshake(
        &mut self,
        slot: Slot,
        sides: &[Translation; 2],
        handshake: &Handshake<'_>,
    ) -> Option<OffloadId> {
        let via = via(sides);
        if !self.by_xdp || !self.take(via) {
            return None;
        }
        // None: the connection goes the longer way.
        let sides = self.sides(sides)?;
        let offloaded = self.part.begin_handshake(&sides, handshake, self.monotonic)?;
        let to = offloaded_to(offloaded)?;
        let lines = self.part.look(offloaded).map(|seen| Line::from(seen.sent));
        let slot = Some(slot);
        self.know(Known {
            offloaded,
            slot,
            lines,
            packets: [0; 2],
            returns: 0,
            back: false,
            awaits_syn_ack: true,
            via,
        });
        Some(to)
    }

    /// A connection that was offloaded.
    fn know(&mut self, known: Known) {
        let at = (known.offloaded.number() - self.part.first()) as usize;
        if self.known.len() <= at {
            self.known.resize_with(at + 1, || None);
        }
        if let Some(place) = self.known.get_mut(at) {
            *place = Some(known);
            self.offloaded += 1;
        }
        self.counters.offloaded += 1;
    }

    fn joins(&mut self, to: OffloadId, offloaded: Offloaded) {
        self.joining.add(to, self.part.ends(offloaded).map(|(from, to)| Ends { from, to }));
    }

    /// Whether frames that are redirected to these interfaces are sent.
    fn take(&self, via: [usize; 2]) -> bool {
        self.targets.as_ref().is_none_or(|targets| via.iter().all(|interface| targets.takes(*interface)))
    }

    /// Takes back the connections of interfaces that send no redirected frames any more.
    fn look_at_interfaces(&mut self, now: Instant) {
        let Some(targets) = &self.targets else { return };
        targets.look(now);
        if targets.all_take() {
            return;
        }
        let all = self.known.iter().flatten().filter(|known| !known.back && !self.take(known.via));
        let lost: Vec<_> = all.filter_map(|known| offloaded_to(known.offloaded)).collect();
        lost.into_iter().for_each(|to| self.came_back(to, now));
    }

    fn sides(&self, translations: &[Translation; 2]) -> Option<[OffloadSide; 2]> {
        let [client, server] = translations;
        Some([self.side(client)?, self.side(server)?])
    }

    fn side(&self, translation: &Translation) -> Option<OffloadSide> {
        let (interface, to) = hops::neighbour(translation.hop)?;
        let interface = self.interfaces.get(interface)?;
        Some(OffloadSide {
            remote: translation.remote,
            local: translation.local,
            add: translation.add,
            stamp_add: translation.stamp_add,
            stamp_first: translation.stamp_first,
            egress: interface.index,
            to,
            from: interface.address,
            mss: translation.mss,
            shift: translation.shift,
            shown_shift: translation.shown_shift,
            finished: translation.finished,
            standing: translation.standing,
        })
    }

    /// Returns what the kernel has done with a connection since the last call. The engine calls this before it handles a
    /// packet of the connection.
    pub(super) fn progress(&mut self, to: OffloadId, now: Instant) -> Option<Progress> {
        let offloaded = self.known(to)?.offloaded;
        let syn_ack = self.syn_ack(to);
        if self.known(to)?.awaits_syn_ack {
            // A server that has not answered has no numbers yet.
            if self.part.is_returned(offloaded) {
                self.came_back(to, now);
            }
            return None;
        }
        let seen = self.part.look(offloaded);
        let known = self.known(to)?;
        let [client, server] = &seen;
        let sides = Pair([known.moved(0, client), known.moved(1, server)]);
        if !known.back {
            self.touched.push(to);
            if self.part.is_returned(offloaded) {
                self.came_back(to, now);
            } else if self.by_xdp && seen.iter().any(|seen| seen.to_user > 0 && !seen.joined) {
                self.joins(to, offloaded);
            }
        }
        let active = client.last_ns.max(server.last_ns);
        let active = (active > 0).then(|| Instant::from_nanos(active.saturating_sub(self.monotonic)));
        Some(Progress { sides, active, syn_ack })
    }

    /// Returns the SYN-ACK of its server, once, if the kernel waited for it and has handled it.
    fn syn_ack(&mut self, to: OffloadId) -> Option<SynAck> {
        let offloaded = self.known(to).filter(|known| known.awaits_syn_ack)?.offloaded;
        let syn_ack = self.part.syn_ack(offloaded, self.monotonic)?;
        self.counters.syn_acks += 1;
        let known = self.known(to)?;
        // The line of its numbers begins here; see `Seen::sent`.
        known.lines[1] = Line::from(1 << 32 | u64::from(syn_ack.number.wrapping_add(1)));
        known.awaits_syn_ack = false;
        Some(syn_ack)
    }

    /// A connection has come back, or ended.
    fn came_back(&mut self, to: OffloadId, now: Instant) {
        let Some(known) = self.known(to).filter(|known| !known.back) else { return };
        known.back = true;
        let offloaded = known.offloaded;
        self.part.take_back(offloaded);
        self.joining.remove(to);
        self.lingering.push_back((now, to));
        self.counters.returned += 1;
    }

    /// A connection has ended.
    pub(super) fn ended(&mut self, to: OffloadId, now: Instant) {
        self.came_back(to, now);
        if let Some(known) = self.known(to) {
            known.slot = None;
        }
    }

    /// The next connection both of whose sides have closed in XDP, and its slot: tell the engine that it is over.
    pub(super) fn over(&mut self) -> Option<(OffloadId, Slot)> {
        while let Some(offloaded) = self.part.over() {
            let Some(to) = offloaded_to(offloaded) else { continue };
            if let Some(slot) = self.known(to).and_then(|known| known.slot) {
                return Some((to, slot));
            }
        }
        None
    }

    /// When those are looked for again; `found` says whether there were some now.
    pub(super) fn looked(&mut self, now: Instant, found: bool) {
        self.look_at = now + if found { SOON } else { WHILE_OFFLOADED };
    }

    /// The next connection that the kernel has done with, and its slot if it is still there: reclaim it, then
    /// [`Offload::forget`] it.
    pub(super) fn done_with(&mut self, now: Instant) -> Option<(OffloadId, Option<Slot>)> {
        let (since, to) = *self.lingering.front()?;
        if since + LINGERS > now {
            return None;
        }
        self.lingering.pop_front();
        Some((to, self.known(to)?.slot))
    }

    /// Forgets a connection that the kernel has let go of. It may be offloaded again after a while.
    pub(super) fn forget(&mut self, to: OffloadId, now: Instant) {
        let at = (to.0.get() - 1).checked_sub(self.part.first());
        let place = at.and_then(|at| self.known.get_mut(at as usize));
        let Some(known) = place.and_then(Option::take) else { return };
        self.offloaded -= 1;
        self.part.forget(known.offloaded);
        if let Some(slot) = known.slot {
            let after = AGAIN.saturating_mul(1 << known.returns.min(10)).min(AGAIN_MAX);
            let returns = known.returns + 1;
            self.later(now + after, slot, returns);
        }
    }

    /// Returns the connections of which packets came here since the last call, each with its slot. Their standing must then be
    /// told by [`Offload::stands`].
    pub(super) fn touched(&mut self) -> Vec<(OffloadId, Slot)> {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        touched.into_iter().filter_map(|to| Some((to, self.known(to)?.slot?))).collect()
    }

    /// From time to time: what programs did without telling is looked for.
    pub(super) fn look_around(&mut self, now: Instant) {
        self.joining.stir_all();
        self.look_at_interfaces(now);
    }

    /// Where a connection stands by what was handled and sent here.
    pub(super) fn stands(&mut self, to: OffloadId, standing: &[(Standing, u32); 2]) {
        let Some(offloaded) = self.known(to).map(|known| known.offloaded) else { return };
        let mut sent = [0; 2];
        for (side, (standing, stamp_first)) in standing.iter().enumerate() {
            sent[side] = self.part.advance(offloaded, side, standing);
            self.part.stamp_first(offloaded, side, *stamp_first);
        }
        if let Some(known) = self.known(to) {
            for (line, sent) in known.lines.iter_mut().zip(sent) {
                line.engine_stands_at(sent);
            }
        }
        self.joining.stir(to);
    }

    /// What user space was given of a connection, and whether the kernel has its sides.
    pub(super) fn given_to_user(&mut self, to: OffloadId) -> Option<[(u32, bool); 2]> {
        let offloaded = self.known(to).filter(|known| !known.back)?.offloaded;
        // In XDP a side that has sent nothing here is the kernel's from its next byte on.
        let has = |seen: Seen| (seen.to_user, seen.joined || (self.by_xdp && seen.to_user == 0));
        Some(self.part.look(offloaded).map(has))
    }

    /// User space has sent on what it was given, as counted there; gives what it was given until now.
    pub(super) fn told(&mut self, to: OffloadId, to_user: [u32; 2]) -> Option<[(u32, bool); 2]> {
        let offloaded = self.known(to)?.offloaded;
        for (side, to_user) in to_user.into_iter().enumerate() {
            self.part.user_sent(offloaded, side, to_user);
        }
        self.given_to_user(to)
    }

    /// The kernel has both sides.
    pub(super) fn has_joined(&mut self, to: OffloadId) {
        self.joining.remove(to);
        self.counters.joined += 1;
    }

    /// User space keeps it for a while: it closes, or the kernel does not get it in time.
    pub(super) fn take_back(&mut self, to: OffloadId, now: Instant) {
        self.came_back(to, now);
    }

    /// When there is something to do here.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let lingering = self.lingering.front().map(|(since, _)| *since + LINGERS);
        let again = self.again.first_key_value().map(|((at, _), _)| *at);
        let look = (self.by_xdp && self.offloaded > 0).then_some(self.look_at);
        lingering.into_iter().chain(again).chain(look).min()
    }

    /// Whether there is something to do at once.
    pub(super) fn is_busy(&self) -> bool {
        !self.waiting.is_empty()
            || !self.early.is_empty()
            || !self.touched.is_empty()
            || self.joining.is_busy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that some looks find: each with the number reached, and whether the FIN, the 42nd, is marked.
    fn counted(begins: u64, looks: &[(u64, bool)]) -> i64 {
        let mut line = Line::from(begins);
        looks.iter().map(|&(sent, marked)| line.new_bytes(sent, marked.then_some(42))).sum()
    }

    #[test]
    fn a_fin_counts_no_byte_whenever_its_mark_is_seen() {
        // The program writes the number 42, and then the mark: looks before, between and after the two.
        for looks in [
            &[(41, false), (42, true)][..],
            &[(42, false), (42, true)],
            &[(42, true), (42, true)],
            &[(10, false), (41, false), (42, false), (42, true), (42, true)],
        ] {
            assert_eq!(counted(1, looks), 40, "{looks:?}");
        }
    }

    #[test]
    fn a_fin_that_the_engine_had_handled_takes_no_byte_away_when_the_kernel_has_it_again() {
        assert_eq!(counted(42, &[(42, false), (42, true), (42, true)]), 0);
        // The engine handled the FIN after a look had counted the bytes before it.
        let mut line = Line::from(1);
        assert_eq!(line.new_bytes(41, None), 40);
        line.engine_stands_at(42);
        assert_eq!(line.new_bytes(42, Some(42)), 0);
    }
}
