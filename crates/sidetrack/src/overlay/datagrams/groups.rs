//! Sends this node's packets to groups. The core works out the links ([`sidetrack_core::overlay::group::plan`]); they are kept
//! until the network or the members change.

use super::spread;
use crate::overlay::shared::Shared;
use sidetrack_core::overlay::NodeId;
use sidetrack_core::overlay::frame::{
    Features, LinkKind, PACKET_MAX, Protocol, Spread, Subgraph, Timed, Vouched,
};
use sidetrack_core::overlay::group::head::Head;
use sidetrack_core::overlay::group::plan::Branch;
use sidetrack_core::overlay::group::{GroupName, Groups};
use sidetrack_core::overlay::route::{Graph, Tree};
use sidetrack_core::overlay::service::{Delivery, Service, Trust};
use sidetrack_sys::sync::lock;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A group, how its packets travel, and the one member that gets them; `None`: all members.
type Key = (GroupName, Service, Option<NodeId>);

/// The links of packets to groups, in one state of the network. There are at most as many as configured services to groups,
/// times the nodes.
#[derive(Default)]
pub(crate) struct Plans {
    known: Option<Known>,
}

/// What is known in one state of the network.
struct Known {
    graph: Arc<Graph>,
    groups: Arc<Groups>,
    /// The network of the nodes that know groups.
    network: Graph,
    /// The cheapest paths in it.
    tree: Tree,
    branches: BTreeMap<Key, Arc<[Branch]>>,
}

impl Plans {
    /// Returns what is known now. It starts anew if the network or the members have changed.
    fn now(&mut self, shared: &Shared) -> &mut Known {
        let (graph, groups) = (shared.graph.load_full(), shared.groups.load_full());
        let known = self
            .known
            .take()
            .filter(|known| Arc::ptr_eq(&known.graph, &graph) && Arc::ptr_eq(&known.groups, &groups));
        self.known.insert(known.unwrap_or_else(|| {
            let network = graph.of_groups();
            let tree = network.cheapest_paths(shared.identity.own());
            Known { graph, groups, network, tree, branches: BTreeMap::new() }
        }))
    }
}

/// Returns the member of a group that gets a packet: `kept` if it is still there, else the nearest one. This node itself counts
/// if `and_here`, and is the nearest one then.
pub(crate) fn nearest(
    shared: &Shared,
    group: &GroupName,
    kept: Option<NodeId>,
    and_here: bool,
) -> Option<NodeId> {
    let own = shared.identity.own();
    if and_here && shared.member.has_joined(group) {
        return Some(own);
    }
    let mut plans = lock(&shared.datagrams.plans);
    let Known { groups, network, tree, .. } = plans.now(shared);
    let is_there = |node: &NodeId| groups.has(group, *node) && tree.cost_us(*node).is_some();
    kept.filter(is_there).or_else(|| network.nearest(own, groups.members(group)))
}

/// Returns the other members of a group that can be reached, the nearest one first.
pub(crate) fn by_distance(shared: &Shared, group: &GroupName) -> Vec<NodeId> {
    let mut plans = lock(&shared.datagrams.plans);
    let Known { groups, network, .. } = plans.now(shared);
    network.by_distance(shared.identity.own(), groups.members(group))
}

/// Sends an IP packet to all members of a group, or to this one. Returns the number of copies that were sent. `shrink` gets the packet
/// and the largest size that travels in one datagram.
pub(crate) fn send_to_group(
    shared: &Shared,
    (group, to): (&GroupName, Option<NodeId>),
    service: &Service,
    mut ip: Vec<u8>,
    shrink: impl FnOnce(&mut [u8], usize),
) -> u64 {
    let own = shared.identity.own();
    let branches = {
        let mut plans = lock(&shared.datagrams.plans);
        let Known { groups, network, branches, .. } = plans.now(shared);
        let plan = || {
            let members = to.map_or_else(|| groups.members(group).collect(), |member| vec![member]);
            branches_of(network, own, members, service)
        };
        branches.entry((group.clone(), *service, to)).or_insert_with(plan).clone()
    };
    let delivery = if to.is_some() { Delivery::Nearest } else { Delivery::Group };
    let heads: Vec<_> = branches
        .iter()
        .map(|Branch { subgraph, deliverers }| {
            (subgraph, Head { delivery, deliverers: *deliverers, group: group.clone() })
        })
        .collect();
    let room = heads.iter().filter_map(|(subgraph, head)| room(shared, service, subgraph, head)).min();
    if let Some(room) = room {
        shrink(&mut ip, room);
    }
    let mut sent = 0;
    for (subgraph, head) in heads {
        let payload = head.payload(&ip);
        let fits = payload.len() <= PACKET_MAX;
        if fits {
            sent += spread::send(shared, service, Subgraph::clone(subgraph), Protocol::Group, payload);
        }
    }
    sent
}

/// Returns the links to these members.
fn branches_of(network: &Graph, own: NodeId, members: Vec<NodeId>, service: &Service) -> Arc<[Branch]> {
    if service.trust == Trust::Members {
        return network.branches(own, members, service).into();
    }
    // A proof has one destination, so each member gets a packet of its own: no other node decides who has it.
    let knows = |member: &NodeId| network.features(*member) & Features::TOLERANT_FLOWS != 0;
    let members = members.into_iter().filter(knows);
    members.flat_map(|member| network.branches(own, [member], service)).collect()
}

/// Returns the largest IP packet that travels in one datagram on the first links. `None`: no first link is up.
fn room(shared: &Shared, service: &Service, subgraph: &Subgraph, head: &Head) -> Option<usize> {
    let numbers = if service.kind == LinkKind::RealTime { Timed::OVERHEAD_BYTES } else { 0 };
    let proof = if service.trust == Trust::Tolerant { Vouched::OVERHEAD_BYTES } else { 0 };
    let around = head.payload(&[]).len() + Spread::overhead(subgraph) + numbers + proof;
    let links = subgraph.next(shared.identity.own()).filter_map(|next| shared.datagrams.link(next));
    links.map(|link| link.frame_bytes()).min().map(|bytes| bytes.saturating_sub(around))
}
