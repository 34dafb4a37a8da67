//! Whole connections over links that lose, repeat and reorder: every byte arrives, once, in order, and every
//! connection ends with one record.

use crate::network::{Addresses, Faults, Network, SERVER_HOP, config};
use crate::peer::{Habits, roll};
use sidetrack_core::engine::{Callbacks, ConnectionId, Opening, Payload, Selection, State, Target};
use sidetrack_core::flow::{EndReason, Side};

/// What callbacks do to payload, so that the expected stream can be worked out without the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    /// Every byte is followed by a copy if it is below 64.
    Grow,
    /// Bytes below 64 are taken out.
    Shrink,
    /// Every byte is flipped.
    Flip,
    /// Chunks become empty, doubled or stay, by their first byte: not a function of the stream alone.
    Mixed,
}

impl Change {
    fn apply(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::None => bytes.to_vec(),
            Self::Grow => {
                bytes.iter().flat_map(|b| std::iter::repeat_n(*b, 1 + usize::from(*b < 64))).collect()
            }
            Self::Shrink => bytes.iter().copied().filter(|b| *b >= 64).collect(),
            Self::Flip => bytes.iter().map(|b| !b).collect(),
            Self::Mixed => match bytes.first().map(|b| b % 3) {
                Some(0) => Vec::new(),
                Some(1) => [bytes, bytes].concat(),
                _ => bytes.to_vec(),
            },
        }
    }
}

struct Choice {
    target: Target,
    change: [Change; 2],
    needs: usize,
    seen: [Vec<u8>; 2],
    changed: [Vec<u8>; 2],
}

impl Callbacks for Choice {
    fn select(&mut self, opening: &Opening<'_>) -> Selection {
        if opening.first.len() < self.needs && !opening.last {
            return Selection::Wait { wait_ms: 60 };
        }
        Selection::Server(self.target)
    }

    fn payload(&mut self, _: ConnectionId, from: Side, bytes: &[u8]) -> Payload {
        let at = usize::from(from == Side::Server);
        let changed = self.change[at].apply(bytes);
        self.seen[at].extend_from_slice(bytes);
        self.changed[at].extend_from_slice(&changed);
        if changed == bytes { Payload::Keep } else { Payload::Replace(changed) }
    }
}

pub(crate) fn stream(random: &mut u64, len: usize) -> Vec<u8> {
    (0..len).map(|_| (roll(random) >> 7) as u8).collect()
}

pub(crate) fn habits(random: &mut u64) -> Habits {
    Habits {
        mss: [536, 1200, 1400, 1460][(roll(random) % 4) as usize],
        stamps: !roll(random).is_multiple_of(3),
        sack: !roll(random).is_multiple_of(3),
        scale: [None, Some(0), Some(2), Some(7), Some(9)][(roll(random) % 5) as usize],
        buffer: [4000, 20_000, 65_535, 300_000][(roll(random) % 4) as usize],
        reads: [None, None, Some(3000)][(roll(random) % 3) as usize],
        flight: 1 + (roll(random) % 12) as usize,
        closes_last: false,
        ragged: roll(random).is_multiple_of(3),
    }
}

