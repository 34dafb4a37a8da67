//! Two model peers, the engine between them, and links that lose, repeat and reorder: all from one seed.

use crate::pcap::Captured;
use crate::peer::{Habits, Peer, Phase, roll};
use crate::wire::Packet;
use sidetrack_core::engine::{Callbacks, Checksums, Config, Engine, Fate, Hop, Listen, Record, Share};
use sidetrack_core::time::Instant;
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// Where packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The engine, and the hop the packet comes from.
    Engine(Hop),
    Client,
    Server,
}

/// Chances out of 1000, for each packet on each link.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub lost: u64,
    pub repeated: u64,
    pub delayed: u64,
}

pub(crate) struct Network<C> {
    pub engine: Engine<C>,
    pub client: Peer,
    pub server: Peer,
    pub faults: Faults,
    pub now: u64,
    pub records: Vec<Record>,
    /// Packets that reached the engine, and that it sent.
    pub counts: [u32; 2],
    /// What reached the engine and what it sent, if it is to be captured.
    pub captured: Option<[Vec<Captured>; 2]>,
    queue: BTreeMap<(u64, u64), (Place, Vec<u8>)>,
    count: u64,
    random: u64,
}

pub(crate) const CLIENT_HOP: Hop = Hop(1);
pub(crate) const SERVER_HOP: Hop = Hop(2);

pub(crate) fn at(ms: u64) -> Instant {
    // Not at the epoch, so that nothing is right by being zero.
    Instant::from_millis(1_000_000 + ms)
}

/// The addresses of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    pub client: SocketAddr,
    pub front: SocketAddr,
    pub server: SocketAddr,
    pub v6_source: bool,
}

impl Addresses {
    pub(crate) fn v4() -> Self {
        Self {
            client: "10.0.0.1:40000".parse().expect("an address"),
            front: "10.0.0.2:80".parse().expect("an address"),
            server: "10.0.1.9:8080".parse().expect("an address"),
            v6_source: false,
        }
    }

    pub(crate) fn v6() -> Self {
        Self {
            client: "[2001:db8::1]:40000".parse().expect("an address"),
            front: "[2001:db8::2]:80".parse().expect("an address"),
            server: "[2001:db8:1::9]:8080".parse().expect("an address"),
            v6_source: true,
        }
    }
}

pub(crate) fn config(addresses: &Addresses) -> Config {
    let source = if addresses.v6_source { "2001:db8:1::5" } else { "10.0.1.5" };
    let listen = Listen { address: Some(addresses.front.ip()), port: Some(addresses.front.port()) };
    let sources = Share { addresses: vec![source.parse().expect("an address")], ports: 20_000..=20_999 };
    let seed = [0x1234_5678_9abc_def0, 0x0fed_cba9_8765_4321, 0xdead_beef_0bad_cafe, 0x5ca1_ab1e_7e57_ab1e];
    Config { max_connections: 64, ..Config::new(vec![listen], sources, seed) }
}

impl<C: Callbacks> Network<C> {
    pub(crate) fn new(
        config: Config,
        callbacks: C,
        addresses: &Addresses,
        habits: [Habits; 2],
        streams: [Vec<u8>; 2],
        seed: u64,
    ) -> Self {
        let [client_habits, server_habits] = habits;
        let [up, down] = streams;
        let nobody = SocketAddr::new(addresses.server.ip(), 1);
        Self {
            engine: Engine::new(config, callbacks, at(0)),
            client: Peer::new(client_habits, addresses.client, addresses.front, up, seed),
            server: Peer::new(server_habits, addresses.server, nobody, down, seed ^ 0xffff),
            faults: Faults::default(),
            now: 0,
            records: Vec::new(),
            counts: [0; 2],
            captured: None,
            queue: BTreeMap::new(),
            count: 0,
            random: seed.wrapping_mul(0xd129_0d3c_5b7f_5e45) | 1,
        }
    }

    pub(crate) fn connect(&mut self) {
        let packets = self.client.connect(self.now);
        self.post(Place::Engine(CLIENT_HOP), packets.iter().map(Packet::encode).collect());
    }

