//! The state of a connection. What every packet needs lies together ([`Hot`]), the rest is separate ([`Cold`], [`Slow`]).
//! The head of the parent module draws the phases.

use super::checksum::Sum;
use super::config::{ConnectionId, Hop};
use super::edit::Edits;
use super::offload::OffloadId;
use super::options::Offer;
use super::packet::Tuple;
use super::record::{Stamps, State};
use super::seq::Seq;
use super::slot::{Pair, Slot, SlowSlot, Table};
use crate::flow::Side;
use crate::time::Instant;
use std::time::Duration;

/// The phase of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// The slot is free.
    #[default]
    Free,
    /// The engine has answered the client's SYN and waits for the acknowledgement.
    Opening,
    /// The handshake with the client is done; the callback has not chosen a server yet.
    Deciding,
    /// The engine has sent a SYN to the server.
    Connecting,
    /// Both handshakes are done; packets are translated.
    Bound,
    /// Both sides have closed. The state is kept for late packets; the record is written.
    TimeWait,
}

/// One side of a connection: what it has sent, in its own numbers, and how to translate that for the other side.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Leg {
    /// The number after the last byte it sent.
    pub(super) next: Seq,
    /// The highest number it acknowledged, as it sees the other side's numbers.
    pub(super) acked: Seq,
    /// The highest number its window ever allowed, as it sees the other side's numbers.
    pub(super) edge: Seq,
    /// The offset added to its numbers for the other side, before any edit that is still kept.
    pub(super) add: u32,
    /// The number after its FIN, if it sent one.
    pub(super) fin: Seq,
    /// The offset added to its time stamps for the other side.
    pub(super) stamp_add: u32,
    /// Its last time stamp.
    pub(super) stamp: u32,
    /// The first time stamp that was translated: this side never sees an echo of an earlier one.
    pub(super) stamp_first: u32,
    /// Packets received from it.
    pub(super) packets: u32,
    /// Payload it sent, each byte counted once.
    pub(super) bytes: u64,
    /// The neighbour to send its packets to.
    pub(super) hop: Hop,
    /// Largest payload it accepts, options included.
    pub(super) mss: u16,
    /// The changes of the TCP checksum and of the IP header's checksum by new addresses and ports.
    pub(super) fix: u16,
    pub(super) ip_fix: u16,
    /// The shift of the windows it sends, and of the windows sent to it.
    pub(super) shift: u8,
    pub(super) shown_shift: u8,
    pub(super) state: State,
    /// It uses time stamps.
    pub(super) stamps: bool,
    pub(super) has_fin: bool,
    pub(super) fin_acked: bool,
}

/// What every packet needs: four cache lines, one of them for each side's numbers.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Hot {
    pub(super) leg: Pair<Leg>,
    /// The tuple of each side's packets as they arrive.
    pub(super) tuple: Pair<Tuple>,
    /// When the last packet came.
    pub(super) active: Instant,
    /// The place of the state that only some connections need.
    pub(super) slow: SlowSlot,
    /// The kernel's number of the connection while it is offloaded.
    pub(super) offloaded: Option<OffloadId>,
    pub(super) phase: Phase,
    /// Packets can be rewritten in place: same family, same options, no edits.
    pub(super) plain: bool,
    /// A callback changed bytes: acknowledged numbers no longer stand for the bytes that the receiver knows.
    pub(super) edited: bool,
    /// Both sides agreed on the same options.
    pub(super) same_options: bool,
    /// Both sides are IPv4, or both IPv6.
    pub(super) same_family: bool,
}

impl Leg {
    /// Converts a time stamp that the other side echoes into this side's clock. An echo of the engine's own earlier
    /// stamps, sent before there was a translation, becomes the first stamp.
    #[inline]
    pub(super) fn echo(&self, echo: u32) -> u32 {
        let own = echo.wrapping_sub(self.stamp_add);
        if Seq(own).before(Seq(self.stamp_first)) { self.stamp_first } else { own }
    }

