//! Delayed binding: the engine holds and acknowledges the client's first bytes, asks for a server, and makes the
//! handshake with it. From then on the engine delivers the held bytes: see `owned.rs`.

use super::config::{Callbacks, Crowd, Opening, Payload, Selection, Target};
use super::connection::{Conn, NEVER, Phase, Source};
use super::machine::{Drop, Engine, Fate};
use super::narrow::length;
use super::open::FIRST_WAIT;
use super::options::{Located, Offer, Written};
use super::outbox::Segment;
use super::packet::{Address, Packet, Tuple, flags, u32_at};
use super::record::State;
use super::room::Full;
use super::seq::Seq;
use super::slot::{Pair, Slot};
use super::source::Chosen;
use super::table::hash;
use crate::flow::{EndReason, Side};
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
    pub(super) fn hold(&mut self, now: Instant, slot: Slot, packet: &mut Packet<'_>) -> Fate {
        let mut conn = self.tables.conn(slot);
        let (before, held_before) = (conn.hot.leg[Side::Client].next, conn.slow.held().len());
        let replies = !conn.slow.reply().is_empty();
        let outcome = take(&self.config, now, &mut conn, packet);
        let Conn { hot, slow, .. } = conn;
        self.held_total += slow.held().len() - held_before;
        let (grown, fin) = (hot.leg[Side::Client].next != before, slow.fin);
        let full = slow.held().len() >= self.config.hold_bytes as usize;
        match outcome {
            Held::Refuse(why) => return Fate::Dropped(why),
            Held::Challenge => return self.challenge(now, slot, Side::Client),
            Held::End(reason) => {
                self.end_silently(now, slot, reason);
                return Fate::Taken;
            }
            Held::Acknowledge => self.acknowledge(now, slot, Side::Client),
            Held::Soon => self.wheel.arm(slot, now + DELAYED_ACK),
            Held::Nothing => {}
        }
        // Checked after the bytes were stored: the connection that exceeds the limit is the one that ends.
        if self.held_total > self.config.hold_total_bytes {
            self.counters.shed += 1;
            self.end(now, slot, EndReason::Limit);
            return Fate::Taken;
        }
        if grown && fin {
            self.state(now, slot, Side::Client, State::FinWait1);
        }
        let deciding = self.tables.hot.at(slot).phase == Phase::Deciding;
        if deciding && (grown || replies) && self.reply_has_arrived(slot) {
            self.decide(now, slot, fin || full);
        }
        Fate::Taken
    }

    /// Asks the callback for a server.
    pub(super) fn decide(&mut self, now: Instant, slot: Slot, last: bool) {
        let mut selection = self.select(slot, last, Crowd::Unknown);
        if selection == Selection::Crowded {
            let client = self.tables.hot.at(slot).tuple[Side::Client].remote_addr().ip();
            let has_left = self.make_room(now, client, Full::Flows);
            let crowd = if has_left { Crowd::HasLeft } else { Crowd::Full };
            selection = self.select(slot, last, crowd);
        }
        let slow = self.slow_at(slot);
        match selection {
            Selection::Reply(_) if last || slow.replied > 0 => self.end(now, slot, EndReason::Internal),
            Selection::Reply(ref reply) => self.reply(now, slot, reply),
            Selection::Wait { .. } if last => self.end(now, slot, EndReason::HandshakeTimeout),
            Selection::Wait { wait_ms } => {
                if slow.until == NEVER {
                    slow.until = now + Duration::from_millis(wait_ms);
                }
                let until = slow.until;
                self.wheel.arm(slot, until);
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

    fn select(&mut self, slot: Slot, last: bool, crowd: Crowd) -> Selection {
        let Conn { hot, cold, slow } = self.tables.conn(slot);
        let tuple = &hot.tuple[Side::Client];
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
        self.callbacks.select(&opening)
    }

    /// Takes a source, and sends the first SYN.
    fn connect(&mut self, now: Instant, slot: Slot, target: &Target) -> Result<(), EndReason> {
        let client = self.tables.hot.at(slot).tuple[Side::Client];
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
            self.ports.assign(tuple.source(), slot);
        } else {
            self.index.insert(hash(&self.config.seed, &tuple), slot.entry(Side::Server));
        }
        let isn = chosen.first_number(super::cookie::isn(self.cookie_key(), &tuple, now));
        self.remember_target(now, slot, target, &chosen, isn);
        self.state(now, slot, Side::Server, State::SynReceived);
        self.send_syn(now, slot);
        self.wheel.arm(slot, now + FIRST_WAIT);
        if self.config.offloads_handshakes {
            self.offload_handshake(now, slot);
        }
        Ok(())
    }

    fn remember_target(&mut self, now: Instant, slot: Slot, target: &Target, chosen: &Chosen, isn: Seq) {
        let millis = |value: Option<u64>, default: u64| Duration::from_millis(value.unwrap_or(default));
        let Conn { hot, cold, slow } = self.tables.conn(slot);
        hot.phase = Phase::Connecting;
        hot.tuple[Side::Server] = chosen.tuple;
        hot.leg[Side::Server].hop = target.hop;
        cold.source = chosen.source;
        cold.idle = millis(target.idle_timeout_ms, self.config.idle_timeout_ms);
        let lifetime = target.lifetime_ms.or(self.config.lifetime_ms);
        cold.expires = lifetime.map_or(NEVER, |ms| cold.opened + Duration::from_millis(ms));
        slow.isn[Side::Server] = isn;
        slow.inspect = Pair([target.inspect_client, target.inspect_server]);
        slow.syn_sent = now;
        slow.resends = 0;
        slow.resend_after = FIRST_WAIT;
        slow.resend_at = now + FIRST_WAIT;
        slow.until = now + millis(target.connect_timeout_ms, self.config.connect_timeout_ms);
    }

    /// Sends the SYN to the server, with the options that the client offered us.
    fn send_syn(&mut self, now: Instant, slot: Slot) {
        let clock = self.clock(now);
        let hot = self.tables.hot.at(slot);
        let slow = self.tables.slow.at(hot.slow);
        let to = hot.tuple[Side::Server];
        // The client's limit is for payload; the limit of the link differs by address family.
        let mss = hot.leg[Side::Client].mss.min(self.mss(to.remote));
        let offer =
            Offer { mss: Some(mss), timestamps: slow.offer.timestamps.map(|_| (clock, 0)), ..slow.offer };
        let window = hot.leg[Side::Client].edge.since(hot.leg[Side::Client].acked).clamp(1, 0xffff) as u16;
        let mut options = Written::default();
        offer.write_into(&mut options);
        self.outbox.segment(&Segment {
            to,
            hop: hot.leg[Side::Server].hop,
            seq: slow.isn[Side::Server],
            ack: Seq(0),
            flags: flags::SYN,
            window,
            options: options.words(),
            payload: &[],
        });
    }

    /// Handles a segment of a server that was sent a SYN.
    pub(super) fn server_answer(&mut self, now: Instant, slot: Slot, packet: &mut Packet<'_>) -> Fate {
        let header = packet.header;
        let slow = self.slow_at(slot);
        let ours = header.has(flags::ACK) && header.ack == slow.isn[Side::Server] + 1;
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
            let fate = self.reset_stranger(now, packet);
            self.send_syn(now, slot);
            return fate;
        }
        // A simultaneous open is not supported: the server must answer with a SYN-ACK.
        if !header.has(flags::SYN) || !header.has(flags::ACK) {
            return Fate::Dropped(Drop::Unexpected);
        }
        let offer = match Offer::parse(packet.options()) {
            Ok(offer) => offer,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        self.tables.hot.at_mut(slot).leg[Side::Server].hop = packet.hop;
        let answer = Answer { seq: header.seq, ack: header.ack, window: header.window, offer };
        let due = self.agreed(now, slot, &answer, self.clock(now));
        if self.own_what_was_held(now, slot) {
            self.wheel.arm(slot, due);
        }
        Fate::Taken
    }

    /// Binds the connection: fixes how packets of both sides are translated. `clock` is the engine's time stamp of that
    /// moment. Returns when the next time-out is.
    pub(super) fn agreed(&mut self, now: Instant, slot: Slot, answer: &Answer, clock: u32) -> Instant {
        let own_mss = self.mss(self.tables.hot.at(slot).tuple[Side::Server].remote);
        let mut conn = self.tables.conn(slot);
        agree(&mut conn, answer, own_mss, clock);
        let Conn { hot, cold, slow } = conn;
        hot.active = now;
        hot.phase = Phase::Bound;
        cold.connected = now;
        slow.resend_after = (now.since(slow.syn_sent) * 3).clamp(SHORTEST_WAIT, FIRST_WAIT);
        (slow.resend_at, slow.until, slow.ack_at) = (NEVER, NEVER, NEVER);
        let due = cold.expires.min(now + cold.idle);
        self.counters.bound += 1;
        self.state(now, slot, Side::Server, State::Established);
        due
    }

    /// Lets the engine deliver the held bytes, changed if a callback changes them. Returns false if that ended the
    /// connection.
    fn own_what_was_held(&mut self, now: Instant, slot: Slot) -> bool {
        let Conn { hot, cold, slow } = self.tables.conn(slot);
        let before = slow.held().len();
        if before == 0 && !slow.fin {
            self.acknowledge(now, slot, Side::Server);
            self.settle(slot);
            return true;
        }
        let len = length(before) + u32::from(slow.fin);
        let looked_at = slow.inspect[Side::Client] && before > 0;
        let result = if looked_at {
            self.callbacks.payload(cold.id, Side::Client, slow.held())
        } else {
            Payload::Keep
        };
        let is_last = matches!(result, Payload::Last(_));
        let edits = &mut slow.edits[Side::Client];
        match result {
            Payload::Keep => {}
            Payload::Replace(bytes) | Payload::Last(bytes) => {
                slow.inspect[Side::Client] &= !is_last;
                hot.edited = bytes != edits.held();
                self.held_total = self.held_total.saturating_sub(before) + bytes.len();
                *edits.held_mut() = bytes;
            }
            Payload::Reset(reason) => {
                self.end(now, slot, reason);
                return false;
            }
        }
        let start = hot.leg[Side::Client].next - len;
        edits.own(start, len, slow.fin);
        slow.sent = start + edits.base();
        self.send_owned(now, slot);
        // A client that has filled the small window we announced must be told the server's window.
        if before * 2 >= self.config.hold_bytes as usize {
            self.acknowledge(now, slot, Side::Client);
        }
        if self.only_delivers(slot) {
            self.callbacks.delivering(slot);
        }
        true
    }

    /// Ends a connection whose server cannot be reached: resets the client.
    pub(super) fn refuse(&mut self, now: Instant, slot: Slot, reason: EndReason) {
        self.reset(now, slot, Side::Client);
        self.end_silently(now, slot, reason);
    }

    /// Ends a connection whose client is gone. A server that was sent a SYN is reset; the client gets no packet.
    fn end_silently(&mut self, now: Instant, slot: Slot, reason: EndReason) {
        let is_connecting = self.tables.hot.at(slot).phase == Phase::Connecting;
        if is_connecting && reason == EndReason::ClientGone {
            self.reset(now, slot, Side::Server);
        }
        self.release(now, slot, Some(reason));
    }

    /// Handles a time-out of a connection that has no server yet.
    pub(super) fn expire_unbound(&mut self, now: Instant, slot: Slot) {
        let hot = self.tables.hot.at(slot);
        let slow = self.tables.slow.at_mut(hot.slow);
        let deciding = hot.phase == Phase::Deciding;
        if slow.ack_at <= now {
            self.acknowledge(now, slot, Side::Client);
        }
        let slow = self.slow_at(slot);
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
fn take(config: &super::config::Config, now: Instant, conn: &mut Conn<'_>, packet: &Packet<'_>) -> Held {
    let Conn { hot, slow, .. } = conn;
    let header = packet.header;
    let leg = &mut hot.leg[Side::Client];
    leg.packets = leg.packets.wrapping_add(1);
    let room = (config.hold_bytes as usize).saturating_sub(slow.held().len());
    if header.has(flags::RST) {
        // RFC 5961, section 3.2: the exact number ends the connection, another one in the window gets a challenge ACK.
        return match header.seq {
            seq if seq == leg.next => Held::End(EndReason::ClientGone),
            seq if seq.since(leg.next) < length(room) && seq.after(leg.next) => Held::Challenge,
            _ => Held::Refuse(Drop::OutOfWindow),
        };
    }
    if header.has(flags::SYN) {
        return Held::Challenge;
    }
    if header.ack - (slow.isn[Side::Client] + 1) > u32::from(slow.replied) {
        return Held::Refuse(Drop::AckOfUnsent);
    }
    hot.active = now;
    leg.acked = leg.acked.max(header.ack);
    leg.edge = leg.edge.max(header.ack + (u32::from(header.window) << leg.shift));
    if let Ok(Located { timestamps: Some(at), .. }) = Located::parse(packet.options())
        && leg.stamps
        && !header.seq.after(leg.next)
    {
        leg.stamp = u32_at(packet.options(), at);
    }
    if header.seq_end() == header.seq {
        return Held::Nothing;
    }
    if header.seq.after(leg.next) || !header.seq_end().after(leg.next) || slow.fin {
        // A gap, or nothing new: the acknowledgement tells the client which byte comes next.
        return Held::Acknowledge;
    }
    let skip = leg.next.since(header.seq) as usize;
    let new = packet.payload().get(skip..).unwrap_or_default();
    let taken = new.get(..room.min(new.len())).unwrap_or_default();
    slow.edits[Side::Client].held_mut().extend_from_slice(taken);
    leg.next = leg.next + length(taken.len());
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
fn agree(conn: &mut Conn<'_>, answer: &Answer, own_mss: u16, clock: u32) {
    let Conn { hot, slow, .. } = conn;
    let Answer { seq, ack, window, offer } = answer;
    let wanted = slow.offer;
    let both_stamps = wanted.timestamps.is_some() && offer.timestamps.is_some();
    let both_scale = wanted.window_scale.is_some() && offer.window_scale.is_some();
    let both_sack = wanted.sack && offer.sack;
    let Pair([client, server]) = &mut hot.leg;
    let held = length(slow.held().len()) + u32::from(slow.fin);
    let first = client.next - held;
    client.add = (slow.isn[Side::Server] + 1) - first;
    client.stamp_add = clock.wrapping_sub(client.stamp);
    client.stamp_first = client.stamp;
    server.add = slow.first_to_client() - (*seq + 1);
    server.next = *seq + 1;
    server.acked = *ack;
    server.edge = *ack + u32::from(*window);
    server.packets = 1;
    server.mss =
        offer.mss.unwrap_or(if hot.tuple[Side::Server].remote.is_v4() { 536 } else { 1220 }).min(own_mss);
    server.stamps = both_stamps;
    server.shift = if both_scale { offer.window_scale.unwrap_or(0) } else { 0 };
    server.shown_shift = if both_scale { client.shift } else { 0 };
    if let Some((value, _)) = offer.timestamps {
        (server.stamp, server.stamp_first) = (value, value);
        server.stamp_add = clock.wrapping_sub(value);
    }
    hot.same_options = both_stamps == wanted.timestamps.is_some() && both_sack == wanted.sack;
    hot.same_family = hot.tuple[Side::Client].remote.is_v4() == hot.tuple[Side::Server].remote.is_v4();
    slow.edits[Side::Client].begin(hot.leg[Side::Client].add);
    slow.edits[Side::Server].begin(hot.leg[Side::Server].add);
    // The server acknowledged our SYN, so the client's numbers acknowledge up to its first byte.
    slow.acked_to[Side::Server] = *seq + 1;
    hot.fix_checksums();
}
