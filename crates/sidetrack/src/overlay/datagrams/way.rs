//! The paths and subgraphs of this node's packets in datagrams, and whether datagrams arrive on them: UDP may be blocked
//! somewhere on the way, and no node there would report that. Each service to a node is tried on its own.

use super::pings::Pings;
use super::receive::forward;
use super::{reliable, spread};
use crate::overlay::shared::Shared;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Packet, Path, Protocol, SessionId, Spread, Subgraph, Timed, Vouched};
use sidetrack_core::overlay::node::echo_request;
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::overlay::service::{Dissemination, LinkKind, Service, Trust};
use sidetrack_core::time::Instant;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often a path is probed with an echo request while packets travel on it, or while no echo comes back.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// How often a path is probed while no packets are sent: idle links should carry little.
const PROBE_IDLE: Duration = Duration::from_secs(2);

/// How long an echo counts as proof for a path, and how long a packet counts as use of it.
const PROVEN: Duration = Duration::from_secs(3);

/// Most intrusion-tolerant services to one node.
const TOLERANT_MAX: usize = 16;

/// Echo requests whose answers count.
const ASKED: usize = 4;

/// Bytes of a packet frame without the nodes of its path and the payload: type, count, position, protocol, session.
const FRAME_BYTES: usize = 4 + SESSION_BYTES;
const SESSION_BYTES: usize = 16;
const NODE_BYTES: usize = 8;

/// Bytes of an echo request: its number.
pub(crate) const ECHO_BYTES: usize = 8;

/// The links that packets use.
#[derive(Clone)]
pub(super) enum Plan {
    /// One path, in frames that every version understands.
    Path(Path),
    /// A subgraph, and the dissemination that its packets name.
    Subgraph(Arc<Subgraph>, Dissemination),
}

impl Plan {
    /// Chooses the links of a service to a node.
    pub(super) fn new(graph: &Graph, own: NodeId, to: NodeId, service: &Service) -> Option<Self> {
        if service.spreads() {
            let subgraph = graph.subgraph(own, to, service)?;
            let named = graph.named(&subgraph, service.dissemination);
            Some(Self::Subgraph(Arc::new(subgraph), named))
        } else {
            graph.route(own, to, &BTreeSet::new()).map(|route| Self::Path(route.path))
        }
    }

    /// The dissemination that its packets name; see [`Graph::named`].
    pub(super) fn named(&self) -> Dissemination {
        match self {
            Self::Path(_) => Dissemination::Shortest,
            Self::Subgraph(_, named) => *named,
        }
    }

    /// Returns its links.
    pub(super) fn links(&self) -> Vec<(NodeId, NodeId)> {
        match self {
            Self::Path(path) => path.nodes().windows(2).map(|link| (link[0], link[1])).collect(),
            Self::Subgraph(subgraph, _) => subgraph.links().collect(),
        }
    }

    /// Sends an echo request with this number over its links, of `bytes` bytes. Returns false if it could not be sent.
    pub(super) fn echo(self, shared: &Shared, service: &Service, number: u64, bytes: usize) -> bool {
        let mut payload = number.to_be_bytes().to_vec();
        payload.resize(bytes.max(ECHO_BYTES), 0);
        match self {
            Self::Path(path) => forward(shared, echo_request(path, payload)),
            Self::Subgraph(subgraph, named) => {
                let subgraph = Subgraph::clone(&subgraph);
                let service = Service { dissemination: named, ..*service };
                spread::send(shared, &service, subgraph, Protocol::EchoRequest, payload) > 0
            }
        }
    }
}

/// What a session between two nodes is for: its id stands ahead of each of its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Use {
    /// Whole packets.
    Packets,
    /// Flows of UDP that this node has caught.
    Caught,
    /// Flows of UDP that this node delivers.
    Delivered,
}

/// The way of one service to one node.
#[derive(Default)]
struct Way {
    sessions: BTreeMap<Use, SessionId>,
    /// The best plan in this graph.
    plan: Option<(Arc<Graph>, Option<Plan>)>,
    /// The numbers of the latest echo requests.
    asked: VecDeque<u64>,
    probed: Option<Instant>,
    proven: Option<Instant>,
    used: Option<Instant>,
}

/// The service that each node gets: one path, in frames that every version understands.
const PLAIN: Service = Service::new(LinkKind::BestEffort);

#[derive(Default)]
struct Ways {
    ways: BTreeMap<(NodeId, Service), Way>,
    /// The number of the latest echo request.
    number: u64,
}

/// The ways to all nodes that accept packets in datagrams.
#[derive(Default)]
pub(crate) struct Paths {
    ways: Mutex<Ways>,
    /// The echo requests of operators.
    pub pings: Pings,
}

