//! Delayed binding: the engine holds and acknowledges the client's first bytes, asks for a server, and makes the
//! handshake with it. From then on the engine delivers the held bytes: see `owned.rs`.

use super::config::{Callbacks, Crowd, Hop, Opening, Payload, Selection, Target};
use super::connection::{CLIENT, Hot, NEVER, Phase, SERVER, Slow, Source, side};
use super::machine::{Drop, Engine, Fate};
use super::open::FIRST_WAIT;
use super::options::{Located, Offer, Written};
use super::outbox::Segment;
use super::packet::{Address, Header, Tuple, flags, u32_at};
use super::record::State;
use super::room::Full;
use super::seq::Seq;
use super::source::Chosen;
use super::table::hash;
use crate::flow::EndReason;
use crate::time::Instant;
use std::time::Duration;

/// How long the engine may delay an acknowledgement of held bytes (RFC 9293, section 3.8.6.3 allows 500 ms).
pub(super) const DELAYED_ACK: Duration = Duration::from_millis(40);
/// Shortest wait for an acknowledgement of held bytes: as in Linux, less than the second of RFC 6298.
const SHORTEST_WAIT: Duration = Duration::from_millis(200);

/// The fields of a server's SYN-ACK.
pub(super) struct Answer {
    pub(super) seq: Seq,
    pub(super) ack: Seq,
    pub(super) window: u16,
    pub(super) offer: Offer,
}

/// What the engine must do after a segment was held.
enum Held {
    Nothing,
    Acknowledge,
    Soon,
    Refuse(Drop),
    Challenge,
    End(EndReason),
}

impl<C: Callbacks> Engine<C> {
    /// Handles a segment of a client that has no server yet.
    pub(super) fn hold(&mut self, now: Instant, slot: usize, header: &Header, packet: &mut [u8]) -> Fate {
        let Some(hot) = self.hot.get_mut(slot) else { return Fate::Dropped(Drop::NoConnection) };
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else {
            return Fate::Dropped(Drop::NoConnection);
        };
        let before = hot.leg[CLIENT].next;
        let held_before = slow.held().len();
        let replies = !slow.reply().is_empty();
        let outcome = take(&self.config, now, hot, slow, header, packet);
        self.held_total += slow.held().len() - held_before;
        let (grown, fin) = (hot.leg[CLIENT].next != before, slow.fin);
        let full = slow.held().len() >= self.config.hold_bytes as usize;
        match outcome {
            Held::Refuse(why) => return Fate::Dropped(why),
            Held::Challenge => return self.challenge(now, slot, CLIENT),
            Held::End(reason) => {
                self.end_silently(now, slot, reason);
                return Fate::Taken;
            }
            Held::Acknowledge => self.acknowledge(now, slot, CLIENT),
            Held::Soon => self.wheel.arm(slot as u32, now + DELAYED_ACK),
            Held::Nothing => {}
        }
        // Checked after the bytes were stored: the connection that exceeds the limit is the one that ends.
        if self.held_total > self.config.hold_total_bytes {
            self.counters.shed += 1;
            self.end(now, slot, EndReason::Limit);
            return Fate::Taken;
        }
        if grown && fin {
            self.state(now, slot, CLIENT, State::FinWait1);
        }
        let deciding = self.hot.get(slot).is_some_and(|hot| hot.phase == Phase::Deciding);
        if deciding && (grown || replies) && self.reply_has_arrived(slot) {
            self.decide(now, slot, fin || full);
        }
        Fate::Taken
    }

