//! The engine itself: it takes packets and time, and returns packets and records.

use super::config::{Callbacks, Config, ConnectionId, Hop};
use super::connection::{NEVER, Phase, Slow, Source, Tables};
use super::outbox::Outbox;
use super::packet::{Address, Checksums, Header, ICMP, ICMPV6, Ip, Malformed, Packet, TCP, Tuple};
use super::ports::Ports;
use super::record::{Record, State};
use super::room::Room;
use super::slot::{Pair, Slot, SlowSlot};
use super::table::{Index, hash};
use super::timer::Wheel;
use crate::flow::{EndReason, Side};
use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// The result of handling a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The packet was rewritten in place: send its first `len` bytes to `hop`.
    Forward {
        /// Length of the packet, bytes.
        len: usize,
        /// The neighbour.
        hop: Hop,
    },
    /// The engine took the packet; packets that it caused come from [`Engine::poll`].
    Taken,
    /// The packet is not for the engine: hand it to the rest of the system.
    NotOurs,
    /// The packet was dropped.
    Dropped(Drop),
}

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    /// It breaks the rules of its protocol.
    Malformed(Malformed),
    /// It belongs to no connection and begins none.
    NoConnection,
    /// Its bytes lie outside the receiver's window.
    OutOfWindow,
    /// It acknowledges what was never sent.
    AckOfUnsent,
    /// Its time to live ran out here.
    Expired,
    /// It makes no sense in the state of its connection.
    Unexpected,
    /// A limit of the engine was reached.
    Limit,
}

/// What the engine has counted since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Handshakes begun with clients, with state or by cookie.
    pub syns: u64,
    /// SYNs answered with a cookie.
    pub cookies_sent: u64,
    /// Connections that began with one of our cookies.
    pub cookies_accepted: u64,
    /// Handshakes with clients that were never finished.
    pub half_open_expired: u64,
    /// Connections whose server answered.
    pub bound: u64,
    /// Packets retransmitted by the engine itself: SYN, SYN-ACK, held bytes.
    pub retransmitted: u64,
    /// Challenge ACKs, and resets for unknown tuples (RFC 5961).
    pub challenges: u64,
    /// Challenge ACKs and resets not sent because the limit was reached.
    pub challenges_suppressed: u64,
    /// Connections refused or ended because the table, the ports or the memory for held bytes were used up.
    pub shed: u64,
    /// Connections in TIME-WAIT that ended early for new ones.
    pub time_wait_cut: u64,
    /// Connections that ended to make room for those of clients with fewer.
    pub left_for_others: u64,
    /// Records that were not taken in time.
    pub records_lost: u64,
    /// Packets dropped.
    pub dropped: u64,
    /// Packets of our own that did not fit into the output buffer.
    pub output_refused: u64,
    /// Errors of the engine itself: a connection that is not in its tables, or lacks what its phase needs.
    pub internal: u64,
}

/// Connections whose memory is reserved at the start, which costs nothing until it is used. An engine that needs more
/// allocates it later.
const ALLOCATED_AT_ONCE: usize = 1 << 17;

/// One engine: the connections of one worker. The head of the parent module draws their phases.
#[derive(Debug)]
pub struct Engine<C> {
    pub(super) config: Config,
    pub(super) callbacks: C,
    /// The listeners, in the form that is compared with packets.
    listen: Vec<(Option<Address>, Option<u16>)>,
    pub(super) tables: Tables,
    pub(super) index: Index,
    pub(super) wheel: Wheel,
    pub(super) ports: Ports,
    /// Connections that share their port with another connection.
    pub(super) shared: u32,
    pub(super) outbox: Outbox,
    records: VecDeque<Record>,
    pub(super) counters: Counters,
    pub(super) half_open: u32,
    /// For what is full: see [`Full`](super::room::Full).
    pub(super) rooms: [Room; 2],
    pub(super) held_total: usize,
    pub(super) cookies_until: Instant,
    pub(super) challenge_second: (u64, u32),
    last_id: u64,
}

