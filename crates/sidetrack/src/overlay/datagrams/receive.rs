//! The thread that receives datagrams.

use super::link::{Link, Route};
use super::{Datagrams, legs, realtime, reliable, spread, tolerant, way};
use crate::overlay::control::Event;
use crate::overlay::paced;
use crate::overlay::shared::Shared;
use crate::overlay::udp::Fate;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::datagram::{Header, OVERHEAD_BYTES, mtu};
use sidetrack_core::overlay::frame::{Frame, LinkKind, Packet, Protocol, SessionId};
use sidetrack_core::overlay::realtime::Input;
use sidetrack_sys::udp::batch::{BATCH, Batch};
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Most batches read from one socket before the next one has its turn.
const TURN: usize = 8;

/// How often the thread checks whether it must end.
const LOOK: Duration = Duration::from_millis(200);

/// How far sending may be ahead of a link's rate, as time: datagrams do not wait, they are dropped.
const BURST: Duration = Duration::from_millis(50);

/// Shortest time between two notes to the control thread that something came, nanoseconds.
const ALIVE_EVERY_NS: u64 = 15_000_000;

/// Receives until `stopped`.
pub(crate) fn run(shared: &Shared, stopped: &AtomicBool) {
    let datagrams = &shared.datagrams;
    let mut batch = Batch::new();
    let mut dice = Dice(shared.clock.now().as_nanos());
    while !stopped.load(Relaxed) {
        let ready = wait(datagrams, shared);
        for (number, socket) in datagrams.sockets.iter().enumerate().filter(|(at, _)| ready.contains(at)) {
            read(shared, number, socket, &mut batch, &mut dice);
        }
        tick(shared);
    }
}

/// Reads what has come to one socket: many datagrams with one system call.
fn read(shared: &Shared, number: usize, socket: &UdpSocket, batch: &mut Batch, dice: &mut Dice) {
    for _ in 0..TURN {
        let count = match batch.receive(socket) {
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            // An ICMP error about something we sent; the next datagram may be good.
            Err(_) => continue,
        };
        for at in 0..count {
            let (Some(from), Some(to)) = batch.addresses(at) else { continue };
            let route = Route { socket: number, to: from, from: to };
            batch.each(at, |datagram| take(shared, datagram, route, dice));
        }
        if count < BATCH {
            return;
        }
    }
}

