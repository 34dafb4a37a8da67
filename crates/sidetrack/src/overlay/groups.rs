//! The groups of this node: which it has joined, by configuration or by command, and the packets that it delivers as a member.

use super::control::Event;
use super::packets;
use super::shared::Shared;
use super::{Entry, datagrams};
use crate::config;
use serde::{Deserialize, Serialize};
use sidetrack_core::overlay::group::GroupName;
use sidetrack_core::overlay::group::head::Head;
use sidetrack_core::overlay::group::rule::Refused;
use sidetrack_core::overlay::packet::Origin;
use sidetrack_sys::sync::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts of the packets of one group.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Caught here and sent.
    pub sent: AtomicU64,
    /// Caught here and not sent: no member could be reached, or the links were full.
    pub unsent: AtomicU64,
    /// Of other nodes, delivered here.
    pub delivered: AtomicU64,
    /// Of other nodes, rejected by the system.
    pub failed: AtomicU64,
    /// Of other nodes, and not delivered, by [`Refused::ALL`].
    refused: [AtomicU64; Refused::ALL.len()],
}

impl Counters {
    /// Counts a packet that is not delivered.
    pub(super) fn refuse(&self, refused: Refused) {
        if let Some(at) = Refused::ALL.iter().position(|one| *one == refused) {
            self.refused[at].fetch_add(1, Relaxed);
        }
    }

    fn fates(&self) -> BTreeMap<String, u64> {
        let named = [
            ("sent", &self.sent),
            ("unsent", &self.unsent),
            ("delivered", &self.delivered),
            ("failed", &self.failed),
        ];
        let refused = Refused::ALL.iter().zip(&self.refused).map(|(refused, count)| (refused.name(), count));
        named.into_iter().chain(refused).map(|(name, count)| (name.to_owned(), count.load(Relaxed))).collect()
    }
}

/// The groups with an entry in the configuration.
pub(super) struct Member {
    joined: Mutex<BTreeSet<GroupName>>,
    counters: BTreeMap<GroupName, Counters>,
    /// Packets to groups without an entry.
    unknown: Counters,
}

impl Member {
    /// Returns the state at the start.
    pub(super) fn new(groups: &[config::Group]) -> Self {
        let joined = groups.iter().filter(|group| group.join).map(|group| group.name.clone());
        let counters = groups.iter().map(|group| (group.name.clone(), Counters::default()));
        Self {
            joined: Mutex::new(joined.collect()),
            counters: counters.collect(),
            unknown: Counters::default(),
        }
    }

    /// Returns the groups that this node is a member of.
    pub(super) fn joined(&self) -> BTreeSet<GroupName> {
        lock(&self.joined).clone()
    }

    /// Whether this node is a member.
    pub(super) fn has_joined(&self, group: &GroupName) -> bool {
        lock(&self.joined).contains(group)
    }

    /// Returns the counts of a group; those of all unknown groups together.
    pub(super) fn counters(&self, group: &GroupName) -> &Counters {
        self.counters.get(group).unwrap_or(&self.unknown)
    }
}

/// A group, as operators see it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupView {
    /// Its name.
    pub name: String,
    /// True if this node is a member.
    pub joined: bool,
    /// All members that this node knows.
    pub members: Vec<String>,
    /// The member that packets to the nearest one go to from here. Empty: none can be reached.
    pub nearest: String,
    /// Packets by result. Empty: this node has no entry for the group.
    pub packets: BTreeMap<String, u64>,
}

/// Delivers a packet to a group that `from` has sent.
pub(super) fn deliver(shared: &Shared, from: Origin, payload: &[u8]) {
    let Some((head, ip)) = Head::split(payload) else {
        return shared.member.unknown.refuse(Refused::Unreadable);
    };
    let counters = shared.member.counters(&head.group);
    match &shared.packets {
        // The configuration of this node counts, not what the source knows: a member that left delivers nothing.
        Some(packets) if shared.member.has_joined(&head.group) => {
            packets::deliver_to_group(shared, packets, from, &head, ip.to_vec());
        }
        _ => counters.refuse(Refused::NotMember),
    }
}

/// Returns all groups that this node knows.
pub(super) fn views(shared: &Shared) -> Vec<GroupView> {
    let (groups, member) = (shared.groups.load(), &shared.member);
    let known = groups.all().map(|(name, _)| name).chain(member.counters.keys()).cloned();
    let view = |name: GroupName| {
        let nearest = datagrams::nearest(shared, &name, None, true);
        GroupView {
            joined: member.has_joined(&name),
            members: groups.members(&name).map(|node| shared.identity.name(node)).collect(),
            nearest: nearest.map(|node| shared.identity.name(node)).unwrap_or_default(),
            packets: member.counters.get(&name).map(Counters::fates).unwrap_or_default(),
            name: name.to_string(),
        }
    };
    known.collect::<BTreeSet<_>>().into_iter().map(view).collect()
}

/// Counts for metrics: packets of all groups by result, the known groups, and their members.
#[derive(Clone, Debug, Default)]
pub struct GroupTotals {
    /// Packets by result.
    pub packets: Vec<(&'static str, u64)>,
    /// Groups that have members.
    pub groups: u64,
    /// Memberships of all nodes.
    pub members: u64,
}

impl Entry {
    /// Returns all groups that this node knows.
    pub fn groups(&self) -> Vec<GroupView> {
        self.last().map(|shared| views(&shared)).unwrap_or_default()
    }

    /// Returns the counts of all groups together.
    pub fn group_totals(&self) -> GroupTotals {
        let Some(shared) = self.last() else { return GroupTotals::default() };
        let groups = shared.groups.load();
        let all = shared.member.counters.values().chain([&shared.member.unknown]);
        let all: Vec<_> = all.map(Counters::fates).collect();
        let words =
            ["sent", "unsent", "delivered", "failed"].into_iter().chain(Refused::ALL.map(Refused::name));
        let sum = |word: &str| all.iter().filter_map(|fates| fates.get(word)).sum();
        GroupTotals {
            packets: words.map(|word| (word, sum(word))).collect(),
            groups: groups.all().count() as u64,
            members: groups.all().map(|(_, members)| members.len() as u64).sum(),
        }
    }

    /// Makes this node a member of a group, or not, until it restarts.
    ///
    /// # Errors
    /// Returns the reason in words.
    pub async fn join_group(&self, group: &str, is_member: bool) -> Result<GroupView, String> {
        let shared = self.here()?.shared;
        let member = &shared.member;
        let name = member.counters.keys().find(|name| name.as_str() == group);
        let name = name.ok_or_else(|| {
            format!("this node has no [[overlay.group]] '{group}': write one with its addresses and restart")
        })?;
        {
            let mut joined = lock(&member.joined);
            if is_member {
                joined.insert(name.clone())
            } else {
                joined.remove(name)
            };
        }
        shared.control.send(Event::Groups).await.map_err(|_| "the overlay is stopping".to_owned())?;
        let view = views(&shared).into_iter().find(|view| view.name == group);
        view.ok_or_else(|| format!("the overlay has no group '{group}'"))
    }
}