    /// Returns the time stamp of a segment that the engine sends on behalf of this side.
    #[inline]
    pub(super) fn stamp_for_other(&self, clock: u32) -> u32 {
        if self.stamps { self.stamp.wrapping_add(self.stamp_add) } else { clock }
    }
}

impl Hot {
    /// Resets all fields. Not inlined: inlined, the compiler would mix it with the writes that follow and build the value
    /// elsewhere.
    #[inline(never)]
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns both sides; the one that the packet comes from is first.
    #[inline]
    pub(super) fn legs(&mut self, from: Side) -> (&mut Leg, &mut Leg) {
        let Pair([client, server]) = &mut self.leg;
        match from {
            Side::Client => (client, server),
            Side::Server => (server, client),
        }
    }

    /// Computes how the new addresses and ports change the checksums in both directions.
    pub(super) fn fix_checksums(&mut self) {
        let Pair([client, server]) = &self.tuple;
        let change = |before: u16, after: u16| Sum::ZERO.replace_u16(before, after).folded();
        let addresses = [client, server].map(|tuple| tuple.remote.sum().add(tuple.local.sum()));
        let whole = [addresses[0].u32(client.ports).folded(), addresses[1].u32(server.ports).folded()];
        let addresses = addresses.map(Sum::folded);
        let Pair([to_server, to_client]) = &mut self.leg;
        to_server.fix = change(whole[0], whole[1]);
        to_client.fix = change(whole[1], whole[0]);
        to_server.ip_fix = change(addresses[0], addresses[1]);
        to_client.ip_fix = change(addresses[1], addresses[0]);
    }
}

/// A time that never comes.
pub(super) const NEVER: Instant = Instant::from_nanos(u64::MAX);

/// What records and time-outs need: two cache lines.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Cold {
    pub(super) id: ConnectionId,
    pub(super) opened: Instant,
    /// When the server answered, or [`NEVER`].
    pub(super) connected: Instant,
    /// When the connection's lifetime ends, or [`NEVER`].
    pub(super) expires: Instant,
    pub(super) idle: Duration,
    /// The hash under which the client's tuple is found.
    pub(super) key: u32,
    /// The kind of source towards the server; it tells whether the port becomes free at the end.
    pub(super) source: Source,
    /// The kernel has forwarded packets of it while it was offloaded.
    pub(super) passed_elsewhere: bool,
    /// It was offloaded at least once.
    pub(super) was_offloaded: bool,
    pub(super) stamps: Stamps,
}

/// The kind of source that the connection to the server has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// No server was chosen yet.
    #[default]
    None,
    /// One of our ports: it becomes free at the end.
    Ours,
    /// One of our ports that a connection to another server uses as well.
    Shared,
    /// The client's own address and port.
    Client,
}

impl Default for Cold {
    fn default() -> Self {
        Self {
            id: ConnectionId(0),
            opened: Instant::ZERO,
            connected: NEVER,
            expires: NEVER,
            idle: Duration::ZERO,
            key: 0,
            source: Source::None,
            passed_elsewhere: false,
            was_offloaded: false,
            stamps: Stamps::default(),
        }
    }
}

/// The state that a connection needs during its handshakes, while its bytes are held, and while callbacks may change
/// them. It is four cache lines long; the first fields are used most. Times may be [`NEVER`].
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Slow {
    /// Our initial sequence number towards each side.
    pub(super) isn: Pair<Seq>,
    /// The highest number we acknowledged to each side ourselves: acknowledgements never go back below it.
    pub(super) acked_to: Pair<Seq>,
    /// The number after the last owned byte that was sent, in the numbers that the server sees.
    pub(super) sent: Seq,
    /// How often unanswered segments were retransmitted.
    pub(super) resends: u8,
    /// Held segments that are not acknowledged yet.
    pub(super) unacknowledged: u8,
    /// A FIN came after the held bytes.
    pub(super) fin: bool,
    /// Which side's bytes are inspected.
    pub(super) inspect: Pair<bool>,
    /// Bytes that the engine itself has sent to the client; they lie in `edits[Side::Server]` until the client acknowledges them.
    pub(super) replied: u8,
    /// The options that the client offered.
    pub(super) offer: Offer,
    /// When to acknowledge held segments.
    pub(super) ack_at: Instant,
    /// When to retransmit what was not answered.
    pub(super) resend_at: Instant,
    /// When the phase times out.
    pub(super) until: Instant,
    /// When the SYN was sent, for the round-trip time.
    pub(super) syn_sent: Instant,
    /// How long to wait before the next retransmission.
    pub(super) resend_after: Duration,
    /// The edits of each side's bytes; the client's also hold its bytes while there is no server.
    pub(super) edits: Pair<Edits>,
}

