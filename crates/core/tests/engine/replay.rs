//! The replay driver: packets of a capture through the engine, on the capture's own clock; what comes out is a capture
//! again. The engine has no other source of time or chance, so a capture of what went in gives what came out, to the byte.

use crate::network::{Addresses, CLIENT_HOP, Faults, Network, SERVER_HOP, at, config};
use crate::pcap::{self, Captured};
use crate::peer::Habits;
use crate::wire::Packet;
use sidetrack_core::engine::{Callbacks, Checksums, Engine, Fate, Hop, Opening, Record, Selection, Target};
use sidetrack_core::time::Instant;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::PathBuf;

/// One server for all.
#[derive(Clone, Copy)]
pub(crate) struct ToServer(pub Target);

impl Callbacks for ToServer {
    fn select(&mut self, opening: &Opening<'_>) -> Selection {
        if opening.first.is_empty() && !opening.last {
            return Selection::Wait { wait_ms: 500 };
        }
        Selection::Server(self.0)
    }
}

/// What a replay gave.
#[derive(Debug, PartialEq)]
pub(crate) struct Replayed {
    pub sent: Vec<Captured>,
    pub records: Vec<Record>,
    /// Packets that were refused.
    pub refused: usize,
}

/// Drives an engine with a capture: time-outs come when they are due between two packets, and for `after_ms` behind the last.
pub(crate) fn replay<C: Callbacks>(engine: &mut Engine<C>, capture: &[Captured], after_ms: u64) -> Replayed {
    let mut out = Replayed { sent: Vec::new(), records: Vec::new(), refused: 0 };
    let end = capture.last().map_or(0, |(at, _)| *at) + after_ms * 1_000_000;
    for (time, packet) in capture {
        ticks(engine, *time, &mut out);
        let (now, hop, mut packet) = (Instant::from_nanos(*time), hop_of(packet), packet.clone());
        match engine.handle(now, &mut packet, hop, Checksums::Verify) {
            Fate::Forward { len, .. } => out.sent.push((*time, packet[..len].to_vec())),
            Fate::Dropped(_) => out.refused += 1,
            Fate::Taken | Fate::NotOurs => {}
        }
        drain(engine, *time, &mut out);
    }
    ticks(engine, end, &mut out);
    out
}

/// Does what is due before `until`.
fn ticks<C: Callbacks>(engine: &mut Engine<C>, until: u64, out: &mut Replayed) {
    for _ in 0..100_000 {
        let due = engine.deadline().map(Instant::as_nanos).filter(|due| *due < until);
        let Some(due) = due else { return };
        engine.tick(Instant::from_nanos(due));
        drain(engine, due, out);
    }
    panic!("time-outs without end before {until} ns");
}

fn drain<C: Callbacks>(engine: &mut Engine<C>, time: u64, out: &mut Replayed) {
    while let Some((packet, _)) = engine.poll() {
        out.sent.push((time, packet.to_vec()));
    }
    out.records.extend(std::iter::from_fn(|| engine.poll_record()));
}

/// Captures of raw packets name no neighbours: servers are told by their address.
fn hop_of(packet: &[u8]) -> Hop {
    let IpAddr::V4(server) = Addresses::v4().server.ip() else { panic!("IPv4") };
    if packet.get(12..16) == Some(&server.octets()) { SERVER_HOP } else { CLIENT_HOP }
}

fn to_server() -> ToServer {
    ToServer(Target::new(Addresses::v4().server, SERVER_HOP))
}

fn fresh() -> Engine<ToServer> {
    Engine::new(config(&Addresses::v4()), to_server(), at(0))
}

/// A run between two model peers: what reached the engine, what it sent, and its records.
fn recorded(seed: u64, faults: Faults) -> (Vec<Captured>, Vec<Captured>, Vec<Record>) {
    let streams = [vec![seed as u8; 9000], vec![b'x'; 20_000]];
    let both = [Habits::default(), Habits { sack: false, ..Habits::default() }];
    let mut network =
        Network::new(config(&Addresses::v4()), to_server(), &Addresses::v4(), both, streams, seed);
    network.faults = faults;
    network.captured = Some(Default::default());
    assert!(network.run(200_000), "seed {seed}");
    let [came, went] = network.captured.take().expect("captured");
    (came, went, network.records)
}

#[test]
fn a_recorded_run_replays_to_the_byte() {
    for seed in 0..12 {
        let faults =
            if seed % 2 == 0 { Faults::default() } else { Faults { lost: 30, repeated: 20, delayed: 100 } };
        let (came, went, records) = recorded(seed, faults);
        // Through the file, as a test that reads one would.
        let came = pcap::read(&pcap::write(&came)).expect("a capture");
        let replayed = replay(&mut fresh(), &came, 0);
        assert_eq!(replayed.records, records, "seed {seed}");
        assert!(replayed.sent == went, "seed {seed}: {} packets, then {}", went.len(), replayed.sent.len());
    }
}

#[test]
fn a_changed_packet_changes_what_comes_out() {
    let (mut came, went, _) = recorded(3, Faults::default());
    let whole = replay(&mut fresh(), &came, 0);
    let data = came.iter().position(|(_, packet)| packet.len() > 1000).expect("data");
    let last = came[data].1.len() - 1;
    came[data].1[last] ^= 1;
    let replayed = replay(&mut fresh(), &came, 0);
    // Its checksum is wrong now, and what its peers said later no longer fits.
    assert!(replayed.refused > whole.refused, "{} and {}", replayed.refused, whole.refused);
    assert!(replayed.sent != went);
}

/// One line a packet, as a person reads it.
fn told(packets: &[Captured]) -> String {
    let mut text = String::new();
    for (time, bytes) in packets {
        let packet = Packet::decode(bytes);
        let names = [(2, "SYN "), (1, "FIN "), (4, "RST "), (8, "PSH "), (16, "ACK ")];
        let flags: String =
            names.iter().filter(|(bit, _)| packet.flags & bit != 0).map(|(_, name)| *name).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:>7} us {} > {} {flags}seq {} ack {} window {} length {}",
            (time - at(0).as_nanos()) / 1000,
            packet.src,
            packet.dst,
            packet.seq,
            packet.ack,
            packet.window,
            packet.payload.len()
        );
    }
    text
}

/// The captures in the folder beside this file: what goes in, and in words what has to come out. With
/// `ENGINE_CAPTURES=write` they are made anew.
#[test]
fn captures_in_the_tree_come_out_as_they_did() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/engine/captures");
    for (name, seed, faults) in
        [("clean", 1, Faults::default()), ("lossy", 5, Faults { lost: 60, repeated: 30, delayed: 150 })]
    {
        let (capture, words) = (folder.join(format!("{name}.pcap")), folder.join(format!("{name}.txt")));
        if std::env::var_os("ENGINE_CAPTURES").is_some_and(|value| value == "write") {
            std::fs::create_dir_all(&folder).expect("a folder");
            let came = recorded(seed, faults).0;
            std::fs::write(&capture, pcap::write(&came)).expect("written");
            std::fs::write(&words, told(&replay(&mut fresh(), &came, 5000).sent)).expect("written");
        }
        let file = std::fs::read(&capture).unwrap_or_else(|error| panic!("{}: {error}", capture.display()));
        let came = pcap::read(&file).expect("a capture");
        let replayed = replay(&mut fresh(), &came, 5000);
        let wanted = std::fs::read_to_string(&words).expect("words");
        assert_eq!(told(&replayed.sent), wanted, "{name}");
        assert_eq!(replayed.records.len(), 1, "{name}");
    }
}
