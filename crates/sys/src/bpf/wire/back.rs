//! A flow comes back from the wire: the kernel stops it, and lets packets go to new sockets (the states HELD and LEAVING of
//! `bpf/wire.h`).

use super::super::layout::engine::flow_side;
use super::super::layout::wires::{
    STAMPS_KNOWN, WIRE_ECN, WIRE_HELD, WIRE_KNOWN, WIRE_LEAVING, WIRE_SACK, WIRE_STAMPS, WIRE_WIRED,
    wire as wire_at, wire_more,
};
use super::{WireId, WireMemory};
use crate::barrier;
use sidetrack_core::wire::{Begin, Options, Stands};
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The bits of `wire.agreed`.
pub(super) fn agreed(options: Options) -> u32 {
    let bit = |is_agreed: bool, bit: u32| if is_agreed { bit } else { 0 };
    WIRE_KNOWN | bit(options.stamps, WIRE_STAMPS) | bit(options.sack, WIRE_SACK) | bit(options.ecn, WIRE_ECN)
}

impl WireMemory {
    /// Returns what both sides have agreed on. `None`: an earlier release has put the flow here, and has not said so.
    pub fn options(&self, id: WireId) -> Option<Options> {
        let bits = self.wires.u32(Self::at(id) + wire_at::AGREED).load(Relaxed);
        (bits & WIRE_KNOWN != 0).then_some(Options {
            stamps: bits & WIRE_STAMPS != 0,
            sack: bits & WIRE_SACK != 0,
            ecn: bits & WIRE_ECN != 0,
        })
    }

    /// Returns where both sides stand, the client first.
    pub fn stands(&self, id: WireId) -> [Stands; 2] {
        let seen = self.look(id);
        [0, 1].map(|side| {
            let word = |word| self.wires.u32(Self::side(id, side) + word).load(Acquire);
            let more = |word| self.wires.u32(Self::more(id, side) + word).load(Acquire);
            let [low, high, shift, shown_shift] = word(flow_side::MSS).to_ne_bytes();
            Stands {
                standing: seen[side].standing,
                add: word(flow_side::ADD),
                mss: u16::from_ne_bytes([low, high]),
                shift,
                shown_shift,
                clock: more(wire_more::CLOCK),
                stamp_add: (more(wire_more::STAMPED) == STAMPS_KNOWN).then(|| word(flow_side::STAMP_ADD)),
            }
        })
    }

    /// Stops a flow: its packets are dropped from now on, and its numbers stand still when this returns. That takes some
    /// milliseconds. Returns false if the flow is not on the wire any more, which changes nothing.
    ///
    /// # Errors
    /// The kernel cannot say when all processors have seen it. The flow goes on then.
    pub fn hold(&self, id: WireId) -> io::Result<bool> {
        let state = self.wires.u32(Self::at(id) + wire_at::STATE);
        if state.compare_exchange(WIRE_WIRED, WIRE_HELD, AcqRel, Relaxed).is_err() {
            return Ok(false);
        }
        // A program that has seen the state before may still pass a packet on, and count it.
        let waited = barrier::wait_for_programs();
        if waited.is_err() {
            self.go_on(id);
        }
        waited.map(|()| true)
    }

    /// Lets a flow go on that was stopped by [`Self::hold`].
    pub fn go_on(&self, id: WireId) {
        let state = self.wires.u32(Self::at(id) + wire_at::STATE);
        // It fails if the flow was not stopped.
        let _ = state.compare_exchange(WIRE_HELD, WIRE_WIRED, AcqRel, Relaxed);
    }

    /// Lets the packets of a flow that was stopped go to new sockets, which begin like this (client, server).
    pub fn leave(&self, id: WireId, begin: &[Begin; 2]) {
        for (side, begin) in begin.iter().enumerate() {
            self.wires.u32(Self::more(id, side) + wire_more::LIMIT).store(begin.sends, Relaxed);
            self.wires.u32(Self::more(id, side) + wire_more::AWAITS).store(1, Relaxed);
        }
        self.wires.u32(Self::at(id) + wire_at::STATE).store(WIRE_LEAVING, Release);
    }

    /// Whether the new sockets of a flow need no help any more: they have sent all that was `passed` on before to their peers
    /// (client, server). Then [`Self::remove`] it.
    pub fn has_left(&self, id: WireId, passed: [u32; 2]) -> bool {
        [0, 1].into_iter().all(|side| {
            let word = |word| self.wires.u32(Self::more(id, side) + word).load(Acquire);
            word(wire_more::AWAITS) == 0
                || word(wire_more::LIMIT).wrapping_sub(passed[side]).cast_signed() >= 0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_has_its_bit() {
        let none = Options::default();
        assert_eq!(agreed(none), WIRE_KNOWN);
        let each =
            [Options { stamps: true, ..none }, Options { sack: true, ..none }, Options { ecn: true, ..none }];
        let bits = each.map(agreed).into_iter().fold(0, |all, bits| all + (bits - WIRE_KNOWN));
        assert_eq!(bits, agreed(Options { stamps: true, sack: true, ecn: true }) - WIRE_KNOWN);
    }
}
