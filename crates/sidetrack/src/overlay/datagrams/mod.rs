//! Datagrams between neighbours, in addition to the connections: frequent hellos, and the best-effort kind of link.
//!
//! A sending thread seals a datagram and gives it to the socket itself, so that a hello does not wait in a queue of ours.
//! One thread receives.

mod groups;
mod legs;
mod link;
mod pings;
mod realtime;
mod receive;
mod reliable;
mod seal;
mod services;
mod spread;
mod tolerant;
mod train;
mod way;

pub(super) use groups::{Plans, by_distance, nearest, send_to_group};
pub(super) use legs::{Ends, candidates};
pub(super) use link::{Link, Route};
pub(super) use pings::{Pinged, links, ping};
pub(super) use realtime::Bell;
pub(super) use realtime::{Totals, recover};
pub(super) use receive::run;
pub(super) use reliable::copies as reliable_copies;
pub(super) use seal::{LABEL, MATERIAL_BYTES};
pub(super) use services::{Counts as ServiceCounts, Services};
pub(super) use train::Train;
pub(super) use way::{ECHO_BYTES, Paths, Use, send, send_reliably, send_vouched};

use super::control::Event;
use super::paced::{Lane, Lanes};
use crate::config;
use crate::live::Clock;
use crate::steer::OWN_MARK;
use legs::{Announced, LinkLegs};
use link::Dropped;
use reliable::Flows;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::datagram::{OVERHEAD_BYTES, mtu};
use sidetrack_core::overlay::frame::Frame;
use sidetrack_core::overlay::service::Trust;
use sidetrack_core::overlay::spread::{Counts, Relay, Source};
use sidetrack_core::overlay::tolerant as core;
use sidetrack_core::overlay::tolerant::reliable::Counts as FlowCounts;
use sidetrack_sys::sync::{lock, read, write};
use sidetrack_sys::{sockopt, udp};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};
use tokio::sync::mpsc;
use tolerant::Tolerant;

/// Wanted size of a socket's buffer, for datagrams that come while the thread is busy, bytes.
const BUFFER_BYTES: usize = 4 << 20;

/// Counts of datagrams.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Received and valid.
    pub received: AtomicU64,
    /// Given to the system.
    pub sent: AtomicU64,
    /// Not accepted by the system, or for a neighbour with an unknown address.
    pub unsent: AtomicU64,
    /// Received for a link that is not open.
    pub unknown: AtomicU64,
    /// Received with a wrong seal.
    pub forged: AtomicU64,
    /// Received for the second time.
    pub replayed: AtomicU64,
    /// From a neighbour, but not a valid frame, or on a path that does not lead here.
    pub unreadable: AtomicU64,
    /// Relayed packets that were dropped because the next link is down.
    pub no_link: AtomicU64,
    /// Packets dropped because they exceeded the rate that an operator has set.
    pub too_fast: AtomicU64,
    /// Received on another leg before; expected where a neighbour sends on all legs.
    pub leg_copies: AtomicU64,
    /// Dropped because an operator has set a loss.
    pub lost_on_purpose: AtomicU64,
    /// Packets over subgraphs without a proof of their source, where `[overlay] trust` demands one.
    pub unvouched: AtomicU64,
    /// Copies that were sent of this node's own packets over subgraphs.
    pub copies: AtomicU64,
}

/// The links by the name in their datagrams, and by neighbour.
#[derive(Default)]
struct Links {
    by_name: BTreeMap<u32, Arc<Link>>,
    by_node: BTreeMap<NodeId, Arc<Link>>,
}

