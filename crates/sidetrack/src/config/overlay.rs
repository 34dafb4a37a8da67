//! The overlay, checked.

use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::overlay::group::GroupName;
use sidetrack_core::overlay::key::{PublicKey, SecretKey};
use sidetrack_core::overlay::service::{Service, Trust};
use sidetrack_sys::nft::InterfaceName;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The overlay as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlay {
    /// The name of this node.
    pub name: Arc<str>,
    /// Its secret key.
    pub key: SecretKey,
    /// Addresses on which neighbours dial this node. Empty: this node only dials.
    pub listen: Vec<SocketAddr>,
    /// Addresses of this host to dial neighbours from. Empty: the system chooses one.
    pub uplinks: Vec<IpAddr>,
    /// Datagrams use all legs of a link that are up. Otherwise they use the best one.
    pub all_legs: bool,
    /// All nodes, including this one.
    pub nodes: Vec<OverlayNode>,
    /// Rates of links; those between other nodes, too.
    pub links: Vec<OverlayLink>,
    /// Flows that may be delivered here. All others are denied.
    pub deliver: Vec<Deliver>,
    /// Congestion control of the links, by its kernel name.
    pub congestion: Arc<str>,
    /// Which nodes packets rely on. [`Trust::Tolerant`]: packets without a proof of their source are dropped.
    pub trust: Trust,
    /// The rate of intrusion-tolerant packets on each link, bits per second.
    pub tolerant_rate: u64,
    /// The links that nodes may announce. Empty: all links.
    pub edges: Vec<OverlayEdge>,
    /// IP packets that are captured and sent through the overlay.
    pub packets: Vec<Packets>,
    /// Groups that this node sends to, or can be a member of.
    pub groups: Vec<Group>,
}

/// A group of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name.
    pub name: GroupName,
    /// This node is a member from its start.
    pub join: bool,
    /// The nodes whose packets are delivered. `None`: all nodes.
    pub senders: Option<Vec<Arc<str>>>,
    /// Its addresses.
    pub to: IpSet,
    /// Where packets to its IP multicast addresses are captured and delivered.
    pub interfaces: Vec<InterfaceName>,
    /// Time to live of delivered packets to IP multicast addresses. `None`: one less than they had.
    pub ttl: Option<u8>,
    /// Which nodes this member relies on.
    pub trust: Trust,
}

/// Which nodes deliver captured packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// This node.
    Node(Arc<str>),
    /// All members of a group.
    Group(GroupName),
    /// The nearest member of a group.
    Nearest(GroupName),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node '{node}'"),
            Self::Group(group) => write!(f, "all members of group '{group}'"),
            Self::Nearest(group) => write!(f, "the nearest member of group '{group}'"),
        }
    }
}

/// IP packets that are captured whole and delivered by another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packets {
    /// Who delivers them.
    pub target: Target,
    /// Their destinations.
    pub to: IpSet,
    /// TCP and UDP ports at either end. `None`: any port.
    pub port: Option<PortSet>,
    /// Only packets of this host. Otherwise also packets that it forwards.
    pub local: bool,
    /// How they travel.
    pub service: Service,
}

/// A link that its two ends may announce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayEdge {
    /// The names of its ends.
    pub ends: [Arc<str>; 2],
    /// The lowest cost that counts, µs.
    pub least_us: u32,
}

/// A node of the overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayNode {
    /// Its name.
    pub name: Arc<str>,
    /// Its public key.
    pub key: PublicKey,
    /// The addresses that this node dials. Empty: the node is not a neighbour, or dials this node.
    pub addresses: Vec<SocketAddr>,
}

/// Flows of the overlay that are delivered here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deliver {
    /// The nodes that may have captured the flow. `None`: any node.
    pub from: Option<Vec<Arc<str>>>,
    /// Their destinations.
    pub to: IpSet,
    /// Their destination ports. `None`: any port.
    pub port: Option<PortSet>,
}

/// The rate of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayLink {
    /// The two nodes.
    pub between: [Arc<str>; 2],
    /// The rate at which each of them sends, bits per second, above 0.
    pub rate: u64,
    /// The link is paced and has no congestion control, because its bandwidth is bought.
    pub bought: bool,
}

impl OverlayLink {
    /// Returns the node at the other end from this one. `None`: the link is between two other nodes.
    pub fn other(&self, own: &str) -> Option<&str> {
        match &self.between {
            [one, other] if **one == *own => Some(other),
            [other, one] if **one == *own => Some(other),
            _ => None,
        }
    }
}
