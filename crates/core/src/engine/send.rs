//! Segments that the engine itself sends: acknowledgements, challenge ACKs, resets.

use super::config::Callbacks;
use super::connection::{NEVER, Phase};
use super::machine::{Drop, Engine, Fate};
use super::narrow::{length, low_half};
use super::options::Written;
use super::outbox::Segment;
use super::packet::{Packet, flags};
use super::seq::Seq;
use super::slot::Slot;
use crate::flow::Side;
use crate::time::Instant;

/// Sequence number, acknowledgement and window of a segment that the engine sends to one side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    pub(super) seq: Seq,
    pub(super) ack: Seq,
    pub(super) window: u16,
}

impl<C: Callbacks> Engine<C> {
    /// Returns our time stamp clock: milliseconds, from a secret start.
    pub(super) fn clock(&self, now: Instant) -> u32 {
        let [.., secret] = self.config.seed;
        low_half(now.as_nanos() / 1_000_000).wrapping_add(low_half(secret))
    }

    /// Returns the numbers of the engine's next segment to side `at`: no new byte, and an acknowledgement of what has
    /// arrived.
    pub(super) fn numbers(&self, slot: Slot, at: Side) -> Numbers {
        let hot = self.tables.hot.at(slot);
        let (own, other) = (&hot.leg[at], &hot.leg[at.other()]);
        if !matches!(hot.phase, Phase::Bound | Phase::TimeWait) {
            let slow = self.tables.slow.at(hot.slow);
            let room = self.config.hold_bytes.saturating_sub(length(slow.held().len()));
            let window = (room >> own.shown_shift).min(0xffff) as u16;
            let seq = if at == Side::Client { slow.first_to_client() } else { slow.isn[at] + 1 };
            return Numbers { seq, ack: own.next, window };
        }
        let (seq, ack, edge) = match self.tables.slow.get(hot.slow) {
            Some(slow) => {
                let ack = slow.edits[at].acknowledged(other.acked).max(slow.acked_to[at]);
                (slow.edits[at.other()].seq(other.next), ack, other.edge - slow.edits[at].total())
            }
            None => (other.next + other.add, other.acked - own.add, other.edge - own.add),
        };
        let window = (edge.since(ack) >> own.shown_shift).min(0xffff) as u16;
        Numbers { seq, ack, window }
    }

    /// Sends one segment to side `at`, with a time stamp if that side uses them.
    pub(super) fn send(
        &mut self,
        now: Instant,
        slot: Slot,
        at: Side,
        numbers: Numbers,
        flags: u8,
        payload: &[u8],
    ) {
        let clock = self.clock(now);
        let hot = self.tables.hot.at(slot);
        let leg = &hot.leg[at];
        let bound = matches!(hot.phase, Phase::Bound | Phase::TimeWait);
        let stamp = if bound { hot.leg[at.other()].stamp_for_other(clock) } else { clock };
        let mut options = Written::default();
        if leg.stamps {
            options.add_timestamps(stamp, leg.stamp);
        }
        let Numbers { seq, ack, window } = numbers;
        let (to, hop) = (hot.tuple[at], leg.hop);
        self.outbox.segment(&Segment { to, hop, seq, ack, flags, window, options: options.words(), payload });
    }

    /// Acknowledges to side `at` what arrived from it.
    pub(super) fn acknowledge(&mut self, now: Instant, slot: Slot, at: Side) {
        let numbers = self.numbers(slot, at);
        if let Some(slow) = self.slow_of(slot) {
            slow.acked_to[at] = slow.acked_to[at].max(numbers.ack);
            if at == Side::Client {
                slow.unacknowledged = 0;
                slow.ack_at = NEVER;
            }
        }
        self.send(now, slot, at, numbers, flags::ACK, &[]);
    }

    /// Sends a challenge ACK (RFC 5961): the segment may be an attack, or the peer may have lost its state.
    pub(super) fn challenge(&mut self, now: Instant, slot: Slot, at: Side) -> Fate {
        if self.may_challenge(now) {
            self.acknowledge(now, slot, at);
        }
        Fate::Taken
    }

    /// Resets side `at`.
    pub(super) fn reset(&mut self, now: Instant, slot: Slot, at: Side) {
        let numbers = Numbers { window: 0, ..self.numbers(slot, at) };
        self.send(now, slot, at, numbers, flags::RST | flags::ACK, &[]);
    }

    /// Resets the sender of a segment that belongs to no connection (RFC 9293, section 3.10.7.1).
    pub(super) fn reset_stranger(&mut self, now: Instant, packet: &Packet<'_>) -> Fate {
        let header = packet.header;
        if header.has(flags::RST) || !self.may_challenge(now) {
            return Fate::Dropped(Drop::NoConnection);
        }
        let (seq, ack, flags) = if header.has(flags::ACK) {
            (header.ack, Seq(0), flags::RST)
        } else {
            (Seq(0), header.seq_end(), flags::RST | flags::ACK)
        };
        let to = header.tuple;
        let hop = packet.hop;
        self.outbox.segment(&Segment { to, hop, seq, ack, flags, window: 0, options: &[], payload: &[] });
        Fate::Taken
    }

    /// True if one more answer may be sent in this second.
    fn may_challenge(&mut self, now: Instant) -> bool {
        let second = now.as_nanos() / 1_000_000_000;
        let (current, count) = &mut self.challenge_second;
        if *current != second {
            (*current, *count) = (second, 0);
        }
        *count += 1;
        let may = *count <= self.config.challenges_per_second;
        if may {
            self.counters.challenges += 1;
        } else {
            self.counters.challenges_suppressed += 1;
        }
        may
    }
}
