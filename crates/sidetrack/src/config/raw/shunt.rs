//! `[shunt]` as it is written.

use crate::config::shape::{FastPathWord, MeaningWord};
use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;
use sidetrack_core::shunt::{FastPathKind, Meaning};
use std::collections::BTreeMap;

/// The shunt. A reload does not change it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Shunt {
    /// The fast path: "tc" (every interface), "xdp" (in the driver), "xdp-generic" (every interface, slow),
    /// "openflow" (a switch), "flowtable" (the kernel's own, of nftables; between the ports of a router) or
    /// "none" (only shows what would be shunted). A list has several side by side: a rule or an action names
    /// one, the first is for all other flows. Default "tc".
    #[schemars(with = "Option<List<FastPathWord>>")]
    pub fast_path: Option<List<FastPathKind>>,
    /// How this host forwards between the ports.
    #[schemars(required)]
    pub forwarding: Option<At<Forwarding>>,
    /// A shunted flow is inspected again after this time without a packet, milliseconds, 100 to 86400000.
    /// Default 10000.
    pub idle_timeout_ms: Option<At<u64>>,
    /// If the table is full, a blocked flow that was silent for this time is replaced, milliseconds. Default
    /// 10000.
    pub block_idle_timeout_ms: Option<At<u64>>,
    /// Most flows on the fast path at a time, 16 to 1048576. A tenth is reserved for blocked flows. Default
    /// 65536.
    pub entries_max: Option<At<u32>>,
    /// Most of these flows of one client address. Default: same as `entries_max`.
    pub entries_max_per_client: Option<At<u32>>,
    /// What happens to a flow when there is no entry for it. "fastest": rates are measured every two seconds, and
    /// a flow takes the entry of one that is less than half as fast; that one goes on on the slow path. "wait": it
    /// waits until an entry is free. Default "fastest".
    pub when_full: Option<At<WhenFull>>,
    /// With "tc", if the other end of a veth or netkit pair is in another network namespace, packets are moved
    /// there directly (bpf_redirect_peer). Filters, counters and captures at the egress of this end, and an XDP
    /// program at the other end, do not see them. Default true.
    pub redirect_peer: Option<At<bool>>,
    /// The meaning of the numbers in marks, 0 to 15: "ignore", "shunt", "block", "rules", or one of `fast_path`,
    /// which shunts by that path. Default { 0 = "ignore", 1 = "shunt", 2 = "block", 3 = "rules" }.
    #[schemars(with = "Option<At<BTreeMap<String, At<MeaningWord>>>>")]
    pub actions: Option<At<BTreeMap<String, At<Meaning>>>>,
    /// What happens to shunted flows while the shunt hangs. "slow_path": after three seconds the program in the
    /// kernel ignores all entries. "keep": they continue until they are idle. A switch always keeps its entries.
    /// Default "slow_path".
    pub on_stall: Option<At<OnStall>>,
    /// The switch of `fast_path = "openflow"`.
    pub openflow: Option<At<OpenFlow>>,
    /// The switches, if there are several. Default: one, which the table `openflow` describes.
    #[serde(default)]
    pub switch: Vec<At<Switch>>,
    /// The interfaces on which flows arrive and leave, at least two.
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
    /// Its interface. With `fast_path = "openflow"` it is optional and only used by `sidetrack shunt rules`;
    /// otherwise required. Default: none.
    pub interface: Option<At<String>>,
    /// The switch that has this port, by its name; only for "openflow" with several switches, where it is required.
    /// Default: none.
    pub switch: Option<At<String>>,
    /// The switch's port towards the hosts; only for "openflow". Default: none.
    pub fast_port: Option<At<u32>>,
    /// The switch's port towards this interface; only for "openflow". Default: none.
    pub slow_port: Option<At<u32>>,
}

/// A switch that connects to us and gets its entries over OpenFlow.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenFlow {
    /// Addresses of this host to which the switch connects, with ports (6653; formerly 6633).
    #[schemars(required)]
    pub listen: Option<List<String>>,
    /// The switch's address; connections from other addresses are rejected. Default: any.
    pub switch: Option<At<String>>,
    /// Allowed versions, "1.0" and "1.3"; the highest that the switch speaks is used. Default both.
    pub versions: Option<List<OpenFlowVersion>>,
    /// Whether all entries of the switch are deleted when it first connects. Default false: entries of an
    /// earlier run are kept and used.
    pub delete_flows_on_startup: Option<At<bool>>,
    /// Whether all entries of the switch are deleted at the end, so that it forwards nothing. Default false:
    /// everything goes to the firewall.
    pub delete_flows_on_shutdown: Option<At<bool>>,
    /// Whether to install the entries that connect each fast port with its slow port. Default true.
    pub install_pairs: Option<At<bool>>,
    /// Beside another controller, with OpenFlow 1.3. "equal": each of them changes entries. "master": this one does, and
    /// the switch makes the others slaves; if another one becomes master, this one claims the switch again at its next
    /// connection. Default "equal".
    pub role: Option<At<Role>>,
    /// Whether other controllers have entries on the switch: only our own are removed then, also by the keys above;
    /// with OpenFlow 1.0 those of others cannot be told apart, and none are. Default false.
    pub shared: Option<At<bool>>,
    /// The table of the switch for our entries, 0 to 254, with OpenFlow 1.3. Something has to lead packets there.
    /// Default 0, where packets begin.
    pub table: Option<At<u32>>,
}

/// The role of this controller beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Each changes entries.
    Equal,
    /// Only this one does.
    Master,
}

/// One of several switches that forward between the ports of the shunt.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// Its name.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// The address it connects from. It tells the switches apart, so each has its own.
    #[schemars(required)]
    pub address: Option<At<String>>,
    /// The switches beside it. All links together form a tree: one path leads from each switch to each other one.
    #[serde(default)]
    pub links: Vec<At<SwitchLink>>,
}

/// A link from one switch to another.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SwitchLink {
    /// The other switch, by its name. It has a link back.
    #[schemars(required)]
    pub to: Option<At<String>>,
    /// This switch's port that leads there.
    #[schemars(required)]
    pub port: Option<At<u32>>,
}

/// A version of OpenFlow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
pub enum OpenFlowVersion {
    /// 1.0.
    #[serde(rename = "1.0")]
    V1_0,
    /// 1.3.
    #[serde(rename = "1.3")]
    V1_3,
}

/// What happens to shunted flows while the shunt hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnStall {
    /// They take the slow path.
    SlowPath,
    /// They continue.
    Keep,
}

/// What happens to a flow when there is no entry for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum WhenFull {
    /// It takes the entry of a much slower flow.
    Fastest,
    /// It waits.
    Wait,
}

/// When flows of a rule move to the fast path. All given conditions must hold.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleShunt {
    /// After this number of bytes of IP packets on the slow path, both directions together, 0 to 2^50. The count
    /// is read twice per second. For the wire: of payload, and it is always known. Default 0.
    pub after_bytes: Option<At<u64>>,
    /// After this time since the shunt first saw the flow, or a listener captured it, milliseconds, 0 to 86400000. Default 0.
    pub after_ms: Option<At<u64>>,
    /// The fast path that it takes: one of [shunt]'s, or "wire" for flows of listeners. Default: the first of [shunt].
    #[schemars(with = "Option<At<FastPathWord>>")]
    pub fast_path: Option<At<FastPathKind>>,
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
