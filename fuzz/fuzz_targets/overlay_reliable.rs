//! Reliable flooding: frames that come one after the other, at any time and from any neighbour. No input panics, each flow to
//! this node is delivered in order and each message once, and what is kept stays bounded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::frame::{FLOW_WINDOW, Frame, HASH_BYTES, Hash, Protocol};
use sidetrack_core::overlay::tolerant::reliable::{FLOW_BYTES, Input, Machine, Output};
use sidetrack_core::overlay::tolerant::store::Rate;
use sidetrack_core::overlay::tolerant::{Epoch, Vouch};
use sidetrack_core::overlay::{Keys, NodeId, Signature};
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
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
    let mut machine = Machine::new(NodeId(2), 5, members.clone());
    let mut now = Instant::from_millis(1000);
    let epochs = |number: u32| members.iter().map(|node| (*node, Epoch { number, next: 0 })).collect();
    machine.handle(now, Input::Epochs(epochs(5)), &Coin);
    for neighbour in [1, 3, 4] {
        machine.handle(now, Input::Up(NodeId(neighbour), Rate(100_000), 20_000), &Coin);
    }
    let (mut rest, mut delivered) = (bytes, BTreeMap::new());
    // Each frame has a neighbour, a time in 100 µs, and a length before it.
    while let [from, later, high, low, more @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(more.len());
        let (frame, after) = more.split_at(length);
        rest = after;
        now = now + Duration::from_micros(u64::from(*later) * 100);
        let from = NodeId(u64::from(from % 5));
        match Frame::from_datagram(frame) {
            Ok(Some(Frame::Vouched(packet))) => machine.handle(now, Input::Message(from, *packet), &Coin),
            Ok(Some(Frame::Holding(holding))) => {
                assert_eq!(Frame::Holding(holding.clone()).to_datagram(), frame);
                machine.handle(now, Input::Holding(from, *holding), &Coin);
            }
            _ => match later % 4 {
                0 => machine.handle(now, Input::Down(from), &Coin),
                1 => machine.handle(now, Input::Up(from, Rate(u64::from(*later) * 1000), 100), &Coin),
                2 => {
                    let room = machine.room(from, frame.len()).min(3);
                    let messages = vec![(Protocol::Ip, frame.to_vec()); room];
                    let refused = machine.counts().blocked;
                    machine.handle(now, Input::Send(from, messages), &Coin);
                    assert_eq!(machine.counts().blocked, refused, "there was room");
                }
                _ => machine.handle(now, Input::Tick, &Coin),
            },
        }
        while let Some(output) = machine.poll() {
            match output {
                Output::Message(to, packet) => assert_ne!(to, packet.packet.subgraph.source()),
                Output::Deliver(packet) => {
                    let next = delivered.entry(packet.packet.subgraph.source()).or_insert(0);
                    assert_eq!(packet.packet.sequence, *next, "in order and once");
                    *next += 1;
                }
                Output::Holding(..) | Output::Confirmed(_) => {}
            }
        }
        let (messages, bytes) = machine.kept();
        assert!(messages <= 12 * FLOW_WINDOW as usize && bytes <= 12 * FLOW_BYTES);
    }
});
