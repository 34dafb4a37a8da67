//! Connections that the kernel translates by itself. The engine offers what nobody wants to see any more; here it is lent
//! and told of, brought back when something comes that the kernel leaves to us, and lent again after a while.
//!
//! How the kernel takes over without a packet being lost or overtaken is told in `joining.rs`.

use super::hops;
use super::joining::{Ends, Joining};
use super::open::Interface;
use crate::live::Clock;
use sidetrack_core::engine::{LentTo, Moved, Progress, Standing, Translation};
use sidetrack_core::time::Instant;
use sidetrack_sys::bpf::{LendingPart, Lent, LentSide, Numbers, monotonic_ns};
use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

/// How long a program may still be at work on a packet of a connection that came back.
const LINGERS: Duration = Duration::from_millis(20);

/// When a connection that came back is lent again: the first time, and the longest.
const AGAIN: Duration = Duration::from_millis(20);
const AGAIN_MAX: Duration = Duration::from_secs(10);

/// Most connections that wait to be lent. Others stay where they are.
const WAITING_MAX: usize = 65_536;

/// What has become of connections since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// They were lent to the kernel.
    pub lent: u64,
    /// There was no room.
    pub refused: u64,
    /// The kernel had both sides.
    pub joined: u64,
    /// A packet came that the kernel left to us.
    pub returned: u64,
}

/// The connections of one worker that the kernel has.
#[derive(Debug)]
pub struct Offload {
    part: LendingPart,
    interfaces: Vec<Interface>,
    /// What is to be added to times of ours to have the kernel's, nanoseconds.
    monotonic: u64,
    known: BTreeMap<LentTo, Known>,
    /// Those that the kernel is taking over.
    pub(super) joining: Joining,
    /// Slots of connections that may be lent.
    waiting: VecDeque<u32>,
    /// Slots of those that came back, when they may be lent again, and how often they have come back.
    again: BTreeMap<(Instant, u32), u32>,
    /// Those that came back, in this order, and since when.
    lingering: VecDeque<(Instant, LentTo)>,
    /// Those of which packets came here since [`Offload::touched`].
    touched: Vec<LentTo>,
    counters: Counters,
}

#[derive(Debug)]
struct Known {
    lent: Lent,
    /// None: it has ended.
    slot: Option<u32>,
    /// What the engine knows: the line that `Seen::sent` counts on, and packets.
    sent: [u64; 2],
    packets: [u32; 2],
    /// How often it has come back before.
    returns: u32,
    back: bool,
}

/// The borrower's number for a connection.
fn lent_to(lent: Lent) -> Option<LentTo> {
    NonZeroU32::new(lent.number().wrapping_add(1)).map(LentTo)
}

const fn numbers(standing: &Standing) -> Numbers {
    let Standing { sent, acknowledged, edge, stamp } = *standing;
    Numbers { sent, acknowledged, edge, stamp }
}

impl Offload {
    /// None yet.
    pub fn new(part: LendingPart, interfaces: Vec<Interface>, clock: Clock) -> Self {
        Self {
            part,
            interfaces,
            monotonic: monotonic_ns().saturating_sub(clock.now().as_nanos()),
            known: BTreeMap::new(),
            joining: Joining::default(),
            waiting: VecDeque::new(),
            again: BTreeMap::new(),
            lingering: VecDeque::new(),
            touched: Vec::new(),
            counters: Counters::default(),
        }
    }

