//! Packets over subgraphs: no input panics, a subgraph reversed twice is the same, and each of three nodes takes a packet
//! once at most and never sends it back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidetrack_core::overlay::frame::{Frame, Protocol};
use sidetrack_core::overlay::group::head::Head;
use sidetrack_core::overlay::spread::Relay;

fuzz_target!(|bytes: &[u8]| {
    let [from, own, bytes @ ..] = bytes else { return };
    let Ok(Some(Frame::Spread(packet))) = Frame::from_datagram(bytes) else { return };
    assert_eq!(Frame::Spread(packet.clone()).to_datagram(), bytes);
    let back = packet.subgraph.reversed();
    assert_eq!(back.reversed().links().count(), packet.subgraph.links().count());
    assert_eq!((back.source(), back.destination()), (packet.subgraph.destination(), packet.subgraph.source()));
    let nodes = packet.subgraph.nodes();
    let at = |index: u8| nodes[usize::from(index) % nodes.len()];
    let (from, own) = (at(*from), at(*own));
    let mut relay = Relay::new(own, nodes.iter().copied().collect());
    let mut first = (*packet).clone();
    if let Ok(step) = relay.handle(from, &mut first, 10) {
        assert!(!step.next.contains(&from) && !step.next.contains(&own));
        let is_for_us = match packet.protocol {
            Protocol::Group => Head::split(&packet.payload).is_some_and(|(head, ip)| {
                assert_eq!(head.payload(ip), packet.payload);
                nodes.iter().position(|node| *node == own).is_some_and(|index| head.deliverers.has(index))
            }),
            _ => packet.subgraph.destination() == own,
        };
        assert_eq!(step.deliver, is_for_us);
        assert!(relay.handle(from, &mut (*packet).clone(), 10).is_err(), "the second copy");
    }
});
