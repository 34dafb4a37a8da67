//! Time-outs of connections, and what the rest of the program asks about live ones.

use super::config::Callbacks;
use super::connection::{NEVER, Phase};
use super::machine::Engine;
use super::seq::Seq;
use super::slot::{Pair, Slot};
use crate::flow::{EndReason, Side};
use crate::time::Instant;

impl<C: Callbacks> Engine<C> {
    /// Handles a connection whose entry in the timing wheel is due, and arms the next one.
    pub(super) fn expire(&mut self, now: Instant, slot: Slot) {
        let hot = self.tables.hot.at(slot);
        if hot.phase == Phase::Connecting && hot.offloaded.is_some() {
            self.recall(now, slot);
        }
        match self.tables.hot.at(slot).phase {
            Phase::Free | Phase::TimeWait => return,
            Phase::Opening => self.expire_opening(now, slot),
            Phase::Deciding | Phase::Connecting => self.expire_unbound(now, slot),
            Phase::Bound => self.expire_bound(now, slot),
        }
        if let Some(at) = self.due(slot) {
            self.wheel.arm(slot, at);
        }
    }

    fn expire_bound(&mut self, now: Instant, slot: Slot) {
        self.catch_up(now, slot);
        let hot = self.tables.hot.at_mut(slot);
        if hot.phase == Phase::Bound {
            // The first time stamp follows the last one at a distance; otherwise it would seem to lie in the future after
            // 24 days.
            for leg in &mut hot.leg.0 {
                // A late copy of a segment may have an earlier stamp than the first one.
                let far = Seq(leg.stamp).since(Seq(leg.stamp_first)) > 1 << 30;
                leg.stamp_first = if far { leg.stamp.wrapping_sub(1 << 29) } else { leg.stamp_first };
            }
        }
        let (hot, cold) = (self.tables.hot.at(slot), self.tables.cold.at(slot));
        // `catch_up` may have ended it: the kernel can have seen both FINs.
        if hot.phase != Phase::Bound {
            return;
        }
        if cold.expires <= now {
            self.end(now, slot, EndReason::Lifetime);
        } else if hot.active + cold.idle <= now {
            self.end(now, slot, EndReason::Idle);
        } else if self.slow_of(slot).is_some_and(|slow| slow.resend_at <= now) {
            self.resend_owned(now, slot);
        }
    }

    /// Returns when the connection has its next time-out.
    fn due(&self, slot: Slot) -> Option<Instant> {
        let (hot, cold) = (self.tables.hot.at(slot), self.tables.cold.at(slot));
        let slow = self.tables.slow.get(hot.slow);
        let timers = slow.map_or(NEVER, |slow| slow.resend_at.min(slow.until).min(slow.ack_at));
        let idle = match hot.phase {
            Phase::Free | Phase::TimeWait => return None,
            Phase::Opening => NEVER,
            _ => hot.active + cold.idle,
        };
        Some(timers.min(idle).min(cold.expires)).filter(|at| *at != NEVER)
    }

    /// Ends the connection with this id, as `flows kill` does. Returns false if there is none.
    pub fn kill(&mut self, now: Instant, id: super::config::ConnectionId) -> bool {
        let found = self.slot_of(id);
        if let Some(slot) = found {
            self.end(now, slot, EndReason::Killed);
        }
        found.is_some()
    }

    /// Returns the connections that have a server, with the payload bytes of the client and of the server.
    pub fn traffic(&self) -> impl Iterator<Item = (super::config::ConnectionId, u64, u64)> {
        let both = self.tables.hot.iter().zip(self.tables.cold.iter());
        both.filter(|(hot, _)| matches!(hot.phase, Phase::Connecting | Phase::Bound)).map(|(hot, cold)| {
            let Pair([client, server]) = &hot.leg;
            (cold.id, client.bytes, server.bytes)
        })
    }

    /// Returns the TCP states of the connections that have a server, if one of them changed at `since` or later.
    pub fn reached_since(
        &self,
        since: Instant,
    ) -> impl Iterator<Item = (super::config::ConnectionId, super::record::Stamps)> {
        let both = self.tables.hot.iter().zip(self.tables.cold.iter());
        both.filter(move |(hot, cold)| {
            // A stamp is exact to 2 us: a change at this time may be shown twice, but is never missed.
            let last = cold.stamps.iter().next_back().map_or(0, |stamp| stamp.after_us);
            let at = cold.opened + std::time::Duration::from_micros(u64::from(last) + 2);
            matches!(hot.phase, Phase::Connecting | Phase::Bound) && at >= since
        })
        .map(|(_, cold)| (cold.id, cold.stamps))
    }

    /// Returns the client of the connection with this id; none if it has ended.
    pub fn client_of(&self, id: super::config::ConnectionId) -> Option<std::net::SocketAddr> {
        self.slot_of(id).map(|slot| self.tables.hot.at(slot).tuple[Side::Client].remote_addr())
    }

    /// Returns the place of the connection with this id; none if it has ended.
    fn slot_of(&self, id: super::config::ConnectionId) -> Option<Slot> {
        self.tables.hot.places().find(|slot| {
            let is_open = !matches!(self.tables.hot.at(*slot).phase, Phase::Free | Phase::TimeWait);
            is_open && self.tables.cold.at(*slot).id == id
        })
    }
}
