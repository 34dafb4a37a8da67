//! Delivers what the engine has acknowledged itself: the held first bytes of a client. They are sent within the server's
//! window, retransmitted if no acknowledgement comes (with the back-off of RFC 6298), and dropped once acknowledged.

use super::config::Callbacks;
use super::connection::NEVER;
use super::machine::Engine;
use super::narrow::length;
use super::packet::flags;
use super::send::Numbers;
use super::seq::Seq;
use super::slot::Slot;
use crate::flow::{EndReason, Side};
use crate::time::Instant;

/// How often the same bytes are retransmitted before the connection ends.
const MOST_RESENDS: u8 = 7;

impl<C: Callbacks> Engine<C> {
    /// Sends those owned bytes that were not sent yet, as far as the server's window allows.
    pub(super) fn send_owned(&mut self, now: Instant, slot: Slot) {
        let hot = self.tables.hot.at(slot);
        let edge = hot.leg[Side::Server].edge;
        let Some(slow) = self.tables.slow.get(hot.slow) else { return };
        let Some((edit, start)) = slow.edits[Side::Client].owned() else { return };
        let (from, end) = (slow.sent, start + edit.new_len());
        if from.before(end) {
            // A zero window is probed with one byte when the timer expires, not earlier.
            self.send_owned_part(now, slot, from, end.min(edge));
        }
        self.arm_owned(now, slot);
    }

    /// Sends the owned bytes with new numbers from `from` to `to`, in segments that fit the server's MSS.
    fn send_owned_part(&mut self, now: Instant, slot: Slot, from: Seq, to: Seq) {
        let mut numbers = self.numbers(slot, Side::Server);
        let hot = self.tables.hot.at(slot);
        let leg = &hot.leg[Side::Server];
        let most = usize::from(leg.mss).saturating_sub(if leg.stamps { 12 } else { 0 }).max(1);
        let slow = self.tables.slow.at_mut(hot.slow);
        let Some((edit, start)) = slow.edits[Side::Client].owned() else { return };
        let (fin, end) = (edit.fin, start + edit.new_len());
        let part = (from - start) as usize..(to.since(start) as usize).min(edit.bytes.len());
        let fin_now = fin && to == end;
        let sent = from + length(part.len()) + u32::from(fin_now);
        slow.sent = slow.sent.max(sent);
        numbers.seq = from;
        if part.is_empty() && !fin_now {
            return self.acknowledge(now, slot, Side::Server);
        }
        // The bytes are put back below; nothing reads them there in between.
        let all = slow.edits[Side::Client].owned_bytes().map(std::mem::take).unwrap_or_default();
        let bytes = all.get(part).unwrap_or_default();
        let mut chunks = bytes.chunks(most).peekable();
        if chunks.peek().is_none() && fin_now {
            self.send(now, slot, Side::Server, numbers, flags::FIN | flags::ACK, &[]);
        }
        while let Some(chunk) = chunks.next() {
            let last = chunks.peek().is_none();
            let fin = if last && fin_now { flags::FIN } else { 0 };
            let push = if last { flags::PSH } else { 0 };
            self.send(now, slot, Side::Server, numbers, flags::ACK | push | fin, chunk);
            numbers = Numbers { seq: numbers.seq + length(chunk.len()), ..numbers };
        }
        if let Some(slow) = self.slow_of(slot)
            && let Some(place) = slow.edits[Side::Client].owned_bytes()
        {
            *place = all;
        }
    }

    pub(super) fn arm_owned(&mut self, now: Instant, slot: Slot) {
        let slow = self.slow_at(slot);
        let at = now + slow.resend_after;
        slow.resend_at = at;
        self.wheel.arm(slot, at);
    }

    /// Handles an acknowledgement of the server up to `new`, in its numbers; the last one was `before`. The edits are
    /// already updated.
    pub(super) fn owned_acknowledged(&mut self, now: Instant, slot: Slot, before: Seq, new: Seq) {
        let hot = self.tables.hot.at(slot);
        let edge = hot.leg[Side::Server].edge;
        let Some(slow) = self.tables.slow.get_mut(hot.slow) else { return };
        let Some((edit, start)) = slow.edits[Side::Client].owned() else {
            slow.resend_at = NEVER;
            return;
        };
        let end = start + edit.new_len();
        let recovering = slow.resends > 0;
        if new == before && new == edge {
            // The server answered a probe: its window is closed, but it is alive.
            slow.resends = 0;
        }
        if new.after(before) {
            slow.resends = 0;
            if recovering {
                // Bytes sent before the loss may be lost as well: continue from here.
                slow.sent = new.min(end);
            }
        }
        if new.after(before) || slow.sent.before(end) {
            self.send_owned(now, slot);
        }
    }

    /// Retransmits the first segment, because no acknowledgement came.
    pub(super) fn resend_owned(&mut self, now: Instant, slot: Slot) {
        let hot = self.tables.hot.at(slot);
        let (acked, mss) = (hot.leg[Side::Server].acked, u32::from(hot.leg[Side::Server].mss));
        let slow = self.tables.slow.at_mut(hot.slow);
        let Some((edit, start)) = slow.edits[Side::Client].owned() else { return };
        let end = start + edit.new_len();
        slow.resends += 1;
        slow.resend_after *= 2;
        if slow.resends > MOST_RESENDS {
            self.end(now, slot, EndReason::Idle);
            return;
        }
        let from = acked.max(start);
        self.counters.retransmitted += 1;
        self.send_owned_part(now, slot, from, end.min(from + mss.saturating_sub(12).max(1)));
        self.arm_owned(now, slot);
    }
}
