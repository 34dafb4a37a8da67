//! The state of a connection: what every packet needs lies together ([`Hot`]), the rest apart from it ([`Cold`], [`Slow`]).
//! The head of the parent module draws the phases.

use super::checksum::Sum;
use super::config::{ConnectionId, Hop};
use super::edit::Edits;
use super::lend::LentTo;
use super::options::Offer;
use super::packet::Tuple;
use super::record::{Stamps, State};
use super::seq::Seq;
use crate::flow::Side;
use crate::time::Instant;
use std::time::Duration;

/// Places of the two sides in arrays.
pub(super) const CLIENT: usize = 0;
pub(super) const SERVER: usize = 1;

#[inline]
pub(super) const fn side(at: usize) -> Side {
    if at == CLIENT { Side::Client } else { Side::Server }
}

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

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
    /// After the last byte it sent.
    pub(super) next: Seq,
    /// The highest number it acknowledged, as it sees the other side's numbers.
    pub(super) acked: Seq,
    /// The highest number its window ever allowed, as it sees the other side's numbers.
    pub(super) edge: Seq,
    /// What is added to its numbers for the other side, before any edit that is still kept.
    pub(super) add: u32,
    /// After its FIN, if it sent one.
    pub(super) fin: Seq,
    /// What is added to its time stamps for the other side.
    pub(super) stamp_add: u32,
    /// Its last time stamp.
    pub(super) stamp: u32,
    /// The first one that was translated: the other side is never shown to echo an earlier one.
    pub(super) stamp_first: u32,
    /// Packets taken from it.
    pub(super) packets: u32,
    /// Payload it sent, each byte once.
    pub(super) bytes: u64,
    /// How it is reached.
    pub(super) hop: Hop,
    /// Largest payload it takes, options included.
    pub(super) mss: u16,
    /// The change of the TCP checksum, and of the IP header's, by new addresses and ports.
    pub(super) fix: u16,
    pub(super) ip_fix: u16,
    /// Shift of the windows it sends, and of those it is shown.
    pub(super) shift: u8,
    pub(super) shown_shift: u8,
    pub(super) state: State,
    /// It uses time stamps.
    pub(super) stamps: bool,
    pub(super) has_fin: bool,
    pub(super) fin_acked: bool,
}

/// What every packet needs: four lines of cache, of which each side's numbers are one.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct Hot {
    pub(super) leg: [Leg; 2],
    /// How each side's packets look when they come.
    pub(super) tuple: [Tuple; 2],
    /// When the last packet came.
    pub(super) active: Instant,
    /// Slot of what only some connections need, or [`NONE`].
    pub(super) slow: u32,
    /// The kernel's number of the connection while it is offloaded.
    pub(super) lent: Option<LentTo>,
    pub(super) phase: Phase,
    /// Packets can be rewritten where they are: same family, same options, no edits.
    pub(super) plain: bool,
    /// A callback changed bytes: acknowledged numbers no longer stand for the bytes that the receiver knows.
    pub(super) edited: bool,
    /// Both sides agreed on the same options.
    pub(super) same_options: bool,
    /// Both sides are IPv4, or both IPv6.
    pub(super) same_family: bool,
}

impl Leg {
    /// A time stamp that the other side echoes, as this side knows it. What the other side echoes of our own segments
    /// before there was a translation stands for the first.
    #[inline]
    pub(super) fn echo(&self, echo: u32) -> u32 {
        let own = echo.wrapping_sub(self.stamp_add);
        if Seq(own).before(Seq(self.stamp_first)) { self.stamp_first } else { own }
    }

    /// The time stamp of a segment of ours in this side's place.
    #[inline]
    pub(super) fn stamp_for_other(&self, clock: u32) -> u32 {
        if self.stamps { self.stamp.wrapping_add(self.stamp_add) } else { clock }
    }
}

impl Hot {
    /// As new. Not in its caller's code, where it would be mixed with what is written next, and made elsewhere.
    #[inline(never)]
    pub(super) fn clear(&mut self) {
        *self = Self { slow: NONE, ..Self::default() };
    }

    /// Both sides, the one a packet comes from first.
    #[inline]
    pub(super) fn legs(&mut self, from: usize) -> (&mut Leg, &mut Leg) {
        let [client, server] = &mut self.leg;
        if from == CLIENT { (client, server) } else { (server, client) }
    }

    /// Works out what both directions' new addresses and ports change in checksums.
    pub(super) fn fix_checksums(&mut self) {
        let [client, server] = &self.tuple;
        let change = |before: u16, after: u16| Sum::ZERO.replace_u16(before, after).folded();
        let addresses = [client, server].map(|tuple| tuple.remote.sum().add(tuple.local.sum()));
        let whole = [addresses[0].u32(client.ports).folded(), addresses[1].u32(server.ports).folded()];
        let addresses = addresses.map(Sum::folded);
        let [to_server, to_client] = &mut self.leg;
        to_server.fix = change(whole[0], whole[1]);
        to_client.fix = change(whole[1], whole[0]);
        to_server.ip_fix = change(addresses[0], addresses[1]);
        to_client.ip_fix = change(addresses[1], addresses[0]);
    }
}