fn one(seed: u64, addresses: &Addresses, change: [Change; 2], faults: Faults) {
    let mut random = seed.wrapping_mul(0xa076_1d64_78bd_642f) | 1;
    let sizes = [0, 1, 100, 1460, 5000, 20_000, 60_000];
    let size = |random: &mut u64| sizes[(roll(random) % 7) as usize];
    let streams = [size(&mut random), size(&mut random)].map(|len| stream(&mut random, len));
    let mut both = [habits(&mut random), habits(&mut random)];
    match roll(&mut random) % 3 {
        0 => both[0].closes_last = true,
        1 => both[1].closes_last = true,
        _ => {}
    }
    let inspect = change != [Change::None; 2];
    let target = Target {
        inspect_client: inspect,
        inspect_server: inspect,
        ..Target::new(addresses.server, SERVER_HOP)
    };
    let needs = (roll(&mut random) % 3 * 2000) as usize;
    let choice = Choice { target, change, needs, seen: Default::default(), changed: Default::default() };
    let what = format!(
        "seed {seed}: {change:?} {faults:?} {both:?} {} up, {} down, {needs} first",
        streams[0].len(),
        streams[1].len()
    );
    let mut network = Network::new(config(addresses), choice, addresses, both, streams.clone(), seed);
    network.faults = faults;
    let done = network.run(180_000);
    let expected = if inspect { network.engine.callbacks_mut().changed.clone() } else { streams.clone() };
    assert!(
        done,
        "{what}: stuck at {} ms: server got {} of {}, client {} of {}, reset {}, {:?}",
        network.now,
        network.server.received.len(),
        expected[0].len(),
        network.client.received.len(),
        expected[1].len(),
        network.is_reset(),
        network.records,
    );
    let differ = |got: &[u8], wanted: &[u8]| {
        let first = got.iter().zip(wanted).position(|(a, b)| a != b);
        (got != wanted).then_some((first, got.len(), wanted.len()))
    };
    assert_eq!(differ(&network.server.received, &expected[0]), None, "{what}: client to server");
    assert_eq!(differ(&network.client.received, &expected[1]), None, "{what}: server to client");
    if inspect {
        assert!(
            network.engine.callbacks_mut().seen == streams,
            "{what}: a callback saw other bytes, or some twice"
        );
    }
    // Links may still lose the last acknowledgements; the peers are content, and time does the rest.
    while network.step(900_000) {}
    assert_eq!(network.records.len(), 1, "{what}: {:?}", network.records);
    let record = &network.records[0];
    assert_eq!(network.engine.connections(), 0, "{what}");
    if faults.lost == 0 {
        assert_eq!(record.reason, EndReason::Ok, "{what} {record:?}");
        let counted = [record.client_bytes, record.server_bytes];
        assert_eq!(counted, [streams[0].len() as u64, streams[1].len() as u64], "{what}");
        let ends = record.stamps.iter().rev().take(2).map(|stamp| stamp.state).collect::<Vec<_>>();
        assert!(ends.iter().all(|state| matches!(state, State::Closed | State::TimeWait)), "{what} {ends:?}");
    }
}

pub(crate) const BAD: Faults = Faults { lost: 30, repeated: 20, delayed: 100 };

/// How many seeds a test runs through: more by `ENGINE_SEEDS=10` (ten times as many).
fn seeds(usual: u64) -> u64 {
    usual * option_env!("ENGINE_SEEDS").and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[test]
fn clean_links() {
    for seed in 0..seeds(30) {
        one(seed, &Addresses::v4(), [Change::None; 2], Faults::default());
    }
}

#[test]
fn bad_links() {
    for seed in 0..seeds(50) {
        one(seed, &Addresses::v4(), [Change::None; 2], BAD);
    }
}

#[test]
fn ipv6_and_both_families() {
    let crossed = Addresses {
        client: "[2001:db8::1]:40000".parse().unwrap(),
        front: "[2001:db8::2]:80".parse().unwrap(),
        ..Addresses::v4()
    };
    for seed in 0..seeds(10) {
        one(seed, &Addresses::v6(), [Change::None; 2], BAD);
        one(seed, &crossed, [Change::None; 2], BAD);
    }
}

#[test]
fn changed_payload_on_clean_links() {
    for (n, change) in [Change::Grow, Change::Shrink, Change::Flip, Change::Mixed].into_iter().enumerate() {
        for seed in 0..seeds(6) {
            one(seed + 1000 * n as u64, &Addresses::v4(), [change, change], Faults::default());
        }
    }
}

#[test]
fn changed_payload_on_bad_links() {
    let changes = [Change::None, Change::Grow, Change::Shrink, Change::Flip, Change::Mixed];
    for seed in 0..seeds(40) {
        let up = changes[seed as usize % 5];
        let down = changes[seed as usize / 5 % 5];
        one(seed, &Addresses::v4(), [up, down], BAD);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = || {
        let target = Target::new(Addresses::v4().server, SERVER_HOP);
        let choice = Choice {
            target,
            change: [Change::None; 2],
            needs: 0,
            seen: Default::default(),
            changed: Default::default(),
        };
        let streams = [vec![7; 30_000], vec![9; 30_000]];
        let both = [Habits::default(), Habits::default()];
        let mut network = Network::new(config(&Addresses::v4()), choice, &Addresses::v4(), both, streams, 5);
        network.faults = BAD;
        assert!(network.run(100_000));
        (network.now, network.counts, network.records.clone())
    };
    assert_eq!(run(), run());
}
