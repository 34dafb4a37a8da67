//! The links that packets to a group use: a pure function from the network and the members to subgraphs.
//!
//! | dissemination | links |
//! |---|---|
//! | shortest | the tree of the cheapest paths to all members |
//! | duplicate, graph, flood | the links that a packet to each member would use ([`super::super::redundancy`]), all together |
//!
//! Only nodes that announce [`Features::GROUPS`] are used.

use super::super::frame::{Dissemination, Features, SUBGRAPH_NODES_MAX, Subgraph};
use super::super::redundancy::{Link, links_of};
use super::super::route::Graph;
use super::super::service::Service;
use super::super::{NODES_MAX, NodeId};
use super::head::Deliverers;
use std::collections::BTreeSet;

/// The links of packets to a group, or to a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    /// The links.
    pub subgraph: Subgraph,
    /// The members that get the packet over these links.
    pub deliverers: Deliverers,
}

/// A part of the members that fits into one subgraph, while it grows.
#[derive(Default)]
struct Part {
    members: Vec<NodeId>,
    nodes: BTreeSet<NodeId>,
    links: BTreeSet<Link>,
}

impl Part {
    fn add(&mut self, member: NodeId, links: BTreeSet<Link>) {
        self.nodes.extend(links.iter().flat_map(|(from, to)| [*from, *to]));
        self.links.extend(links);
        self.members.push(member);
    }

    fn has_room_for(&self, links: &BTreeSet<Link>) -> bool {
        let more: BTreeSet<_> = links.iter().flat_map(|(from, to)| [*from, *to]).collect();
        self.nodes.union(&more).count() <= SUBGRAPH_NODES_MAX
    }

    fn branch(self, from: NodeId) -> Option<Branch> {
        let subgraph = Subgraph::new(from, *self.members.first()?, self.links)?;
        let mut deliverers = Deliverers::default();
        for (index, node) in subgraph.nodes().iter().enumerate() {
            if self.members.contains(node) {
                deliverers.add(index);
            }
        }
        Some(Branch { subgraph, deliverers })
    }
}

impl Graph {
    /// Returns the network of the nodes that understand packets to groups.
    #[must_use]
    pub fn of_groups(&self) -> Self {
        self.with_only(Features::SPREAD | Features::GROUPS)
    }

    /// Returns the links of packets of this service to these members, for a graph of [`Graph::of_groups`]. Members that no links
    /// lead to get nothing. There is more than one branch if the links have more nodes than a frame can name.
    pub fn branches(
        &self,
        from: NodeId,
        members: impl IntoIterator<Item = NodeId>,
        service: &Service,
    ) -> Vec<Branch> {
        let members: BTreeSet<_> =
            members.into_iter().filter(|member| *member != from).take(NODES_MAX).collect();
        let mut parts: Vec<Part> = Vec::new();
        for (member, links) in self.links_to_each(from, members, service) {
            match parts.last_mut() {
                Some(part) if part.has_room_for(&links) => part.add(member, links),
                _ => {
                    let mut part = Part::default();
                    part.add(member, links);
                    parts.push(part);
                }
            }
        }
        parts.into_iter().filter_map(|part| part.branch(from)).collect()
    }

    /// Returns the links to each member that is reached. Each list fits into a subgraph.
    fn links_to_each(
        &self,
        from: NodeId,
        members: BTreeSet<NodeId>,
        service: &Service,
    ) -> Vec<(NodeId, BTreeSet<Link>)> {
        if service.dissemination == Dissemination::Shortest {
            // One search for all, so that the paths make a tree: two paths of the same cost to two members do not part
            // and join again.
            let tree = self.cheapest_paths(from);
            let links = |member: NodeId| Some((member, links_of(&[tree.path(member)?])));
            return members.into_iter().filter_map(links).collect();
        }
        let links = |member: NodeId| {
            let subgraph = self.subgraph(from, member, service)?;
            Some((member, subgraph.links().collect()))
        };
        members.into_iter().filter_map(links).collect()
    }

    /// Returns the member of these that is cheapest to reach from a node, for a graph of [`Graph::of_groups`]. Of two that cost
    /// the same, the lower node. The node itself does not count.
    pub fn nearest(&self, from: NodeId, members: impl IntoIterator<Item = NodeId>) -> Option<NodeId> {
        self.by_distance(from, members).first().copied()
    }

    /// Returns the members of these that can be reached from a node, for a graph of [`Graph::of_groups`]: the cheapest one first. Of
    /// two that cost the same, the lower node is first. The node itself does not count.
    pub fn by_distance(&self, from: NodeId, members: impl IntoIterator<Item = NodeId>) -> Vec<NodeId> {
        let tree = self.cheapest_paths(from);
        let costs = members.into_iter().filter(|member| *member != from);
        let mut costs: Vec<_> = costs.filter_map(|member| Some((tree.cost_us(member)?, member))).collect();
        costs.sort_unstable();
        costs.into_iter().map(|(_, member)| member).collect()
    }
}
