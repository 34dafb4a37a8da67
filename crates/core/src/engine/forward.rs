//! The path of nearly every packet: packets of a bound connection, rewritten in place.

use super::checksum::Sum;
use super::config::Callbacks;
use super::connection::{Hot, Leg, Phase};
use super::machine::{Drop, Engine, Fate};
use super::options::Located;
use super::packet::{Checksums, Header, Packet, flags, put, u8_at, u16_at, u32_at};
use super::record::State;
use super::seq::Seq;
use super::slot::{Pair, Slot};
use crate::flow::{EndReason, Side};
use crate::time::Instant;

/// Length of the TCP header without options.
const BARE: usize = 20;

/// The numbers of a packet as the other side sees them.
struct Translated {
    seq: Seq,
    ack: Seq,
    window: u16,
}

impl<C: Callbacks> Engine<C> {
    /// Handles a segment of a bound connection.
    pub(super) fn forward(&mut self, now: Instant, slot: Slot, from: Side, packet: &mut Packet<'_>) -> Fate {
        let header = packet.header;
        let hot = self.tables.hot.at_mut(slot);
        if header.ttl <= 1 {
            return Fate::Dropped(Drop::Expired);
        }
        if !hot.passes(from, packet) {
            return self.rebuild(now, slot, from, packet);
        }
        let located = match Located::parse(packet.options()) {
            Ok(located) => located,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        let (own, other) = hot.legs(from);
        if let Err(why) = in_window(own, other, header) {
            return Fate::Dropped(why);
        }
        self.translate(now, slot, from, packet, &located)
    }

    /// Rewrites a segment in place, and updates the connection's state from it.
    pub(super) fn translate(
        &mut self,
        now: Instant,
        slot: Slot,
        from: Side,
        packet: &mut Packet<'_>,
        located: &Located,
    ) -> Fate {
        let header = packet.header;
        let hot = self.tables.hot.at_mut(slot);
        let (own, other) = hot.legs(from);
        // FINs first: `note` moves `next`, by which `closing` tells a new FIN from a repeated one.
        if own.has_fin || other.has_fin || header.has(flags::FIN) {
            self.closing(now, slot, from, header, header.ack);
        }
        let hot = self.tables.hot.at_mut(slot);
        let (own, other) = hot.legs(from);
        note(own, packet, located);
        let translated = Translated {
            seq: header.seq + own.add,
            ack: header.ack - other.add,
            window: rescale(header.window, own.shift, other.shown_shift),
        };
        let sum = rewrite_options(packet.bytes, header, located, own.stamp_add, other);
        if hot.phase == Phase::Bound {
            hot.active = now;
        }
        rewrite(packet.bytes, header, hot, from, &translated, sum);
        Fate::Forward { len: header.end, hop: hot.leg[from.other()].hop }
    }

    /// Follows both sides' FINs. `ack` is the acknowledgement in the other side's numbers, as its sender sees them.
    pub(super) fn closing(&mut self, now: Instant, slot: Slot, from: Side, header: &Header, ack: Seq) {
        let hot = self.tables.hot.at_mut(slot);
        if hot.phase != Phase::Bound {
            return;
        }
        let (mut state, other_state) = fin_acknowledged(hot, from, ack);
        let (own, _) = hot.legs(from);
        if header.has(flags::FIN) && !own.has_fin && header.seq_end().after(own.next) {
            (own.has_fin, own.fin) = (true, header.seq_end());
            state = state.fin_sent();
            if let Some(offloaded) = hot.offloaded {
                // The answers must come to user space.
                self.callbacks.closing(offloaded);
            }
        }
        self.reached(now, slot, from, state, other_state);
    }

    /// Checks whether side `from` has acknowledged the other side's FIN in the kernel.
    pub(super) fn heard_elsewhere(&mut self, now: Instant, slot: Slot, from: Side) {
        let hot = self.tables.hot.at_mut(slot);
        if hot.phase != Phase::Bound {
            return;
        }
        let ack = hot.leg[from].acked;
        let (state, other_state) = fin_acknowledged(hot, from, ack);
        self.reached(now, slot, from, state, other_state);
    }

    /// Sets the states of side `from` and of the other side.
    fn reached(&mut self, now: Instant, slot: Slot, from: Side, state: State, other: State) {
        self.state(now, slot, from, state);
        self.state(now, slot, from.other(), other);
        if state.is_over() && other.is_over() {
            self.record(now, slot, EndReason::Ok);
            self.wait(now, slot);
        }
    }

    /// Keeps a closed connection for late packets.
    fn wait(&mut self, now: Instant, slot: Slot) {
        let hot = self.tables.hot.at_mut(slot);
        (hot.active, hot.phase) = (now, Phase::TimeWait);
        self.wheel.wait(slot);
    }

    /// Checks whether packets of a bound connection can be rewritten in place from now on. Frees what is not needed then.
    pub(super) fn settle(&mut self, slot: Slot) {
        let hot = self.tables.hot.at_mut(slot);
        if let Some(slow) = self.tables.slow.get(hot.slow) {
            let Pair([client, server]) = &slow.edits;
            hot.leg[Side::Client].add = client.base();
            hot.leg[Side::Server].add = server.base();
            let needed = slow.inspect != Pair([false; 2]) || !client.is_empty() || !server.is_empty();
            if needed {
                return;
            }
            self.free_slow(slot);
        }
        let hot = self.tables.hot.at_mut(slot);
        hot.plain = hot.same_options && hot.same_family;
        if hot.may_be_offloaded() {
            self.callbacks.plain(slot);
        }
    }
}

/// Returns the states of `from` and of the other side after `from` acknowledged up to `ack`, which may include the
/// other's FIN.
fn fin_acknowledged(hot: &mut Hot, from: Side, ack: Seq) -> (State, State) {
    let (own, other) = hot.legs(from);
    let (mut own_state, mut other_state) = (own.state, other.state);
    if other.has_fin && !other.fin_acked && !ack.before(other.fin + other.add) {
        other.fin_acked = true;
        (own_state, other_state) = (own_state.other_fin_acknowledged(), other_state.fin_acknowledged());
    }
    (own_state, other_state)
}

impl Hot {
    /// True if a segment can be rewritten in place.
    #[inline]
    pub(super) fn passes(&self, from: Side, packet: &Packet<'_>) -> bool {
        let header = packet.header;
        let special = flags::SYN | flags::RST;
        let whole = header.len() as usize + (header.data - header.tcp - BARE);
        let fits = whole <= usize::from(self.leg[from.other()].mss);
        let again = self.edited && (header.seq + self.leg[from].add).before(self.leg[from.other()].acked);
        self.plain && fits && !again && !header.has(special) && packet.checksums != Checksums::Partial
    }
}

/// Checks that a segment can be of use to the receiver: it is not past the receiver's window (except for the one byte of
/// a window probe), and it acknowledges only what was sent.
fn in_window(own: &Leg, other: &Leg, header: &Header) -> Result<(), Drop> {
    if (header.ack - other.add).after(other.next) {
        return Err(Drop::AckOfUnsent);
    }
    if (header.seq_end() + own.add).after(other.edge + 1) {
        return Err(Drop::OutOfWindow);
    }
    Ok(())
}

/// Stores the numbers, the window and the time stamp of a segment.
pub(super) fn note(own: &mut Leg, packet: &Packet<'_>, located: &Located) {
    let header = packet.header;
    own.packets = own.packets.wrapping_add(1);
    if let Some(at) = located.timestamps
        && !header.seq.after(own.next)
    {
        own.stamp = u32_at(packet.options(), at);
    }
    let end = header.seq_end();
    // An empty segment after a lost one does not show what was sent.
    if end != header.seq && end.after(own.next) {
        own.bytes += u64::from(end - own.next) - u64::from(header.has(flags::FIN));
        own.next = end;
    }
    own.acked = own.acked.max(header.ack);
    own.edge = own.edge.max(header.ack + (u32::from(header.window) << own.shift));
}

/// Converts a window field with shift `shift` for a receiver that uses the shift `shown`.
pub(super) fn rescale(window: u16, shift: u8, shown: u8) -> u16 {
    if shift == shown {
        return window;
    }
    ((u32::from(window) << shift) >> shown).min(0xffff) as u16
}

/// Translates time stamps and SACK blocks in place.
fn rewrite_options(
    packet: &mut [u8],
    header: &Header,
    located: &Located,
    stamp_add: u32,
    other: &Leg,
) -> Sum {
    let mut sum = Sum::ZERO;
    let start = header.tcp + BARE;
    if let Some(at) = located.timestamps {
        sum = sum.add(shift(packet, start + at, header.tcp, stamp_add));
        let echo = other.echo(u32_at(packet, start + at + 4));
        sum = sum.add(replace(packet, start + at + 4, header.tcp, echo));
    }
    if let Some((first, blocks)) = located.sack {
        for edge in 0..blocks * 2 {
            sum = sum.add(shift(packet, start + first + edge * 4, header.tcp, 0_u32.wrapping_sub(other.add)));
        }
    }
    sum
}

/// Adds to the number at `at`. Returns the change of the checksum of the data that begins at `base`.
fn shift(packet: &mut [u8], at: usize, base: usize, add: u32) -> Sum {
    replace(packet, at, base, u32_at(packet, at).wrapping_add(add))
}

/// Replaces the number at `at`. Returns the same change as [`shift`].
fn replace(packet: &mut [u8], at: usize, base: usize, new: u32) -> Sum {
    let old = u32_at(packet, at);
    put(packet, at, &new.to_be_bytes());
    let change = Sum::ZERO.replace_u32(old, new);
    // A number that does not begin on a word boundary counts with its bytes swapped (RFC 1071, section 2(B)).
    if (at - base).is_multiple_of(2) { change } else { Sum::ZERO.u16(change.folded().swap_bytes()) }
}

/// Writes the new header: numbers, ports, addresses, time to live, and checksums computed from what changed. `options` is
/// the change already made to the options.
fn rewrite(packet: &mut [u8], header: &Header, hot: &Hot, from: Side, new: &Translated, options: Sum) {
    let tcp = header.tcp;
    let (leg, to) = (&hot.leg[from], &hot.tuple[from.other()]);
    let sum = options
        .replace_u32(header.seq.0, new.seq.0)
        .replace_u32(header.ack.0, new.ack.0)
        .replace_u16(header.window, new.window)
        .u16(leg.fix);
    let checksum = sum.apply(u16_at(packet, tcp + 16));
    if let Some(Ok(head)) = packet.get_mut(tcp..tcp + BARE).map(<&mut [u8; BARE]>::try_from) {
        head[0..2].copy_from_slice(&to.local_port().to_be_bytes());
        head[2..4].copy_from_slice(&to.remote_port().to_be_bytes());
        head[4..8].copy_from_slice(&new.seq.0.to_be_bytes());
        head[8..12].copy_from_slice(&new.ack.0.to_be_bytes());
        head[14..16].copy_from_slice(&new.window.to_be_bytes());
        head[16..18].copy_from_slice(&checksum.to_be_bytes());
    }
    let ttl = header.ttl.saturating_sub(1);
    if to.remote.is_v4() {
        let protocol = u8_at(packet, 9);
        let (old, fresh) = (u16::from_be_bytes([header.ttl, protocol]), u16::from_be_bytes([ttl, protocol]));
        let checksum = Sum::ZERO.u16(leg.ip_fix).replace_u16(old, fresh).apply(u16_at(packet, 10));
        if let Some(Ok(head)) = packet.get_mut(..20).map(<&mut [u8; 20]>::try_from) {
            head[8] = ttl;
            head[10..12].copy_from_slice(&checksum.to_be_bytes());
            head[12..16].copy_from_slice(&to.local.v4_bits().to_be_bytes());
            head[16..20].copy_from_slice(&to.remote.v4_bits().to_be_bytes());
        }
    } else {
        put(packet, 7, &[ttl]);
        put(packet, 8, &to.local.v6_bytes());
        put(packet, 24, &to.remote.v6_bytes());
    }
}