impl Paths {
    /// Allows packets of this use to a node, under a session that both ends know.
    pub(crate) fn enter(
        &self,
        to: NodeId,
        what: Use,
        session: SessionId,
        services: impl IntoIterator<Item = Service>,
    ) {
        let mut ways = lock(&self.ways);
        let services = services.into_iter().filter(|service| service.trust == Trust::Members);
        // Packets of a service that spreads take the plain way while their own way fails.
        for service in services.filter(Service::spreads).chain([PLAIN]) {
            ways.ways.entry((to, service)).or_default().sessions.insert(what, session);
        }
    }

    /// Stops packets of this use to a node.
    pub(crate) fn leave(&self, to: NodeId, what: Use) {
        lock(&self.ways).ways.retain(|(node, service), way| {
            if *node != to || service.trust == Trust::Tolerant {
                return true;
            }
            way.sessions.remove(&what);
            !way.sessions.is_empty()
        });
    }

    /// Allows packets of an intrusion-tolerant service to this node. They need no session: the node knows their source. Returns
    /// false if too many such services are in use: the other node may have chosen them.
    pub(crate) fn begin(&self, to: NodeId, service: Service) -> bool {
        let mut ways = lock(&self.ways);
        let of_node = |(node, service): &&(NodeId, Service)| *node == to && service.trust == Trust::Tolerant;
        let is_known = ways.ways.contains_key(&(to, service));
        if !is_known && ways.ways.keys().filter(of_node).count() >= TOLERANT_MAX {
            return false;
        }
        ways.ways.entry((to, service)).or_default();
        true
    }

    /// True if packets of this service arrive at this node.
    pub(crate) fn is_proven_by(&self, to: NodeId, service: &Service, now: Instant) -> bool {
        lock(&self.ways).ways.get(&(to, *service)).is_some_and(|way| way.is_proven(now))
    }

    /// Returns the time until an echo request is due.
    pub(crate) fn due(&self, now: Instant) -> Duration {
        let ways = lock(&self.ways);
        let due = ways.ways.values().map(|way| way.probe_at(now).since(now));
        due.min().unwrap_or(PROVEN)
    }

    /// Handles an echo that came back from this node.
    pub(crate) fn answered(&self, from: NodeId, payload: &[u8], now: Instant) {
        let Some(number) = payload.first_chunk().map(|bytes| u64::from_be_bytes(*bytes)) else { return };
        if self.pings.answered(from, number) {
            return;
        }
        let mut ways = lock(&self.ways);
        let mut asked =
            ways.ways.iter_mut().filter(|((to, _), way)| *to == from && way.asked.contains(&number));
        if let Some((_, way)) = asked.next() {
            way.proven = Some(now);
        }
    }

    /// A node has confirmed packets of its reliable flow.
    pub(super) fn confirmed(&self, to: NodeId, now: Instant) {
        let mut ways = lock(&self.ways);
        let ways =
            ways.ways.iter_mut().filter(|((node, service), _)| *node == to && service.is_reliable_flood());
        ways.for_each(|(_, way)| way.proven = Some(now));
    }

    /// True if datagrams arrive at this node on one path.
    pub(crate) fn is_proven(&self, to: NodeId, now: Instant) -> bool {
        lock(&self.ways).ways.get(&(to, PLAIN)).is_some_and(|way| way.is_proven(now))
    }

    /// Returns the services over subgraphs to this node, the links that their packets use, and whether they arrive.
    pub(crate) fn subgraphs(&self, to: NodeId, now: Instant) -> Vec<(Service, Option<Arc<Subgraph>>, bool)> {
        let ways = lock(&self.ways);
        let ways = ways.ways.iter().filter(|((node, service), _)| *node == to && service.spreads());
        ways.map(|((_, service), way)| {
            let subgraph = match &way.plan {
                Some((_, Some(Plan::Subgraph(subgraph, _)))) => Some(subgraph.clone()),
                _ => None,
            };
            (*service, subgraph, way.is_proven(now))
        })
        .collect()
    }
}

impl Way {
    fn is_proven(&self, now: Instant) -> bool {
        self.proven.is_some_and(|at| now.since(at) < PROVEN)
    }

    fn probe_at(&self, now: Instant) -> Instant {
        let is_used = self.used.is_some_and(|at| now.since(at) < PROVEN);
        let every = if is_used || !self.is_proven(now) { PROBE_EVERY } else { PROBE_IDLE };
        self.probed.map_or(now, |at| at + every)
    }

    fn plan(&mut self, shared: &Shared, to: NodeId, service: &Service) -> Option<Plan> {
        let graph = shared.graph.load_full();
        if self.plan.as_ref().is_none_or(|(known, _)| !Arc::ptr_eq(known, &graph)) {
            let plan = Plan::new(&graph, shared.identity.own(), to, service);
            self.plan = Some((graph, plan));
        }
        self.plan.as_ref()?.1.clone()
    }
}

