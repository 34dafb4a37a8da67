//! The handshake with the client.

use super::config::{Callbacks, Hop};
use super::connection::{Conn, NEVER, Phase, Source};
use super::cookie::{self, Cookies};
use super::machine::{Drop, Engine, Fate};
use super::narrow::low_half;
use super::options::{Located, Offer, Written};
use super::outbox::Segment;
use super::packet::{Address, Packet, Tuple, flags, u32_at};
use super::record::State;
use super::room::Full;
use super::seq::Seq;
use super::slot::Slot;
use crate::flow::{EndReason, Side};
use crate::time::Instant;
use std::time::Duration;

/// First wait for the answer to a SYN or SYN-ACK (RFC 6298, section 2).
pub(super) const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest handshake with a client, and the longest time a client may take to acknowledge a reply.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(10);
/// An acknowledgement further away than this from the last one may belong to another connection. (Cookies of the same
/// minute differ in 24 bits.)
const ANEW: u32 = 1 << 20;
/// How long the engine looks for cookies after it sent the last one: as long as a cookie is valid.
const COOKIES: Duration = Duration::from_secs(128);

impl<C: Callbacks> Engine<C> {
    /// Handles a segment with an unknown tuple: a new client, an acknowledgement of a cookie, or a stray.
    pub(super) fn stranger(&mut self, now: Instant, key: u32, packet: &mut Packet<'_>) -> Fate {
        let header = packet.header;
        let (ip, port) = header.tuple.source();
        // Ports towards servers come first: a listener for every address and port would take the servers' answers.
        if self.ports.owns(ip, port) {
            return self.reset_stranger(now, packet);
        }
        if !self.listens(ip, port) {
            return Fate::NotOurs;
        }
        if header.has(flags::RST) {
            return Fate::Dropped(Drop::NoConnection);
        }
        match header.flags & (flags::SYN | flags::ACK) {
            flags::SYN => self.syn(now, key, packet),
            flags::ACK if self.config.cookies_elsewhere || now < self.cookies_until => {
                self.cookie_answer(now, key, packet)
            }
            _ => self.reset_stranger(now, packet),
        }
    }

    /// True if a client in TIME-WAIT may open a new connection with this segment (RFC 6191, RFC 9293 section 3.6.1).
    /// Either the client has closed, or the new connection cannot be mistaken for the old one.
    pub(super) fn may_open_again(&self, slot: Slot, packet: &Packet<'_>) -> bool {
        let header = packet.header;
        let hot = self.tables.hot.at(slot);
        let leg = &hot.leg[Side::Client];
        if header.flags & (flags::SYN | flags::ACK) != flags::SYN {
            return false;
        }
        let newer_stamp = || {
            let stamp = Offer::parse(packet.options()).ok().and_then(|offer| offer.timestamps);
            stamp.is_some_and(|(value, _)| leg.stamps && Seq(value).after(Seq(leg.stamp)))
        };
        leg.state == State::Closed || header.seq.after(leg.next) || newer_stamp()
    }

