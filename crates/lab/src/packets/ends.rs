//! Both ends of the connections. The server keeps no state: every answer follows from the segment. A client keeps a
//! few bytes: its progress and its start.

use std::net::{Ipv4Addr, SocketAddrV4};

use serde::{Deserialize, Serialize};

use super::kept::{EVERY_NS, Kept, KeptReport, QUESTION};
use super::segment::{ACK, FIN, PAYLOAD_MAX, PSH, RST, SYN, Segment};
use crate::load::Histogram;

/// Number of client addresses.
pub(super) const CLIENT_ADDRESSES: u32 = 16;
/// The first client port; all above are used.
pub(super) const FIRST_PORT: u16 = 1024;
/// The server's initial sequence number; fixed, so that its answers need no memory.
const SERVER_ISN: u32 = 0x7fff_fff0;
/// A connection that has not ended after this time is given up and counted, in nanoseconds.
const GIVEN_UP_NS: u64 = 1_000_000_000;

/// Counts of both ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Connections begun.
    pub opened: u64,
    /// Connections whose every byte and both FINs were acknowledged.
    pub completed: u64,
    /// Connections that the server saw closed.
    pub server_closed: u64,
    /// Connections given up because no packet came for 1 s.
    pub stuck: u64,
    /// Connections that were reset.
    pub reset: u64,
    /// Segments that fit no state.
    pub unexpected: u64,
    /// Segments with a wrong checksum, among the checked ones.
    pub corrupt: u64,
}

/// The progress of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Vacant,
    Opening,
    Asked,
    Closing,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    step: Step,
    /// Number of connections that this slot had; determines port and initial sequence number.
    turn: u32,
    since_ns: u64,
}

/// Returns the address after the clients' ones: that of connections that stay.
const fn after(clients: Ipv4Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(clients.to_bits().wrapping_add(CLIENT_ADDRESSES))
}

/// Both ends of all connections.
#[derive(Debug)]
pub struct Ends {
    front: SocketAddrV4,
    server: SocketAddrV4,
    clients: u32,
    slots: Vec<Slot>,
    /// Number of ports for each slot.
    ports: u16,
    tally: Tally,
    latencies: Histogram,
    /// Whether new connections have stopped.
    draining: bool,
    kept: Kept,
    /// Where the next look at slots begins.
    looked: usize,
    given_up_ns: u64,
}

impl Ends {
    /// Makes `open` connections from addresses starting at `clients` to `front`, behind which `server` answers.
    #[must_use]
    pub fn new(front: SocketAddrV4, server: SocketAddrV4, clients: Ipv4Addr, connections: u32) -> Self {
        let connections = connections.clamp(1, 65_536);
        let places = connections.div_ceil(CLIENT_ADDRESSES);
        let ports = (u32::from(u16::MAX - FIRST_PORT) / places) as u16;
        let vacant = Slot { step: Step::Vacant, turn: 0, since_ns: 0 };
        Self {
            front,
            server,
            clients: clients.to_bits(),
            slots: vec![vacant; connections as usize],
            ports,
            tally: Tally::default(),
            latencies: Histogram::new(),
            draining: false,
            kept: Kept::new(front, after(clients), 0, EVERY_NS),
            looked: 0,
            given_up_ns: GIVEN_UP_NS,
        }
    }

    /// Adds connections that stay and ask once in `every_us`, and sets how long the others wait (0: one second).
    #[must_use]
    pub fn with(mut self, kept: u32, every_us: Option<u64>, patience_ms: u64) -> Self {
        let every_ns = every_us.map_or(EVERY_NS, |every_us| every_us * 1000);
        self.kept = Kept::new(self.front, after(Ipv4Addr::from_bits(self.clients)), kept, every_ns);
        if patience_ms > 0 {
            self.given_up_ns = patience_ms * 1_000_000;
        }
        self
    }

    /// Sends what connections that stay have to send.
    pub fn ask(&mut self, now_ns: u64, out: &mut Vec<Segment>) {
        self.kept.poll(now_ns, out);
    }

    /// Returns what connections that stay have seen.
    #[must_use]
    pub fn kept(&self) -> KeptReport {
        self.kept.report()
    }

    /// Returns the address and port of a slot's current connection.
    fn client(&self, place: usize, turn: u32) -> SocketAddrV4 {
        let place = place as u32;
        let (address, group) = (place % CLIENT_ADDRESSES, place / CLIENT_ADDRESSES);
        let port = u32::from(FIRST_PORT) + group * u32::from(self.ports) + turn % u32::from(self.ports);
        SocketAddrV4::new(Ipv4Addr::from_bits(self.clients + address), port as u16)
    }