    /// Asks the callback for a server.
    pub(super) fn decide(&mut self, now: Instant, slot: usize, last: bool) {
        let Some(mut selection) = self.select(slot, last, Crowd::Unknown) else { return };
        if selection == Selection::Crowded {
            let client = self.hot.get(slot).map(|hot| hot.tuple[CLIENT].remote_addr().ip());
            let has_left = client.is_some_and(|client| self.make_room(now, client, Full::Flows));
            let crowd = if has_left { Crowd::HasLeft } else { Crowd::Full };
            let Some(again) = self.select(slot, last, crowd) else { return };
            selection = again;
        }
        let Some(hot) = self.hot.get(slot) else { return };
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else { return };
        match selection {
            Selection::Reply(_) if last || slow.replied > 0 => self.end(now, slot, EndReason::Internal),
            Selection::Reply(ref reply) => self.reply(now, slot, reply),
            Selection::Wait { .. } if last => self.end(now, slot, EndReason::HandshakeTimeout),
            Selection::Wait { wait_ms } => {
                if slow.until == NEVER {
                    slow.until = now + Duration::from_millis(wait_ms);
                }
                self.wheel.arm(slot as u32, slow.until);
            }
            Selection::Server(ref target) => {
                slow.until = NEVER;
                if let Err(reason) = self.connect(now, slot, target) {
                    if reason == EndReason::Limit {
                        self.counters.shed += 1;
                    }
                    self.end(now, slot, reason);
                }
            }
            Selection::Refuse(reason) => self.end(now, slot, reason),
            Selection::Crowded => self.end(now, slot, EndReason::Limit),
        }
    }

    fn select(&mut self, slot: usize, last: bool, crowd: Crowd) -> Option<Selection> {
        let (hot, cold) = (self.hot.get(slot)?, self.cold.get(slot)?);
        let slow = self.slow.get(hot.slow as usize)?;
        let tuple = &hot.tuple[CLIENT];
        let opening = Opening {
            id: cold.id,
            client: tuple.remote_addr(),
            local: tuple.local_addr(),
            opened: cold.opened,
            first: slow.held(),
            last,
            replied: slow.replied > 0,
            crowd,
        };
        Some(self.callbacks.select(&opening))
    }

    /// Takes a source, and sends the first SYN.
    fn connect(&mut self, now: Instant, slot: usize, target: &Target) -> Result<(), EndReason> {
        let client = self.hot.get(slot).map(|hot| hot.tuple[CLIENT]).ok_or(EndReason::Internal)?;
        let server = Address::from(target.address.ip());
        let chosen = if target.keep_client_address {
            if client.remote.is_v4() != server.is_v4() {
                return Err(EndReason::Unreachable);
            }
            let ports = u32::from(target.address.port()) << 16 | u32::from(client.remote_port());
            let tuple = Tuple { remote: server, local: client.remote, ports };
            if self.is_used(&tuple) {
                // Two connections of one client to different listeners may need the same four ends at one server.
                return Err(EndReason::Limit);
            }
            Chosen::of_client(tuple)
        } else {
            self.choose_source(now, target.address).ok_or(EndReason::Limit)?
        };
        let tuple = chosen.tuple;
        if chosen.source == Source::Ours {
            self.ports.assign(tuple.source(), slot as u32);
        } else {
            self.index.insert(hash(&self.config.seed, &tuple), (slot as u32) << 1 | 1);
        }
        let isn = chosen.first_number(super::cookie::isn(self.cookie_key(), &tuple, now));
        self.remember_target(now, slot, target, &chosen, isn);
        self.state(now, slot, SERVER, State::SynReceived);
        self.send_syn(now, slot);
        self.wheel.arm(slot as u32, now + FIRST_WAIT);
        if self.config.offloads_handshakes {
            self.offload_handshake(now, slot);
        }
        Ok(())
    }

    fn remember_target(&mut self, now: Instant, slot: usize, target: &Target, chosen: &Chosen, isn: Seq) {
        let millis = |value: Option<u64>, default: u64| Duration::from_millis(value.unwrap_or(default));
        let (Some(hot), Some(cold)) = (self.hot.get_mut(slot), self.cold.get_mut(slot)) else { return };
        hot.phase = Phase::Connecting;
        hot.tuple[SERVER] = chosen.tuple;
        hot.leg[SERVER].hop = target.hop;
        cold.source = chosen.source;
        cold.idle = millis(target.idle_timeout_ms, self.config.idle_timeout_ms);
        let lifetime = target.lifetime_ms.or(self.config.lifetime_ms);
        cold.expires = lifetime.map_or(NEVER, |ms| cold.opened + Duration::from_millis(ms));
        if let Some(slow) = self.slow.get_mut(hot.slow as usize) {
            slow.isn[SERVER] = isn;
            slow.inspect = [target.inspect_client, target.inspect_server];
            slow.syn_sent = now;
            slow.resends = 0;
            slow.resend_after = FIRST_WAIT;
            slow.resend_at = now + FIRST_WAIT;
            slow.until = now + millis(target.connect_timeout_ms, self.config.connect_timeout_ms);
        }
    }