/// The sockets for datagrams, and the links that use them.
pub(super) struct Datagrams {
    own: NodeId,
    sockets: Vec<UdpSocket>,
    links: RwLock<Links>,
    control: mpsc::Sender<Event>,
    clock: Clock,
    /// Datagrams are sent on all legs of a link that are up.
    all_legs: bool,
    /// Our addresses to send from.
    uplinks: Vec<IpAddr>,
    /// What connections know of legs.
    pub legs: Announced,
    /// Counts of datagrams.
    pub counters: Counters,
    /// Paths of this node's own packets.
    pub paths: Paths,
    /// The links of this node's packets to groups.
    pub plans: Mutex<Plans>,
    /// Counts of real-time links.
    pub real_time: Totals,
    /// Counts of packets over subgraphs, by service.
    pub services: Services,
    bell: Bell,
    /// Losses that an operator has set, by neighbour, parts per million.
    losses: Mutex<BTreeMap<NodeId, Arc<AtomicU32>>>,
    /// Numbers this node's packets over subgraphs.
    source: Mutex<Source>,
    /// Relays and receives packets over subgraphs.
    relay: Mutex<Relay>,
    /// What paced links share.
    pub lanes: Lanes,
    /// Relays and receives packets with proofs of their source.
    tolerant: Tolerant,
    /// Keeps and passes on the packets of reliable flows.
    flows: Flows,
    /// Packets without a proof are dropped.
    only_tolerant: bool,
}

/// Bytes of the headers of IP and UDP before a datagram.
const HEADERS_V4: usize = 20 + 8;
const HEADERS_V6: usize = 40 + 8;

/// Binds the sockets for datagrams: one with the same port as each listener, and one of each address family for
/// neighbours that we dial.
pub(super) fn bind(
    listeners: &[SocketAddr],
    dialled: impl Iterator<Item = SocketAddr>,
    mut given: impl FnMut(SocketAddr) -> Option<UdpSocket>,
) -> Vec<UdpSocket> {
    let mut addresses = listeners.to_vec();
    for dialled in dialled {
        let any: IpAddr =
            if dialled.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let any = SocketAddr::new(any, 0);
        if !addresses.contains(&any) {
            addresses.push(any);
        }
    }
    let mut bind = |address| given(address).map_or_else(|| bind_one(address), Ok);
    let bound = addresses.into_iter().map(|address| (address, bind(address)));
    bound
        .filter_map(|(address, socket)| {
            socket
                .inspect_err(|error| {
                    tracing::warn!(%address, %error, "no datagrams here: links that fall silent are noticed late");
                })
                .ok()
        })
        .collect()
}

fn bind_one(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = udp::bind_family(address)?;
    sockopt::set_dont_fragment(&socket, true)?;
    sockopt::set_receive_buffer(&socket, BUFFER_BYTES)?;
    sockopt::set_send_buffer(&socket, BUFFER_BYTES)?;
    udp::batch::receive_trains(&socket);
    // Without the right to set marks, the node cannot catch packets either, so its datagrams need no mark.
    match sockopt::set_mark(&socket, OWN_MARK.value) {
        Err(error) if error.kind() != io::ErrorKind::PermissionDenied => Err(error),
        _ => Ok(socket),
    }
}

impl Datagrams {
    /// Returns the state for these sockets.
    ///
    /// # Errors
    /// Fails if the system provides no descriptor.
    pub(super) fn new(
        own: NodeId,
        members: BTreeSet<NodeId>,
        sockets: Vec<UdpSocket>,
        control: mpsc::Sender<Event>,
        clock: Clock,
        lanes: Lanes,
        (trust, tolerant_rate): (Trust, u64),
    ) -> io::Result<Self> {
        // 0 means several destinations.
        let epoch = u32::from_be_bytes(sidetrack_sys::random::bytes()).max(1);
        let tolerant = Tolerant::new(own, epoch, members.clone(), tolerant_rate);
        let flows = Flows::new(own, epoch, members.clone(), tolerant_rate);
        Ok(Self {
            own,
            sockets,
            links: RwLock::default(),
            control,
            clock,
            all_legs: false,
            uplinks: Vec::new(),
            legs: Announced::default(),
            counters: Counters::default(),
            paths: Paths::default(),
            losses: Mutex::default(),
            source: Mutex::new(Source::new(epoch)),
            relay: Mutex::new(Relay::new(own, members)),
            plans: Mutex::default(),
            real_time: Totals::default(),
            services: Services::default(),
            bell: Bell::new()?,
            lanes,
            tolerant,
            flows,
            only_tolerant: trust == Trust::Tolerant,
        })
    }