impl<C: Callbacks> Engine<C> {
    /// Returns an engine without connections. Values of `config` are clamped to their ranges.
    pub fn new(mut config: Config, callbacks: C, now: Instant) -> Self {
        config.max_connections = config.max_connections.clamp(1, 1 << 24);
        config.mtu = config.mtu.max(1280);
        config.window_shift = config.window_shift.min(super::options::MAX_WINDOW_SHIFT);
        config.hold_bytes = config.hold_bytes.clamp(1, 1 << 20);
        let max = config.max_connections as usize;
        let [seed, ..] = config.seed;
        Self {
            ports: Ports::new(&config.sources, seed),
            // Only connections that keep their client's address or share a port have two entries; then it is two thirds
            // full at most.
            index: Index::new(max + max / 2),
            wheel: Wheel::new(max, now),
            tables: Tables::new(max.min(ALLOCATED_AT_ONCE)),
            shared: 0,
            outbox: Outbox::default(),
            records: VecDeque::new(),
            counters: Counters::default(),
            half_open: 0,
            rooms: Default::default(),
            held_total: 0,
            cookies_until: Instant::ZERO,
            challenge_second: (0, 0),
            last_id: 0,
            listen: config.listen.iter().map(|at| (at.address.map(Address::from), at.port)).collect(),
            config,
            callbacks,
        }
    }

    /// Handles one IP packet that came from `hop`. Call [`Engine::poll`] afterwards until it returns none.
    pub fn handle(&mut self, now: Instant, packet: &mut [u8], hop: Hop, checksums: Checksums) -> Fate {
        let fate = self.sort(now, packet, hop, checksums);
        if matches!(fate, Fate::Dropped(_)) {
            self.counters.dropped += 1;
        }
        fate
    }

