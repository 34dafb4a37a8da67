//! Brings what a batch of packets needs from memory into the cache before the first of them is handled: many reads that wait
//! for memory at the same time, in place of one after the other.

use super::config::Callbacks;
use super::connection::{CLIENT, SERVER};
use super::machine::Engine;
use super::packet::{Ip, Tuple, u32_at};
use super::table::hash;
use std::hint::black_box;

/// Most packets of a batch.
const BATCH: usize = 64;

/// The packets of a batch, as far as they have been looked at.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    keys: [u32; BATCH],
    /// Slots of answers of servers; [`UNKNOWN`] where the index has to be asked.
    slots: [u32; BATCH],
    len: usize,
}

const UNKNOWN: u32 = u32::MAX;

impl Default for Ahead {
    fn default() -> Self {
        Self { keys: [0; BATCH], slots: [UNKNOWN; BATCH], len: 0 }
    }
}

impl<C: Callbacks> Engine<C> {
    /// Adds a packet to a batch of at most 64; further ones are handled without this.
    pub fn approach(&self, ahead: &mut Ahead, packet: &[u8]) {
        let Ok(ip) = Ip::parse(packet) else { return };
        let (Some(key), Some(slot)) = (ahead.keys.get_mut(ahead.len), ahead.slots.get_mut(ahead.len)) else {
            return;
        };
        let tuple = Tuple { remote: ip.src, local: ip.dst, ports: u32_at(packet, ip.payload) };
        *slot = self.ports.slot(&tuple).unwrap_or(UNKNOWN);
        *key = hash(&self.config.seed, &tuple);
        ahead.len += 1;
        black_box(self.index.place(*key));
    }

    /// Reads what the packets of the batch will need, and begins a new batch.
    pub fn warm(&self, ahead: &mut Ahead) {
        let slots = &mut ahead.slots;
        for (key, slot) in ahead.keys.iter().zip(&mut *slots).take(ahead.len) {
            if *slot == UNKNOWN {
                let Some(value) = self.index.probable(*key) else { continue };
                *slot = value >> 1;
            }
            if let Some(cold) = self.cold.get(*slot as usize) {
                black_box((cold.opened, cold.stamps.has_any()));
            }
            if let Some(hot) = self.hot.get(*slot as usize) {
                black_box((hot.leg[CLIENT].next, hot.leg[SERVER].next, hot.tuple[CLIENT].ports, hot.active));
            }
            black_box(self.wheel.list_of(*slot));
        }
        for slot in slots.iter().take(ahead.len) {
            let Some(hot) = self.hot.get(*slot as usize) else { continue };
            if let Some(slow) = self.slow.get(hot.slow as usize) {
                black_box((slow.isn, slow.until, slow.held().len(), slow.edits[SERVER].is_empty()));
            }
        }
        ahead.len = 0;
    }
}
