//! Single packets into the engine, and what comes out of it, one step at a time.

use crate::network::{Addresses, CLIENT_HOP, SERVER_HOP, at, config};
use crate::wire::{ACK, FIN, PSH, Packet, SYN};
use sidetrack_core::engine::{
    Callbacks, Checksums, Config, ConnectionId, Crowd, Drop, Engine, Fate, Handshake, Hop, OffloadId,
    Opening, Payload, Progress, Record, Selection, Slot, Target, Translation,
};
use sidetrack_core::flow::{EndReason, Side};
use std::collections::VecDeque;
use std::net::SocketAddr;

/// Says the same to every connection.
pub(crate) struct Fixed {
    pub selection: Selection,
    pub asked: Vec<(Vec<u8>, bool)>,
    /// There is no room for one more connection with a server.
    pub crowded: bool,
    pub payload: Payload,
    /// Slots that may be offloaded, what the progress that the kernel reports in turn, and the connections that it was told to return and to remove.
    pub plain: Vec<Slot>,
    pub delivering: Vec<Slot>,
    /// The number that the kernel gives to connections whose handshakes it takes, and the handshakes that it was offered.
    pub takes_handshakes: Option<OffloadId>,
    pub handshakes: Vec<Offered>,
    pub progress: VecDeque<Progress>,
    pub closing: Vec<OffloadId>,
    pub ended: Vec<OffloadId>,
}

/// A [`Handshake`] and how its program would translate, owned.
#[derive(Clone, Debug)]
pub(crate) struct Offered {
    pub sides: [Translation; 2],
    pub acknowledges: u32,
    pub shown: u32,
    pub clock: u32,
    pub needs: u16,
    pub packet: Vec<u8>,
}

impl Fixed {
    pub(crate) fn new(selection: Selection) -> Self {
        Self {
            selection,
            asked: Vec::new(),
            crowded: false,
            payload: Payload::Keep,
            plain: Vec::new(),
            delivering: Vec::new(),
            takes_handshakes: None,
            handshakes: Vec::new(),
            progress: VecDeque::new(),
            closing: Vec::new(),
            ended: Vec::new(),
        }
    }
}

impl Callbacks for Fixed {
    fn select(&mut self, opening: &Opening<'_>) -> Selection {
        self.asked.push((opening.first.to_vec(), opening.last));
        // Delayed binding: nothing is decided without a byte.
        if opening.first.is_empty() && !opening.last {
            return Selection::Wait { wait_ms: 500 };
        }
        match opening.crowd {
            Crowd::Unknown if self.crowded => Selection::Crowded,
            Crowd::Full => Selection::Refuse(EndReason::Limit),
            Crowd::Unknown | Crowd::HasLeft => self.selection,
        }
    }

    fn payload(&mut self, _: ConnectionId, _: Side, _: &[u8]) -> Payload {
        self.payload.clone()
    }

    fn plain(&mut self, slot: Slot) {
        self.plain.push(slot);
    }

    fn delivering(&mut self, slot: Slot) {
        self.delivering.push(slot);
    }

    fn offload_handshake(
        &mut self,
        slot: Slot,
        sides: &[Translation; 2],
        handshake: &Handshake<'_>,
    ) -> Option<OffloadId> {
        assert_eq!(slot, Slot::FIRST);
        let (sides, Handshake { acknowledges, shown, clock, needs, packet, .. }) = (*sides, *handshake);
        self.handshakes.push(Offered { sides, acknowledges, shown, clock, needs, packet: packet.to_vec() });
        self.takes_handshakes
    }

    fn progress(&mut self, _: OffloadId) -> Option<Progress> {
        self.progress.pop_front()
    }

    fn closing(&mut self, offloaded: OffloadId) {
        self.closing.push(offloaded);
    }

    fn ended(&mut self, offloaded: OffloadId) {
        self.ended.push(offloaded);
    }
}

pub(crate) struct Script {
    pub engine: Engine<Fixed>,
    pub now: u64,
    pub addresses: Addresses,
}

pub(crate) const CLIENT_ISN: u32 = 0xffff_ff00;
pub(crate) const SERVER_ISN: u32 = 5000;

/// The numbers of a bound connection: next ones of both sides, as each sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub source: SocketAddr,
    /// The client's next number, and the server's as the client sees it.
    pub client: (u32, u32),
    /// The server's next number, and the client's as the server sees it.
    pub server: (u32, u32),
}

impl Script {
    pub(crate) fn new() -> Self {
        Self::with(|_| {}, Selection::Server(Target::new(Addresses::v4().server, SERVER_HOP)))
    }

    pub(crate) fn with(change: impl FnOnce(&mut Config), selection: Selection) -> Self {
        let addresses = Addresses::v4();
        let mut config = config(&addresses);
        change(&mut config);
        Self { engine: Engine::new(config, Fixed::new(selection), at(0)), now: 0, addresses }
    }

    pub(crate) fn client(&self, flags: u8, seq: u32, ack: u32) -> Packet {
        Packet::new(self.addresses.client, self.addresses.front, flags, seq, ack)
    }

    pub(crate) fn fate(&mut self, packet: &Packet, hop: Hop) -> (Fate, Vec<Packet>) {
        self.raw(packet.encode(), hop)
    }

