//! Loads the memory that a batch of packets needs into the cache, before the first packet is handled. Many reads wait for
//! memory at the same time instead of one after the other.
//!
//! A processor looks only some hundred instructions ahead of a read that waits. So each step is a loop that does nothing
//! but read. The next step then finds its addresses in the cache.

use super::config::Callbacks;
use super::connection::{Cold, Hot, Phase, Slow};
use super::machine::Engine;
use super::narrow::low_half;
use super::packet::{TCP, Tuple, flags, u8_at};
use super::schedule::BATCH;
use super::slot::Slot;
use super::table::hash;
use crate::flow::Side;
use std::hint::black_box;

/// The packets of a batch, as far as they have been read.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    keys: [u32; BATCH],
    /// For answers of servers: the place of the port that the packet goes to. Otherwise [`UNKNOWN`].
    ports: [u32; BATCH],
    /// The connections.
    slots: [Slot; BATCH],
    len: usize,
    /// The number of packets that begin connections.
    syns: usize,
    /// One bit for each packet that may belong to a connection, whether or not one was found.
    others: u64,
    /// One bit for each packet of TCP that belongs to no connection, after [`Engine::warm`].
    strangers: u64,
}

impl Ahead {
    /// Adds a frame without a packet, so that the numbers of later ones fit.
    pub const fn skip(&mut self) {
        if self.len < BATCH {
            self.others |= 1 << self.len;
            self.len += 1;
        }
    }

    /// Returns one bit for each packet of TCP that belongs to no connection: the first one of a new connection, or a late
    /// one of an ended connection. The lowest bit is the first packet of the batch.
    pub const fn strangers(&self) -> u64 {
        self.strangers
    }
}

const UNKNOWN: u32 = u32::MAX;

impl Default for Ahead {
    fn default() -> Self {
        Self {
            keys: [0; BATCH],
            ports: [UNKNOWN; BATCH],
            slots: [Slot::NONE; BATCH],
            len: 0,
            syns: 0,
            others: 0,
            strangers: 0,
        }
    }
}

impl<C: Callbacks> Engine<C> {
    /// Adds a packet to a batch of at most 64; further packets are handled without this.
    #[inline]
    pub fn approach(&self, ahead: &mut Ahead, packet: &[u8]) {
        let Some(tuple) = Tuple::guess(packet) else { return ahead.skip() };
        let (Some(key), Some(port)) = (ahead.keys.get_mut(ahead.len), ahead.ports.get_mut(ahead.len)) else {
            return;
        };
        *port = self.ports.place(&tuple).unwrap_or(UNKNOWN);
        *key = hash(&self.config.seed, &tuple);
        ahead.others |= u64::from(!is_tcp(packet)) << ahead.len;
        ahead.len += 1;
        ahead.syns += usize::from(begins(packet));
    }

