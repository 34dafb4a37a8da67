//! The file of an agreement as it is written: `docs/control.md` lists the keys.

use crate::config::{At, List};
use serde::Deserialize;
use sidetrack_core::agreement::{Access, Surplus};
use std::collections::BTreeMap;

/// An agreement between parties.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Version of the format: 1.
    pub version: Option<At<u32>>,
    /// The attributes there are (Eq. 2).
    pub attributes: Option<List<String>>,
    /// What data may be wanted for.
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
    /// What was agreed.
    #[serde(default)]
    pub agreement: Vec<At<Agreement>>,
}

/// A bridging function.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Function {
    /// The attributes it applies.
    pub applies: Option<List<String>>,
    /// What it costs.
    pub cost: Option<At<u32>>,
    /// Where in a chain it stands.
    pub position: Option<At<Position>>,
    /// Functions it stands before.
    pub before: Option<List<String>>,
    /// Functions it stands after.
    pub after: Option<List<String>>,
    /// Functions of the proxy at the client's end.
    pub client: Option<List<String>>,
    /// Functions of the proxy at the end of the data.
    pub server: Option<List<String>>,
}

/// Where in a chain a function stands.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Position {
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
pub struct Party {
    /// Words for conditions.
    pub labels: Option<List<String>>,
}

/// A node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Whose it is.
    pub party: Option<At<String>>,
    /// Its networks or addresses.
    pub address: Option<List<String>>,
    /// Its attributes.
    pub attributes: Option<List<String>>,
}

/// A data set.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// The node that has it.
    pub node: Option<At<String>>,
    /// The TCP ports of its service.
    pub port: Option<List<u16>>,
    /// Names of its service.
    pub host: Option<List<String>>,
    /// Whether those whom the data is about have agreed.
    pub consent: Option<At<Consent>>,
    /// Words for conditions.
    pub labels: Option<List<String>>,
}

/// Whether those whom data is about have agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Consent {
    /// They have.
    Given,
    /// They have taken it back.
    Withdrawn,
    /// The data is about nobody.
    NotNeeded,
}

/// What an agreement does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// It allows.
    Permit,
    /// It forbids, whatever others allow.
    Forbid,
}

/// One agreement.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agreement {
    /// Its name.
    pub name: Option<At<String>>,
    /// What it does.
    pub effect: Option<At<Effect>>,
    /// Parties whose nodes are the clients.
    pub parties: Option<List<String>>,
    /// The clients.
    pub nodes: Option<List<String>>,
    /// The data.
    pub data: Option<List<String>>,
    /// What for.
    pub purpose: Option<List<String>>,
    /// What is done.
    pub access: Option<List<Access>>,
    /// Attributes that have to be applied.
    pub requires: Option<List<String>>,
    /// Whether data may move to a node that has less (Eq. 4).
    pub surplus: Option<At<Surplus>>,
    /// From when on.
    pub from: Option<At<String>>,
    /// Until when.
    pub until: Option<At<String>>,
    /// A condition in Cedar.
    pub when: Option<At<String>>,
}
