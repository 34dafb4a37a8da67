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
    /// The name of this node.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// The file with this node's secret key, made by 'sidetrack overlay key FILE'.
    #[schemars(required)]
    pub key_file: Option<At<String>>,
    /// Addresses on which neighbours dial this node: "0.0.0.0:8100", or a list. Default: none, this node only
    /// dials.
    pub listen: Option<List<String>>,
    /// Addresses of this host to dial neighbours from, a list of at most 8: one for each uplink. Each pair of an uplink and an
    /// address of a neighbour is a leg of the link to it. Default: the system chooses the address.
    pub uplinks: Option<List<String>>,
    /// The legs that datagrams use. "best": the leg with the lowest cost. "both": all legs; the first copy counts.
    /// Connections are always on one leg. Default "best".
    pub legs: Option<At<OverlayLegs>>,
    /// Congestion control of the links, by its kernel name. Default "bbr".
    pub congestion: Option<At<String>>,
    /// Which nodes packets rely on, where an [[overlay.packets]] does not say otherwise. With "intrusion-tolerant" this node
    /// also drops all packets over subgraphs that carry no proof of their source, and there must be an
    /// [[overlay.topology]].
    /// Default "members".
    pub trust: Option<At<OverlayTrust>>,
    /// The rate of intrusion-tolerant packets on each link, Mb/s, 1 to 100000. All sources share it equally. It should be
    /// below what the slowest link carries. Default 100.
    pub tolerant_rate_mbit: Option<At<u32>>,
    /// The links that nodes may announce. If there is one entry, all other links are forbidden. Default: all links are
    /// allowed. The same list should be in the file of each node.
    #[serde(default)]
    pub topology: Vec<At<OverlayEdge>>,
    /// All nodes of the overlay by name, including this one. The same table may be in the file of each node.
    #[serde(default)]
    pub node: BTreeMap<String, At<OverlayNode>>,
    /// Rates of links between two nodes. The same entries may be in the file of each node. Default: none.
    #[serde(default)]
    pub link: Vec<At<OverlayLink>>,
    /// Flows of other nodes that are delivered here. Default: none.
    #[serde(default)]
    pub deliver: Vec<At<Deliver>>,
    /// IP packets that are captured whole and delivered by another node. Default: none.
    #[serde(default)]
    pub packets: Vec<At<Packets>>,
    /// Groups of nodes that packets are sent to, or delivered from, here. Default: none.
    #[serde(default)]
    pub group: Vec<At<Group>>,
}

/// A group of nodes. Packets to it are delivered by all of its members, or by the nearest one. Each node that sends
/// to the group or is a member needs an entry.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// The name: 1 to 32 letters, digits, dots, underscores and hyphens; the same on all nodes.
    #[schemars(required)]
    pub name: Option<At<String>>,
    /// Makes this node a member from its start: it delivers packets of the group. 'sidetrack overlay group join' and
    /// 'leave' change this until the node restarts. Default false.
    pub join: Option<At<bool>>,
    /// The nodes whose packets this member delivers. Default: all nodes.
    pub senders: Option<List<String>>,
    /// The addresses of the group: IP multicast addresses one by one, and networks or "@set"s of virtual addresses that
    /// several members have.
    #[schemars(required)]
    pub to: Option<List<String>>,
    /// The interfaces on which packets to IP multicast addresses are captured and delivered. Required if `to` has such
    /// addresses.
    pub interface: Option<List<String>>,
    /// Time to live (hop limit), 1 to 255, of delivered packets to IP multicast addresses. With it, this node also sends
    /// packets that have only one hop left. Default: one less than the packet had; packets with one hop left are not sent.
    pub ttl: Option<At<u8>>,
    /// Which nodes this member relies on. "intrusion-tolerant": it delivers only packets with a proof of their source, so no
    /// relay can send in another node's name. Default: `trust` of [overlay].
    pub trust: Option<At<OverlayTrust>>,
}

