//! The overlay, checked.

use sidetrack_core::net::{IpSet, PortSet};
use sidetrack_core::overlay::frame::LinkKind;
use sidetrack_core::overlay::key::{PublicKey, SecretKey};
use std::net::SocketAddr;
use std::sync::Arc;

/// The overlay as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlay {
    /// Which of the nodes this is.
    pub name: Arc<str>,
    /// Its secret key.
    pub key: SecretKey,
    /// Where neighbours dial it; empty: it dials only.
    pub listen: Vec<SocketAddr>,
    /// All nodes, itself included.
    pub nodes: Vec<OverlayNode>,
    /// What may be delivered here; nothing else is.
    pub deliver: Vec<Deliver>,
    /// Congestion control of the links, by its kernel name.
    pub congestion: Arc<str>,
    /// Packets that are caught whole.
    pub packets: Vec<Packets>,
}

/// Packets that are caught whole, for another node to deliver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packets {
    /// That node.
    pub node: Arc<str>,
    /// To these addresses.
    pub to: IpSet,
    /// TCP and UDP with one of these ports at either end; none = with any.
    pub port: Option<PortSet>,
    /// Of this host only; else those it forwards, too.
    pub local: bool,
    /// The kind of links they travel on.
    pub link: LinkKind,
}

/// A node of the overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayNode {
    /// Its name.
    pub name: Arc<str>,
    /// Its public key.
    pub key: PublicKey,
    /// Where this node dials it; none = it is no neighbour, or dials this node.
    pub address: Option<SocketAddr>,
}

/// Flows of the overlay that are delivered here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deliver {
    /// Caught by one of these nodes; none = by any.
    pub from: Option<Vec<Arc<str>>>,
    /// To one of these addresses.
    pub to: IpSet,
    /// To one of these ports; none = to any.
    pub port: Option<PortSet>,
}
