//! The payload function of `crates/core/examples/engine_function.rs`, in the engine.

#[allow(dead_code, reason = "its main shows it, and is not run here")]
#[path = "../../examples/engine_function.rs"]
mod engine_function;

use crate::network::{Addresses, Faults, Network, SERVER_HOP, config};
use crate::transfers::{BAD, habits, stream};
use engine_function::Guard;
use sidetrack_core::flow::EndReason;

const WORD: &[u8] = b"FORBIDDEN WORD";

/// A connection through the function. The client's stream has the word at this place, if there is one.
fn run(seed: u64, word_at: Option<usize>, faults: Faults) -> (Network<Guard>, [Vec<u8>; 2], bool) {
    let addresses = Addresses::v4();
    let mut random = seed.wrapping_mul(0xa076_1d64_78bd_642f) | 1;
    let mut streams = [6000, 9000].map(|length| stream(&mut random, length));
    if let Some(at) = word_at {
        streams[0][at..at + WORD.len()].copy_from_slice(WORD);
    }
    let mut both = [habits(&mut random), habits(&mut random)];
    both[1].closes_last = true;
    let guard = Guard::new(addresses.server, SERVER_HOP, WORD);
    let mut network = Network::new(config(&addresses), guard, &addresses, both, streams.clone(), seed);
    network.faults = faults;
    let done = network.run(180_000);
    (network, streams, done)
}

#[test]
fn other_streams_pass_and_the_servers_is_in_capitals() {
    for (seed, faults) in (0..10).flat_map(|seed| [(seed, Faults::default()), (seed, BAD)]) {
        let (network, streams, done) = run(seed, None, faults);
        assert!(done && !network.is_reset(), "seed {seed}: {:?}", network.records);
        assert!(network.server.received == streams[0], "seed {seed}");
        assert!(network.client.received == streams[1].to_ascii_uppercase(), "seed {seed}");
    }
}

#[test]
fn the_word_ends_its_connection_wherever_segments_cut_it() {
    // Every cut of the smallest segments of the peers, and some elsewhere.
    let places = (530..550).chain([0, 1400, 6000 - WORD.len()]);
    for (seed, at) in (0..).zip(places) {
        let (mut network, _, done) = run(seed, Some(at), Faults::default());
        assert!(!done && network.is_reset(), "place {at}");
        while network.step(900_000) {}
        assert_eq!(network.records[0].reason, EndReason::PolicyDenied, "place {at}");
        let passed = network.server.received.windows(WORD.len()).any(|part| part == WORD);
        assert!(!passed, "place {at}");
        network.engine.callbacks_mut().forget(network.records[0].id);
    }
}
