//! The file of an agreement as written. `docs/control.md` lists the keys.

use serde::Deserialize;
use sidetrack_common::file::{At, List};
use sidetrack_core::agreement::{Access, Surplus};
use std::collections::BTreeMap;

/// An agreement between parties.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// Version of the format: 1.
    pub version: Option<At<u32>>,
    /// All attributes (Eq. 2).
    pub attributes: Option<List<String>>,
    /// All purposes of data flows.
    pub purposes: Option<List<String>>,
    /// Bridging functions, by name.
    #[serde(default)]
    pub function: BTreeMap<String, At<Function>>,
    /// The parties, by name.
    #[serde(default)]
    pub party: BTreeMap<String, At<Party>>,
    /// Nodes of parties, by name.
    #[serde(default)]
    pub node: BTreeMap<String, At<Node>>,
    /// Data sets, by name.
    #[serde(default)]
    pub data: BTreeMap<String, At<Data>>,
    /// The agreements.
    #[serde(default)]
    pub agreement: Vec<At<Agreement>>,
}

/// A bridging function.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Function {
    /// The attributes it applies.
    pub applies: Option<List<String>>,
    /// Its cost.
    pub cost: Option<At<u32>>,
    /// Its position in a chain.
    pub position: Option<At<Position>>,
    /// Functions that come after it.
    pub before: Option<List<String>>,
    /// Functions that come before it.
    pub after: Option<List<String>>,
    /// Functions of the proxy at the client's end.
    pub client: Option<List<String>>,
    /// Functions of the proxy at the end of the data.
    pub server: Option<List<String>>,
}

/// The position of a function in a chain.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Position {
    /// Nearest to the ends of the path.
    First,
    /// Anywhere.
    Anywhere,
    /// Nearest to the middle of the path.
    Last,
}

/// A party.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Party {
    /// Labels for conditions.
    pub labels: Option<List<String>>,
}

/// A node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Node {
    /// The party that it belongs to.
    pub party: Option<At<String>>,
    /// Its networks or addresses.
    pub address: Option<List<String>>,
    /// Its attributes.
    pub attributes: Option<List<String>>,
}

/// A data set.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Data {
    /// The node that has it.
    pub node: Option<At<String>>,
    /// The TCP ports of its service.
    pub port: Option<List<u16>>,
    /// Names of its service.
    pub host: Option<List<String>>,
    /// Whether the people that the data is about have agreed.
    pub consent: Option<At<Consent>>,
    /// Labels for conditions.
    pub labels: Option<List<String>>,
}

/// Whether the people that data is about have agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Consent {
    /// They have agreed.
    Given,
    /// They have withdrawn their consent.
    Withdrawn,
    /// The data is not about people.
    NotNeeded,
}

/// The effect of an agreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Effect {
    /// It allows.
    Permit,
    /// It forbids, whatever other agreements permit.
    Forbid,
}

/// One agreement.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Agreement {
    /// Its name.
    pub name: Option<At<String>>,
    /// Its effect.
    pub effect: Option<At<Effect>>,
    /// Parties whose nodes are the clients.
    pub parties: Option<List<String>>,
    /// The clients.
    pub nodes: Option<List<String>>,
    /// The data sets.
    pub data: Option<List<String>>,
    /// The purposes.
    pub purpose: Option<List<String>>,
    /// The kinds of access.
    pub access: Option<List<Access>>,
    /// Attributes that must be applied.
    pub requires: Option<List<String>>,
    /// Whether data may move to a node with fewer attributes (Eq. 4).
    pub surplus: Option<At<Surplus>>,
    /// Start of its validity.
    pub from: Option<At<String>>,
    /// End of its validity.
    pub until: Option<At<String>>,
    /// A condition in Cedar.
    pub when: Option<At<String>>,
}