    fn sort(&mut self, now: Instant, packet: &mut [u8], hop: Hop, checksums: Checksums) -> Fate {
        let ip = match Ip::parse(packet) {
            Ok(ip) => ip,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        match ip.protocol {
            TCP => {}
            ICMP | ICMPV6 => return self.icmp(now, packet),
            _ => return Fate::NotOurs,
        }
        // A malformed packet for another socket of this host is not ours to drop.
        let header = match Header::parse(packet, &ip, checksums) {
            Ok(header) => header,
            Err(_) if !self.is_ours(packet) => return Fate::NotOurs,
            Err(error) => return Fate::Dropped(Drop::Malformed(error)),
        };
        let checksums = match checksums {
            Checksums::Verify | Checksums::Verified => checksums,
            Checksums::Partial | Checksums::Unmarked => self.finished(packet, &header, checksums),
        };
        let packet = &mut Packet { bytes: packet, header: &header, hop, checksums };
        // Servers' packets first: our own port finds the connection without the hash.
        if let Some(slot) = self.answered(&header.tuple) {
            return self.segment(now, slot, Side::Server, packet);
        }
        let key = hash(&self.config.seed, &header.tuple);
        match self.indexed(key, &header.tuple) {
            Some((slot, from)) => self.segment(now, slot, from, packet),
            None => self.stranger(now, key, packet),
        }
    }

    /// Finishes the checksum of a packet that may pass unchanged; a packet that will be cut gets new ones.
    // Parses the IP header again: a reference to the caller's copy would keep that out of registers for every packet.
    #[inline(never)]
    fn finished(&self, packet: &mut [u8], header: &Header, checksums: Checksums) -> Checksums {
        let Ok(ip) = &Ip::parse(packet) else { return checksums };
        let unfinished = checksums == Checksums::Partial || header.is_unfinished(packet, ip);
        if unfinished && ip.end <= usize::from(self.config.mtu) {
            header.finish(packet, ip);
            return Checksums::Verified;
        }
        if unfinished { Checksums::Partial } else { Checksums::Verified }
    }

    /// Returns the connection of a tuple, and the side that sends with it.
    #[inline]
    pub(super) fn find(&self, key: u32, tuple: &Tuple) -> Option<(Slot, Side)> {
        self.answered(tuple).map(|slot| (slot, Side::Server)).or_else(|| self.indexed(key, tuple))
    }

    /// Returns the connection whose server sends with this tuple, found by our own port without the index.
    #[inline]
    fn answered(&self, tuple: &Tuple) -> Option<Slot> {
        let slot = self.ports.slot(tuple)?;
        (self.tables.hot.at(slot).tuple[Side::Server] == *tuple).then_some(slot)
    }

    #[inline]
    fn indexed(&self, key: u32, tuple: &Tuple) -> Option<(Slot, Side)> {
        let is_it = |value: u32| {
            let (slot, from) = Slot::of_entry(value);
            self.tables.hot.at(slot).tuple[from] == *tuple
        };
        self.index.find(key, is_it).map(Slot::of_entry)
    }

    #[inline]
    fn segment(&mut self, now: Instant, slot: Slot, from: Side, packet: &mut Packet<'_>) -> Fate {
        let header = packet.header;
        // First copy the kernel's numbers. The packet would otherwise be checked against old ones.
        if self.tables.hot.at(slot).offloaded.is_some() {
            self.recall(now, slot);
        }
        let phase = self.tables.hot.at(slot).phase;
        // The engine does not see SYNs that are answered elsewhere, so an acknowledgement may begin a new connection.
        if self.config.cookies_elsewhere && from == Side::Client && self.has_begun_anew(now, slot, packet) {
            self.end(now, slot, EndReason::ClientReset);
            let key = hash(&self.config.seed, &header.tuple);
            return self.stranger(now, key, packet);
        }
        match phase {
            Phase::Bound => self.forward(now, slot, from, packet),
            Phase::TimeWait if from == Side::Client && self.may_open_again(slot, packet) => {
                self.counters.time_wait_cut += 1;
                self.release(now, slot, None);
                let key = hash(&self.config.seed, &header.tuple);
                self.stranger(now, key, packet)
            }
            Phase::TimeWait => self.forward(now, slot, from, packet),
            Phase::Opening => self.opening(now, slot, packet),
            Phase::Deciding | Phase::Connecting if from == Side::Client => self.hold(now, slot, packet),
            Phase::Connecting => self.server_answer(now, slot, packet),
            Phase::Deciding | Phase::Free => Fate::Dropped(Drop::NoConnection),
        }
    }

    /// True if a packet goes to an address and port that only the engine uses.
    #[inline(never)]
    fn is_ours(&self, packet: &[u8]) -> bool {
        let Ok(ip) = Ip::parse(packet) else { return false };
        let port = super::packet::u16_at(packet, ip.payload + 2);
        self.listens(ip.dst, port) || self.ports.owns(ip.dst, port)
    }

    /// True if clients may connect to this address and port.
    #[inline]
    pub(super) fn listens(&self, to: Address, port: u16) -> bool {
        let fits = |(address, at): &(Option<Address>, Option<u16>)| {
            address.is_none_or(|address| address == to) && at.is_none_or(|at| at == port)
        };
        self.listen.iter().any(fits)
    }

    /// Handles all time-outs that are due.
    pub fn tick(&mut self, now: Instant) {
        self.tick_at_most(now, usize::MAX);
    }

    /// Handles at most this many of the time-outs that are due, the earliest ones first. Returns how many.
    pub fn tick_at_most(&mut self, now: Instant, most: usize) -> usize {
        self.tables.clear_outside();
        let mut done = 0;
        while done < most
            && let Some(slot) = self.wheel.due(now)
        {
            self.expire(now, slot);
            done += 1;
        }
        let kept = Duration::from_millis(self.config.time_wait_ms);
        while done < most
            && let Some(slot) = self.wheel.longest_waiting()
        {
            if self.tables.hot.at(slot).active + kept > now {
                break;
            }
            self.release(now, slot, None);
            done += 1;
        }
        done
    }

    /// Returns the latest time for the next call of [`Engine::tick`].
    pub fn deadline(&self) -> Option<Instant> {
        let kept = Duration::from_millis(self.config.time_wait_ms);
        let waiting = self.wheel.longest_waiting().map(|slot| self.tables.hot.at(slot));
        [self.wheel.deadline(), waiting.map(|hot| hot.active + kept)].into_iter().flatten().min()
    }

    /// Returns the next packet that the engine itself sends, and the neighbour to send it to.
    pub fn poll(&mut self) -> Option<(&[u8], Hop)> {
        self.outbox.poll()
    }

    /// Returns the next record of an ended session.
    pub fn poll_record(&mut self) -> Option<Record> {
        self.records.pop_front()
    }

    /// Returns address and length in bytes of the tables that are read for every packet, so that the caller can put them
    /// on huge pages.
    pub fn tables(&self) -> [(usize, usize); 4] {
        [self.tables.hot.memory(), self.tables.cold.memory(), self.tables.slow.memory(), self.index.memory()]
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        let impossible = self.tables.impossible() + self.wheel.impossible();
        Counters { output_refused: self.outbox.refused, internal: impossible, ..self.counters }
    }

    /// Returns the number of connections, including those in TIME-WAIT.
    pub fn connections(&self) -> usize {
        self.tables.hot.len() - self.tables.free.len()
    }

    /// Returns the callbacks given to [`Engine::new`].
    pub fn callbacks_mut(&mut self) -> &mut C {
        &mut self.callbacks
    }

    /// Ends every connection with a reset to both sides.
    pub fn shut_down(&mut self, now: Instant, reason: EndReason) {
        for slot in self.tables.hot.places() {
            if self.tables.hot.at(slot).phase != Phase::Free {
                self.end(now, slot, reason);
            }
        }
    }

    /// Returns a free slot, in which nothing is set yet. If the table is full, the oldest connection in TIME-WAIT ends.
    pub(super) fn allocate(&mut self, now: Instant) -> Option<Slot> {
        if self.tables.free.is_empty() && self.tables.hot.len() >= self.config.max_connections as usize {
            let oldest = self.wheel.longest_waiting()?;
            self.counters.time_wait_cut += 1;
            self.release(now, oldest, None);
        }
        self.tables.free.pop().or_else(|| {
            self.tables.cold.add();
            Some(self.tables.hot.add())
        })
    }

    #[inline]
    pub(super) fn next_id(&mut self) -> ConnectionId {
        self.last_id += 1;
        ConnectionId(self.last_id)
    }

    #[inline]
    pub(super) fn allocate_slow(&mut self) -> SlowSlot {
        self.tables.free_slow.pop().unwrap_or_else(|| self.tables.slow.add())
    }

    /// Returns the state that a connection has only during some phases.
    #[inline]
    pub(super) fn slow_of(&mut self, slot: Slot) -> Option<&mut Slow> {
        let at = self.tables.hot.at(slot).slow;
        self.tables.slow.get_mut(at)
    }

    /// The same for a phase in which every connection has it.
    #[inline]
    pub(super) fn slow_at(&mut self, slot: Slot) -> &mut Slow {
        let at = self.tables.hot.at(slot).slow;
        self.tables.slow.at_mut(at)
    }

    /// Frees what [`Engine::slow_of`] returns, and the bytes held in it.
    pub(super) fn free_slow(&mut self, slot: Slot) {
        let hot = self.tables.hot.at_mut(slot);
        let at = std::mem::take(&mut hot.slow);
        if let Some(slow) = self.tables.slow.get_mut(at) {
            let kept: usize = slow.edits.0.iter().map(super::edit::Edits::bytes).sum();
            self.held_total = self.held_total.saturating_sub(kept);
            slow.reset();
            self.tables.free_slow.push(at);
        }
    }

    /// Sets the state of a side and stores the time.
    #[inline]
    pub(super) fn state(&mut self, now: Instant, slot: Slot, at: Side, state: State) {
        let (hot, cold) = (self.tables.hot.at_mut(slot), self.tables.cold.at_mut(slot));
        let leg = &mut hot.leg[at];
        if leg.state != state {
            leg.state = state;
            cold.stamps.push(at, state, now.as_nanos().saturating_sub(cold.opened.as_nanos()));
        }
    }

    /// Writes the record of a connection.
    pub(super) fn record(&mut self, now: Instant, slot: Slot, reason: EndReason) {
        let (hot, cold) = (self.tables.hot.at(slot), self.tables.cold.at(slot));
        if self.records.len() >= self.config.max_records {
            self.counters.records_lost += 1;
            return;
        }
        let Pair([client, server]) = &hot.leg;
        self.records.push_back(Record {
            id: cold.id,
            tuple: hot.tuple,
            chosen: cold.source != Source::None,
            opened: cold.opened,
            connected: Some(cold.connected).filter(|at| *at != NEVER),
            closed: now,
            client_bytes: client.bytes,
            server_bytes: server.bytes,
            client_packets: client.packets,
            server_packets: server.packets,
            reason,
            passed_elsewhere: cold.passed_elsewhere,
            stamps: cold.stamps,
        });
    }

    /// Frees a slot and all that belongs to it. Writes the record if a reason is given.
    pub(super) fn release(&mut self, now: Instant, slot: Slot, reason: Option<EndReason>) {
        // The record holds the last states, so both sides are closed before it is written.
        if let Some(reason) = reason {
            for at in Side::BOTH {
                self.state(now, slot, at, State::Closed);
            }
            self.record(now, slot, reason);
        }
        self.free_slow(slot);
        self.ended(slot);
        let (hot, cold) = (self.tables.hot.at_mut(slot), self.tables.cold.at_mut(slot));
        if hot.phase == Phase::Opening {
            self.half_open = self.half_open.saturating_sub(1);
        }
        self.index.remove(cold.key, slot.entry(Side::Client));
        match cold.source {
            Source::None => {}
            Source::Ours => self.ports.give(hot.tuple[Side::Server].source()),
            Source::Client | Source::Shared => {
                self.index
                    .remove(hash(&self.config.seed, &hot.tuple[Side::Server]), slot.entry(Side::Server));
                self.shared -= u32::from(cold.source == Source::Shared);
            }
        }
        if hot.phase == Phase::TimeWait {
            self.wheel.wait_no_more(slot);
        }
        hot.phase = Phase::Free;
        cold.source = Source::None;
        self.tables.free.push(slot);
    }
}
