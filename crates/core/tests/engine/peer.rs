//! A model TCP endpoint: handshake, sliding window, retransmission, fast retransmit, reordering, SACK blocks, time
//! stamps, zero windows, FIN in any order. It knows nothing of the engine and complains about whatever does not fit.

use crate::wire::{ACK, FIN, PSH, Packet, RST, SYN};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

#[derive(Clone, Debug)]
pub(crate) struct Habits {
    pub mss: u16,
    pub stamps: bool,
    pub sack: bool,
    pub scale: Option<u8>,
    /// Bytes it may receive before its reader has taken any.
    pub buffer: usize,
    /// Bytes its reader takes every 20 ms; none: all at once.
    pub reads: Option<usize>,
    /// Segments in flight at most.
    pub flight: usize,
    /// Sends FIN only after it has received the other side's.
    pub closes_last: bool,
    /// Segments are cut at random lengths.
    pub ragged: bool,
}

impl Default for Habits {
    fn default() -> Self {
        Self {
            mss: 1460,
            stamps: true,
            sack: true,
            scale: Some(7),
            buffer: 65_535,
            reads: None,
            flight: 10,
            closes_last: false,
            ragged: false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Listen,
    SynSent,
    SynReceived,
    Open,
    Reset,
}

pub(crate) struct Peer {
    pub habits: Habits,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub phase: Phase,
    pub sends: Vec<u8>,
    pub received: Vec<u8>,
    pub fin_received: bool,
    pub retransmissions: u32,
    /// Sends at most the first number of bytes until it has received the second number.
    pub turn: Option<(u64, usize)>,
    /// No segment goes past one of these offsets.
    pub cuts: Vec<u64>,
    isn: u32,
    peer_isn: u32,
    /// Offsets in the stream that is sent; one past the end stands for FIN.
    una: u64,
    next: u64,
    sent: u64,
    edge: u64,
    shown_edge: u64,
    early: BTreeMap<u64, Vec<u8>>,
    peer_fin: Option<u64>,
    unread: usize,
    read_at: Option<u64>,
    stamps: bool,
    sack: bool,
    peer_scale: u8,
    own_scale: u8,
    peer_mss: usize,
    recent: u32,
    clock_base: u32,
    stamps_sent: BTreeSet<u32>,
    rto: u64,
    pub timer: Option<u64>,
    duplicates: u32,
    random: u64,
    out: Vec<Packet>,
}

impl Peer {
    pub(crate) fn new(
        habits: Habits,
        local: SocketAddr,
        remote: SocketAddr,
        sends: Vec<u8>,
        seed: u64,
    ) -> Self {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let isn = roll(&mut random) as u32;
        let clock_base = roll(&mut random) as u32;
        Self {
            habits,
            local,
            remote,
            phase: Phase::Listen,
            sends,
            received: Vec::new(),
            fin_received: false,
            retransmissions: 0,
            turn: None,
            cuts: Vec::new(),
            // Some begin just before the numbers wrap.
            isn: if isn.is_multiple_of(3) { u32::MAX - isn % 5000 } else { isn },
            peer_isn: 0,
            una: 0,
            next: 0,
            sent: 0,
            edge: 0,
            shown_edge: 0,
            early: BTreeMap::new(),
            peer_fin: None,
            unread: 0,
            read_at: None,
            stamps: false,
            sack: false,
            peer_scale: 0,
            own_scale: 0,
            peer_mss: 536,
            recent: 0,
            clock_base,
            stamps_sent: BTreeSet::new(),
            rto: 300,
            timer: None,
            duplicates: 0,
            random,
            out: Vec::new(),
        }
    }

    fn clock(&self, now: u64) -> u32 {
        self.clock_base.wrapping_add(now as u32)
    }

    /// Everything sent and acknowledged, everything received, both FINs.
    pub(crate) fn is_done(&self) -> bool {
        self.fin_received && self.una > self.sends.len() as u64
    }

    pub(crate) fn connect(&mut self, now: u64) -> Vec<Packet> {
        self.phase = Phase::SynSent;
        self.syn(now, SYN);
        self.timer = Some(now + self.rto);
        std::mem::take(&mut self.out)
    }

    fn syn(&mut self, now: u64, flags: u8) {
        let answer = flags & ACK != 0;
        let mut packet =
            Packet::new(self.local, self.remote, flags, self.isn, if answer { self.peer_isn + 1 } else { 0 });
        packet.ack = if answer { self.peer_isn.wrapping_add(1) } else { 0 };
        packet.mss = Some(self.habits.mss);
        packet.sack_permitted = if answer { self.sack } else { self.habits.sack };
        let scaled = if answer { self.own_scale > 0 || self.peer_scale > 0 } else { true };
        packet.scale = self.habits.scale.filter(|_| scaled);
        if if answer { self.stamps } else { self.habits.stamps } {
            packet.stamps = Some((self.clock(now), if answer { self.recent } else { 0 }));
            self.stamps_sent.insert(self.clock(now));
        }
        packet.window = self.habits.buffer.min(65_535) as u16;
        self.shown_edge = u64::from(packet.window);
        self.out.push(packet);
    }

    fn agree(&mut self, packet: &Packet) {
        self.peer_isn = packet.seq;
        self.stamps = self.habits.stamps && packet.stamps.is_some();
        self.sack = self.habits.sack && packet.sack_permitted;
        if let (Some(own), Some(peer)) = (self.habits.scale, packet.scale) {
            (self.own_scale, self.peer_scale) = (own, peer);
        }
        self.peer_mss = usize::from(packet.mss.expect("an MSS is always said"));
        self.recent = packet.stamps.map_or(0, |(value, _)| value);
        self.edge = u64::from(packet.window);
    }

    pub(crate) fn take(&mut self, now: u64, packet: &Packet) -> Vec<Packet> {
        assert_eq!((packet.src, packet.dst), (self.remote, self.local), "addresses");
        if packet.is(RST) {
            self.phase = Phase::Reset;
            self.timer = None;
            return Vec::new();
        }
        match self.phase {
            Phase::Reset => return Vec::new(),
            Phase::Listen => {
                assert!(packet.is(SYN) && !packet.is(ACK), "{packet:?}");
                self.agree(packet);
                self.phase = Phase::SynReceived;
                self.syn(now, SYN | ACK);
                self.timer = Some(now + self.rto);
            }
            Phase::SynSent => {
                assert!(packet.is(SYN | ACK), "{packet:?}");
                assert_eq!(packet.ack, self.isn.wrapping_add(1));
                self.check_stamps(now, packet);
                self.agree(packet);
                self.phase = Phase::Open;
                self.timer = None;
                self.ack(now);
            }
            Phase::SynReceived if packet.is(SYN) => self.syn(now, SYN | ACK),
            Phase::SynReceived => {
                self.phase = Phase::Open;
                self.timer = None;
                self.segment(now, packet);
            }
            Phase::Open if packet.is(SYN) => self.ack(now),
            Phase::Open => self.segment(now, packet),
        }
        self.send_more(now);
        std::mem::take(&mut self.out)
    }

    fn check_stamps(&mut self, now: u64, packet: &Packet) {
        let Some((value, echo)) = packet.stamps else {
            assert!(!self.stamps, "a segment without the agreed time stamps: {packet:?}");
            return;
        };
        let _ = now;
        assert!(self.stamps_sent.contains(&echo), "echo {echo} of a time stamp never sent: {packet:?}");
        // Never far in the past: a receiver would drop it (PAWS). Reordering within a flight is fine.
        if self.recent != 0 {
            assert!(
                (value.wrapping_sub(self.recent) as i32) > -60_000,
                "PAWS: {value} after {}",
                self.recent
            );
        }
    }

    fn segment(&mut self, now: u64, packet: &Packet) {
        assert!(packet.is(ACK), "{packet:?}");
        self.check_stamps(now, packet);
        assert!(
            packet.payload.len() <= usize::from(self.habits.mss),
            "larger than our MSS: {}",
            packet.payload.len()
        );
        self.take_ack(now, packet);
        let offset = self.offset(packet.seq, self.peer_isn, self.received.len() as u64);
        let end = offset + packet.payload.len() as u64;
        if let Some((value, _)) = packet.stamps
            && offset <= self.received.len() as u64
            && (value.wrapping_sub(self.recent) as i32) > 0
        {
            self.recent = value;
        }
        if packet.is(FIN) && end <= self.shown_edge + 1 {
            assert!(self.peer_fin.is_none_or(|fin| fin == end), "two FINs");
            self.peer_fin = Some(end);
        }
        if !packet.payload.is_empty() || packet.is(FIN) {
            if end <= self.shown_edge {
                self.store(offset, &packet.payload);
            }
            self.deliver(now);
            self.ack(now);
        } else if offset < self.received.len() as u64 {
            // A keep-alive or a probe wants an answer.
            self.ack(now);
        }
    }

    fn offset(&self, seq: u32, isn: u32, near: u64) -> u64 {
        let expected = isn.wrapping_add(1).wrapping_add(near as u32);
        let distance = i64::from(seq.wrapping_sub(expected) as i32);
        u64::try_from(near as i64 + distance).unwrap_or(0)
    }

    fn store(&mut self, offset: u64, payload: &[u8]) {
        for (at, byte) in payload.iter().enumerate() {
            let place = offset + at as u64;
            if let Some(known) = self.received.get(place as usize) {
                assert_eq!(known, byte, "byte {place} changed by a retransmission");
            }
        }
        if !payload.is_empty() && offset + payload.len() as u64 > self.received.len() as u64 {
            self.early.insert(offset, payload.to_vec());
        }
    }

    fn deliver(&mut self, now: u64) {
        let before = self.received.len();
        while let Some((&offset, _)) = self.early.range(..=self.received.len() as u64).next() {
            let bytes = self.early.remove(&offset).expect("just found");
            let skip = self.received.len() - offset as usize;
            self.received.extend(bytes.get(skip..).unwrap_or_default());
        }
        if let Some(reads) = self.habits.reads {
            self.unread += self.received.len() - before;
            if self.unread > 0 && self.read_at.is_none() && reads > 0 {
                self.read_at = Some(now + 20);
            }
        }
        if self.peer_fin == Some(self.received.len() as u64) && !self.fin_received {
            self.fin_received = true;
        }
    }

    fn take_ack(&mut self, now: u64, packet: &Packet) {
        let acked = self.offset(packet.ack, self.isn, self.una);
        assert!(acked <= self.sent, "acknowledges {acked}, sent were {}", self.sent);
        for (from, to) in &packet.sack {
            assert!(self.sack, "SACK was not agreed on");
            let (from, to) = (self.offset(*from, self.isn, self.una), self.offset(*to, self.isn, self.una));
            assert!(from < to && to <= self.sent, "SACK {from}..{to} of {}", self.sent);
        }
        let edge = acked + (u64::from(packet.window) << self.peer_scale);
        if acked > self.una {
            self.una = acked;
            self.next = self.next.max(acked);
            self.duplicates = 0;
            self.rto = 300;
            self.timer = (self.una < self.sent).then_some(now + self.rto);
        } else if acked == self.una && packet.payload.is_empty() && edge == self.edge && self.una < self.sent
        {
            self.duplicates += 1;
            if self.duplicates == 3 {
                self.retransmit(now);
            }
        }
        if acked >= self.una {
            self.edge = edge;
        }
    }

    fn end(&self) -> u64 {
        if let Some((end, _)) = self.turn.filter(|(_, needs)| self.received.len() < *needs) {
            return end;
        }
        let may_close = !self.habits.closes_last || self.fin_received;
        self.sends.len() as u64 + u64::from(may_close)
    }

    fn send_more(&mut self, now: u64) {
        if self.phase != Phase::Open {
            return;
        }
        let most = (self.habits.flight * self.mss()) as u64;
        while self.next < self.end() && self.next < self.edge && self.next - self.una < most {
            let len = self.transmit(now, self.next, self.edge);
            self.next += len;
            self.sent = self.sent.max(self.next);
        }
        if self.timer.is_none() && (self.una < self.end()) {
            self.timer = Some(now + self.rto);
        }
    }

    fn mss(&self) -> usize {
        self.peer_mss - if self.stamps { 12 } else { 0 }
    }

    /// Sends a segment from `at` on, not past `edge`; returns the numbers it took.
    fn transmit(&mut self, now: u64, at: u64, edge: u64) -> u64 {
        let data = (self.sends.len() as u64).min(self.end());
        let cut = self.cuts.iter().map(|cut| cut.saturating_sub(at)).filter(|left| *left > 0).min();
        let mut len = (data.saturating_sub(at)).min(self.mss() as u64).min(edge.saturating_sub(at).max(1));
        len = len.min(cut.unwrap_or(len));
        if self.habits.ragged && len > 1 {
            len = 1 + roll(&mut self.random) % len;
        }
        let payload = self.sends.get(at as usize..(at + len) as usize).unwrap_or_default().to_vec();
        let fin = at + len == data && self.end() > data && at + len < edge.max(at + 1) + 1;
        let mut packet = self.packet(now, ACK | if len > 0 { PSH } else { 0 } | if fin { FIN } else { 0 });
        packet.seq = self.isn.wrapping_add(1).wrapping_add(at as u32);
        packet.payload = payload;
        self.sent = self.sent.max(at + len + u64::from(fin));
        self.out.push(packet);
        len + u64::from(fin)
    }

    fn retransmit(&mut self, now: u64) {
        self.retransmissions += 1;
        let at = self.una;
        if at < self.end() {
            let len = self.transmit(now, at, self.edge);
            self.next = self.next.max(at + len);
        }
    }

    fn packet(&mut self, now: u64, flags: u8) -> Packet {
        let fin = u32::from(self.fin_received);
        let ack = self.peer_isn.wrapping_add(1).wrapping_add(self.received.len() as u32).wrapping_add(fin);
        let seq = self.isn.wrapping_add(1).wrapping_add(self.next as u32);
        let mut packet = Packet::new(self.local, self.remote, flags, seq, ack);
        if self.stamps {
            packet.stamps = Some((self.clock(now), self.recent));
            self.stamps_sent.insert(self.clock(now));
        }
        let window = (self.habits.buffer.saturating_sub(self.unread)) >> self.own_scale;
        packet.window = window.min(65_535) as u16;
        let edge = self.received.len() as u64 + (u64::from(packet.window) << self.own_scale);
        self.shown_edge = self.shown_edge.max(edge);
        packet
    }

    fn ack(&mut self, now: u64) {
        let mut packet = self.packet(now, ACK);
        if self.sack {
            let number = |offset: u64| self.peer_isn.wrapping_add(1).wrapping_add(offset as u32);
            let blocks = self.early.iter().map(|(at, bytes)| (number(*at), number(at + bytes.len() as u64)));
            packet.sack = blocks.take(if self.stamps { 3 } else { 4 }).collect();
        }
        self.out.push(packet);
    }

    /// When the peer wants to be asked again.
    pub(crate) fn deadline(&self) -> Option<u64> {
        [self.timer, self.read_at].into_iter().flatten().min()
    }

    pub(crate) fn tick(&mut self, now: u64) -> Vec<Packet> {
        if self.read_at.is_some_and(|at| at <= now) {
            let before = self.habits.buffer.saturating_sub(self.unread);
            self.unread = self.unread.saturating_sub(self.habits.reads.unwrap_or(0));
            self.read_at = (self.unread > 0).then_some(now + 20);
            if before < usize::from(self.habits.mss) * 2 {
                self.ack(now);
            }
        }
        if self.timer.is_some_and(|at| at <= now) {
            self.rto = (self.rto * 2).min(2000);
            self.timer = Some(now + self.rto);
            match self.phase {
                Phase::SynSent => self.syn(now, SYN),
                Phase::SynReceived => self.syn(now, SYN | ACK),
                Phase::Open if self.una < self.end() => self.retransmit(now),
                _ => self.timer = None,
            }
        }
        std::mem::take(&mut self.out)
    }
}

pub(crate) fn roll(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
}