    pub(crate) fn raw(&mut self, mut bytes: Vec<u8>, hop: Hop) -> (Fate, Vec<Packet>) {
        let fate = self.engine.handle(at(self.now), &mut bytes, hop, Checksums::Verify);
        let mut out = Vec::new();
        if let Fate::Forward { len, .. } = fate {
            out.push(Packet::decode(&bytes[..len]));
        }
        out.extend(self.output());
        (fate, out)
    }

    pub(crate) fn output(&mut self) -> Vec<Packet> {
        let mut out = Vec::new();
        while let Some((bytes, _)) = self.engine.poll() {
            out.push(Packet::decode(bytes));
        }
        out
    }

    /// Hands a packet over; what comes out of it.
    pub(crate) fn take(&mut self, packet: &Packet) -> Vec<Packet> {
        let hop = if packet.src == self.addresses.server { SERVER_HOP } else { CLIENT_HOP };
        self.fate(packet, hop).1
    }

    pub(crate) fn refused(&mut self, packet: &Packet) -> Drop {
        let hop = if packet.src == self.addresses.server { SERVER_HOP } else { CLIENT_HOP };
        match self.fate(packet, hop) {
            (Fate::Dropped(why), out) if out.is_empty() => why,
            other => panic!("{other:?}"),
        }
    }

    /// Lets time pass, with a tick whenever one is due; what comes out, with its time.
    pub(crate) fn wait(&mut self, ms: u64) -> Vec<(u64, Packet)> {
        let (end, mut out) = (self.now + ms, Vec::new());
        for _ in 0..10_000 {
            let due = self.engine.deadline().map(|at| (at.as_nanos() / 1_000_000).saturating_sub(1_000_000));
            let Some(due) = due.filter(|due| *due <= end) else { break };
            self.now = self.now.max(due);
            self.engine.tick(at(self.now));
            let now = self.now;
            out.extend(self.output().into_iter().map(|packet| (now, packet)));
        }
        self.now = end;
        self.engine.tick(at(end));
        out.extend(self.output().into_iter().map(|packet| (end, packet)));
        out
    }

    pub(crate) fn records(&mut self) -> Vec<Record> {
        std::iter::from_fn(|| self.engine.poll_record()).collect()
    }

    pub(crate) fn syn(&self) -> Packet {
        Packet { mss: Some(1460), ..self.client(SYN, CLIENT_ISN, 0) }
    }

    /// The client's handshake; the engine's initial number.
    pub(crate) fn open(&mut self) -> u32 {
        let syn = self.syn();
        let out = self.take(&syn);
        assert!(
            out.len() == 1 && out[0].is(SYN | ACK) && out[0].ack == CLIENT_ISN.wrapping_add(1),
            "{out:?}"
        );
        let isn = out[0].seq;
        let ack = self.client(ACK, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1));
        assert_eq!(self.take(&ack), []);
        isn
    }

    /// The client's handshake and its first bytes; the engine's SYN to the server.
    pub(crate) fn request(&mut self, payload: &[u8]) -> (u32, Packet) {
        let isn = self.open();
        let data = self.client(ACK | PSH, CLIENT_ISN.wrapping_add(1), isn.wrapping_add(1)).payload(payload);
        let out = self.take(&data);
        assert!(out.len() == 1 && out[0].flags == SYN, "{out:?}");
        (isn, out[0].clone())
    }

    pub(crate) fn syn_ack(&self, syn: &Packet) -> Packet {
        let packet = Packet::new(syn.dst, syn.src, SYN | ACK, SERVER_ISN, syn.seq.wrapping_add(1));
        Packet { mss: Some(1460), ..packet }
    }

    /// A connection over which `payload` went to the server and was acknowledged.
    pub(crate) fn bind(&mut self, payload: &[u8]) -> Bound {
        let (isn, syn) = self.request(payload);
        let answer = self.syn_ack(&syn);
        let out = self.take(&answer);
        assert_eq!(out.iter().flat_map(|p| p.payload.clone()).collect::<Vec<_>>(), payload, "{out:?}");
        let len = payload.len() as u32;
        let bound = Bound {
            source: syn.src,
            client: (CLIENT_ISN.wrapping_add(1 + len), isn.wrapping_add(1)),
            server: (SERVER_ISN + 1, syn.seq.wrapping_add(1 + len)),
        };
        let ack = self.server(&bound, ACK);
        let out = self.take(&ack);
        assert!(out.len() == 1 && out[0].ack == bound.client.0, "{out:?}");
        bound
    }

    /// The server's next segment.
    pub(crate) fn server(&self, bound: &Bound, flags: u8) -> Packet {
        let (seq, ack) = bound.server;
        Packet::new(self.addresses.server, bound.source, flags, seq, if flags & ACK == 0 { 0 } else { ack })
    }

    /// The client's next segment.
    pub(crate) fn next(&self, bound: &Bound, flags: u8) -> Packet {
        self.client(flags, bound.client.0, if flags & ACK == 0 { 0 } else { bound.client.1 })
    }

    /// Both sides close, the client first.
    pub(crate) fn close(&mut self, bound: &mut Bound) {
        assert_eq!(self.take(&self.next(bound, FIN | ACK).clone()).len(), 1);
        bound.client.0 = bound.client.0.wrapping_add(1);
        bound.server.1 = bound.server.1.wrapping_add(1);
        let fin = self.server(bound, FIN | ACK);
        assert_eq!(self.take(&fin).len(), 1);
        bound.server.0 += 1;
        bound.client.1 = bound.client.1.wrapping_add(1);
        let last = self.next(bound, ACK);
        assert_eq!(self.take(&last).len(), 1);
    }
}
