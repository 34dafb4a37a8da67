//! The engine's core alone, in memory, without any packet I/O.
//!
//! A closed loop of complete connections, each of seven packets in: SYN, ACK, request; SYN-ACK of the server; its
//! FIN, the client's FIN, its acknowledgement. All connections are open at once, at different steps. Consecutive
//! packets belong to different connections, so every packet meets a cold connection. Only the engine is timed, 64
//! packets at a time: handling them, taking their outputs, and taking the records. A batch that took more than four
//! times the median was interrupted by another task and is left out; the table shows how many.
//!
//! The packets of up to 32 batches are made in advance, as a card puts them into memory, and their outputs are
//! checked afterwards. Otherwise the generator's own memory would evict the engine's data from the caches between two
//! batches, which a peer behind a wire does not do.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant as Clock};

use anyhow::{Result, ensure};
use serde::Serialize;
use sidetrack_core::engine::packet::{Header, Ip, flags};
use sidetrack_core::engine::{
    Ahead, Callbacks, Checksums, Config, Engine, Fate, Hop, Listen, Opening, Selection, Share, Target,
};
use sidetrack_core::time::Instant;
use sidetrack_sys::pages;

use crate::kit::Missing;
use crate::progress::Progress;

/// Packets handled between two readings of the clock.
const BATCH: usize = 64;
/// Maximum number of batches made in advance; no connection has two packets in them.
const IN_ADVANCE: usize = 32;
/// Distance of two batches on the engine's virtual clock: ten million packets per second. So a disturbed machine
/// causes no time-outs.
const BATCH_TIME: Duration = Duration::from_nanos(100 * BATCH as u64);
/// Incoming packets of a connection.
const PACKETS: usize = 7;
/// Open connections, and the maximum nanoseconds per packet.
const BARS: [(usize, f64); 2] = [(4096, 70.0), (65_536, 100.0)];
const REQUEST: &[u8] = b"sixteen bytes...";
const CLIENT_ISN: u32 = 1000;
const SERVER_ISN: u32 = 9000;

/// One row of the table.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Row {
    /// Number of open connections.
    pub open: usize,
    /// Nanoseconds per packet, the median of all rounds.
    pub nanos: f64,
    /// Batches that were interrupted in that round, percent.
    pub left_out: f64,
    /// Maximum nanoseconds per packet; none: the row is only for comparison.
    pub bar: Option<f64>,
}

impl Row {
    /// Returns nanoseconds per connection.
    #[must_use]
    pub(super) fn connection_nanos(&self) -> f64 {
        self.nanos * PACKETS as f64
    }
}

/// Measures each row in this number of rounds and connections. With `verify` the engine verifies every incoming
/// checksum, as it must if no network card has done so. A row in which a connection deviates from its script is missing.
pub(super) fn run(
    rounds: u32,
    connections: usize,
    verify: bool,
    progress: &Progress,
    missing: &mut Missing,
) -> Vec<Row> {
    let checksums = if verify { Checksums::Verify } else { Checksums::Verified };
    let mut rows = Vec::new();
    for open in [1024, 4096, 65_536] {
        let costs = (0..rounds.max(1)).map(|_| measure(open, connections, checksums));
        let costs = missing.note(&format!("core, {open} open"), costs.collect::<Result<Vec<_>>>(), progress);
        let Some(mut costs) = costs else { continue };
        costs.sort_by(|a, b| a.nanos.total_cmp(&b.nanos));
        let Some(Cost { nanos, left_out }) = costs.get(costs.len() / 2).copied() else { continue };
        let bar = BARS.iter().find(|(at, _)| *at == open).map(|(_, bar)| *bar);
        rows.push(Row { open, nanos, left_out, bar });
    }
    rows
}

/// The client's address determines its server, so that answers are matched without a table.
struct ByAddress;

impl Callbacks for ByAddress {
    fn select(&mut self, opening: &Opening<'_>) -> Selection {
        let (IpAddr::V4(client), false) = (opening.client.ip(), opening.first.is_empty()) else {
            return Selection::Wait { wait_ms: 1000 };
        };
        let server = Ipv4Addr::from_bits(client.to_bits() & 0x00ff_ffff | 11 << 24);
        Selection::Server(Target::new(SocketAddr::new(server.into(), 80), Hop(2)))
    }
}

/// The peers' state of one connection.
#[derive(Clone, Copy)]
struct Peers {
    step: usize,
    client: SocketAddr,
    server: SocketAddr,
    /// The engine's end towards the server, and its next numbers towards client and server.
    source: SocketAddr,
    to_client: u32,
    to_server: u32,
}