/// IP packets (TCP and UDP) that are captured whole and delivered by another node. The applications' own TCP
/// runs end to end. The other node needs an entry for the way back, and an [[overlay.deliver]] for the packets
/// that may arrive.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Packets {
    /// The node that delivers them. Each entry has one of `node`, `group` and `nearest`.
    pub node: Option<At<String>>,
    /// The name of a group in [[overlay.group]]: each of its members delivers them (UDP only).
    pub group: Option<At<String>>,
    /// The name of a group in [[overlay.group]]: its nearest member delivers them. All packets of a conversation go to the
    /// same member while it is there. If this node is a member, its packets stay here.
    pub nearest: Option<At<String>>,
    /// Destination networks or "@set"s. Required with `node`; else the default is `to` of the group.
    pub to: Option<List<String>>,
    /// Ports at either end, of TCP and UDP alike, numbers or "first-last". Default: any.
    pub port: Option<List<Number>>,
    /// Which packets are captured: "local" for those of this host, "router" for all packets that leave it,
    /// including forwarded ones. For IP multicast "router" means packets that arrive on the interfaces of the group.
    /// Default "local".
    pub at: Option<At<PacketsAt>>,
    /// The kind of links. "reliable" recovers losses on each hop and keeps all packets in order. "best-effort"
    /// leaves both to the applications, so that one flow does not wait for another. "real-time" recovers a loss on its
    /// hop while the packet can still be in time, and no packet waits for another. Default "reliable"; with `group` or
    /// `nearest` write another one.
    pub link: Option<At<PacketsLink>>,
    /// The links that a packet uses. "shortest": the cheapest path. "duplicate": a copy on each of `paths` paths that
    /// share no relay; the first copy is delivered. "flood": all links on ways with at most `hops` links. "graph": two such
    /// paths, and more links around the source or the destination while links there are in trouble. The last three need
    /// `link = "best-effort"` or "real-time". Default "shortest".
    pub dissemination: Option<At<PacketsDissemination>>,
    /// The number of paths with `dissemination = "duplicate"`, 2 to 5. If the network has fewer, packets use those.
    /// Default 2.
    pub paths: Option<At<u8>>,
    /// Most links on the way of a packet with `dissemination = "flood"`, 1 to 15. Default 4.
    pub hops: Option<At<u8>>,
    /// Which nodes a packet relies on. "members": each node trusts its neighbours. "intrusion-tolerant": each node checks
    /// a proof of the source, and each source has an equal share of every link; needs `link = "best-effort"`, or
    /// `link = "reliable"` with `dissemination = "flood"`: then all packets arrive, in order, while honest nodes connect
    /// the two. The other node's entry needs the same value. Default: `trust` of [overlay].
    pub trust: Option<At<OverlayTrust>>,
    /// With `trust = "intrusion-tolerant"` and `link = "best-effort"`: which packets of this node are sent first where they wait, 1 to 10; 10 is
    /// sent first. Default 5.
    pub priority: Option<At<u8>>,
    /// Milliseconds that a packet may travel, 1 to 10000; later it is dropped. Required with `link = "real-time"`.
    /// With "best-effort" it needs another `dissemination` than "shortest", and the default is: there is no limit.
    pub deadline_ms: Option<At<u32>>,
}

/// Which nodes a packet relies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OverlayTrust {
    /// The members of the overlay.
    Members,
    /// The source, the destination, and one way of honest nodes between them.
    IntrusionTolerant,
}

/// A link that its two ends may announce.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlayEdge {
    /// The names of its two ends.
    #[schemars(required)]
    pub ends: Option<List<String>>,
    /// The lowest cost that counts, µs, 1 to 60000000: half of the round trip that the distance allows. A node can only
    /// make the link more expensive. Default 1.
    pub least_us: Option<At<u32>>,
}

/// The kind of links that carry packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PacketsLink {
    /// Losses are recovered on each hop, and the order is kept.
    Reliable,
    /// Datagrams.
    BestEffort,
    /// Datagrams; a lost packet is sent again on its hop while it can be in time.
    RealTime,
}

/// The links that a packet uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PacketsDissemination {
    /// The cheapest path.
    Shortest,
    /// Paths that share no relay.
    Duplicate,
    /// All links on short ways.
    Flood,
    /// Two paths that share no relay, and more links around an end in trouble.
    Graph,
}

/// The legs of a link that datagrams use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OverlayLegs {
    /// The one with the lowest cost.
    Best,
    /// All of them.
    Both,
}

/// Which packets are captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PacketsAt {
    /// Those of this host.
    Local,
    /// All packets that leave it.
    Router,
}

/// A node of the overlay.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlayNode {
    /// Its public key, as 'sidetrack overlay key FILE' prints it.
    #[schemars(required)]
    pub key: Option<At<String>>,
    /// The addresses that this node dials: one, or a list of at most 8. With several, and with several `uplinks`, the link
    /// has several legs: each is measured, and the link uses the best one. Default: none; it may dial this node.
    pub address: Option<List<String>>,
}

/// The rate of the link between two nodes. Entries that do not name this node have no effect here.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OverlayLink {
    /// The two nodes: `["baltimore", "chicago"]`.
    #[schemars(required)]
    pub between: Option<List<String>>,
    /// The rate at which this node sends on the link: a number and "kbit/s", "Mbit/s" or "Gbit/s", from "64kbit/s" to
    /// "100Gbit/s". With `bought = true` it counts the headers of UDP and IP.
    #[schemars(required)]
    pub rate: Option<At<String>>,
    /// The bandwidth of the link is bought, so that this rate is free for the overlay at any time. Then the flows of the
    /// link travel in datagrams at this rate, without congestion control: a loss does not slow them down. Both nodes must
    /// say so, otherwise flows use TCP. Never set it for a path that other users share. Default false: `rate` limits the
    /// TCP connections of the link.
    pub bought: Option<At<bool>>,
}

/// Flows of other nodes that are delivered here.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Deliver {
    /// The nodes that captured the flow. Default: any.
    pub from: Option<List<String>>,
    /// Destination networks or "@set"s.
    #[schemars(required)]
    pub to: Option<List<String>>,
    /// Destination ports, numbers or "first-last". Default: any.
    pub port: Option<List<Number>>,
}