impl Default for Slow {
    fn default() -> Self {
        Self {
            isn: Pair::default(),
            acked_to: Pair::default(),
            sent: Seq(0),
            resends: 0,
            unacknowledged: 0,
            fin: false,
            inspect: Pair::default(),
            replied: 0,
            offer: Offer::default(),
            ack_at: NEVER,
            resend_at: NEVER,
            until: NEVER,
            syn_sent: Instant::ZERO,
            resend_after: Duration::ZERO,
            edits: Pair::default(),
        }
    }
}

impl Slow {
    /// Returns the client's held bytes while there is no server.
    #[inline]
    pub(super) fn held(&self) -> &[u8] {
        self.edits[Side::Client].held()
    }

    /// Returns the number of the first byte that the client gets from its server.
    #[inline]
    pub(super) fn first_to_client(&self) -> Seq {
        self.isn[Side::Client] + 1 + u32::from(self.replied)
    }

    /// Returns what the engine itself has sent to the client and the client has not acknowledged; only while there is no
    /// server.
    #[inline]
    pub(super) fn reply(&self) -> &[u8] {
        self.edits[Side::Server].held()
    }

    /// Resets everything except the capacity of the buffers.
    pub(super) fn reset(&mut self) {
        for edits in &mut self.edits.0 {
            edits.reset();
        }
        (self.isn, self.acked_to, self.sent) = (Pair::default(), Pair::default(), Seq(0));
        (self.resends, self.unacknowledged, self.fin, self.inspect) = (0, 0, false, Pair::default());
        self.replied = 0;
        (self.ack_at, self.resend_at, self.until) = (NEVER, NEVER, NEVER);
    }
}

/// The state of all connections.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) hot: Table<Slot, Hot>,
    pub(super) cold: Table<Slot, Cold>,
    pub(super) slow: Table<SlowSlot, Slow>,
    pub(super) free: Vec<Slot>,
    pub(super) free_slow: Vec<SlowSlot>,
}

/// One connection in a phase in which it has all its state.
pub(super) struct Conn<'a> {
    pub(super) hot: &'a mut Hot,
    pub(super) cold: &'a mut Cold,
    pub(super) slow: &'a mut Slow,
}

impl Tables {
    /// Returns tables without connections that reserve memory for `connections` of them.
    pub(super) fn new(connections: usize) -> Self {
        Self {
            hot: Table::new(connections),
            cold: Table::new(connections),
            slow: Table::new(connections),
            free: Vec::new(),
            free_slow: Vec::new(),
        }
    }

    /// Returns a connection that is not in [`Phase::Bound`] or [`Phase::TimeWait`], or becomes bound now.
    #[inline]
    pub(super) fn conn(&mut self, slot: Slot) -> Conn<'_> {
        let hot = self.hot.at_mut(slot);
        let slow = self.slow.at_mut(hot.slow);
        Conn { hot, cold: self.cold.at_mut(slot), slow }
    }

    /// Empties the rows that an impossible index finds.
    pub(super) fn clear_outside(&mut self) {
        self.hot.clear_outside();
        self.cold.clear_outside();
        self.slow.clear_outside();
    }

    /// Returns how often an impossible connection was looked for.
    pub(super) fn impossible(&self) -> u64 {
        self.hot.impossible() + self.cold.impossible() + self.slow.impossible()
    }
}

// A larger size would cost one more memory access with every packet.
const _: () = assert!(size_of::<Leg>() == 64 && size_of::<Hot>() == 256);
const _: () = assert!(size_of::<Cold>() == 128 && size_of::<Slow>() == 256);
