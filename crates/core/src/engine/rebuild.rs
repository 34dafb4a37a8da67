//! The path of the other packets of a bound connection. They are built anew: packets to be cut, changed or given other
//! options, resets, and all packets while held bytes are still on their way.

use super::config::{Callbacks, Payload};
use super::connection::Phase;
use super::edit::{Edit, Edits, Piece};
use super::forward::note;
use super::machine::{Drop, Engine, Fate};
use super::narrow::length;
use super::options::{Located, Written, blank};
use super::outbox::Segment;
use super::packet::{Header, Packet, flags, put, u32_at};
use super::seq::Seq;
use super::slot::Slot;
use crate::flow::{EndReason, Side};
use crate::time::Instant;

/// The options of a segment, at most 40 bytes.
#[derive(Clone, Copy)]
struct Options {
    bytes: [u8; 40],
    len: usize,
}

impl Options {
    fn copied(options: &[u8]) -> Self {
        let mut bytes = [0; 40];
        put(&mut bytes, 0, options);
        Self { bytes, len: options.len().min(40) }
    }

    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(..self.len).unwrap_or_default()
    }

    fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

/// How the payload of a segment was forwarded.
#[derive(Clone, Copy, Default)]
struct Passed {
    /// Some of the payload was sent.
    sent: bool,
    /// The engine itself delivers some of it.
    owned: bool,
}

/// What a callback decided about the payload of one segment.
enum Change {
    Keep,
    Edit(Vec<u8>),
    Reset(EndReason),
}

