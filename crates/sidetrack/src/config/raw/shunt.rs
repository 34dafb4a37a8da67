//! `[shunt]` as it is written.

use crate::config::{At, List};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The shunt. A reload does not change it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Shunt {
    /// Which fast path: "tc" (every interface), "xdp" (in the driver), "xdp-generic" (every interface, slow), "openflow"
    /// (a switch), "flowtable" (the kernel's own, of nftables; between the ports of a router) or "none" (only shows what would be shunted). A list has several side by side: a rule or an action names
    /// one, the first is for all other flows. Default "tc".
    pub fast_path: Option<List<FastPath>>,
    /// How this host forwards between the ports.
    #[schemars(required)]
    pub forwarding: Option<At<Forwarding>>,
    /// A shunted flow is inspected again after so long without a packet, milliseconds, 100 to 86400000. Default 10000.
    pub idle_timeout_ms: Option<At<u64>>,
    /// A blocked flow that was silent for this long makes room for another where the table is full, milliseconds. Default 10000.
    pub block_idle_timeout_ms: Option<At<u64>>,
    /// Most flows on the fast path at a time, 16 to 1048576; a tenth is kept for those that are blocked. Default 65536.
    pub entries_max: Option<At<u32>>,
    /// Most of them of one client address. Default: as `entries_max`.
    pub entries_max_per_client: Option<At<u32>>,
    /// By "tc", where the other end of a veth or netkit is in another network namespace, packets are put there at once
    /// (bpf_redirect_peer): what hangs at the egress of this end (filters, counters, captures), and a program of XDP at the
    /// other, does not see them. Default true.
    pub redirect_peer: Option<At<bool>>,
    /// What the numbers in marks mean, 0 to 15: "ignore", "shunt", "block", "rules", or one of `fast_path`: shunted by
    /// that. Default { 0 = "ignore", 1 = "shunt", 2 = "block", 3 = "rules" }.
    pub actions: Option<At<BTreeMap<String, At<ShuntAction>>>>,
    /// What becomes of shunted flows while the shunt hangs: "slow_path" (after three seconds the program in the kernel
    /// believes no entry any more) or "keep" (they go on until they stand still). A switch always keeps its entries.
    /// Default "slow_path".
    pub on_stall: Option<At<OnStall>>,
    /// The switch of `fast_path = "openflow"`.
    pub openflow: Option<At<OpenFlow>>,
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
    /// Its interface. Needed but for `fast_path = "openflow"`, where it is only for `sidetrack shunt rules`. Default: none.
    pub interface: Option<At<String>>,
    /// The switch's port where the hosts are; only for "openflow". Default: none.
    pub fast_port: Option<At<u32>>,
    /// The switch's port that leads to this interface; only for "openflow". Default: none.
    pub slow_port: Option<At<u32>>,
}

/// A switch that connects to us and is told its entries by OpenFlow.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpenFlow {
    /// Where it connects to: addresses of this host, with ports (6653; of old 6633).
    #[schemars(required)]
    pub listen: Option<List<String>>,
    /// The switch's address: connections from others are refused. Default: any.
    pub switch: Option<At<String>>,
    /// Versions that may be spoken, "1.0" and "1.3"; the highest that the switch speaks is. Default both.
    pub versions: Option<List<OpenFlowVersion>>,
    /// Everything that the switch has is deleted when it first connects. Default false: what an earlier run left is taken over.
    pub delete_flows_on_startup: Option<At<bool>>,
    /// Everything that it has is deleted at the end, so that it passes nothing at all. Default false: everything goes to the
    /// firewall.
    pub delete_flows_on_shutdown: Option<At<bool>>,
    /// The entries that lead from each fast port to its slow one and back are installed. Default true.
    pub install_pairs: Option<At<bool>>,
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
    /// A switch.
    #[serde(rename = "openflow")]
    OpenFlow,
    /// A flow table of nftables.
    Flowtable,
    /// None.
    None,
}

/// What becomes of shunted flows while the shunt hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnStall {
    /// They take the slow path.
    SlowPath,
    /// They go on.
    Keep,
}

/// When forwarded flows of a rule take the fast path: when all that is given holds.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleShunt {
    /// So many bytes of IP packets have passed on the slow path, both directions together, 0 to 2^50. They are looked at twice a
    /// second. Default 0.
    pub after_bytes: Option<At<u64>>,
    /// So long after the shunt first saw the flow, milliseconds, 0 to 86400000. Default 0.
    pub after_ms: Option<At<u64>>,
    /// Which of [shunt]'s fast paths it takes. Default: the first.
    pub fast_path: Option<At<FastPath>>,
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
#[serde(rename_all = "kebab-case")]
pub enum ShuntAction {
    /// The slow path.
    Ignore,
    /// The fast path.
    Shunt,
    /// Dropped on the fast path.
    Block,
    /// What the rules with `shunt` say.
    Rules,
    /// The fast path by tc.
    Tc,
    /// The fast path by XDP in the driver.
    Xdp,
    /// The fast path by XDP behind the driver.
    XdpGeneric,
    /// The fast path by a switch.
    #[serde(rename = "openflow")]
    OpenFlow,
    /// The fast path by a flow table.
    Flowtable,
    /// Shown, and left on the slow path.
    None,
}