impl Peers {
    fn new(index: usize) -> Self {
        let bits = index as u32;
        let address = |net: u32, port| SocketAddr::new(Ipv4Addr::from_bits(net << 24 | bits).into(), port);
        let (client, server) = (address(10, 4000), address(11, 80));
        Self { step: 0, client, server, source: server, to_client: 0, to_server: 0 }
    }

    /// The next packet that reaches the engine.
    fn packet(&self, front: SocketAddr) -> Packet {
        let request = REQUEST.len() as u32;
        let (ours, theirs) = (CLIENT_ISN + 1, self.to_client);
        let client = |flags, seq, ack, payload| Packet::new(self.client, front, flags, seq, ack, payload);
        let server = |flags, seq, ack| Packet::new(self.server, self.source, flags, seq, ack, &[]);
        let acked = self.to_server.wrapping_add(request);
        match self.step {
            0 => client(flags::SYN, CLIENT_ISN, 0, &[]),
            1 => client(flags::ACK, ours, theirs, &[]),
            2 => client(flags::ACK | flags::PSH, ours, theirs, REQUEST),
            3 => server(flags::SYN | flags::ACK, SERVER_ISN, self.to_server),
            4 => server(flags::FIN | flags::ACK, SERVER_ISN + 1, acked),
            5 => client(flags::FIN | flags::ACK, ours + request, theirs.wrapping_add(1), &[]),
            _ => server(flags::ACK, SERVER_ISN + 2, acked.wrapping_add(1)),
        }
    }
}

/// An IPv4 TCP segment with both checksums.
struct Packet {
    bytes: [u8; 64],
    len: usize,
}

impl Packet {
    fn new(src: SocketAddr, dst: SocketAddr, flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Self {
        use sidetrack_core::engine::checksum::Sum;
        let (len, mut bytes) = (40 + payload.len(), [0; 64]);
        if let (IpAddr::V4(from), IpAddr::V4(to)) = (src.ip(), dst.ip()) {
            bytes[..12].copy_from_slice(&[0x45, 0, 0, len as u8, 0, 0, 0x40, 0, 64, 6, 0, 0]);
            bytes[12..16].copy_from_slice(&from.octets());
            bytes[16..20].copy_from_slice(&to.octets());
        }
        let sum = Sum::ZERO.bytes(&bytes[..20]).checksum();
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        bytes[20..22].copy_from_slice(&src.port().to_be_bytes());
        bytes[22..24].copy_from_slice(&dst.port().to_be_bytes());
        bytes[24..28].copy_from_slice(&seq.to_be_bytes());
        bytes[28..32].copy_from_slice(&ack.to_be_bytes());
        bytes[32..36].copy_from_slice(&[0x50, flags, 0xff, 0xff]);
        bytes[40..len].copy_from_slice(payload);
        let pseudo = Sum::ZERO.bytes(&bytes[12..20]).u16(6).u16((len - 20) as u16);
        let sum = pseudo.bytes(&bytes[20..len]).checksum();
        bytes[36..38].copy_from_slice(&sum.to_be_bytes());
        Self { bytes, len }
    }
}

/// The result of one round.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Nanoseconds per packet.
    nanos: f64,
    /// Batches that were interrupted, percent.
    left_out: f64,
}

impl Cost {
    /// Computes it from the nanoseconds and packets of each batch.
    fn of(mut batches: Vec<(u64, usize)>) -> Self {
        let each = |(nanos, packets): &(u64, usize)| *nanos as f64 / *packets as f64;
        batches.sort_by(|a, b| each(a).total_cmp(&each(b)));
        let most = batches.get(batches.len() / 2).map_or(0.0, each) * 4.0;
        let kept = batches.partition_point(|batch| each(batch) <= most);
        let of_kept = batches.iter().take(kept);
        let sum = of_kept.fold((0, 0), |sum, (nanos, packets)| (sum.0 + nanos, sum.1 + packets));
        let left_out = 100.0 * (1.0 - kept as f64 / batches.len() as f64);
        Self { nanos: each(&sum), left_out }
    }
}