    /// Runs until both peers are done, or at most for `limit` milliseconds; says whether they are.
    pub(crate) fn run(&mut self, limit: u64) -> bool {
        self.connect();
        for _ in 0..2_000_000 {
            if self.client.is_done() && self.server.is_done() && self.queue.is_empty() {
                return true;
            }
            if self.is_reset() || !self.step(limit) {
                return false;
            }
        }
        false
    }

    pub(crate) fn is_reset(&self) -> bool {
        [&self.client, &self.server].iter().any(|peer| peer.phase == Phase::Reset)
    }

    /// The next thing that happens; false when nothing does before `limit`.
    pub(crate) fn step(&mut self, limit: u64) -> bool {
        let engine =
            self.engine.deadline().map(|at| at.as_nanos().div_ceil(1_000_000).saturating_sub(1_000_000));
        let packet = self.queue.keys().next().map(|(at, _)| *at);
        let timers = [engine, packet, self.client.deadline(), self.server.deadline()];
        let Some(next) = timers.into_iter().flatten().min().filter(|next| *next <= limit) else {
            return false;
        };
        self.now = self.now.max(next);
        if packet == Some(next) {
            if let Some((_, (place, bytes))) = self.queue.pop_first() {
                self.arrive(place, bytes);
            }
            return true;
        }
        self.engine.tick(at(self.now));
        self.drain();
        for place in [Place::Client, Place::Server] {
            let peer = if place == Place::Client { &mut self.client } else { &mut self.server };
            if peer.deadline().is_some_and(|at| at <= self.now) {
                let packets = peer.tick(self.now).iter().map(Packet::encode).collect();
                self.post(Place::Engine(to_hop(place)), packets);
            }
        }
        true
    }

    fn arrive(&mut self, place: Place, mut bytes: Vec<u8>) {
        match place {
            Place::Engine(from) => {
                self.counts[0] += 1;
                self.capture(0, &bytes);
                let fate = self.engine.handle(at(self.now), &mut bytes, from, Checksums::Verify);
                if let Fate::Forward { len, hop } = fate {
                    bytes.truncate(len);
                    self.counts[1] += 1;
                    self.capture(1, &bytes);
                    self.post(to_place(hop), vec![bytes]);
                }
                self.drain();
            }
            Place::Client | Place::Server => {
                let packet = Packet::decode(&bytes);
                let peer = if place == Place::Client { &mut self.client } else { &mut self.server };
                if peer.phase == Phase::Listen {
                    peer.remote = packet.src;
                }
                let packets = peer.take(self.now, &packet).iter().map(Packet::encode).collect();
                self.post(Place::Engine(to_hop(place)), packets);
            }
        }
    }

    fn drain(&mut self) {
        let mut packets = Vec::new();
        while let Some((bytes, hop)) = self.engine.poll() {
            packets.push((bytes.to_vec(), hop));
        }
        for (bytes, hop) in packets {
            self.counts[1] += 1;
            self.capture(1, &bytes);
            self.post(to_place(hop), vec![bytes]);
        }
        while let Some(record) = self.engine.poll_record() {
            self.records.push(record);
        }
    }

    fn capture(&mut self, way: usize, bytes: &[u8]) {
        let now = at(self.now).as_nanos();
        if let Some(captured) = &mut self.captured {
            captured[way].push((now, bytes.to_vec()));
        }
    }

    fn post(&mut self, place: Place, packets: Vec<Vec<u8>>) {
        for bytes in packets {
            let copies = match roll(&mut self.random) % 1000 {
                n if n < self.faults.lost => 0,
                n if n < self.faults.lost + self.faults.repeated => 2,
                _ => 1,
            };
            for _ in 0..copies {
                let late = roll(&mut self.random) % 1000 < self.faults.delayed;
                let delay = 2 + if late { roll(&mut self.random) % 30 } else { 0 };
                self.count += 1;
                self.queue.insert((self.now + delay, self.count), (place, bytes.clone()));
            }
        }
    }
}

fn to_place(hop: Hop) -> Place {
    match hop {
        CLIENT_HOP => Place::Client,
        SERVER_HOP => Place::Server,
        other => panic!("{other:?}"),
    }
}

fn to_hop(place: Place) -> Hop {
    match place {
        Place::Engine(hop) => hop,
        Place::Client => CLIENT_HOP,
        Place::Server => SERVER_HOP,
    }
}
