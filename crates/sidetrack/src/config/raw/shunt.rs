//! `[shunt]` as it is written.

use crate::config::At;
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The shunt. A reload does not change it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Shunt {
    /// Which fast path: "tc" (every interface), "xdp" (in the driver) or "xdp-generic" (every interface, slow). Default "tc".
    pub fast_path: Option<At<FastPath>>,
    /// How this host forwards between the ports.
    #[schemars(required)]
    pub forwarding: Option<At<Forwarding>>,
    /// A shunted flow is inspected again after so long without a packet, milliseconds, 100 to 86400000. Default 10000.
    pub idle_timeout_ms: Option<At<u64>>,
    /// The same for a blocked flow, milliseconds. Default 10000.
    pub block_idle_timeout_ms: Option<At<u64>>,
    /// Most flows on the fast path at a time, 16 to 1048576; a tenth is kept for those that are blocked. Default 65536.
    pub entries_max: Option<At<u32>>,
    /// Most of them of one client address. Default: as `entries_max`.
    pub entries_max_per_client: Option<At<u32>>,
    /// What the numbers in marks mean, 0 to 15. Default { 0 = "ignore", 1 = "shunt", 2 = "block" }.
    pub actions: Option<At<BTreeMap<String, At<ShuntAction>>>>,
    /// The interfaces that flows come in by and leave by, at least two.
    #[schemars(required)]
    #[serde(default)]
    pub port: Vec<At<ShuntPort>>,
}

/// A port of the shunt.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShuntPort {
    /// Its number in marks, 0 to 15.
    #[schemars(required)]
    pub number: Option<At<u32>>,
    /// Its interface.
    #[schemars(required)]
    pub interface: Option<At<String>>,
}

/// Which fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FastPath {
    /// BPF between driver and stack.
    Tc,
    /// BPF in the driver.
    Xdp,
    /// BPF behind the driver, without its help.
    XdpGeneric,
}

/// How this host forwards between the ports of the shunt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Forwarding {
    /// They are ports of one bridge.
    Bridged,
    /// It is a router.
    Routed,
}

/// What a number in a mark means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ShuntAction {
    /// The slow path.
    Ignore,
    /// The fast path.
    Shunt,
    /// Dropped on the fast path.
    Block,
}