impl<C: Callbacks> Engine<C> {
    pub(super) fn rebuild(&mut self, now: Instant, slot: Slot, from: Side, packet: &mut Packet<'_>) -> Fate {
        let header = packet.header;
        if header.has(flags::SYN) {
            return self.challenge(now, slot, from);
        }
        let located = match Located::parse(packet.options()) {
            Ok(located) => located,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        // Checked first: a segment outside the window must not reset or acknowledge anything.
        if let Err(why) = self.acceptable(slot, from, header) {
            return Fate::Dropped(why);
        }
        if header.has(flags::RST) {
            return self.rebuild_reset(now, slot, from, header);
        }
        self.acknowledged(now, slot, from, header);
        if self.slow_of(slot).is_some() {
            // This segment may acknowledge the last bytes that the engine had to deliver. Then it is translated in place.
            self.settle(slot);
            if self.tables.hot.at(slot).passes(from, packet) {
                return self.translate(now, slot, from, packet, &located);
            }
        }
        let inspected = self.slow_of(slot).is_some_and(|slow| slow.inspect[from]);
        let next = self.tables.hot.at(slot).leg[from].next;
        let occupies = header.seq_end() != header.seq;
        if inspected && occupies && header.seq.after(next) {
            // Bytes after a gap cannot be inspected, so they do not pass. The sender is told of the gap; its
            // acknowledgement is forwarded.
            self.acknowledge(now, slot, from);
            self.acknowledge(now, slot, from.other());
            return Fate::Taken;
        }
        let change = if inspected { self.inspect(slot, from, packet, next) } else { Ok(Change::Keep) };
        match change {
            Err(why) => return Fate::Dropped(why),
            Ok(Change::Reset(reason)) => {
                self.end(now, slot, reason);
                return Fate::Taken;
            }
            Ok(Change::Edit(bytes)) => self.push_edit(slot, from, next, header, bytes),
            Ok(Change::Keep) => {}
        }
        self.pass_on(now, slot, from, packet, &located);
        Fate::Taken
    }

    /// Checks that the segment can be of use to the receiver. Where bytes are inspected, the sender's window is not
    /// checked.
    fn acceptable(&self, slot: Slot, from: Side, header: &Header) -> Result<(), Drop> {
        let hot = self.tables.hot.at(slot);
        let (own, other) = (&hot.leg[from], &hot.leg[from.other()]);
        let (sent, end) = match self.tables.slow.get(hot.slow) {
            Some(slow) => (slow.edits[from.other()].seq(other.next), slow.edits[from].seq(header.seq_end())),
            None => (other.next + other.add, header.seq_end() + own.add),
        };
        if header.has(flags::ACK) && header.ack.after(sent) {
            return Err(Drop::AckOfUnsent);
        }
        let inspected = self.tables.slow.get(hot.slow).is_some_and(|slow| slow.inspect[from]);
        if !inspected && end.after(other.edge + 1) {
            return Err(Drop::OutOfWindow);
        }
        Ok(())
    }

    /// Handles a reset. It ends the connection if it has exactly the number that the receiver expects. Otherwise the
    /// receiver may send a challenge ACK (RFC 5961, section 3.2), and the answer comes through here again.
    fn rebuild_reset(&mut self, now: Instant, slot: Slot, from: Side, header: &Header) -> Fate {
        let hot = self.tables.hot.at(slot);
        let other = &hot.leg[from.other()];
        let seq = match self.tables.slow.get(hot.slow) {
            Some(slow) => slow.edits[from].seq(header.seq),
            None => header.seq + hot.leg[from].add,
        };
        if seq.before(other.acked) {
            return Fate::Dropped(Drop::OutOfWindow);
        }
        // The number after what we sent counts as expected too: the acknowledgement of it may still be on its way.
        let expected = match self.tables.slow.get(hot.slow) {
            Some(slow) => slow.edits[from].seq(hot.leg[from].next),
            None => hot.leg[from].next + hot.leg[from].add,
        };
        let exact = seq == other.acked || seq == expected;
        let numbers = super::send::Numbers { seq, window: 0, ..self.numbers(slot, from.other()) };
        self.send(now, slot, from.other(), numbers, flags::RST | flags::ACK, &[]);
        if exact {
            let over = self.tables.hot.at(slot).phase == Phase::TimeWait;
            let reason = if from == Side::Client { EndReason::ClientReset } else { EndReason::ServerReset };
            self.release(now, slot, (!over).then_some(reason));
        }
        Fate::Taken
    }

    /// Handles the acknowledgement of a segment: drops the edits it covers, and sends more owned bytes.
    fn acknowledged(&mut self, now: Instant, slot: Slot, from: Side, header: &Header) {
        let hot = self.tables.hot.at_mut(slot);
        let leg = &mut hot.leg[from];
        let before = leg.acked;
        leg.acked = leg.acked.max(header.ack);
        leg.edge = leg.edge.max(header.ack + (u32::from(header.window) << leg.shift));
        let acked = leg.acked;
        self.forget_acknowledged(slot, from);
        if from == Side::Server {
            self.owned_acknowledged(now, slot, before, acked);
        }
    }

    /// Drops edits of the other side's bytes that side `from` has acknowledged.
    pub(super) fn forget_acknowledged(&mut self, slot: Slot, from: Side) {
        let hot = self.tables.hot.at_mut(slot);
        if let Some(slow) = self.tables.slow.get_mut(hot.slow) {
            let edits = &mut slow.edits[from.other()];
            let kept = edits.bytes();
            edits.acknowledge(hot.leg[from].acked);
            hot.leg[from.other()].add = edits.base();
            self.held_total = self.held_total.saturating_sub(kept - edits.bytes());
        }
    }

    /// Gives the new bytes of a segment to [`Callbacks::payload`].
    fn inspect(&mut self, slot: Slot, from: Side, packet: &Packet<'_>, next: Seq) -> Result<Change, Drop> {
        let header = packet.header;
        let new = packet.payload().get(next.since(header.seq) as usize..).unwrap_or_default();
        let (hot, cold) = (self.tables.hot.at(slot), self.tables.cold.at(slot));
        if new.is_empty() || !(header.seq + header.len()).after(next) {
            return Ok(Change::Keep);
        }
        let kept = self.tables.slow.get(hot.slow).map_or(0, |slow| slow.edits[from].bytes());
        if kept >= self.config.edit_bytes || self.held_total > self.config.hold_total_bytes {
            return Err(Drop::Limit);
        }
        let result = self.callbacks.payload(cold.id, from, new);
        if let Payload::Last(_) = result {
            self.slow_at(slot).inspect[from] = false;
        }
        Ok(match result {
            Payload::Keep => Change::Keep,
            Payload::Replace(bytes) | Payload::Last(bytes) if bytes == new => Change::Keep,
            Payload::Replace(bytes) | Payload::Last(bytes) => Change::Edit(bytes),
            Payload::Reset(reason) => Change::Reset(reason),
        })
    }

    fn push_edit(&mut self, slot: Slot, from: Side, next: Seq, header: &Header, bytes: Vec<u8>) {
        self.held_total += bytes.len();
        let hot = self.tables.hot.at_mut(slot);
        let slow = self.tables.slow.at_mut(hot.slow);
        let (len, edits) = ((header.seq + header.len()) - next, &mut slow.edits[from]);
        edits.push(Edit { start: next, len, bytes, fin: false, owned: false });
        // An edit without bytes may already be complete: no acknowledgement will come for it.
        edits.acknowledge(hot.leg[from.other()].acked);
        hot.leg[from].add = edits.base();
        hot.edited = true;
    }

    /// Forwards the segment: its payload in pieces that fit the receiver, with acknowledgement, window and options.
    fn pass_on(&mut self, now: Instant, slot: Slot, from: Side, packet: &mut Packet<'_>, located: &Located) {
        let header = packet.header;
        let hot = self.tables.hot.at_mut(slot);
        if hot.phase == Phase::Bound {
            hot.active = now;
        }
        // FINs first: `note` moves `next`, by which `closing` tells a new FIN from a repeated one.
        self.closing(now, slot, from, header, self.fin_ack(slot, from, header));
        let options = self.options(now, slot, from, packet, located);
        note(&mut self.tables.hot.at_mut(slot).leg[from], packet, located);
        let passed = self.send_pieces(slot, from, packet, options.words());
        if passed.owned || (!passed.sent && !header.is_empty()) {
            // The receiver will not acknowledge bytes that the engine delivers or removed, so the engine does.
            self.acknowledge(now, slot, from);
        }
        self.settle(slot);
    }

    /// Cuts a segment at edits and at the receiver's MSS, and sends the parts.
    fn send_pieces(&mut self, slot: Slot, from: Side, packet: &Packet<'_>, options: &[u32]) -> Passed {
        let header = packet.header;
        let mut passed = Passed::default();
        let numbers = self.numbers(slot, from.other());
        let hot = self.tables.hot.at(slot);
        let leg = &hot.leg[from.other()];
        let plain = Edits::new(hot.leg[from].add);
        let edits = self.tables.slow.get(hot.slow).map_or(&plain, |slow| &slow.edits[from]);
        let most = usize::from(leg.mss).saturating_sub(options.len() * 4).max(1);
        let outbox = &mut self.outbox;
        let mut segment = Segment {
            to: hot.tuple[from.other()],
            hop: leg.hop,
            seq: edits.seq(header.seq),
            ack: numbers.ack,
            flags: flags::ACK,
            window: numbers.window,
            options,
            payload: &[],
        };
        let data_end = header.seq + header.len();
        // Acknowledged bytes may have been changed, and the receiver does not need them again.
        let known = edits.acknowledged(leg.acked).max(header.seq).min(data_end);
        edits.pieces(if hot.edited { known } else { header.seq }, data_end, |piece| {
            let (bytes, seq) = match piece {
                Piece::Same(old, len, new) => {
                    let start = header.data + (old - header.seq) as usize;
                    (packet.bytes.get(start..start + len as usize).unwrap_or_default(), new)
                }
                Piece::Edited(edit, _) if edit.owned => {
                    passed.owned = true;
                    return;
                }
                Piece::Edited(edit, new) => (edit.bytes.as_slice(), new),
            };
            for (at, chunk) in bytes.chunks(most).enumerate() {
                let seq = seq + length(at * most);
                let push = header.flags & flags::PSH;
                outbox.segment(&Segment { seq, payload: chunk, flags: flags::ACK | push, ..segment });
                passed.sent = true;
            }
        });
        // A FIN goes in a segment of its own, unless the engine delivers it. A segment that sent nothing else goes on for its
        // acknowledgement.
        let fin = header.has(flags::FIN);
        let owned_fin =
            fin && edits.owned().is_some_and(|(edit, _)| edit.fin && edit.end() == header.seq_end());
        if fin && !owned_fin {
            segment.seq = edits.seq(data_end);
            segment.flags |= flags::FIN;
            outbox.segment(&segment);
        } else if !fin && !passed.sent && !passed.owned {
            outbox.segment(&segment);
        }
        passed.owned |= owned_fin;
        passed
    }

    /// Returns the acknowledgement as `closing` needs it: past the other side's FIN only if that was acknowledged.
    fn fin_ack(&self, slot: Slot, from: Side, header: &Header) -> Seq {
        let hot = self.tables.hot.at(slot);
        let other = &hot.leg[from.other()];
        match self.tables.slow.get(hot.slow) {
            // First in the other side's own numbers, then as `closing` will translate its FIN.
            Some(slow) => slow.edits[from.other()].acknowledged(header.ack) + other.add,
            None => header.ack,
        }
    }

    /// Returns the options of a segment for the other side: translated, removed if that side does not know them, and with
    /// a time stamp added if it expects one.
    fn options(
        &self,
        now: Instant,
        slot: Slot,
        from: Side,
        packet: &Packet<'_>,
        located: &Located,
    ) -> Written {
        let header = packet.header;
        let hot = self.tables.hot.at(slot);
        let (own, other) = (&hot.leg[from], &hot.leg[from.other()]);
        if header.data == header.tcp + 20 && !other.stamps {
            return Written::default();
        }
        let mut options = Options::copied(packet.options());
        let edited = self.tables.slow.get(hot.slow).is_some_and(|slow| !slow.edits[from.other()].is_empty());
        if let Some((first, blocks)) = located.sack {
            if edited || !hot.same_options {
                blank(options.as_mut(), first, blocks * 8);
            } else {
                for edge in 0..blocks * 2 {
                    add_at(options.as_mut(), first + edge * 4, 0_u32.wrapping_sub(other.add));
                }
            }
        }
        match located.timestamps {
            Some(at) if other.stamps => {
                add_at(options.as_mut(), at, own.stamp_add);
                let echo = other.echo(u32_at(options.as_slice(), at + 4));
                put(options.as_mut(), at + 4, &echo.to_be_bytes());
            }
            Some(at) => blank(options.as_mut(), at, 8),
            None if other.stamps => {
                return Written::timestamps(self.clock(now), other.stamp);
            }
            None => {}
        }
        if options.as_slice().iter().all(|byte| *byte == 1) {
            return Written::default();
        }
        Written::from(options.as_slice())
    }
}

fn add_at(bytes: &mut [u8], at: usize, add: u32) {
    let number = u32_at(bytes, at).wrapping_add(add);
    put(bytes, at, &number.to_be_bytes());
}