    fn syn(&mut self, now: Instant, key: u32, packet: &Packet<'_>) -> Fate {
        let header = packet.header;
        let offer = match Offer::parse(packet.options()) {
            Ok(offer) => offer,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        self.counters.syns += 1;
        // Above the backlog the engine keeps no state: a flood of SYNs must not fill the table.
        if self.half_open >= self.config.syn_backlog {
            return self.send_cookie(now, packet, &offer);
        }
        let Some(slot) = self.allocate(now) else { return self.send_cookie(now, packet, &offer) };
        let isn = cookie::isn(self.cookie_key(), &header.tuple, now);
        self.begin(now, slot, key, &header.tuple, header.seq + 1, &offer, isn, packet.hop);
        self.half_open += 1;
        let slow = self.slow_at(slot);
        slow.until = now + HANDSHAKE;
        slow.resend_after = FIRST_WAIT;
        slow.resend_at = now + FIRST_WAIT;
        self.send_syn_ack(now, slot);
        self.wheel.arm(slot, now + FIRST_WAIT);
        Fate::Taken
    }

    pub(super) fn cookie_key(&self) -> [u64; 2] {
        let [_, a, b, _] = self.config.seed;
        [a, b]
    }

    /// Fills a slot for a client whose first byte will have the number `first`.
    #[allow(clippy::too_many_arguments, reason = "what a SYN says, or a cookie remembers")]
    fn begin(
        &mut self,
        now: Instant,
        slot: Slot,
        key: u32,
        tuple: &Tuple,
        first: Seq,
        offer: &Offer,
        isn: Seq,
        hop: Hop,
    ) {
        let id = self.next_id();
        let slow_at = self.allocate_slow();
        let default_mss = if tuple.remote.is_v4() { 536 } else { 1220 };
        let mss = offer.mss.unwrap_or(default_mss).min(self.mss(tuple.remote));
        let window_shift = self.config.window_shift;
        let (hot, cold) = (self.tables.hot.at_mut(slot), self.tables.cold.at_mut(slot));
        // Clear first, then set each field: a value built elsewhere and moved here would go through memory twice.
        hot.clear();
        (hot.active, hot.slow, hot.phase) = (now, slow_at, Phase::Opening);
        hot.tuple[Side::Client] = *tuple;
        let client = &mut hot.leg[Side::Client];
        (client.next, client.acked, client.edge) = (first, isn + 1, isn + 1);
        (client.packets, client.hop, client.mss, client.state) = (1, hop, mss, State::SynSent);
        if let Some((value, _)) = offer.timestamps {
            (client.stamps, client.stamp) = (true, value);
        }
        if let Some(shift) = offer.window_scale {
            (client.shift, client.shown_shift) = (shift, window_shift);
        }
        (cold.id, cold.opened, cold.connected, cold.expires) = (id, now, NEVER, NEVER);
        (cold.key, cold.source) = (key, Source::None);
        (cold.passed_elsewhere, cold.was_offloaded) = (false, false);
        cold.idle = Duration::from_millis(self.config.idle_timeout_ms);
        cold.stamps.clear();
        cold.stamps.push(Side::Client, State::SynSent, 0);
        let slow = self.tables.slow.at_mut(slow_at);
        slow.offer = *offer;
        slow.isn[Side::Client] = isn;
        slow.acked_to[Side::Client] = first;
        self.index.insert(key, slot.entry(Side::Client));
    }

    /// Returns the largest payload, options included, that fits our MTU towards this address.
    pub(super) fn mss(&self, address: Address) -> u16 {
        self.config.mtu - if address.is_v4() { 40 } else { 60 }
    }

    /// Returns our answer to a client's offer.
    fn answer(&self, tuple: &Tuple, offer: &Offer, stamp: u32) -> Offer {
        Offer {
            mss: Some(self.mss(tuple.remote)),
            window_scale: offer.window_scale.map(|_| self.config.window_shift),
            sack: offer.sack,
            timestamps: offer.timestamps.map(|(value, _)| (stamp, value)),
        }
    }

    fn first_window(&self) -> u16 {
        self.config.hold_bytes.min(0xffff) as u16
    }

    pub(super) fn send_syn_ack(&mut self, now: Instant, slot: Slot) {
        let clock = self.clock(now);
        let (hot, window) = (self.tables.hot.at(slot), self.first_window());
        let slow = self.tables.slow.at(hot.slow);
        let (to, leg) = (hot.tuple[Side::Client], &hot.leg[Side::Client]);
        let mut options = Written::default();
        self.answer(&to, &slow.offer, clock).write_into(&mut options);
        self.outbox.segment(&Segment {
            to,
            hop: leg.hop,
            seq: slow.isn[Side::Client],
            ack: leg.next,
            flags: flags::SYN | flags::ACK,
            window,
            options: options.words(),
            payload: &[],
        });
    }

    fn send_cookie(&mut self, now: Instant, packet: &Packet<'_>, offer: &Offer) -> Fate {
        let header = packet.header;
        let (key, clock) = (self.cookie_key(), self.clock(now));
        let (seq, stamp) = cookie::make(key, &header.tuple, header.seq, offer, now, clock);
        // Without time stamps the cookie has no room for window scale and SACK, so we do not offer them.
        let kept = match offer.timestamps {
            Some(_) => *offer,
            None => Offer { mss: offer.mss, ..Offer::default() },
        };
        let options = self.answer(&header.tuple, &kept, stamp).write();
        self.outbox.segment(&Segment {
            to: header.tuple,
            hop: packet.hop,
            seq,
            ack: header.seq + 1,
            flags: flags::SYN | flags::ACK,
            window: self.first_window(),
            options: options.words(),
            payload: &[],
        });
        self.counters.cookies_sent += 1;
        self.cookies_until = now + COOKIES;
        Fate::Taken
    }

    /// Returns what another program needs to answer SYNs as this engine would.
    pub fn cookies(&self) -> Cookies {
        let [.., secret] = self.config.seed;
        Cookies {
            key: self.cookie_key(),
            clock: low_half(secret),
            mss: [self.config.mtu - 40, self.config.mtu - 60],
            window: self.first_window(),
            window_shift: self.config.window_shift,
        }
    }

    /// Returns the options in the cookie that this segment brings back, if it is a valid one.
    fn cookie(&self, now: Instant, packet: &Packet<'_>) -> Option<Offer> {
        let header = packet.header;
        let options = packet.options();
        let located = Located::parse(options).unwrap_or_default();
        let stamps = located.timestamps.map(|at| (u32_at(options, at), u32_at(options, at + 4)));
        let echo = stamps.map(|(_, echo)| echo);
        let (client, isn) = (header.seq - 1, header.ack - 1);
        let offer = cookie::open(self.cookie_key(), &header.tuple, client, isn, echo, now)?;
        Some(Offer { timestamps: stamps, ..offer })
    }

    /// True if a client whose SYNs are answered elsewhere has begun a new connection: it acknowledges a number that this
    /// connection never sent, and that number is a cookie.
    pub(super) fn has_begun_anew(&self, now: Instant, slot: Slot, packet: &Packet<'_>) -> bool {
        let header = packet.header;
        let hot = self.tables.hot.at(slot);
        let away = header.ack.0.wrapping_sub(hot.leg[Side::Client].acked.0);
        // After the end the client can acknowledge only one number.
        let is_another =
            if hot.phase == Phase::TimeWait { away != 0 } else { away > ANEW && away < ANEW.wrapping_neg() };
        header.flags & (flags::SYN | flags::ACK | flags::RST) == flags::ACK
            && is_another
            && self.cookie(now, packet).is_some()
    }

    /// Handles an acknowledgement without a connection while cookies are valid: it may bring one back.
    fn cookie_answer(&mut self, now: Instant, key: u32, packet: &mut Packet<'_>) -> Fate {
        let header = packet.header;
        let isn = header.ack - 1;
        let Some(offer) = self.cookie(now, packet) else {
            return self.reset_stranger(now, packet);
        };
        let mut slot = self.allocate(now);
        // Only here, not at the SYN: a cookie proves that the client has its address.
        if slot.is_none() && self.make_room(now, header.tuple.remote_addr().ip(), Full::Table) {
            slot = self.allocate(now);
        }
        let Some(slot) = slot else {
            self.counters.shed += 1;
            return self.reset_stranger(now, packet);
        };
        self.counters.cookies_accepted += 1;
        self.begin(now, slot, key, &header.tuple, header.seq, &offer, isn, packet.hop);
        self.half_open += 1;
        self.opening(now, slot, packet)
    }

    /// Handles a segment of a client whose SYN was answered.
    pub(super) fn opening(&mut self, now: Instant, slot: Slot, packet: &mut Packet<'_>) -> Fate {
        let header = packet.header;
        let Conn { hot, slow, .. } = self.tables.conn(slot);
        let (leg, isn) = (&mut hot.leg[Side::Client], slow.isn[Side::Client]);
        if header.has(flags::RST) {
            if header.seq != leg.next {
                return Fate::Dropped(Drop::OutOfWindow);
            }
            self.release(now, slot, None);
            return Fate::Taken;
        }
        if header.has(flags::SYN) {
            // The same SYN again: our answer was lost, so send it again. For another SYN send a challenge ACK.
            if header.seq + 1 == leg.next {
                self.send_syn_ack(now, slot);
                return Fate::Taken;
            }
            return self.challenge(now, slot, Side::Client);
        }
        // Only an acknowledgement of our SYN-ACK completes the handshake.
        if !header.has(flags::ACK) || header.ack != isn + 1 {
            packet.hop = leg.hop;
            return self.reset_stranger(now, packet);
        }
        slow.resend_at = NEVER;
        slow.until = NEVER;
        hot.phase = Phase::Deciding;
        self.half_open = self.half_open.saturating_sub(1);
        self.state(now, slot, Side::Client, State::Established);
        // `hold` asks for a server if this segment has bytes; otherwise the first question follows here.
        let fate = self.hold(now, slot, packet);
        if self.tables.hot.at(slot).phase == Phase::Deciding && self.slow_at(slot).until == NEVER {
            self.decide(now, slot, false);
        }
        fate
    }

    /// Handles a time-out of a handshake with a client.
    pub(super) fn expire_opening(&mut self, now: Instant, slot: Slot) {
        let slow = self.slow_at(slot);
        if slow.until <= now {
            self.counters.half_open_expired += 1;
            self.release(now, slot, None);
            return;
        }
        if slow.resend_at <= now {
            slow.resend_after *= 2;
            slow.resend_at = now + slow.resend_after;
            self.counters.retransmitted += 1;
            self.send_syn_ack(now, slot);
        }
    }

    /// Ends a connection in any phase: resets the client, and the server if it has been contacted.
    pub(super) fn end(&mut self, now: Instant, slot: Slot, reason: EndReason) {
        self.recall(now, slot);
        let hot = self.tables.hot.at(slot);
        let phase = hot.phase;
        match phase {
            Phase::Free => return,
            Phase::Opening | Phase::Deciding => self.reset(now, slot, Side::Client),
            Phase::Connecting => {
                self.reset(now, slot, Side::Client);
                self.reset(now, slot, Side::Server);
            }
            Phase::Bound => {
                self.reset(now, slot, Side::Client);
                self.reset(now, slot, Side::Server);
            }
            Phase::TimeWait => {}
        }
        let reason = (!matches!(phase, Phase::Opening | Phase::TimeWait)).then_some(reason);
        self.release(now, slot, reason);
    }
}