    /// Returns the counts of packets with proofs, and how many of them wait with how many bytes.
    pub(super) fn tolerant_counts(&self) -> (core::Counts, (usize, usize)) {
        self.tolerant.counts()
    }

    /// Returns the counts of reliable flows, and how many of their packets are kept with how many bytes.
    pub(super) fn flow_counts(&self) -> (FlowCounts, (usize, usize)) {
        self.flows.counts()
    }

    /// Returns the epoch of this node's packets, and the number of the next one.
    pub(super) fn numbering(&self) -> (u32, u64) {
        let source = lock(&self.source);
        (source.epoch(), source.next())
    }

    /// Adds what the configuration says about legs.
    pub(super) fn with_legs(self, overlay: &config::Overlay) -> Self {
        Self { all_legs: overlay.all_legs, uplinks: overlay.uplinks.clone(), ..self }
    }

    /// Returns the counts of packets over subgraphs.
    pub(super) fn spread_counts(&self) -> Counts {
        lock(&self.relay).counts()
    }

    /// Adds the link of a new control connection. `material` is the secret that both ends have from its handshake.
    /// `addresses` are those of the neighbour. If we `dialled` it, they are the legs of the link, each with each of our uplinks.
    pub(super) fn enter(
        &self,
        neighbour: NodeId,
        number: u64,
        material: &[u8; MATERIAL_BYTES],
        (addresses, dialled): (&[SocketAddr], bool),
    ) {
        let Some(directions) = seal::directions(self.own, neighbour, material) else { return };
        let legs = candidates(&self.uplinks, addresses);
        let routes: Vec<_> = legs.into_iter().filter_map(|(from, to)| self.route_to(from, to)).collect();
        let legs = LinkLegs::new(dialled.then_some(&routes[..]));
        let route = routes.first().copied();
        let now = self.clock.now();
        let lane = self.lanes.rate_now(neighbour).map(|rate| {
            let around = OVERHEAD_BYTES + self.headers(addresses.first().copied());
            Lane::new(rate, around, self.own < neighbour, now)
        });
        let link = Arc::new(Link::new(neighbour, number, directions, (route, legs), lane, now));
        let old = {
            let mut links = write(&self.links);
            let old = links.by_node.insert(neighbour, link.clone());
            if let Some(old) = &old {
                links.by_name.remove(&old.name());
            }
            links.by_name.insert(link.name(), link);
            old
        };
        if let Some(old) = old {
            self.lanes.ended(&old, now);
        }
        self.lanes.began();
    }

    /// Returns the bytes of the headers before a datagram to this address. While it is unknown, the longer ones that our
    /// sockets can send count.
    fn headers(&self, address: Option<SocketAddr>) -> usize {
        let is_v4 = |socket: &UdpSocket| socket.local_addr().is_ok_and(|own| own.is_ipv4());
        let is_v4 = address.map_or_else(|| self.sockets.iter().all(is_v4), |to| to.is_ipv4());
        if is_v4 { HEADERS_V4 } else { HEADERS_V6 }
    }

    /// Returns the route to a neighbour that we dial. It uses the last socket of the address family, which is bound to
    /// any free port.
    fn route_to(&self, from: Option<IpAddr>, to: SocketAddr) -> Option<Route> {
        let fits = |socket: &UdpSocket| socket.local_addr().is_ok_and(|own| own.is_ipv4() == to.is_ipv4());
        let socket = self.sockets.iter().rposition(fits)?;
        let any: IpAddr =
            if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        Some(Route { socket, to, from: from.unwrap_or(any) })
    }

