//! What is kept of a connection: the part every packet needs, in one place; the rest apart from it.

use super::checksum::Sum;
use super::config::{ConnectionId, Hop, Target};
use super::edit::Edits;
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

pub(super) const fn side(at: usize) -> Side {
    if at == CLIENT { Side::Client } else { Side::Server }
}

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

/// How far a connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// The slot is free.
    #[default]
    Free,
    /// The client's SYN was answered.
    Opening,
    /// The client is there; the server is being chosen.
    Deciding,
    /// The server was sent a SYN.
    Connecting,
    /// Both are there; packets are translated.
    Bound,
    /// Both have closed; kept for late packets. Its record is written.
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
    pub(super) phase: Phase,
    /// Packets can be rewritten where they are: same family, same options, no edits.
    pub(super) plain: bool,
    /// Somebody changed bytes: old numbers that were acknowledged no longer stand for the bytes a receiver knows.
    pub(super) edited: bool,
    /// Both sides agreed on the same options.
    pub(super) same_options: bool,
    /// Both sides are IPv4, or both IPv6.
    pub(super) same_family: bool,
}

impl Leg {
    /// A time stamp that the other side echoes, as this side knows it. What the other side echoes of our own segments
    /// before there was a translation stands for the first.
    pub(super) fn echo(&self, echo: u32) -> u32 {
        let own = echo.wrapping_sub(self.stamp_add);
        if Seq(own).before(Seq(self.stamp_first)) { self.stamp_first } else { own }
    }

    /// The time stamp of a segment of ours in this side's place.
    pub(super) fn stamp_for_other(&self, clock: u32) -> u32 {
        if self.stamps { self.stamp.wrapping_add(self.stamp_add) } else { clock }
    }
}

impl Hot {
    /// Both sides, the one a packet comes from first.
    pub(super) fn legs(&mut self, from: usize) -> (&mut Leg, &mut Leg) {
        let [client, server] = &mut self.leg;
        if from == CLIENT { (client, server) } else { (server, client) }
    }

    /// Works out what both directions' new addresses and ports change in checksums.
    pub(super) fn fix_checksums(&mut self) {
        let [client, server] = self.tuple;
        for (at, before, after) in [(CLIENT, client, server), (SERVER, server, client)] {
            if let Some(leg) = self.leg.get_mut(at) {
                leg.fix = Sum::ZERO.u16(!before.sum().folded()).add(after.sum()).folded();
                let addresses = |tuple: &Tuple| tuple.remote.sum().add(tuple.local.sum());
                leg.ip_fix = Sum::ZERO.u16(!addresses(&before).folded()).add(addresses(&after)).folded();
            }
        }
    }
}

/// What records and time-outs need.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cold {
    pub(super) id: ConnectionId,
    pub(super) opened: Instant,
    pub(super) connected: Option<Instant>,
    pub(super) stamps: Stamps,
    pub(super) idle: Duration,
    pub(super) expires: Option<Instant>,
    /// Whether there is a source towards the server, and whether it goes back to the free ones.
    pub(super) source: Source,
}

/// What the connection to the server comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// No server was chosen yet.
    #[default]
    None,
    /// One of ours: it goes back to the free ones.
    Ours,
    /// The client's own.
    Client,
}

impl Default for Cold {
    fn default() -> Self {
        Self {
            id: ConnectionId(0),
            opened: Instant::ZERO,
            connected: None,
            stamps: Stamps::default(),
            idle: Duration::ZERO,
            expires: None,
            source: Source::None,
        }
    }
}

/// What a connection needs while it is made, while its bytes are held, and as long as they may be changed.
#[derive(Debug, Default)]
pub(super) struct Slow {
    /// Our own initial number towards each side.
    pub(super) isn: [Seq; 2],
    /// What the client offered.
    pub(super) offer: Offer,
    /// The chosen server.
    pub(super) target: Option<Target>,
    /// The client's bytes while there is no server.
    pub(super) held: Vec<u8>,
    /// A FIN came after them.
    pub(super) fin: bool,
    /// What became of each side's bytes.
    pub(super) edits: [Edits; 2],
    /// Which side's bytes are looked at.
    pub(super) inspect: [bool; 2],
    /// The highest number we acknowledged to each side ourselves: acknowledgements never go back behind it.
    pub(super) acked_to: [Seq; 2],
    /// Held segments that are not acknowledged yet.
    pub(super) unacknowledged: u8,
    /// When they are to be.
    pub(super) ack_at: Option<Instant>,
    /// When to send again what was not answered, how long to wait the next time, and how often it was sent.
    pub(super) resend_at: Option<Instant>,
    pub(super) resend_after: Duration,
    pub(super) resends: u8,
    /// The last number of the owned bytes that was sent, as the server sees them.
    pub(super) sent: Seq,
    /// When the SYN left, for the round-trip time.
    pub(super) asked: Instant,
    /// When the phase is given up.
    pub(super) until: Option<Instant>,
}

impl Slow {
    /// As new, but for the room its buffers have.
    pub(super) fn reset(&mut self) {
        let mut held = std::mem::take(&mut self.held);
        let mut edits = std::mem::take(&mut self.edits);
        for edits in &mut edits {
            let spare = edits.take_spare();
            if spare.capacity() > held.capacity() {
                held = spare;
            }
            edits.begin(0);
        }
        held.clear();
        held.shrink_to(2048);
        *self = Self { held, edits, ..Self::default() };
    }
}

// More would be one more wait for memory with every packet.
const _: () = assert!(size_of::<Leg>() == 64 && size_of::<Hot>() == 256);
