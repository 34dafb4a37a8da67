//! The paths of this node's packets in datagrams, and whether datagrams arrive: UDP may be blocked somewhere on a path,
//! and no node on it would report that.

use super::receive::forward;
use crate::overlay::shared::Shared;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{Packet, Path, Protocol, SessionId};
use sidetrack_core::overlay::node::echo_request;
use sidetrack_core::overlay::route::Graph;
use sidetrack_core::time::Instant;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a path is probed with an echo request while packets travel on it, or while no echo comes back.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// How often a path is probed while no packets are sent: idle links should carry little.
const PROBE_IDLE: Duration = Duration::from_secs(2);

/// How long an echo counts as proof for a path, and how long a packet counts as use of it.
const PROVEN: Duration = Duration::from_secs(3);

/// Bytes of a packet frame without the nodes of its path and the payload: type, count, position, protocol, session.
const FRAME_BYTES: usize = 4 + 16;
const NODE_BYTES: usize = 8;

/// The path to one node.
#[derive(Default)]
struct Way {
    session: Option<SessionId>,
    /// The best path in this graph.
    route: Option<(Arc<Graph>, Option<Path>)>,
    /// The number of the latest echo request.
    number: u64,
    probed: Option<Instant>,
    proven: Option<Instant>,
    used: Option<Instant>,
}

/// The paths to all nodes that accept packets in datagrams.
#[derive(Default)]
pub(crate) struct Paths {
    ways: Mutex<BTreeMap<NodeId, Way>>,
}

impl Paths {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Way>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allows packets to this node, under the session that it has accepted.
    pub(crate) fn enter(&self, to: NodeId, session: SessionId) {
        self.lock().insert(to, Way { session: Some(session), ..Way::default() });
    }

    /// Stops packets to this node.
    pub(crate) fn leave(&self, to: NodeId) {
        self.lock().remove(&to);
    }

    /// Returns the time until an echo request is due.
    pub(crate) fn due(&self, now: Instant) -> Duration {
        let ways = self.lock();
        let due = ways.values().map(|way| way.probe_at(now).since(now));
        due.min().unwrap_or(PROVEN)
    }

    /// Handles an echo that came back from this node.
    pub(crate) fn answered(&self, from: NodeId, payload: &[u8], now: Instant) {
        let number = payload.first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
        if let Some(way) = self.lock().get_mut(&from)
            && number.is_some_and(|number| number <= way.number && number + 4 > way.number)
        {
            way.proven = Some(now);
        }
    }

    /// True if datagrams arrive at this node.
    pub(crate) fn is_proven(&self, to: NodeId, now: Instant) -> bool {
        self.lock().get(&to).is_some_and(|way| way.is_proven(now))
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

    fn path(&mut self, shared: &Shared, to: NodeId) -> Option<Path> {
        let graph = shared.graph.load_full();
        if self.route.as_ref().is_none_or(|(known, _)| !Arc::ptr_eq(known, &graph)) {
            let route = graph.route(shared.identity.own(), to, &BTreeSet::new());
            self.route = Some((graph, route.map(|route| route.path)));
        }
        self.route.as_ref()?.1.clone()
    }
}

/// Sends the echo requests that are due.
pub(super) fn probe(shared: &Shared, now: Instant) {
    let mut requests = Vec::new();
    for (to, way) in &mut *shared.datagrams.paths.lock() {
        if way.probe_at(now) > now {
            continue;
        }
        way.probed = Some(now);
        way.number += 1;
        if let Some(path) = way.path(shared, *to) {
            requests.push(echo_request(path, way.number.to_be_bytes().to_vec()));
        }
    }
    for request in requests {
        forward(shared, request);
    }
}

/// Sends an IP packet to a node. None: datagrams do not arrive there. False: the packet is dropped. `shrink` gets the
/// packet and the largest size that travels in one datagram.
pub(crate) fn send(
    shared: &Shared,
    to: NodeId,
    mut ip: Vec<u8>,
    shrink: impl FnOnce(&mut [u8], usize),
) -> Option<bool> {
    let (path, session) = {
        let mut ways = shared.datagrams.paths.lock();
        let way = ways.get_mut(&to)?;
        let now = shared.clock.now();
        way.used = Some(now);
        if !way.is_proven(now) {
            return None;
        }
        (way.path(shared, to)?, way.session?)
    };
    if let Some(link) = path.at(1).and_then(|next| shared.datagrams.link(next)) {
        let around = FRAME_BYTES + NODE_BYTES * path.nodes().len();
        shrink(&mut ip, link.frame_bytes().saturating_sub(around));
    }
    let payload = [&session.0[..], &ip].concat();
    Some(forward(shared, Packet { path, position: 0, protocol: Protocol::Ip, payload }))
}
