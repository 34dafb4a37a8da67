//! The engine's core alone, in memory, without any packet I/O.
//!
//! A closed loop of complete connections, each of seven packets in: SYN, ACK, request; SYN-ACK of the server; its FIN,
//! the client's FIN, its acknowledgement. All connections are open at once, at different steps, and consecutive packets
//! belong to different ones, so every packet meets a cold connection. Only the engine is timed, 64 packets at a time:
//! handling them, taking what they cause, and taking the records. A batch that took more than four times as long as the
//! median one was interrupted by somebody else and is left out; how many were is shown.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant as Clock};

use anyhow::{Result, ensure};
use serde::Serialize;
use sidetrack_core::engine::packet::{Header, Ip, flags};
use sidetrack_core::engine::{
    Ahead, Callbacks, Checksums, Config, Engine, Fate, Hop, Listen, Opening, Selection, Share, Target,
};
use sidetrack_core::time::Instant;

/// Packets handled between two readings of the clock.
const BATCH: usize = 64;
/// How much later each batch comes for the engine: ten million packets a second, on a clock of its own, so that a
/// disturbed machine makes no time-outs.
const BATCH_TIME: Duration = Duration::from_nanos(100 * BATCH as u64);
/// Packets of a connection that come in.
const PACKETS: usize = 7;
/// Open connections, and the most nanoseconds a packet may take there.
const BARS: [(usize, f64); 2] = [(4096, 70.0), (65_536, 100.0)];
const REQUEST: &[u8] = b"sixteen bytes...";
const CLIENT_ISN: u32 = 1000;
const SERVER_ISN: u32 = 9000;

/// One row of the table.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Row {
    /// Connections open all the time.
    pub open: usize,
    /// Nanoseconds a packet, the median of all rounds.
    pub nanos: f64,
    /// Batches that were interrupted in that round, percent.
    pub left_out: f64,
    /// The most nanoseconds a packet may take; none: it is shown for comparison.
    pub bar: Option<f64>,
}

impl Row {
    /// Nanoseconds a connection.
    #[must_use]
    pub fn connection_nanos(&self) -> f64 {
        self.nanos * PACKETS as f64
    }
}

/// Measures; each row in so many rounds of so many connections. With `verify` the engine computes every checksum that comes
/// in, as it must where no network card has done so.
///
/// # Errors
/// When a connection does not go as it must.
pub fn run(rounds: usize, connections: usize, verify: bool) -> Result<Vec<Row>> {
    let checksums = if verify { Checksums::Verify } else { Checksums::Verified };
    let mut rows = Vec::new();
    for open in [1024, 4096, 65_536] {
        let mut costs = Vec::new();
        for _ in 0..rounds.max(1) {
            costs.push(measure(open, connections, checksums)?);
        }
        costs.sort_by(|a, b| a.nanos.total_cmp(&b.nanos));
        let Some(Cost { nanos, left_out }) = costs.get(costs.len() / 2).copied() else { continue };
        let bar = BARS.iter().find(|(at, _)| *at == open).map(|(_, bar)| *bar);
        rows.push(Row { open, nanos, left_out, bar });
    }
    Ok(rows)
}

/// The server for a client is told by the client's address, so that answers are matched without a table.
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

/// What the peers of one connection know.
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
    fn packet(&self, front: SocketAddr) -> Vec<u8> {
        let request = REQUEST.len() as u32;
        let (ours, theirs) = (CLIENT_ISN + 1, self.to_client);
        let client = |flags, seq, ack, payload| segment(self.client, front, flags, seq, ack, payload);
        let server = |flags, seq, ack| segment(self.server, self.source, flags, seq, ack, &[]);
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
fn segment(src: SocketAddr, dst: SocketAddr, flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Vec<u8> {
    use sidetrack_core::engine::checksum::Sum;
    let (IpAddr::V4(from), IpAddr::V4(to)) = (src.ip(), dst.ip()) else { return Vec::new() };
    let tcp = 20 + payload.len();
    let mut out = vec![0x45, 0, 0, (20 + tcp) as u8, 0, 0, 0x40, 0, 64, 6, 0, 0];
    out.extend(from.octets());
    out.extend(to.octets());
    let sum = Sum::ZERO.bytes(&out).checksum();
    out.splice(10..12, sum.to_be_bytes());
    out.extend(src.port().to_be_bytes());
    out.extend(dst.port().to_be_bytes());
    out.extend(seq.to_be_bytes());
    out.extend(ack.to_be_bytes());
    out.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    out.extend(payload);
    let pseudo = Sum::ZERO.bytes(&out[12..20]).u16(6).u16(tcp as u16);
    let sum = pseudo.bytes(&out[20..]).checksum();
    out.splice(36..38, sum.to_be_bytes());
    out
}

/// What one round found.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Nanoseconds a packet.
    nanos: f64,
    /// Batches that were interrupted, percent.
    left_out: f64,
}

impl Cost {
    /// From the nanoseconds each batch took.
    fn of(mut batches: Vec<u64>) -> Self {
        batches.sort_unstable();
        let most = batches.get(batches.len() / 2).copied().unwrap_or(0) * 4;
        let kept = batches.partition_point(|nanos| *nanos <= most);
        let sum: u64 = batches.iter().take(kept).sum();
        let left_out = 100.0 * (1.0 - kept as f64 / batches.len() as f64);
        Self { nanos: sum as f64 / (kept * BATCH) as f64, left_out }
    }
}

/// Nanoseconds a packet, over at least so many complete connections with `open` of them open all the time.
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
    let mut caused = Caused::default();
    let mut peers: Vec<Peers> = (0..open).map(Peers::new).collect();
    let (mut batches, mut records, mut at, mut now) = (Vec::new(), 0_usize, 0, Instant::ZERO);
    // A third is warm-up: table, slots and caches as in a process that has run for a while.
    let warm = connections / 3;
    while records < connections + warm {
        let mut batch: Vec<(usize, Vec<u8>)> = Vec::with_capacity(BATCH);
        while batch.len() < BATCH {
            // A different number of steps for each: all kinds of packets are mixed.
            let index = (at * 7919) % open;
            at += 1;
            batch.push((index, peers[index].packet(front)));
        }
        now = now + BATCH_TIME;
        caused.clear();
        let start = Clock::now();
        let done = handle(&mut engine, now, &mut batch, checksums, &mut caused);
        let spent = start.elapsed().as_nanos() as u64;
        if records >= warm {
            batches.push(spent);
        }
        records += done?;
        learn(&mut peers, &caused)?;
        for (index, _) in batch {
            peers[index].step = (peers[index].step + 1) % PACKETS;
        }
    }
    Ok(Cost::of(batches))
}

/// The engine's own packets of one batch, copied behind each other as a driver copies them to where they are sent from.
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

/// What is timed: one batch through the engine, all it causes, and its records.
fn handle(
    engine: &mut Engine<ByAddress>,
    now: Instant,
    batch: &mut [(usize, Vec<u8>)],
    checksums: Checksums,
    caused: &mut Caused,
) -> Result<usize> {
    let mut ahead = Ahead::default();
    for (_, packet) in &*batch {
        engine.approach(&mut ahead, packet);
    }
    engine.warm(&mut ahead);
    engine.tick(now);
    for (_, packet) in &mut *batch {
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

/// Reads from the engine's own packets what the peers have to know for their next ones.
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
        let cost = Cost::of(vec![64, 64, 64, 64_000]);
        assert_eq!((cost.nanos, cost.left_out), (1.0, 25.0));
    }
}