    /// Reads the memory that the packets of the batch will need, and begins a new batch.
    pub fn warm(&self, ahead: &mut Ahead) {
        let Ahead { keys, ports, slots, len, syns, others, strangers } = ahead;
        let (count, syns, others) = (std::mem::take(len), std::mem::take(syns), std::mem::take(others));
        let found = || keys.iter().zip(ports.iter()).take(count);
        black_box(found().fold(0, |all, (key, port)| match *port {
            UNKNOWN => all ^ low_half(self.index.place(*key)),
            place => all ^ self.ports.at(place).map_or(0, Slot::number),
        }));
        for (slot, (key, port)) in slots.iter_mut().zip(found()) {
            let answered = Some(*port).filter(|port| *port != UNKNOWN).and_then(|port| self.ports.at(port));
            let indexed = || self.index.probable(*key).map(|value| Slot::of_entry(value).0);
            *slot = answered.or_else(indexed).unwrap_or(Slot::NONE);
        }
        let unknown =
            slots.iter().take(count).rev().fold(0, |bits, slot| bits << 1 | u64::from(*slot == Slot::NONE));
        *strangers = unknown & !others;
        let slots = || slots.iter().take(count).copied();
        black_box(slots().filter_map(|slot| self.tables.hot.get(slot)).fold(0, |all, hot| all ^ hot.lines()));
        black_box(
            slots().filter_map(|slot| self.tables.cold.get(slot)).fold(0, |all, cold| all ^ cold.lines()),
        );
        black_box(slots().filter_map(|slot| self.wheel.list_of(slot)).fold(0, |all, list| all ^ list));
        let phase = |of: Phase| {
            slots().filter_map(|slot| self.tables.hot.get(slot)).filter(move |hot| hot.phase == of)
        };
        // Sources that will be taken, and those that become free where clients open new connections.
        let deciding = phase(Phase::Deciding).count();
        if deciding > 0 {
            black_box(self.ports.next(deciding));
        }
        if syns > 0 {
            let given = phase(Phase::TimeWait).filter_map(|hot| self.ports.slot(&hot.tuple[Side::Server]));
            black_box(given.fold(0, |all, slot| all ^ slot.number()));
        }
        let slow = slots().filter_map(|slot| self.tables.slow.get(self.tables.hot.get(slot)?.slow));
        black_box(slow.fold(0, |all, slow| all ^ slow.lines()));
        if syns > 0 {
            self.warm_free(syns);
        }
    }

    /// Whether a packet belongs to a connection.
    pub fn knows(&self, packet: &[u8]) -> bool {
        let find = |tuple: Tuple| self.find(hash(&self.config.seed, &tuple), &tuple);
        Tuple::guess(packet).and_then(find).is_some()
    }

    /// Loads the free slots that the next new connections will use.
    // The slot freed last is taken first. It may still be in the cache, but not if many connections end together.
    #[inline(never)]
    fn warm_free(&self, count: usize) {
        let hot = self.tables.free.iter().rev().take(count).filter_map(|at| self.tables.hot.get(*at));
        black_box(hot.fold(0, |all, hot| all ^ hot.lines()));
        let cold = self.tables.free.iter().rev().take(count).filter_map(|at| self.tables.cold.get(*at));
        black_box(cold.fold(0, |all, cold| all ^ cold.lines()));
        let slow = self.tables.free_slow.iter().rev().take(count).filter_map(|at| self.tables.slow.get(*at));
        black_box(
            slow.fold(0, |all, slow| all ^ slow.isn[Side::Client].0 ^ low_half(slow.resend_at.as_nanos())),
        );
    }
}

/// Guesses whether a packet is one of TCP. Headers of IPv6 between the two are rare.
#[inline(always)]
fn is_tcp(packet: &[u8]) -> bool {
    let at = packet.first().map_or(0, |first| if first >> 4 == 4 { 9 } else { 6 });
    u8_at(packet, at) == TCP
}

/// Guesses, from the flags alone, whether a packet is the first of a connection.
#[inline(always)]
fn begins(packet: &[u8]) -> bool {
    let tcp =
        packet.first().map_or(0, |first| if first >> 4 == 4 { usize::from(first & 0x0f) * 4 } else { 40 });
    u8_at(packet, tcp + 13) & (flags::SYN | flags::ACK) == flags::SYN
}

// One field of each cache line that packets need. Two adjacent fields would be merged into one read.

impl Hot {
    #[inline]
    fn lines(&self) -> u32 {
        self.leg[Side::Client].next.0
            ^ self.leg[Side::Server].next.0
            ^ self.tuple[Side::Client].ports
            ^ self.slow.number()
    }
}

impl Cold {
    #[inline]
    fn lines(&self) -> u32 {
        self.key ^ u32::from(self.stamps.has_any())
    }
}

impl Slow {
    #[inline]
    fn lines(&self) -> u32 {
        let held = u32::from(self.held().is_empty()) ^ u32::from(self.edits[Side::Server].is_empty());
        self.isn[Side::Client].0 ^ low_half(self.resend_at.as_nanos()) ^ held
    }
}
