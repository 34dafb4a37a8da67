//! The handshake with the client.

use super::config::{Callbacks, Hop};
use super::connection::{CLIENT, NEVER, Phase, Source};
use super::cookie::{self, Cookies};
use super::machine::{Drop, Engine, Fate};
use super::options::{Located, Offer, Written};
use super::outbox::Segment;
use super::packet::{Address, Header, Tuple, flags, u32_at};
use super::record::State;
use super::room::Full;
use super::seq::Seq;
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
    pub(super) fn stranger(
        &mut self,
        now: Instant,
        key: u32,
        header: &Header,
        packet: &mut [u8],
        hop: Hop,
    ) -> Fate {
        let (ip, port) = header.tuple.source();
        // Ports towards servers come first: a listener for every address and port would take the servers' answers.
        if self.ports.owns(ip, port) {
            return self.reset_stranger(now, header, hop);
        }
        if !self.listens(ip, port) {
            return Fate::NotOurs;
        }
        if header.has(flags::RST) {
            return Fate::Dropped(Drop::NoConnection);
        }
        match header.flags & (flags::SYN | flags::ACK) {
            flags::SYN => self.syn(now, key, header, packet, hop),
            flags::ACK if self.config.cookies_elsewhere || now < self.cookies_until => {
                self.cookie_answer(now, key, header, packet, hop)
            }
            _ => self.reset_stranger(now, header, hop),
        }
    }

    /// True if a client in TIME-WAIT may open a new connection with this segment (RFC 6191, RFC 9293 section 3.6.1).
    /// Either the client has closed, or the new connection cannot be mistaken for the old one.
    pub(super) fn may_open_again(&self, slot: usize, header: &Header, packet: &[u8]) -> bool {
        let Some(hot) = self.hot.get(slot) else { return false };
        let leg = &hot.leg[CLIENT];
        if header.flags & (flags::SYN | flags::ACK) != flags::SYN {
            return false;
        }
        let newer_stamp = || {
            let stamp = Offer::parse(header.options(packet)).ok().and_then(|offer| offer.timestamps);
            stamp.is_some_and(|(value, _)| leg.stamps && Seq(value).after(Seq(leg.stamp)))
        };
        leg.state == State::Closed || header.seq.after(leg.next) || newer_stamp()
    }

    fn syn(&mut self, now: Instant, key: u32, header: &Header, packet: &[u8], hop: Hop) -> Fate {
        let offer = match Offer::parse(header.options(packet)) {
            Ok(offer) => offer,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        self.counters.syns += 1;
        // Above the backlog the engine keeps no state: a flood of SYNs must not fill the table.
        if self.half_open >= self.config.syn_backlog {
            return self.send_cookie(now, header, &offer, hop);
        }
        let Some(slot) = self.allocate(now) else { return self.send_cookie(now, header, &offer, hop) };
        let isn = cookie::isn(self.cookie_key(), &header.tuple, now);
        self.begin(now, slot, key, &header.tuple, header.seq + 1, &offer, isn, hop);
        self.half_open += 1;
        if let Some(slow) = self.slow_of(slot) {
            slow.until = now + HANDSHAKE;
            slow.resend_after = FIRST_WAIT;
            slow.resend_at = now + FIRST_WAIT;
        }
        self.send_syn_ack(now, slot);
        self.wheel.arm(slot as u32, now + FIRST_WAIT);
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
        slot: usize,
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
        let (Some(hot), Some(cold)) = (self.hot.get_mut(slot), self.cold.get_mut(slot)) else { return };
        // Clear first, then set each field: a value built elsewhere and moved here would go through memory twice.
        hot.clear();
        (hot.active, hot.slow, hot.phase) = (now, slow_at, Phase::Opening);
        hot.tuple[CLIENT] = *tuple;
        let client = &mut hot.leg[CLIENT];
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
        if let Some(slow) = self.slow.get_mut(slow_at as usize) {
            slow.offer = *offer;
            slow.isn[CLIENT] = isn;
            slow.acked_to[CLIENT] = first;
        }
        self.index.insert(key, (slot as u32) << 1);
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

    pub(super) fn send_syn_ack(&mut self, now: Instant, slot: usize) {
        let clock = self.clock(now);
        let (Some(hot), window) = (self.hot.get(slot), self.first_window()) else { return };
        let Some(slow) = self.slow.get(hot.slow as usize) else { return };
        let (to, leg) = (hot.tuple[CLIENT], &hot.leg[CLIENT]);
        let mut options = Written::default();
        self.answer(&to, &slow.offer, clock).write_into(&mut options);
        self.outbox.segment(&Segment {
            to,
            hop: leg.hop,
            seq: slow.isn[CLIENT],
            ack: leg.next,
            flags: flags::SYN | flags::ACK,
            window,
            options: options.words(),
            payload: &[],
        });
    }

    fn send_cookie(&mut self, now: Instant, header: &Header, offer: &Offer, hop: Hop) -> Fate {
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
            hop,
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
            clock: secret as u32,
            mss: [self.config.mtu - 40, self.config.mtu - 60],
            window: self.first_window(),
            window_shift: self.config.window_shift,
        }
    }

    /// Returns the options in the cookie that this segment brings back, if it is a valid one.
    fn cookie(&self, now: Instant, header: &Header, packet: &[u8]) -> Option<Offer> {
        let options = header.options(packet);
        let located = Located::parse(options).unwrap_or_default();
        let stamps = located.timestamps.map(|at| (u32_at(options, at), u32_at(options, at + 4)));
        let echo = stamps.map(|(_, echo)| echo);
        let (client, isn) = (header.seq - 1, header.ack - 1);
        let offer = cookie::open(self.cookie_key(), &header.tuple, client, isn, echo, now)?;
        Some(Offer { timestamps: stamps, ..offer })
    }

    /// True if a client whose SYNs are answered elsewhere has begun a new connection: it acknowledges a number that this
    /// connection never sent, and that number is a cookie.
    pub(super) fn has_begun_anew(&self, now: Instant, slot: usize, header: &Header, packet: &[u8]) -> bool {
        let Some(hot) = self.hot.get(slot) else { return false };
        let away = header.ack.0.wrapping_sub(hot.leg[CLIENT].acked.0);
        // After the end the client can acknowledge only one number.
        let is_another =
            if hot.phase == Phase::TimeWait { away != 0 } else { away > ANEW && away < ANEW.wrapping_neg() };
        header.flags & (flags::SYN | flags::ACK | flags::RST) == flags::ACK
            && is_another
            && self.cookie(now, header, packet).is_some()
    }

    /// Handles an acknowledgement without a connection while cookies are valid: it may bring one back.
    fn cookie_answer(
        &mut self,
        now: Instant,
        key: u32,
        header: &Header,
        packet: &mut [u8],
        hop: Hop,
    ) -> Fate {
        let isn = header.ack - 1;
        let Some(offer) = self.cookie(now, header, packet) else {
            return self.reset_stranger(now, header, hop);
        };
        let mut slot = self.allocate(now);
        // Only here, not at the SYN: a cookie proves that the client has its address.
        if slot.is_none() && self.make_room(now, header.tuple.remote_addr().ip(), Full::Table) {
            slot = self.allocate(now);
        }
        let Some(slot) = slot else {
            self.counters.shed += 1;
            return self.reset_stranger(now, header, hop);
        };
        self.counters.cookies_accepted += 1;
        self.begin(now, slot, key, &header.tuple, header.seq, &offer, isn, hop);
        self.half_open += 1;
        self.opening(now, slot, header, packet)
    }

    /// Handles a segment of a client whose SYN was answered.
    pub(super) fn opening(&mut self, now: Instant, slot: usize, header: &Header, packet: &mut [u8]) -> Fate {
        let Some(hot) = self.hot.get_mut(slot) else { return Fate::Dropped(Drop::NoConnection) };
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else {
            return Fate::Dropped(Drop::NoConnection);
        };
        let (leg, isn) = (&mut hot.leg[CLIENT], slow.isn[CLIENT]);
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
            return self.challenge(now, slot, CLIENT);
        }
        // Only an acknowledgement of our SYN-ACK completes the handshake.
        if !header.has(flags::ACK) || header.ack != isn + 1 {
            let hop = leg.hop;
            return self.reset_stranger(now, header, hop);
        }
        slow.resend_at = NEVER;
        slow.until = NEVER;
        hot.phase = Phase::Deciding;
        self.half_open = self.half_open.saturating_sub(1);
        self.state(now, slot, CLIENT, State::Established);
        // `hold` asks for a server if this segment has bytes; otherwise the first question follows here.
        let fate = self.hold(now, slot, header, packet);
        let undecided = self.hot.get(slot).is_some_and(|hot| hot.phase == Phase::Deciding);
        if undecided && self.slow_of(slot).is_some_and(|slow| slow.until == NEVER) {
            self.decide(now, slot, false);
        }
        fate
    }

    /// Handles a time-out of a handshake with a client.
    pub(super) fn expire_opening(&mut self, now: Instant, slot: usize) {
        let Some(slow) = self.slow_of(slot) else { return };
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
    pub(super) fn end(&mut self, now: Instant, slot: usize, reason: EndReason) {
        self.recall(now, slot);
        let Some(hot) = self.hot.get(slot) else { return };
        let phase = hot.phase;
        match phase {
            Phase::Free => return,
            Phase::Opening | Phase::Deciding => self.reset(now, slot, CLIENT),
            Phase::Connecting => {
                self.reset(now, slot, CLIENT);
                self.reset(now, slot, super::connection::SERVER);
            }
            Phase::Bound => {
                self.reset(now, slot, CLIENT);
                self.reset(now, slot, super::connection::SERVER);
            }
            Phase::TimeWait => {}
        }
        let reason = (!matches!(phase, Phase::Opening | Phase::TimeWait)).then_some(reason);
        self.release(now, slot, reason);
    }
}