    /// Returns the slot whose current connection has this address and port.
    fn place(&self, client: SocketAddrV4) -> Option<usize> {
        let address = client.ip().to_bits().wrapping_sub(self.clients);
        let group = u32::from(client.port().checked_sub(FIRST_PORT)? / self.ports);
        let place = (group * CLIENT_ADDRESSES).checked_add(address)? as usize;
        let slot = self.slots.get(place).filter(|_| address < CLIENT_ADDRESSES)?;
        (self.client(place, slot.turn) == client).then_some(place)
    }

    const fn isn(turn: u32) -> u32 {
        turn.wrapping_mul(0x0101_0101)
    }

    /// Begins connections in all vacant slots, at most `most`.
    pub fn open(&mut self, now_ns: u64, most: usize, out: &mut Vec<Segment>) {
        if self.draining {
            return;
        }
        let vacant = self.slots.iter().enumerate().filter(|(_, slot)| slot.step == Step::Vacant);
        let places: Vec<usize> = vacant.map(|(place, _)| place).take(most).collect();
        out.extend(places.into_iter().filter_map(|place| self.begin(now_ns, place)));
    }

    fn begin(&mut self, now_ns: u64, place: usize) -> Option<Segment> {
        let draining = self.draining;
        let slot = self.slots.get_mut(place)?;
        if draining {
            slot.step = Step::Vacant;
            return None;
        }
        *slot = Slot { step: Step::Opening, turn: slot.turn.wrapping_add(1), since_ns: now_ns };
        let turn = slot.turn;
        self.tally.opened += 1;
        let from = self.client(place, turn);
        Some(Segment { from, to: self.front, seq: Self::isn(turn), ack: 0, flags: SYN, payload: 0 })
    }

    /// Takes a segment from the engine; answers go to `out`.
    pub fn take(&mut self, now_ns: u64, segment: &Segment, out: &mut Vec<Segment>) {
        if segment.from == self.front {
            self.client_takes(now_ns, segment, out);
        } else if segment.to == self.server {
            self.server_takes(segment, out);
        } else {
            self.tally.unexpected += 1;
        }
    }

    fn server_takes(&mut self, segment: &Segment, out: &mut Vec<Segment>) {
        if segment.flags & RST != 0 {
            self.tally.reset += 1;
        } else if segment.is(SYN) {
            out.push(Segment { seq: SERVER_ISN, ..segment.answer(SYN | ACK) });
        } else if segment.payload == QUESTION {
            out.push(Segment { payload: QUESTION, ..segment.answer(PSH | ACK) });
        } else if segment.payload > 0 {
            out.push(segment.answer(FIN | ACK));
        } else if segment.is(FIN | ACK) {
            self.tally.server_closed += 1;
            out.push(segment.answer(ACK));
        }
    }

    fn client_takes(&mut self, now_ns: u64, segment: &Segment, out: &mut Vec<Segment>) {
        if self.kept.take(now_ns, segment) {
            return;
        }
        let Some(place) = self.place(segment.to) else {
            // The segment belongs to a connection that was given up.
            self.tally.unexpected += 1;
            return;
        };
        let Some(slot) = self.slots.get_mut(place) else { return };
        let (first, request) = (Self::isn(slot.turn).wrapping_add(1), PAYLOAD_MAX as u16);
        let asked = first.wrapping_add(u32::from(request));
        if segment.flags & RST != 0 {
            self.tally.reset += 1;
            out.extend(self.begin(now_ns, place));
            return;
        }
        match slot.step {
            Step::Opening if segment.is(SYN | ACK) && segment.ack == first => {
                slot.step = Step::Asked;
                let ack = segment.answer(ACK);
                out.extend([ack, Segment { flags: ACK | PSH, payload: request, ..ack }]);
            }
            Step::Asked | Step::Closing if segment.flags & FIN != 0 && segment.ack == asked => {
                slot.step = Step::Closing;
                out.push(segment.answer(FIN | ACK));
            }
            Step::Closing if segment.is(ACK) && segment.ack == asked.wrapping_add(1) => {
                self.tally.completed += 1;
                self.latencies.record(now_ns.saturating_sub(slot.since_ns));
                out.extend(self.begin(now_ns, place));
            }
            // The request was acknowledged before the server answered it.
            Step::Asked if segment.is(ACK) && segment.ack == asked => {}
            _ => self.tally.unexpected += 1,
        }
    }

    /// Gives stuck connections up and begins new ones in their slots.
    pub fn sweep(&mut self, now_ns: u64, out: &mut Vec<Segment>) {
        for place in 0..self.slots.len() {
            self.sweep_one(now_ns, place, out);
        }
    }

    /// Does the same for the next `count` slots, and begins connections in vacant ones: evenly over time.
    pub fn sweep_some(&mut self, now_ns: u64, count: usize, out: &mut Vec<Segment>) {
        for _ in 0..count.min(self.slots.len()) {
            self.looked = (self.looked + 1) % self.slots.len();
            let is_vacant = self.slots.get(self.looked).is_some_and(|slot| slot.step == Step::Vacant);
            if is_vacant {
                out.extend(self.begin(now_ns, self.looked));
            } else {
                self.sweep_one(now_ns, self.looked, out);
            }
        }
    }

