//! The overlay, checked.

use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::overlay::key::{PublicKey, SecretKey};
use sidetrack_core::overlay::service::Service;
use std::net::SocketAddr;
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
    /// All nodes, including this one.
    pub nodes: Vec<OverlayNode>,
    /// Rates of links; those between other nodes, too.
    pub links: Vec<OverlayLink>,
    /// Flows that may be delivered here. All others are denied.
    pub deliver: Vec<Deliver>,
    /// Congestion control of the links, by its kernel name.
    pub congestion: Arc<str>,
    /// IP packets that are captured and sent through the overlay.
    pub packets: Vec<Packets>,
}

/// IP packets that are captured whole and delivered by another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packets {
    /// The node that delivers them.
    pub node: Arc<str>,
    /// Their destinations.
    pub to: IpSet,
    /// TCP and UDP ports at either end. `None`: any port.
    pub port: Option<PortSet>,
    /// Only packets of this host. Otherwise also packets that it forwards.
    pub local: bool,
    /// How they travel.
    pub service: Service,
}

/// A node of the overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayNode {
    /// Its name.
    pub name: Arc<str>,
    /// Its public key.
    pub key: PublicKey,
    /// The address that this node dials. `None`: the node is not a neighbour, or dials this node.
    pub address: Option<SocketAddr>,
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