/// A time that never comes.
pub(super) const NEVER: Instant = Instant::from_nanos(u64::MAX);

/// What records and time-outs need: two lines of cache.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Cold {
    pub(super) id: ConnectionId,
    pub(super) opened: Instant,
    /// When the server answered, or [`NEVER`].
    pub(super) connected: Instant,
    /// The end of its life, or [`NEVER`].
    pub(super) expires: Instant,
    pub(super) idle: Duration,
    /// The hash under which the client's tuple is found.
    pub(super) key: u32,
    /// Whether there is a source towards the server, and whether it goes back to the free ones.
    pub(super) source: Source,
    /// The kernel has passed on packets of it while it was offloaded.
    pub(super) passed_elsewhere: bool,
    /// It was offloaded at least once.
    pub(super) was_lent: bool,
    pub(super) stamps: Stamps,
}

/// What the connection to the server comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// No server was chosen yet.
    #[default]
    None,
    /// One of ours: it goes back to the free ones.
    Ours,
    /// One of ours that another connection, to another server, has as well.
    Shared,
    /// The client's own.
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
            was_lent: false,
            stamps: Stamps::default(),
        }
    }
}

/// The state that a connection needs during its handshakes, while its bytes are held, and while callbacks may change them. It is
/// four cache lines long; the first fields are used most. Times may be [`NEVER`].
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct Slow {
    /// Our own initial number towards each side.
    pub(super) isn: [Seq; 2],
    /// The highest number we acknowledged to each side ourselves: acknowledgements never go back behind it.
    pub(super) acked_to: [Seq; 2],
    /// The last number of the owned bytes that was sent, as the server sees them.
    pub(super) sent: Seq,
    /// How often what was not answered was sent again.
    pub(super) resends: u8,
    /// Held segments that are not acknowledged yet.
    pub(super) unacknowledged: u8,
    /// A FIN came after the held bytes.
    pub(super) fin: bool,
    /// Which side's bytes are looked at.
    pub(super) inspect: [bool; 2],
    /// Bytes that the engine itself has sent to the client; they lie in `edits[SERVER]` until the client acknowledges them.
    pub(super) replied: u8,
    /// What the client offered.
    pub(super) offer: Offer,
    /// When held segments are to be acknowledged.
    pub(super) ack_at: Instant,
    /// When to send again what was not answered.
    pub(super) resend_at: Instant,
    /// When the phase is given up.
    pub(super) until: Instant,
    /// When the SYN left, for the round-trip time.
    pub(super) asked: Instant,
    /// How long to wait the next time before sending again.
    pub(super) resend_after: Duration,
    /// What became of each side's bytes; the client's hold its bytes while there is no server.
    pub(super) edits: [Edits; 2],
}

impl Default for Slow {
    fn default() -> Self {
        Self {
            isn: [Seq(0); 2],
            acked_to: [Seq(0); 2],
            sent: Seq(0),
            resends: 0,
            unacknowledged: 0,
            fin: false,
            inspect: [false; 2],
            replied: 0,
            offer: Offer::default(),
            ack_at: NEVER,
            resend_at: NEVER,
            until: NEVER,
            asked: Instant::ZERO,
            resend_after: Duration::ZERO,
            edits: [Edits::default(), Edits::default()],
        }
    }
}

impl Slow {
    /// The client's bytes while there is no server.
    #[inline]
    pub(super) fn held(&self) -> &[u8] {
        self.edits[CLIENT].held()
    }

    /// The number of the first byte that the client gets from its server.
    #[inline]
    pub(super) fn first_to_client(&self) -> Seq {
        self.isn[CLIENT] + 1 + u32::from(self.replied)
    }

    /// What the engine itself has sent to the client and the client has not acknowledged; only while there is no server.
    #[inline]
    pub(super) fn reply(&self) -> &[u8] {
        self.edits[SERVER].held()
    }

    /// As new, but for the room its buffers have.
    pub(super) fn reset(&mut self) {
        for edits in &mut self.edits {
            edits.reset();
        }
        (self.isn, self.acked_to, self.sent) = ([Seq(0); 2], [Seq(0); 2], Seq(0));
        (self.resends, self.unacknowledged, self.fin, self.inspect) = (0, 0, false, [false; 2]);
        self.replied = 0;
        (self.ack_at, self.resend_at, self.until) = (NEVER, NEVER, NEVER);
    }
}

// More would be one more wait for memory with every packet.
const _: () = assert!(size_of::<Leg>() == 64 && size_of::<Hot>() == 256);
const _: () = assert!(size_of::<Cold>() == 128 && size_of::<Slow>() == 256);
