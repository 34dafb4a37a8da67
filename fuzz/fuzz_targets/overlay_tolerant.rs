//! Packets with proofs: frames that come one after the other, at any time and from any neighbour. No input panics, no packet is
//! delivered twice, none goes back to the neighbour that it came from, and the stores stay bounded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::frame::{Frame, HASH_BYTES, Hash};
use sidetrack_core::overlay::tolerant::store::{PACKETS_MAX, Rate};
use sidetrack_core::overlay::tolerant::{Epoch, Input, Output, Relay, Vouch};
use sidetrack_core::overlay::{Keys, NodeId, Signature};
use sidetrack_core::time::Instant;
use std::collections::BTreeSet;
use std::time::Duration;

/// Accepts every second signature.
struct Coin;

impl Keys for Coin {
    fn sign(&self, _: &[u8]) -> Signature {
        Signature::NONE
    }

    fn verify(&self, _: NodeId, _: &[u8], signature: &Signature) -> bool {
        signature.0[0] & 1 == 0
    }
}

impl Vouch for Coin {
    fn digest(&self, bytes: &[u8]) -> Hash {
        let mut hash = [0; HASH_BYTES];
        bytes.iter().enumerate().for_each(|(at, byte)| hash[at % HASH_BYTES] ^= byte.rotate_left(at as u32 % 7));
        hash
    }
}

fuzz_target!(|bytes: &[u8]| {
    // Nodes 1 to 4; this one is 2. All have the epoch 5.
    let members: BTreeSet<_> = (1..=4).map(NodeId).collect();
    let mut relay = Relay::new(NodeId(2), 5, members.clone());
    let mut now = Instant::from_millis(1000);
    let epochs = members.iter().map(|node| (*node, Epoch { number: 5, next: 0 })).collect();
    relay.handle(now, Input::Epochs(epochs), &Coin);
    for neighbour in [1, 3, 4] {
        relay.handle(now, Input::Up(NodeId(neighbour), Rate(100_000)), &Coin);
    }
    let (mut rest, mut delivered) = (bytes, BTreeSet::new());
    // Each frame has a neighbour, a time in 100 µs, and a length before it.
    while let [from, later, high, low, more @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
        let (frame, after) = more.split_at(length);
        rest = after;
        now = now + Duration::from_micros(u64::from(*later) * 100);
        let from = NodeId(u64::from(from % 5));
        let Ok(Some(Frame::Vouched(packet))) = Frame::from_datagram(frame) else {
            relay.handle(now, Input::Down(from), &Coin);
            relay.handle(now, Input::Up(from, Rate(u64::from(*later) * 1000)), &Coin);
            continue;
        };
        assert_eq!(Frame::Vouched(packet.clone()).to_datagram(), frame);
        let key = (packet.packet.subgraph.source(), packet.packet.sequence);
        let came = relay.counts();
        relay.handle(now, Input::Came(from, *packet, 10), &Coin);
        let is_first = relay.counts().relayed + relay.counts().delivered.iter().sum::<u64>()
            > came.relayed + came.delivered.iter().sum::<u64>();
        while let Some(output) = relay.poll() {
            match output {
                Output::Send(to, copy) => {
                    let source = copy.packet.subgraph.source();
                    let is_this = is_first && (source, copy.packet.sequence) == key;
                    assert!(to != source && !(is_this && to == from), "back where it came from");
                }
                Output::Deliver(packet) => {
                    let key = (packet.packet.subgraph.source(), packet.packet.sequence);
                    assert!(delivered.insert(key), "delivered twice");
                }
            }
        }
        assert!(relay.waiting().0 <= 5 * PACKETS_MAX);
    }
});