    fn sweep_one(&mut self, now_ns: u64, place: usize, out: &mut Vec<Segment>) {
        let stuck = self.slots.get(place).is_some_and(|slot| {
            slot.step != Step::Vacant && now_ns.saturating_sub(slot.since_ns) > self.given_up_ns
        });
        if stuck {
            self.tally.stuck += 1;
            out.extend(self.begin(now_ns, place));
        }
    }

    /// Stops beginning connections.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn open_now(&self) -> u64 {
        self.slots.iter().filter(|slot| slot.step != Step::Vacant).count() as u64
    }

    /// Returns the counts so far.
    #[must_use]
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Counts a segment with a wrong checksum.
    pub fn corrupt(&mut self) {
        self.tally.corrupt += 1;
    }

    /// Returns the times from SYN to the last acknowledgement.
    #[must_use]
    pub fn latencies(&self) -> &Histogram {
        &self.latencies
    }

    /// Removes the times until now.
    pub fn forget_latencies(&mut self) {
        self.latencies.clear();
        self.kept.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stand-in for an engine that only swaps addresses: clients and server communicate with each other.
    fn loop_back(ends: &mut Ends, rounds: usize, lost: impl Fn(usize) -> bool) -> usize {
        let relay: SocketAddrV4 = "10.0.0.9:7".parse().unwrap();
        let (mut waiting, mut count) = (Vec::new(), 0);
        ends.open(0, usize::MAX, &mut waiting);
        // The tuple of the one connection of this stand-in.
        let mut client = relay;
        for round in 0..rounds {
            let mut out = Vec::new();
            for segment in std::mem::take(&mut waiting) {
                count += 1;
                if lost(count) {
                    continue;
                }
                let passed = if segment.to == ends.front {
                    client = segment.from;
                    Segment { from: relay, to: ends.server, ..segment }
                } else {
                    Segment { from: ends.front, to: client, ..segment }
                };
                ends.take(round as u64 * 1000, &passed, &mut out);
            }
            waiting = out;
        }
        count
    }

    fn one() -> Ends {
        let front = "10.0.0.1:80".parse().unwrap();
        Ends::new(front, "10.0.1.1:80".parse().unwrap(), "10.78.0.1".parse().unwrap(), 1)
    }

    #[test]
    fn a_connection_is_seven_packets_and_the_next_begins() {
        let mut ends = one();
        let packets = loop_back(&mut ends, 6, |_| false);
        let tally = ends.tally();
        assert_eq!((tally.opened, tally.completed, tally.server_closed), (2, 1, 1), "{tally:?}");
        assert_eq!((packets, tally.unexpected, tally.stuck), (7, 0, 0));
        assert!(ends.latencies().quantile(0.5) > 0);
    }

    #[test]
    fn what_is_lost_is_given_up_and_replaced() {
        let mut ends = one();
        loop_back(&mut ends, 6, |count| count == 4);
        let mut out = Vec::new();
        ends.sweep(GIVEN_UP_NS / 2, &mut out);
        assert!(out.is_empty(), "not yet");
        ends.sweep(GIVEN_UP_NS * 2, &mut out);
        assert_eq!((out.len(), ends.tally().stuck, ends.tally().completed), (1, 1, 0));
        assert!(out[0].is(SYN));
    }

    #[test]
    fn a_reset_ends_a_connection_and_a_drain_begins_no_other() {
        let mut ends = one();
        let mut out = Vec::new();
        ends.open(0, 10, &mut out);
        let rst = out[0].answer(RST | ACK);
        ends.drain();
        ends.take(5, &rst, &mut out);
        assert_eq!((out.len(), ends.tally().reset, ends.open_now()), (1, 1, 0));
        // Late packets of it belong to no connection.
        ends.take(6, &Segment { to: "10.78.0.1:65535".parse().unwrap(), ..rst }, &mut out);
        assert_eq!((out.len(), ends.tally().unexpected), (1, 1));
    }

    #[test]
    fn every_place_has_ports_of_its_own() {
        for connections in [1, 16, 17, 4096, 65_536] {
            let front = "10.0.0.1:80".parse().unwrap();
            let mut ends =
                Ends::new(front, "10.0.1.1:80".parse().unwrap(), "10.78.0.1".parse().unwrap(), connections);
            let mut out = Vec::new();
            for turn in 0..3 {
                out.clear();
                ends.open(turn, usize::MAX, &mut out);
                assert_eq!(out.len(), connections as usize);
                for (place, segment) in out.iter().enumerate() {
                    assert_eq!(ends.place(segment.from), Some(place));
                }
                let froms: std::collections::BTreeSet<_> = out.iter().map(|segment| segment.from).collect();
                assert_eq!(froms.len(), out.len());
                ends.slots.iter_mut().for_each(|slot| slot.step = Step::Vacant);
            }
        }
    }
}