    /// What has become of them.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// The connection in this slot may be lent.
    pub fn offer(&mut self, slot: u32) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back(slot);
        }
    }

    /// The next slot whose connection may be lent now, and how often it has come back.
    pub fn next(&mut self, now: Instant) -> Option<(u32, u32)> {
        if let Some(slot) = self.waiting.pop_front() {
            return Some((slot, 0));
        }
        let due = self.again.first_entry().filter(|entry| entry.key().0 <= now)?;
        let ((_, slot), returns) = due.remove_entry();
        Some((slot, returns))
    }

    /// Lends a connection.
    pub fn lend(
        &mut self,
        slot: u32,
        returns: u32,
        translations: &[Translation; 2],
        now: Instant,
    ) -> Option<LentTo> {
        let Some(sides) = self.sides(translations) else {
            // Who leads to a server is not known yet.
            self.again.insert((now + AGAIN_MAX, slot), returns);
            return None;
        };
        let Some((lent, to)) = self.part.lend(&sides).and_then(|lent| Some((lent, lent_to(lent)?))) else {
            self.counters.refused += 1;
            self.again.insert((now + AGAIN_MAX, slot), returns);
            return None;
        };
        let sent = self.part.look(lent).map(|seen| seen.sent);
        self.known.insert(to, Known { lent, slot: Some(slot), sent, packets: [0; 2], returns, back: false });
        let [client, server] = translations;
        self.joining.add(to, [Ends::of(client), Ends::of(server)]);
        self.counters.lent += 1;
        Some(to)
    }

    fn sides(&self, translations: &[Translation; 2]) -> Option<[LentSide; 2]> {
        let [client, server] = translations;
        Some([self.side(client)?, self.side(server)?])
    }

    fn side(&self, translation: &Translation) -> Option<LentSide> {
        let (interface, to) = hops::neighbour(translation.hop)?;
        let interface = self.interfaces.get(interface)?;
        Some(LentSide {
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
            numbers: numbers(&translation.standing),
        })
    }

    /// What the kernel has done with a connection since this was asked last. It is asked before every packet of the
    /// connection that comes here.
    pub fn progress(&mut self, to: LentTo, now: Instant) -> Option<Progress> {
        let known = self.known.get_mut(&to)?;
        let seen = self.part.look(known.lent);
        let mut active = 0;
        let mut sides = [Moved::default(); 2];
        for (side, (moved, seen)) in sides.iter_mut().zip(&seen).enumerate() {
            let (sent, packets) = (&mut known.sent[side], &mut known.packets[side]);
            let Numbers { sent: number, acknowledged, edge, stamp } = seen.numbers;
            *moved = Moved {
                standing: Standing { sent: number, acknowledged, edge, stamp },
                bytes: seen.sent.saturating_sub(*sent),
                packets: seen.packets.wrapping_sub(*packets),
                fin: None,
            };
            (*sent, *packets) = (seen.sent.max(*sent), seen.packets);
            active = active.max(seen.last_ns);
        }
        if !known.back {
            self.touched.push(to);
            if self.part.is_returned(known.lent) {
                self.came_back(to, now);
            }
        }
        let active = (active > 0).then(|| Instant::from_nanos(active.saturating_sub(self.monotonic)));
        Some(Progress { sides, active })
    }

    /// A connection has come back, or ended.
    fn came_back(&mut self, to: LentTo, now: Instant) {
        let Some(known) = self.known.get_mut(&to).filter(|known| !known.back) else { return };
        known.back = true;
        self.part.take_back(known.lent);
        self.joining.remove(to);
        self.lingering.push_back((now, to));
        self.counters.returned += 1;
    }

    /// A connection has ended.
    pub fn ended(&mut self, to: LentTo, now: Instant) {
        self.came_back(to, now);
        if let Some(known) = self.known.get_mut(&to) {
            known.slot = None;
        }
    }

    /// The next connection that the kernel has done with, and its slot if it is still there: reclaim it, then
    /// [`Offload::forget`] it.
    pub fn done_with(&mut self, now: Instant) -> Option<(LentTo, Option<u32>)> {
        let (since, to) = *self.lingering.front()?;
        if since + LINGERS > now {
            return None;
        }
        self.lingering.pop_front();
        Some((to, self.known.get(&to)?.slot))
    }

    /// It is no longer lent; it may be again after a while.
    pub fn forget(&mut self, to: LentTo, now: Instant) {
        let Some(known) = self.known.remove(&to) else { return };
        self.part.forget(known.lent);
        if let Some(slot) = known.slot {
            let after = AGAIN.saturating_mul(1 << known.returns.min(10)).min(AGAIN_MAX);
            self.again.insert((now + after, slot), known.returns + 1);
        }
    }

    /// The connections of which packets came here since this was asked last, each with its slot: tell where they stand by
    /// [`Offload::stands`].
    pub fn touched(&mut self) -> Vec<(LentTo, u32)> {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        touched.into_iter().filter_map(|to| Some((to, self.known.get(&to)?.slot?))).collect()
    }

    /// From time to time: what programs did without telling is looked for.
    pub fn look_around(&mut self) {
        self.joining.stir_all();
    }

    /// Where a connection stands by what was handled and sent here.
    pub fn stands(&mut self, to: LentTo, standing: &[(Standing, u32); 2]) {
        let Some(known) = self.known.get_mut(&to) else { return };
        for (side, (standing, stamp_first)) in standing.iter().enumerate() {
            known.sent[side] = self.part.advance(known.lent, side, &numbers(standing));
            self.part.stamp_first(known.lent, side, *stamp_first);
        }
        self.joining.stir(to);
    }

    /// What user space was given of a connection, and whether the kernel has its sides.
    pub(super) fn given(&self, to: LentTo) -> Option<[(u32, bool); 2]> {
        let known = self.known.get(&to).filter(|known| !known.back)?;
        Some(self.part.look(known.lent).map(|seen| (seen.given, seen.joined)))
    }

    /// User space has sent on what it was given, as counted there; gives what it was given until now.
    pub(super) fn told(&mut self, to: LentTo, given: [u32; 2]) -> Option<[(u32, bool); 2]> {
        let known = self.known.get(&to)?;
        for (side, given) in given.into_iter().enumerate() {
            self.part.done(known.lent, side, given);
        }
        self.given(to)
    }

    /// The kernel has both sides.
    pub(super) fn has_joined(&mut self, to: LentTo) {
        self.joining.remove(to);
        self.counters.joined += 1;
    }

    /// User space keeps it for a while: it closes, or the kernel does not get it in time.
    pub(super) fn take_back(&mut self, to: LentTo, now: Instant) {
        self.came_back(to, now);
    }

    /// When there is something to do here.
    pub fn deadline(&self) -> Option<Instant> {
        let lingering = self.lingering.front().map(|(since, _)| *since + LINGERS);
        let again = self.again.first_key_value().map(|((at, _), _)| *at);
        lingering.into_iter().chain(again).min()
    }

    /// Whether there is something to do at once.
    pub fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || !self.touched.is_empty() || self.joining.is_busy()
    }
}