/// Waits until a datagram came or a time-out is due. Returns the sockets to read.
fn wait(datagrams: &Datagrams, shared: &Shared) -> Vec<usize> {
    let now = shared.clock.now();
    let links = datagrams.all();
    let tasks = links
        .iter()
        .flat_map(|link| [Some(link.search_at()), link.recovery().deadline(), link.legs.deadline()]);
    let due = tasks
        .chain([tolerant::deadline(datagrams), reliable::deadline(datagrams)])
        .flatten()
        .map(|at| at.since(now))
        .min();
    let due = due.unwrap_or(LOOK).min(datagrams.paths.due(now)).min(LOOK);
    let limit = Timespec { tv_sec: 0, tv_nsec: due.subsec_nanos().max(1_000_000).into() };
    let mut sockets: Vec<_> =
        datagrams.sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    let count = sockets.len();
    if sockets.is_empty() {
        std::thread::park_timeout(due);
        return Vec::new();
    }
    sockets.push(PollFd::new(&datagrams.bell, PollFlags::IN));
    // A signal needs no reaction.
    let _ = poll(&mut sockets, Some(&limit));
    if !sockets[count].revents().is_empty() {
        datagrams.bell.heard();
    }
    sockets.truncate(count);
    let is_ready = |(at, socket): (usize, &PollFd<'_>)| (!socket.revents().is_empty()).then_some(at);
    sockets.iter().enumerate().filter_map(is_ready).collect()
}

fn tick(shared: &Shared) {
    let (datagrams, now) = (&shared.datagrams, shared.clock.now());
    for link in datagrams.all().into_iter().filter(|link| link.search_at() <= now) {
        for probe in link.search(now, mtu::Input::Tick) {
            datagrams.send_probe(&link, &probe);
        }
    }
    for link in datagrams.all() {
        legs::tick(shared, &link);
    }
    realtime::tick(shared, datagrams);
    tolerant::tick(shared);
    reliable::tick(shared);
    way::probe(shared, now);
}

/// Handles one datagram.
fn take(shared: &Shared, datagram: &mut [u8], route: Route, dice: &mut Dice) {
    let datagrams = &shared.datagrams;
    let counters = &datagrams.counters;
    let link = Header::split(datagram).and_then(|(header, _)| Some((header, datagrams.named(header.link)?)));
    let Some((header, link)) = link else {
        counters.unknown.fetch_add(1, Relaxed);
        return;
    };
    if dice.falls(datagrams.loss(link.neighbour).load(Relaxed)) {
        counters.lost_on_purpose.fetch_add(1, Relaxed);
        return;
    }
    let bytes = datagram.len().saturating_sub(OVERHEAD_BYTES);
    let sealed = datagram.get_mut(sidetrack_core::overlay::datagram::HEADER_BYTES..).unwrap_or_default();
    match link.open(header, sealed, route) {
        Ok(frame) => {
            counters.received.fetch_add(1, Relaxed);
            tell_alive(shared, &link);
            if let Some(frame) = frame {
                serve(shared, &link, frame, (bytes, route));
            }
        }
        Err(dropped) => datagrams.count(dropped),
    }
}

/// Tells the control thread that the neighbour is alive, also if its hellos are lost among much traffic.
fn tell_alive(shared: &Shared, link: &Link) {
    let now = shared.clock.now().as_nanos();
    if now.saturating_sub(link.alive_told.load(Relaxed)) > ALIVE_EVERY_NS {
        link.alive_told.store(now, Relaxed);
        // If the queue is full, the next datagram reports the same.
        let _ = shared.datagrams.control.try_send(Event::Alive(link.neighbour, link.number));
    }
}

fn serve(shared: &Shared, link: &Arc<Link>, frame: Frame, (bytes, route): (usize, Route)) {
    let datagrams = &shared.datagrams;
    match frame {
        Frame::Hello(hello) => {
            // If the control thread is that busy, it gets the next hello.
            let _ = datagrams.control.try_send(Event::Datagram(link.neighbour, link.number, hello));
        }
        Frame::Probe { number, .. } => {
            datagrams.send_on(link, &Frame::ProbeAck { number });
        }
        Frame::ProbeAck { number } => {
            if legs::has_passed(link, number) {
                for probe in link.search(shared.clock.now(), mtu::Input::Answered(number)) {
                    datagrams.send_probe(link, &probe);
                }
            }
        }
        Frame::Packet(packet) => pass(shared, link.neighbour, packet),
        Frame::Spread(_) | Frame::Timed(_) if datagrams.only_tolerant => {
            datagrams.counters.unvouched.fetch_add(1, Relaxed);
        }
        Frame::Vouched(packet) if packet.packet.kind == LinkKind::Reliable => {
            reliable::came(shared, link, *packet);
        }
        Frame::Holding(holding) => reliable::heard(shared, link, *holding),
        Frame::Vouched(packet) => tolerant::came(shared, link, *packet),
        Frame::Spread(packet) => spread::arrived(shared, link, *packet, false),
        Frame::Timed(timed) => realtime::came(shared, link, timed),
        Frame::Resend(resend) => {
            realtime::recover(shared, link, Input::Requested(resend));
        }
        Frame::LegHello { leg, hello } => legs::came(shared, link, leg, hello, route),
        Frame::Newest(newest) => {
            realtime::recover(shared, link, Input::Newest(newest));
        }
        frame @ (Frame::Paced(_) | Frame::PacedAck(_) | Frame::Offer(_)) => {
            paced::came(shared, link, frame, bytes);
        }
        // Other frames are not allowed in a datagram.
        _ => {
            datagrams.counters.unreadable.fetch_add(1, Relaxed);
        }
    }
}

/// Handles a packet: delivers it here, or forwards it to the next node of its path.
fn pass(shared: &Shared, from: NodeId, packet: Packet) {
    let (datagrams, own) = (&shared.datagrams, shared.identity.own());
    let is_on_path =
        packet.path.at(packet.position) == Some(own) && packet.path.before(packet.position) == Some(from);
    if !is_on_path {
        datagrams.counters.unreadable.fetch_add(1, Relaxed);
        return;
    }
    if packet.path.last() != own {
        forward(shared, packet);
        return;
    }
    match packet.protocol {
        Protocol::EchoRequest => {
            let path = packet.path.reversed();
            forward(shared, Packet { path, position: 0, protocol: Protocol::EchoReply, ..packet });
        }
        Protocol::EchoReply => {
            datagrams.paths.answered(packet.path.first(), &packet.payload, shared.clock.now());
        }
        Protocol::Ip => deliver(shared, packet.path.first(), &packet.payload),
        Protocol::Session | Protocol::Group => {
            datagrams.counters.unreadable.fetch_add(1, Relaxed);
        }
    }
}

/// Forwards a packet that is at `position` to the next node. Returns false if it is dropped.
pub(super) fn forward(shared: &Shared, mut packet: Packet) -> bool {
    packet.position = packet.position.saturating_add(1);
    let Some(link) = link_to(shared, packet.path.at(packet.position), packet.payload.len()) else {
        return false;
    };
    shared.datagrams.send_on(&link, &Frame::Packet(packet))
}

/// Returns the link to the next node for a frame with `bytes` of payload. `None`, and counts why, if the link is down or the
/// rate set for it does not allow the frame.
pub(super) fn link_to(shared: &Shared, next: Option<NodeId>, bytes: usize) -> Option<Arc<Link>> {
    let Some(next) = next.filter(|next| shared.link(*next).is_some()) else {
        shared.datagrams.counters.no_link.fetch_add(1, Relaxed);
        return None;
    };
    if !may_send(shared, next, bytes) {
        return None;
    }
    shared.datagrams.link(next)
}

/// Returns false, and counts it, if the rate set for the link to this node does not allow another frame now.
pub(super) fn may_send(shared: &Shared, next: NodeId, bytes: usize) -> bool {
    let counters = &shared.datagrams.counters;
    let shaper = shared.shapers.of(next);
    if !shaper.wait(BURST).is_zero() {
        counters.too_fast.fetch_add(1, Relaxed);
        return false;
    }
    shaper.spend(bytes);
    true
}

/// Delivers an IP packet, or a message about flows of UDP; there must be a session for it with its sender.
pub(super) fn deliver(shared: &Shared, origin: NodeId, payload: &[u8]) {
    let Some((session, packet)) = payload.split_first_chunk::<16>() else { return };
    if shared.udp.came(origin, SessionId(*session), packet) {
        return;
    }
    if let Some(packets) = &shared.packets {
        packets.deliver_datagram(shared, origin, SessionId(*session), packet);
    }
}

/// Notes what happened to a packet for this node, for the record of the flow of UDP that it belongs to.
pub(super) fn note(shared: &Shared, origin: NodeId, payload: &[u8], fate: Fate) {
    if let Some((session, message)) = payload.split_first_chunk::<16>() {
        shared.udp.note(origin, SessionId(*session), message, fate);
    }
}

/// Decides which datagrams are dropped if an operator has set a loss. Its quality does not matter (xorshift64).
struct Dice(u64);

impl Dice {
    fn falls(&mut self, ppm: u32) -> bool {
        if ppm == 0 {
            return false;
        }
        self.0 |= 1;
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % 1_000_000 < u64::from(ppm)
    }
}