    /// Removes the link, because the control connection has ended.
    pub(super) fn leave(&self, neighbour: NodeId) {
        let old = {
            let mut links = write(&self.links);
            let old = links.by_node.remove(&neighbour);
            if let Some(old) = &old {
                links.by_name.remove(&old.name());
            }
            old
        };
        if let Some(old) = old {
            self.lanes.ended(&old, self.clock.now());
        }
        self.forget_legs(neighbour);
    }

    /// Returns the link to this neighbour.
    pub(super) fn link(&self, neighbour: NodeId) -> Option<Arc<Link>> {
        let links = read(&self.links);
        links.by_node.get(&neighbour).cloned()
    }

    fn named(&self, name: u32) -> Option<Arc<Link>> {
        let links = read(&self.links);
        links.by_name.get(&name).cloned()
    }

    /// Returns all links.
    pub(super) fn all(&self) -> Vec<Arc<Link>> {
        let links = read(&self.links);
        links.by_node.values().cloned().collect()
    }

    /// Drops this share of what comes from the neighbour, parts per million: for tests, like `setlink` of Spines.
    pub(super) fn set_loss(&self, neighbour: NodeId, ppm: u32) {
        self.loss(neighbour).store(ppm.min(1_000_000), Relaxed);
    }

    /// Returns the share that [`Datagrams::set_loss`] has set.
    pub(super) fn loss(&self, neighbour: NodeId) -> Arc<AtomicU32> {
        let mut losses = lock(&self.losses);
        losses.entry(neighbour).or_default().clone()
    }

    /// Sends a frame to a neighbour. Returns false if its address is unknown or the system did not accept all of it.
    pub(super) fn send(&self, to: NodeId, frame: &Frame) -> bool {
        self.link(to).is_some_and(|link| self.send_on(&link, frame))
    }

    fn send_on(&self, link: &Link, frame: &Frame) -> bool {
        let legs = link.legs.chosen();
        let sent = match &legs[..] {
            [] => link.route().is_some_and(|route| self.give_all(link, route, &link.seal(frame))),
            [route] => self.give_all(link, *route, &link.seal(frame)),
            // The same datagrams on each leg: the neighbour drops the second copy by its number.
            legs => {
                let datagrams = link.seal(frame);
                // All of them, also after one that took it.
                legs.iter().filter(|route| self.give_all(link, **route, &datagrams)).count() > 0
            }
        };
        let counter = if sent { &self.counters.sent } else { &self.counters.unsent };
        counter.fetch_add(1, Relaxed);
        sent
    }

    /// Sends a frame on one leg.
    fn send_over(&self, link: &Link, route: Route, frame: &Frame) {
        let sent = self.give_all(link, route, &link.seal(frame));
        let counter = if sent { &self.counters.sent } else { &self.counters.unsent };
        counter.fetch_add(1, Relaxed);
    }

    fn give_all(&self, link: &Link, route: Route, datagrams: &[Vec<u8>]) -> bool {
        datagrams.iter().all(|datagram| self.give(link, route, datagram).is_ok())
    }

    fn give(&self, link: &Link, route: Route, datagram: &[u8]) -> io::Result<()> {
        let socket = self.sockets.get(route.socket).ok_or(io::ErrorKind::NotFound)?;
        if let Some(lane) = &link.lane {
            let headers = if route.to.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
            lane.spend(datagram.len() + headers);
        }
        let given = udp::send(socket, datagram, route.to, route.from);
        if given.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE)) {
            // The search must learn of the limit. It returns its next probes, which are sent at once.
            for probe in link.search(self.clock.now(), mtu::Input::TooLarge(datagram.len())) {
                self.send_probe(link, &probe);
            }
        }
        given.map(drop)
    }

    fn count(&self, dropped: Dropped) {
        let counter = match dropped {
            Dropped::Forged => &self.counters.forged,
            Dropped::Replayed => &self.counters.replayed,
            Dropped::Copy => &self.counters.leg_copies,
            Dropped::Unreadable => &self.counters.unreadable,
        };
        counter.fetch_add(1, Relaxed);
    }
}
