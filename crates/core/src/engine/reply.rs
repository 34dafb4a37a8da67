//! Answers a client that waits for an answer before it says which server it wants ([`Selection::Reply`]).
//!
//! ```text
//!   client                     engine                                   server
//!     | first request ---------> held, the selector asks for a reply
//!     | <---------------- reply  retransmitted until it is acknowledged
//!     | acknowledgement -------> the selector is asked again
//!     | second request --------> held, the selector chooses a server
//!     |                          SYN, then both requests -----------------> |
//!     |                          the callback removes the server's answer <-- |
//!     | <------------------------------------------ answer to the second request
//! ```
//!
//! No server is chosen before the client has acknowledged the whole reply. So the reply is never in flight together with bytes of
//! the server, and the server's numbers begin behind it.
//!
//! [`Selection::Reply`]: super::Selection::Reply

use super::config::{Callbacks, Reply};
use super::connection::NEVER;
use super::machine::Engine;
use super::open::{FIRST_WAIT, HANDSHAKE};
use super::packet::flags;
use super::send::Numbers;
use super::slot::Slot;
use crate::flow::Side;
use crate::time::Instant;

impl<C: Callbacks> Engine<C> {
    /// Sends a reply to the client, and stores it until the client acknowledges it.
    pub(super) fn reply(&mut self, now: Instant, slot: Slot, reply: &Reply) {
        let slow = self.slow_at(slot);
        let bytes = reply.as_slice();
        slow.replied = reply.len();
        slow.edits[Side::Server].held_mut().extend_from_slice(bytes);
        slow.resend_after = FIRST_WAIT;
        slow.resend_at = now + FIRST_WAIT;
        slow.until = now + HANDSHAKE;
        self.held_total += bytes.len();
        self.send_reply(now, slot);
        self.wheel.arm(slot, now + FIRST_WAIT);
    }

    /// Sends the whole reply; its acknowledgement number covers all held bytes.
    pub(super) fn send_reply(&mut self, now: Instant, slot: Slot) {
        let numbers = self.numbers(slot, Side::Client);
        let slow = self.slow_at(slot);
        slow.acked_to[Side::Client] = slow.acked_to[Side::Client].max(numbers.ack);
        (slow.unacknowledged, slow.ack_at) = (0, NEVER);
        let numbers = Numbers { seq: slow.isn[Side::Client] + 1, ..numbers };
        // The bytes are put back below; nothing reads them there in between.
        let bytes = std::mem::take(slow.edits[Side::Server].held_mut());
        self.send(now, slot, Side::Client, numbers, flags::ACK | flags::PSH, &bytes);
        *self.slow_at(slot).edits[Side::Server].held_mut() = bytes;
    }

    /// True if no byte of a reply is unacknowledged. Drops the reply when that becomes true.
    pub(super) fn reply_has_arrived(&mut self, slot: Slot) -> bool {
        let hot = self.tables.hot.at(slot);
        let acked = hot.leg[Side::Client].acked;
        let slow = self.tables.slow.at_mut(hot.slow);
        let len = slow.reply().len();
        if len == 0 {
            return true;
        }
        if acked != slow.first_to_client() {
            return false;
        }
        slow.edits[Side::Server].held_mut().clear();
        self.held_total = self.held_total.saturating_sub(len);
        // The wait for the next request begins now.
        (slow.resend_at, slow.until) = (NEVER, NEVER);
        true
    }
}
