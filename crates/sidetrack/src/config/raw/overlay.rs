//! `[overlay]` as it is written.

use super::Number;
use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The overlay this node is part of.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Overlay {
    /// Which of the nodes this is.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// File that holds this node's secret key, made by 'sidetrack overlay key FILE'.
    #[schemars(required)]
    pub key_file: Option<At<String>>,
    /// Where neighbours dial this node: "0.0.0.0:8100", or a list. Default: nowhere, this node dials.
    pub listen: Option<List<String>>,
    /// Congestion control of the links, by its kernel name. Default "bbr".
    pub congestion: Option<At<String>>,
    /// All nodes of the overlay by name, this one included; the same table may stand in every node's file.
    #[serde(default)]
    pub node: BTreeMap<String, At<OverlayNode>>,
    /// Flows of other nodes that are delivered here. Default: none are.
    #[serde(default)]
    pub deliver: Vec<At<Deliver>>,
    /// IP packets that are caught whole and delivered by another node. Default: none are.
    #[serde(default)]
    pub packets: Vec<At<Packets>>,
}

/// IP packets (TCP and UDP) that are caught whole and delivered by another node: the applications' own TCP runs end to end.
/// The other node has an entry for the way back, and an [[overlay.deliver]] for what may come.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Packets {
    /// The node that delivers them.
    #[schemars(required)]
    pub node: Option<At<String>>,
    /// To these networks or "@set"s.
    #[schemars(required)]
    pub to: Option<List<String>>,
    /// With one of these ports at either end, numbers or "first-last". Default: any.
    pub port: Option<List<Number>>,
    /// Where they are caught: "local" for those of this host, "router" for all that leave it, forwarded ones too. Default
    /// "local".
    pub at: Option<At<PacketsAt>>,
    /// The kind of links they travel on: "reliable" recovers on every hop what is lost and keeps the order of all of them,
    /// "best-effort" leaves both to the applications, and none of their flows waits for another. Default "reliable".
    pub link: Option<At<PacketsLink>>,
}

/// The kind of links that packets travel on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PacketsLink {
    /// Recovered hop by hop, in order.
    Reliable,
    /// Datagrams.
    BestEffort,
}

/// Where packets are caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PacketsAt {
    /// Those of this host.
    Local,
    /// All that leave it.
    Router,
}

/// A node of the overlay.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlayNode {
    /// Its public key, as 'sidetrack overlay key FILE' prints it.
    #[schemars(required)]
    pub key: Option<At<String>>,
    /// Where this node dials it. Default: not at all; it may dial this node.
    pub address: Option<At<String>>,
}

/// Flows of other nodes that are delivered here.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Deliver {
    /// Caught by these nodes. Default: by any.
    pub from: Option<List<String>>,
    /// To these networks or "@set"s.
    #[schemars(required)]
    pub to: Option<List<String>>,
    /// To these ports, numbers or "first-last". Default: any.
    pub port: Option<List<Number>>,
}
