//! Paths along which packets of this node travel in datagrams, and whether those arrive: somewhere on the path UDP may be
//! blocked, and nobody on it would say so.

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

/// How often a path is tried with an echo request while packets travel on it, or none has come back.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// How often it is while nobody sends anything: idle links say little.
const PROBE_IDLE: Duration = Duration::from_secs(2);

/// A path whose echo came back so long ago still counts; one that carried a packet so long ago is in use.
const PROVEN: Duration = Duration::from_secs(3);

/// Bytes of a packet frame besides the nodes of its path, and what it carries: type, count, position, protocol, session.
const FRAME_BYTES: usize = 4 + 16;
const NODE_BYTES: usize = 8;

/// The path to one node.
#[derive(Default)]
struct Way {
    session: Option<SessionId>,
    /// The best path in this graph.
    route: Option<(Arc<Graph>, Option<Path>)>,
    /// The latest echo request.
    number: u64,
    probed: Option<Instant>,
    proven: Option<Instant>,
    used: Option<Instant>,
}

/// See the module.
#[derive(Default)]
pub struct Paths {
    ways: Mutex<BTreeMap<NodeId, Way>>,
}

impl Paths {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Way>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Packets may be sent to this node, under the session that it has agreed to.
    pub fn enter(&self, to: NodeId, session: SessionId) {
        self.lock().insert(to, Way { session: Some(session), ..Way::default() });
    }

    /// They may no more.
    pub fn leave(&self, to: NodeId) {
        self.lock().remove(&to);
    }

    /// When an echo request is due.
    pub fn due(&self, now: Instant) -> Duration {
        let ways = self.lock();
        let due = ways.values().map(|way| way.probe_at(now).since(now));
        due.min().unwrap_or(PROVEN)
    }

    /// An echo came back from this node.
    pub fn answered(&self, from: NodeId, payload: &[u8], now: Instant) {
        let number = payload.first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
        if let Some(way) = self.lock().get_mut(&from)
            && number.is_some_and(|number| number <= way.number && number + 4 > way.number)
        {
            way.proven = Some(now);
        }
    }

    /// Whether datagrams arrive at this node.
    pub fn is_proven(&self, to: NodeId, now: Instant) -> bool {
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
pub fn probe(shared: &Shared, now: Instant) {
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

/// Sends an IP packet to a node; none: datagrams do not arrive there; false: this one is dropped. `shrink` is told how large a
/// packet may be to travel whole.
pub fn send(
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
