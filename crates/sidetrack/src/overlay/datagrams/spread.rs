//! Packets over subgraphs: sends this node's own packets, and relays and delivers those of others. The core decides
//! ([`sidetrack_core::overlay::spread`]).

use super::link::Link;
use super::receive::{deliver, link_to, note};
use super::{realtime, reliable, tolerant};
use crate::overlay::groups;
use crate::overlay::shared::Shared;
use crate::overlay::udp::Fate;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Frame, Protocol, Spread, Subgraph};
use sidetrack_core::overlay::service::{LinkKind, Service, Trust};
use sidetrack_core::overlay::spread::Dropped;
use sidetrack_sys::sync::lock;
use std::sync::atomic::Ordering::Relaxed;

/// Handles a copy that a neighbour has sent. `recovered`: it was lost on the link, and was sent again.
pub(super) fn arrived(shared: &Shared, link: &Link, mut packet: Spread, recovered: bool) {
    let datagrams = &shared.datagrams;
    let one_way_us = link.one_way_us.load(Relaxed);
    let step = {
        let mut relay = lock(&datagrams.relay);
        relay.handle(link.neighbour, &mut packet, one_way_us)
    };
    datagrams.services.came(&packet, &step);
    // The core has counted the copy, too.
    let is_ours = packet.protocol == Protocol::Ip && packet.is_for(shared.identity.own());
    let fate = match &step {
        Err(Dropped::Late) if is_ours => Some(Fate::Late),
        Ok(step) if is_ours && step.deliver && recovered => Some(Fate::Recovered),
        _ => None,
    };
    if let Some(fate) = fate {
        note(shared, packet.subgraph.source(), &packet.payload, fate);
    }
    let Ok(step) = step else { return };
    if step.deliver {
        deliver_here(shared, &packet);
    }
    if !step.next.is_empty() {
        forward(shared, packet, &step.next);
    }
}

fn deliver_here(shared: &Shared, packet: &Spread) {
    let datagrams = &shared.datagrams;
    let source = packet.subgraph.source();
    match packet.protocol {
        Protocol::EchoRequest => {
            let answer = {
                let mut own = lock(&datagrams.source);
                own.echo(packet.clone())
            };
            send_copies(shared, answer);
        }
        Protocol::EchoReply => datagrams.paths.answered(source, &packet.payload, shared.clock.now()),
        Protocol::Ip => deliver(shared, source, &packet.payload),
        Protocol::Group => groups::deliver(shared, source.into(), &packet.payload),
        Protocol::Session => {
            datagrams.counters.unreadable.fetch_add(1, Relaxed);
        }
    }
}

/// Sends a packet of this node. Returns the number of copies that were sent, or that wait for their proof; 0: it is dropped.
pub(super) fn send(
    shared: &Shared,
    service: &Service,
    subgraph: Subgraph,
    protocol: Protocol,
    payload: Vec<u8>,
) -> u64 {
    if service.is_reliable_flood() {
        return reliable::send(shared, subgraph.destination(), protocol, payload);
    }
    if service.trust == Trust::Tolerant {
        let nexts = subgraph.next(shared.identity.own()).count() as u64;
        return if tolerant::send(shared, service, subgraph, protocol, payload) { nexts } else { 0 };
    }
    let packet = {
        let mut own = lock(&shared.datagrams.source);
        own.packet(service, subgraph, protocol, payload)
    };
    send_copies(shared, packet)
}

fn send_copies(shared: &Shared, packet: Spread) -> u64 {
    let next: Vec<_> = packet.subgraph.next(shared.identity.own()).collect();
    let sent = forward(shared, packet, &next);
    shared.datagrams.counters.copies.fetch_add(sent, Relaxed);
    sent
}

/// Sends a copy to each of these nodes. Returns the number of copies that the system accepted.
fn forward(shared: &Shared, packet: Spread, next: &[NodeId]) -> u64 {
    let (bytes, graph) = (packet.payload.len(), shared.graph.load());
    let is_real_time = packet.kind == LinkKind::RealTime;
    let frame = Frame::Spread(Box::new(packet));
    let send = |next: NodeId| {
        // The subgraph may name a link that has gone, or never was.
        let Some(link) = link_to(shared, Some(next), bytes) else { return false };
        match &frame {
            Frame::Spread(packet) if is_real_time && graph.recovers(shared.identity.own(), next) => {
                realtime::send(shared, &link, packet.clone())
            }
            frame => shared.datagrams.send_on(&link, frame),
        }
    };
    let sent = next.iter().map(|next| u64::from(send(*next))).sum();
    if let Frame::Spread(packet) = &frame {
        shared.datagrams.services.sent(packet, sent);
    }
    sent
}