    /// Sends the SYN to the server, with the options that the client offered us.
    fn send_syn(&mut self, now: Instant, slot: usize) {
        let clock = self.clock(now);
        let Some(hot) = self.hot.get(slot) else { return };
        let Some(slow) = self.slow.get(hot.slow as usize) else { return };
        let to = hot.tuple[SERVER];
        // The client's limit is for payload; the limit of the link differs by address family.
        let mss = hot.leg[CLIENT].mss.min(self.mss(to.remote));
        let offer =
            Offer { mss: Some(mss), timestamps: slow.offer.timestamps.map(|_| (clock, 0)), ..slow.offer };
        let window = hot.leg[CLIENT].edge.since(hot.leg[CLIENT].acked).clamp(1, 0xffff) as u16;
        let mut options = Written::default();
        offer.write_into(&mut options);
        self.outbox.segment(&Segment {
            to,
            hop: hot.leg[SERVER].hop,
            seq: slow.isn[SERVER],
            ack: Seq(0),
            flags: flags::SYN,
            window,
            options: options.words(),
            payload: &[],
        });
    }

    /// Handles a segment of a server that was sent a SYN.
    pub(super) fn server_answer(
        &mut self,
        now: Instant,
        slot: usize,
        header: &Header,
        packet: &mut [u8],
        hop: Hop,
    ) -> Fate {
        let Some(slow) = self.slow_of(slot) else { return Fate::Dropped(Drop::NoConnection) };
        let ours = header.has(flags::ACK) && header.ack == slow.isn[SERVER] + 1;
        if header.has(flags::RST) {
            if !ours {
                return Fate::Dropped(Drop::OutOfWindow);
            }
            self.refuse(now, slot, EndReason::Refused);
            return Fate::Taken;
        }
        if header.has(flags::ACK) && !ours {
            // The server remembers an older connection of this port. A reset makes it forget that (RFC 9293, Sec. 3.5.2).
            // Then the SYN is repeated, which would otherwise wait for the retransmission timer.
            let fate = self.reset_stranger(now, header, hop);
            self.send_syn(now, slot);
            return fate;
        }
        // A simultaneous open is not supported: the server must answer with a SYN-ACK.
        if !header.has(flags::SYN) || !header.has(flags::ACK) {
            return Fate::Dropped(Drop::Unexpected);
        }
        let offer = match Offer::parse(header.options(packet)) {
            Ok(offer) => offer,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        if let Some(hot) = self.hot.get_mut(slot) {
            hot.leg[SERVER].hop = hop;
        }
        let answer = Answer { seq: header.seq, ack: header.ack, window: header.window, offer };
        if let Some(due) = self.agreed(now, slot, &answer, self.clock(now))
            && self.own_what_was_held(now, slot)
        {
            self.wheel.arm(slot as u32, due);
        }
        Fate::Taken
    }

    /// Binds the connection: fixes how packets of both sides are translated. `clock` is the engine's time stamp of that
    /// moment. Returns when the next time-out is.
    pub(super) fn agreed(
        &mut self,
        now: Instant,
        slot: usize,
        answer: &Answer,
        clock: u32,
    ) -> Option<Instant> {
        let own_mss = self.mss(self.hot.get(slot)?.tuple[SERVER].remote);
        let (hot, cold) = (self.hot.get_mut(slot)?, self.cold.get_mut(slot)?);
        let slow = self.slow.get_mut(hot.slow as usize)?;
        agree(hot, slow, answer, own_mss, clock);
        hot.active = now;
        hot.phase = Phase::Bound;
        cold.connected = now;
        slow.resend_after = (now.since(slow.syn_sent) * 3).clamp(SHORTEST_WAIT, FIRST_WAIT);
        (slow.resend_at, slow.until, slow.ack_at) = (NEVER, NEVER, NEVER);
        let due = cold.expires.min(now + cold.idle);
        self.counters.bound += 1;
        self.state(now, slot, SERVER, State::Established);
        Some(due)
    }

    /// Lets the engine deliver the held bytes, changed if a callback changes them. Returns false if that ended the
    /// connection.
    fn own_what_was_held(&mut self, now: Instant, slot: usize) -> bool {
        let (Some(hot), Some(cold)) = (self.hot.get_mut(slot), self.cold.get(slot)) else { return false };
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else { return false };
        let before = slow.held().len();
        if before == 0 && !slow.fin {
            self.acknowledge(now, slot, SERVER);
            self.settle(slot);
            return true;
        }
        let len = before as u32 + u32::from(slow.fin);
        let looked_at = slow.inspect[CLIENT] && before > 0;
        let result = if looked_at {
            self.callbacks.payload(cold.id, side(CLIENT), slow.held())
        } else {
            Payload::Keep
        };
        let is_last = matches!(result, Payload::Last(_));
        let edits = &mut slow.edits[CLIENT];
        match result {
            Payload::Keep => {}
            Payload::Replace(bytes) | Payload::Last(bytes) => {
                slow.inspect[CLIENT] &= !is_last;
                hot.edited = bytes != edits.held();
                self.held_total = self.held_total.saturating_sub(before) + bytes.len();
                *edits.held_mut() = bytes;
            }
            Payload::Reset(reason) => {
                self.end(now, slot, reason);
                return false;
            }
        }
        let start = hot.leg[CLIENT].next - len;
        edits.own(start, len, slow.fin);
        slow.sent = start + edits.base();
        self.send_owned(now, slot);
        // A client that has filled the small window we announced must be told the server's window.
        if before * 2 >= self.config.hold_bytes as usize {
            self.acknowledge(now, slot, CLIENT);
        }
        if self.only_delivers(slot) {
            self.callbacks.delivering(slot as u32);
        }
        true
    }

    /// Ends a connection whose server cannot be reached: resets the client.
    pub(super) fn refuse(&mut self, now: Instant, slot: usize, reason: EndReason) {
        self.reset(now, slot, CLIENT);
        self.end_silently(now, slot, reason);
    }

    /// Ends a connection whose client is gone. A server that was sent a SYN is reset; the client gets no packet.
    fn end_silently(&mut self, now: Instant, slot: usize, reason: EndReason) {
        let is_connecting = self.hot.get(slot).is_some_and(|hot| hot.phase == Phase::Connecting);
        if is_connecting && reason == EndReason::ClientGone {
            self.reset(now, slot, SERVER);
        }
        self.release(now, slot, Some(reason));
    }

    /// Handles a time-out of a connection that has no server yet.
    pub(super) fn expire_unbound(&mut self, now: Instant, slot: usize) {
        let Some(hot) = self.hot.get(slot) else { return };
        let Some(slow) = self.slow.get_mut(hot.slow as usize) else { return };
        let deciding = hot.phase == Phase::Deciding;
        if slow.ack_at <= now {
            self.acknowledge(now, slot, CLIENT);
        }
        let Some(slow) = self.slow_of(slot) else { return };
        if slow.until <= now {
            if !slow.reply().is_empty() {
                self.end(now, slot, EndReason::HandshakeTimeout);
            } else if deciding {
                slow.until = NEVER;
                self.decide(now, slot, true);
            } else {
                self.end(now, slot, EndReason::ConnectTimeout);
            }
        } else if slow.resend_at <= now {
            slow.resend_after *= 2;
            slow.resend_at = now + slow.resend_after;
            self.counters.retransmitted += 1;
            if deciding { self.send_reply(now, slot) } else { self.send_syn(now, slot) }
        }
    }
}

/// Adds the new bytes of a client's segment to the held ones.
fn take(
    config: &super::config::Config,
    now: Instant,
    hot: &mut Hot,
    slow: &mut Slow,
    header: &Header,
    packet: &[u8],
) -> Held {
    let leg = &mut hot.leg[CLIENT];
    leg.packets = leg.packets.wrapping_add(1);
    let room = (config.hold_bytes as usize).saturating_sub(slow.held().len());
    if header.has(flags::RST) {
        // RFC 5961, section 3.2: the exact number ends the connection, another one in the window gets a challenge ACK.
        return match header.seq {
            seq if seq == leg.next => Held::End(EndReason::ClientGone),
            seq if seq.since(leg.next) < room as u32 && seq.after(leg.next) => Held::Challenge,
            _ => Held::Refuse(Drop::OutOfWindow),
        };
    }
    if header.has(flags::SYN) {
        return Held::Challenge;
    }
    if header.ack - (slow.isn[CLIENT] + 1) > u32::from(slow.replied) {
        return Held::Refuse(Drop::AckOfUnsent);
    }
    hot.active = now;
    leg.acked = leg.acked.max(header.ack);
    leg.edge = leg.edge.max(header.ack + (u32::from(header.window) << leg.shift));
    if let Ok(Located { timestamps: Some(at), .. }) = Located::parse(header.options(packet))
        && leg.stamps
        && !header.seq.after(leg.next)
    {
        leg.stamp = u32_at(header.options(packet), at);
    }
    if header.seq_end() == header.seq {
        return Held::Nothing;
    }
    if header.seq.after(leg.next) || !header.seq_end().after(leg.next) || slow.fin {
        // A gap, or nothing new: the acknowledgement tells the client which byte comes next.
        return Held::Acknowledge;
    }
    let skip = leg.next.since(header.seq) as usize;
    let new = header.payload(packet).get(skip..).unwrap_or_default();
    let taken = new.get(..room.min(new.len())).unwrap_or_default();
    slow.edits[CLIENT].held_mut().extend_from_slice(taken);
    leg.next = leg.next + taken.len() as u32;
    leg.bytes += taken.len() as u64;
    if taken.len() < new.len() {
        return Held::Acknowledge;
    }
    if header.has(flags::FIN) {
        slow.fin = true;
        leg.next = leg.next + 1;
        (leg.has_fin, leg.fin) = (true, leg.next);
        return Held::Acknowledge;
    }
    slow.unacknowledged += 1;
    if slow.unacknowledged >= 2 {
        return Held::Acknowledge;
    }
    slow.ack_at = now + DELAYED_ACK;
    Held::Soon
}

/// Fixes how numbers, windows and options are translated between both sides.
fn agree(hot: &mut Hot, slow: &mut Slow, answer: &Answer, own_mss: u16, clock: u32) {
    let Answer { seq, ack, window, offer } = answer;
    let wanted = slow.offer;
    let both_stamps = wanted.timestamps.is_some() && offer.timestamps.is_some();
    let both_scale = wanted.window_scale.is_some() && offer.window_scale.is_some();
    let both_sack = wanted.sack && offer.sack;
    let [client, server] = &mut hot.leg;
    let held = slow.held().len() as u32 + u32::from(slow.fin);
    let first = client.next - held;
    client.add = (slow.isn[SERVER] + 1) - first;
    client.stamp_add = clock.wrapping_sub(client.stamp);
    client.stamp_first = client.stamp;
    server.add = slow.first_to_client() - (*seq + 1);
    server.next = *seq + 1;
    server.acked = *ack;
    server.edge = *ack + u32::from(*window);
    server.packets = 1;
    server.mss = offer.mss.unwrap_or(if hot.tuple[SERVER].remote.is_v4() { 536 } else { 1220 }).min(own_mss);
    server.stamps = both_stamps;
    server.shift = if both_scale { offer.window_scale.unwrap_or(0) } else { 0 };
    server.shown_shift = if both_scale { client.shift } else { 0 };
    if let Some((value, _)) = offer.timestamps {
        (server.stamp, server.stamp_first) = (value, value);
        server.stamp_add = clock.wrapping_sub(value);
    }
    hot.same_options = both_stamps == wanted.timestamps.is_some() && both_sack == wanted.sack;
    hot.same_family = hot.tuple[CLIENT].remote.is_v4() == hot.tuple[SERVER].remote.is_v4();
    slow.edits[CLIENT].begin(hot.leg[CLIENT].add);
    slow.edits[SERVER].begin(hot.leg[SERVER].add);
    // The server acknowledged our SYN, so the client's numbers acknowledge up to its first byte.
    slow.acked_to[SERVER] = *seq + 1;
    hot.fix_checksums();
}
