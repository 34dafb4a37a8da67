//! Groups: a packet goes to all members of a group (multicast), or to the nearest one (anycast).
//!
//! | part | decides or holds |
//! |---|---|
//! | this file | names of groups, and who is a member: what the records of all nodes say together |
//! | [`head`] | what a packet to a group carries ahead of the IP packet |
//! | [`plan`] | the links that packets to a group use, and the nearest member |
//! | [`rule`] | which packets may be delivered here |
//!
//! Each node signs a list of its groups and floods it like its links ([`super::disseminate`]). The source of a packet works out
//! the links and writes them into the packet, so relays keep no state for groups or flows.

pub mod head;
pub mod plan;
pub mod rule;

use super::NodeId;
use super::frame::Membership;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Most groups that a node can be a member of.
pub const GROUPS_MAX: usize = 256;

/// Most bytes of a name.
pub const NAME_MAX: usize = 32;

/// The name of a group: 1 to [`NAME_MAX`] ASCII letters, digits, dots, underscores and hyphens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupName(Arc<str>);

impl GroupName {
    /// Reads a name. `None` if it is empty, too long, or has another character.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let is_allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        let fits = (1..=NAME_MAX).contains(&bytes.len()) && bytes.iter().all(is_allowed);
        let text = std::str::from_utf8(bytes).ok().filter(|_| fits)?;
        Some(Self(text.into()))
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The text is not the name of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a group's name has 1 to {NAME_MAX} letters, digits, dots, underscores and hyphens")]
pub struct BadName;

impl FromStr for GroupName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        Self::from_bytes(text.as_bytes()).ok_or(BadName)
    }
}

/// The members of all groups, as the records of all nodes say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    members: BTreeMap<GroupName, BTreeSet<NodeId>>,
}

impl Groups {
    /// Collects the groups of these records. At most [`super::NODES_MAX`] times [`GROUPS_MAX`] memberships, because nodes
    /// keep one record for each member of the overlay.
    pub fn new<'a>(records: impl Iterator<Item = &'a Membership>) -> Self {
        let mut members: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for record in records {
            for name in &record.groups {
                members.entry(name.clone()).or_default().insert(record.origin);
            }
        }
        Self { members }
    }

    /// Returns all groups that have members.
    pub fn all(&self) -> impl Iterator<Item = (&GroupName, &BTreeSet<NodeId>)> {
        self.members.iter()
    }

    /// Returns the members of a group.
    pub fn members(&self, name: &GroupName) -> impl Iterator<Item = NodeId> {
        self.members.get(name).into_iter().flatten().copied()
    }

    /// Whether a node is a member.
    pub fn has(&self, name: &GroupName, node: NodeId) -> bool {
        self.members.get(name).is_some_and(|members| members.contains(&node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for good in ["a", "cameras", "Floor-2_east.v4", &"x".repeat(NAME_MAX)] {
            assert_eq!(good.parse::<GroupName>().map(|name| name.to_string()), Ok(good.to_owned()));
        }
        for bad in ["", "two words", "a/b", "bücher", "a\0", &"x".repeat(NAME_MAX + 1)] {
            assert_eq!(bad.parse::<GroupName>(), Err(BadName), "{bad:?}");
        }
    }
}
