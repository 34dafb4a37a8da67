//! The memberships of groups in a node: a second link state beside that of links, for neighbours that know groups.

use super::{Node, Output};
use crate::overlay::disseminate::{Disseminator, Drops, Input, Output as Flood};
use crate::overlay::frame::{Features, Frame, Membership};
use crate::overlay::group::Groups;
use crate::overlay::{Keys, NodeId};
use crate::time::Instant;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The memberships of all nodes. A node of an older version has none.
#[derive(Clone, Debug, Default)]
pub(super) struct Members {
    state: Option<Disseminator<Membership>>,
    /// The neighbours that get them: their links are up, and they know groups.
    told: BTreeSet<NodeId>,
    groups: Arc<Groups>,
}

impl Members {
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.state.as_ref().and_then(Disseminator::deadline)
    }
}

impl<K: Keys> Node<K> {
    /// Returns the members of all groups, as this node knows them.
    pub fn groups(&self) -> &Arc<Groups> {
        &self.members.groups
    }

    /// Returns how many memberships were dropped.
    pub fn group_drops(&self) -> Drops {
        self.members.state.as_ref().map(Disseminator::drops).unwrap_or_default()
    }

    /// Starts with an empty list of groups. It replaces the list of an earlier run at other nodes.
    pub(super) fn begin_groups(&mut self, now: Instant) {
        if self.config.features & Features::GROUPS != 0 {
            self.members.state = Some(Disseminator::new(self.config.disseminate.clone()));
            self.tell_groups(now, Input::Own(Vec::new()));
        }
    }

    pub(super) fn tell_groups(&mut self, now: Instant, input: Input<Membership>) {
        if let Some(state) = &mut self.members.state {
            state.handle(now, input, &self.keys);
        }
    }

    /// Tells the memberships which neighbours get them, and turns their outputs into frames.
    pub(super) fn settle_groups(&mut self, now: Instant) {
        let knows = |node: &NodeId| self.graph.features(*node) & Features::GROUPS != 0;
        let up = self.links.iter().filter(|(_, link)| link.is_up()).map(|(node, _)| *node);
        let wanted: BTreeSet<_> = up.filter(knows).collect();
        let told = std::mem::replace(&mut self.members.told, wanted.clone());
        let gone = told.difference(&wanted).map(|node| Input::NeighbourDown(*node));
        let came = wanted.difference(&told).map(|node| Input::NeighbourUp(*node));
        for input in gone.chain(came).collect::<Vec<_>>() {
            self.tell_groups(now, input);
        }
        let Some(state) = &mut self.members.state else { return };
        let mut changed = false;
        while let Some(output) = state.poll() {
            match output {
                Flood::Send(to, record) => {
                    self.outputs.push_back(Output::Send(to, Frame::Membership((*record).clone())));
                }
                Flood::Ack { to, origin, sequence } => {
                    self.outputs.push_back(Output::Send(to, Frame::MembershipAck { origin, sequence }));
                }
                Flood::Changed => changed = true,
            }
        }
        if changed {
            let groups = Groups::new(state.records());
            if groups != *self.members.groups {
                self.members.groups = Arc::new(groups);
                self.outputs.push_back(Output::GroupsChanged);
            }
        }
    }
}
