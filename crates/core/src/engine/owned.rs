//! Delivers what the engine has acknowledged itself: the held first bytes of a client. They are sent within the server's
//! window, retransmitted if no acknowledgement comes (with the back-off of RFC 6298), and dropped once acknowledged.

use super::config::Callbacks;
use super::connection::{CLIENT, NEVER, SERVER};
use super::machine::Engine;
use super::packet::flags;
use super::send::Numbers;
use super::seq::Seq;
use crate::flow::EndReason;
use crate::time::Instant;

/// How often the same bytes are retransmitted before the connection ends.
const MOST_RESENDS: u8 = 7;

impl<C: Callbacks> Engine<C> {
    /// Sends those owned bytes that were not sent yet, as far as the server's window allows.
    pub(super) fn send_owned(&mut self, now: Instant, slot: usize) {
        let Some(hot) = self.hot.get(slot) else { return };
        let edge = hot.leg[SERVER].edge;
        let Some(slow) = self.slow.get(hot.slow as usize) else { return };
        let Some((edit, start)) = slow.edits[CLIENT].owned() else { return };
        let (from, end) = (slow.sent, start + edit.new_len());
        if from.before(end) {
            // A zero window is probed with one byte when the timer expires, not earlier.
            self.send_owned_part(now, slot, from, end.min(edge));
        }
        self.arm_owned(now, slot);
    }

    /// Sends the owned bytes with new numbers from `from` to `to`, in segments that fit the server's MSS.
    fn send_owned_part(&mut self, now: Instant, slot: usize, from: Seq, to: Seq) {
        let Some(mut numbers) = self.numbers(slot, SERVER) else { return };
        let Some(hot) = self.hot.get(slot) else { return };
        let leg = &hot.leg[SERVER];
        let most = usize::from(leg.mss).saturating_sub(if leg.stamps { 12 } else { 0 }).max(1);
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else { return };
        let Some((edit, start)) = slow.edits[CLIENT].owned() else { return };
        let (fin, end) = (edit.fin, start + edit.new_len());
        let part = (from - start) as usize..(to.since(start) as usize).min(edit.bytes.len());
        let fin_now = fin && to == end;
        let sent = from + part.len() as u32 + u32::from(fin_now);
        slow.sent = slow.sent.max(sent);
        numbers.seq = from;
        if part.is_empty() && !fin_now {
            return self.acknowledge(now, slot, SERVER);
        }
        // The bytes are put back below; nothing reads them there in between.
        let all = slow.edits[CLIENT].owned_bytes().map(std::mem::take).unwrap_or_default();
        let bytes = all.get(part).unwrap_or_default();
        let mut chunks = bytes.chunks(most).peekable();
        if chunks.peek().is_none() && fin_now {
            self.send(now, slot, SERVER, numbers, flags::FIN | flags::ACK, &[]);
        }
        while let Some(chunk) = chunks.next() {
            let last = chunks.peek().is_none();
            let fin = if last && fin_now { flags::FIN } else { 0 };
            let push = if last { flags::PSH } else { 0 };
            self.send(now, slot, SERVER, numbers, flags::ACK | push | fin, chunk);
            numbers = Numbers { seq: numbers.seq + chunk.len() as u32, ..numbers };
        }
        if let Some(slow) = self.slow_of(slot)
            && let Some(place) = slow.edits[CLIENT].owned_bytes()
        {
            *place = all;
        }
    }

    pub(super) fn arm_owned(&mut self, now: Instant, slot: usize) {
        let Some(slow) = self.slow_of(slot) else { return };
        let at = now + slow.resend_after;
        slow.resend_at = at;
        self.wheel.arm(slot as u32, at);
    }

    /// Handles an acknowledgement of the server up to `new`, in its numbers; the last one was `before`. The edits are
    /// already updated.
    pub(super) fn owned_acknowledged(&mut self, now: Instant, slot: usize, before: Seq, new: Seq) {
        let Some(hot) = self.hot.get(slot) else { return };
        let edge = hot.leg[SERVER].edge;
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else { return };
        let Some((edit, start)) = slow.edits[CLIENT].owned() else {
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
    pub(super) fn resend_owned(&mut self, now: Instant, slot: usize) {
        let Some(hot) = self.hot.get(slot) else { return };
        let (acked, mss) = (hot.leg[SERVER].acked, u32::from(hot.leg[SERVER].mss));
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else { return };
        let Some((edit, start)) = slow.edits[CLIENT].owned() else { return };
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