/// Sends the echo requests that are due.
pub(super) fn probe(shared: &Shared, now: Instant) {
    let mut requests = Vec::new();
    {
        let mut ways = lock(&shared.datagrams.paths.ways);
        let Ways { ways, number } = &mut *ways;
        for ((to, service), way) in ways {
            if way.probe_at(now) > now {
                continue;
            }
            way.probed = Some(now);
            *number += 1;
            way.asked.truncate(ASKED - 1);
            way.asked.push_front(*number);
            requests.extend(way.plan(shared, *to, service).map(|plan| (*service, plan, *number)));
        }
    }
    // The lock is free again: an answer may come at once.
    for (service, plan, number) in requests {
        // A request that is not sent is not answered either.
        let _ = plan.echo(shared, &service, number, ECHO_BYTES);
    }
}

/// Sends an IP packet, or a message about flows of UDP, to a node. Returns the number of copies that were sent; 0: the packet is
/// dropped. `None`: datagrams do not arrive there. `shrink` gets the packet and the largest size that travels in one datagram.
pub(crate) fn send(
    shared: &Shared,
    (to, what): (NodeId, Use),
    service: &Service,
    mut packet: Vec<u8>,
    shrink: impl FnOnce(&mut [u8], usize),
) -> Option<u64> {
    let (plan, session) = {
        let mut ways = lock(&shared.datagrams.paths.ways);
        let now = shared.clock.now();
        let mut proven = |service: &Service| {
            let way = ways.ways.get_mut(&(to, *service))?;
            way.used = Some(now);
            if !way.is_proven(now) {
                return None;
            }
            Some((way.plan(shared, to, service)?, *way.sessions.get(&what)?))
        };
        let spread = if service.spreads() { proven(service) } else { None };
        spread.or_else(|| proven(&PLAIN))?
    };
    let (nexts, around): (Vec<NodeId>, _) = match &plan {
        Plan::Path(path) => (path.at(1).into_iter().collect(), FRAME_BYTES + NODE_BYTES * path.nodes().len()),
        Plan::Subgraph(subgraph, _) => {
            let numbers = if service.kind == LinkKind::RealTime { Timed::OVERHEAD_BYTES } else { 0 };
            let around = SESSION_BYTES + Spread::overhead(subgraph) + numbers;
            (subgraph.next(shared.identity.own()).collect(), around)
        }
    };
    let links = nexts.iter().filter_map(|next| shared.datagrams.link(*next));
    if let Some(room) = links.map(|link| link.frame_bytes()).min() {
        shrink(&mut packet, room.saturating_sub(around));
    }
    let payload = [&session.0[..], &packet].concat();
    Some(match plan {
        Plan::Path(path) => {
            forward(shared, Packet { path, position: 0, protocol: Protocol::Ip, payload }).into()
        }
        Plan::Subgraph(subgraph, named) => {
            let service = Service { dissemination: named, ..*service };
            spread::send(shared, &service, Subgraph::clone(&subgraph), Protocol::Ip, payload)
        }
    })
}

/// Sends a packet of this protocol to a node with a proof of its source. Returns the number of copies; 0: it is dropped. `shrink` is as for [`send`].
pub(crate) fn send_vouched(
    shared: &Shared,
    to: NodeId,
    service: &Service,
    protocol: Protocol,
    mut ip: Vec<u8>,
    shrink: impl FnOnce(&mut [u8], usize),
) -> u64 {
    if service.is_reliable_flood() {
        if let Some(way) = lock(&shared.datagrams.paths.ways).ways.get_mut(&(to, *service)) {
            way.used = Some(shared.clock.now());
        }
        shrink(&mut ip, reliable::room(shared, to));
        return reliable::send(shared, to, protocol, ip);
    }
    let plan = {
        let mut ways = lock(&shared.datagrams.paths.ways);
        ways.ways.get_mut(&(to, *service)).and_then(|way| {
            way.used = Some(shared.clock.now());
            way.plan(shared, to, service)
        })
    };
    let Some(Plan::Subgraph(subgraph, named)) = plan else { return 0 };
    let around = Vouched::OVERHEAD_BYTES + Spread::overhead(&subgraph);
    let nexts = subgraph.next(shared.identity.own());
    let rooms = nexts.filter_map(|next| Some(shared.datagrams.link(next)?.frame_bytes()));
    if let Some(room) = rooms.min() {
        shrink(&mut ip, room.saturating_sub(around));
    }
    let service = Service { dissemination: named, ..*service };
    spread::send(shared, &service, Subgraph::clone(&subgraph), protocol, ip)
}

/// Sends a message about flows of UDP to a node in the reliable flow of this node. Returns false if too many wait.
pub(crate) fn send_reliably(shared: &Shared, to: NodeId, message: Vec<u8>) -> bool {
    reliable::send(shared, to, Protocol::Session, message) > 0
}