/// Measures nanoseconds per packet, over at least this number of complete connections, with `open` of them open all
/// the time.
fn measure(open: usize, connections: usize, checksums: Checksums) -> Result<Cost> {
    let front: SocketAddr = ([10, 255, 0, 1], 80).into();
    let addresses = (1..=4).map(|n| IpAddr::from([10, 255, 1, n])).collect();
    let config = Config {
        max_connections: open as u32 + 64,
        syn_backlog: open as u32,
        hold_total_bytes: 256 << 20,
        ..Config::new(
            vec![Listen { address: Some(front.ip()), port: Some(front.port()) }],
            Share { addresses, ports: 1024..=65_535 },
            [0x0123_4567_89ab_cdef, 0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00, 0x0f1e_2d3c_4b5a_6978],
        )
    };
    let mut engine = Engine::new(config, ByAddress, Instant::ZERO);
    engine.tables().into_iter().for_each(|(address, bytes)| pages::prefer_huge(address, bytes));
    let (mut caused, mut coming) = (Caused::default(), Vec::new());
    let mut peers: Vec<Peers> = (0..open).map(Peers::new).collect();
    let (mut batches, mut records, mut at, mut now) = (Vec::new(), 0_usize, 0, Instant::ZERO);
    // A third is warm-up: table, slots and caches are then as in a process that has run for a while.
    let warm = connections / 3;
    while records < connections + warm {
        coming.clear();
        for _ in 0..open.min(IN_ADVANCE * BATCH) {
            // Each connection begins at a different step, so that all kinds of packets are mixed.
            let peer = &mut peers[(at * 7919) % open];
            at += 1;
            coming.push(peer.packet(front));
            peer.step = (peer.step + 1) % PACKETS;
        }
        caused.clear();
        for batch in coming.chunks_mut(BATCH) {
            now = now + BATCH_TIME;
            let start = Clock::now();
            let done = handle(&mut engine, now, batch, checksums, &mut caused);
            let spent = start.elapsed().as_nanos() as u64;
            if records >= warm {
                batches.push((spent, batch.len()));
            }
            records += done?;
        }
        learn(&mut peers, &caused)?;
    }
    Ok(Cost::of(batches))
}

/// The engine's own packets, copied one after the other, as a driver copies them for sending.
#[derive(Default)]
struct Caused {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Caused {
    fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    fn push(&mut self, packet: &[u8]) {
        self.bytes.extend_from_slice(packet);
        self.ends.push(self.bytes.len());
    }

    fn packets(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).filter_map(|(start, end)| self.bytes.get(start..*end))
    }
}

/// The timed part: one batch through the engine, all its outputs, and its records.
fn handle(
    engine: &mut Engine<ByAddress>,
    now: Instant,
    batch: &mut [Packet],
    checksums: Checksums,
    caused: &mut Caused,
) -> Result<usize> {
    let mut ahead = Ahead::default();
    for packet in &*batch {
        engine.approach(&mut ahead, &packet.bytes[..packet.len]);
    }
    engine.warm(&mut ahead);
    engine.tick(now);
    for packet in &mut *batch {
        let packet = &mut packet.bytes[..packet.len];
        let fate = engine.handle(now, packet, Hop(1), checksums);
        ensure!(matches!(fate, Fate::Taken | Fate::Forward { .. }), "{fate:?} of {packet:?}");
    }
    while let Some((packet, _)) = engine.poll() {
        caused.push(packet);
    }
    let mut records = 0;
    while let Some(record) = engine.poll_record() {
        ensure!(record.reason == sidetrack_core::flow::EndReason::Ok, "{record:?}");
        records += 1;
    }
    Ok(records)
}

/// Reads from the engine's packets what the peers need for their next packets.
fn learn(peers: &mut [Peers], caused: &Caused) -> Result<()> {
    for packet in caused.packets() {
        let header = Header::parse(packet, &Ip::parse(packet)?, Checksums::Verify)?;
        let to = header.tuple.local_addr();
        let IpAddr::V4(address) = to.ip() else { continue };
        let Some(peer) = peers.get_mut((address.to_bits() & 0x00ff_ffff) as usize) else { continue };
        match (header.flags, address.octets()[0]) {
            (f, 10) if f == flags::SYN | flags::ACK => peer.to_client = header.seq.0.wrapping_add(1),
            (f, 11) if f == flags::SYN => {
                peer.source = header.tuple.remote_addr();
                peer.to_server = header.seq.0.wrapping_add(1);
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_connection_of_the_loop_is_complete_and_recorded() {
        // An error, a refused packet or a record with another reason than "ok" would fail it.
        for open in [1, 64, 1000] {
            let cost = measure(open, 2000, Checksums::Verify).expect("connections as they must be");
            assert!(cost.nanos > 0.0);
        }
    }

    #[test]
    fn interrupted_batches_are_left_out() {
        let cost = Cost::of(vec![(64, 64), (64_000, 64), (32, 32), (64, 64)]);
        assert_eq!((cost.nanos, cost.left_out), (1.0, 25.0));
    }
}
