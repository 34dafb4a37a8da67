//! The subject of an agreement: nodes, data sets and functions.

use crate::area::{AttributeSet, Catalogue};
use crate::flow::{Destination, Host};
use crate::net::{IpNet, IpSet, PortSet};
use crate::policy::HostPattern;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

/// A node n_j of a party, with its attributes A_j (Eqs. 1 to 3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name, unique.
    pub name: Arc<str>,
    /// The party that owns it.
    pub party: Arc<str>,
    /// Its addresses. No other node may have the same network.
    pub addresses: IpSet,
    /// The attributes it has.
    pub attributes: AttributeSet,
}

/// Data that a node has and serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataSet {
    /// Its name, unique.
    pub name: Arc<str>,
    /// The index of its node in [`Facts::nodes`].
    pub node: usize,
    /// The TCP ports of the service that provides it.
    pub ports: PortSet,
    /// Host names of this service, for clients that send a name instead of an address.
    pub hosts: Vec<HostPattern>,
}

/// The functions of the proxies at both ends of the path that together form a bridging function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Functions at the client's end, in the order in which the client's bytes pass them.
    pub client: Vec<Arc<str>>,
    /// Functions at the end of the data, in the order in which the client's bytes pass them.
    pub server: Vec<Arc<str>>,
}

/// Facts before they are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FactsParts {
    /// Attributes and bridging functions.
    pub catalogue: Catalogue,
    /// The steps of each bridging function, by its name in the catalogue.
    pub steps: BTreeMap<Arc<str>, Steps>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The data sets.
    pub data: Vec<DataSet>,
}

/// Why facts contradict each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FactsError {
    /// Two nodes have the same network, so an address would be ambiguous.
    #[error("the nodes '{first}' and '{second}' have the same address {net}: an address is one node's")]
    SameAddress {
        /// The node declared first.
        first: Arc<str>,
        /// The other node.
        second: Arc<str>,
        /// The network of both.
        net: IpNet,
    },
    /// A data set names a node that is not declared.
    #[error("the data set '{0}' is on a node that is not declared")]
    NoNode(Arc<str>),
}

/// The subject of an agreement, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    parts: FactsParts,
    /// The networks with their nodes, the narrowest first.
    networks: Vec<(IpNet, usize)>,
}

impl Facts {
    /// Checks the parts of these facts against each other.
    ///
    /// # Errors
    /// Fails with the first contradiction.
    pub fn new(parts: FactsParts) -> Result<Self, FactsError> {
        let mut owners: BTreeMap<IpNet, usize> = BTreeMap::new();
        for (place, node) in parts.nodes.iter().enumerate() {
            for net in node.addresses.nets() {
                if let Some(first) = owners.insert(*net, place).filter(|first| *first != place) {
                    let first = parts.nodes[first].name.clone();
                    return Err(FactsError::SameAddress { first, second: node.name.clone(), net: *net });
                }
            }
        }
        if let Some(lost) = parts.data.iter().find(|data| data.node >= parts.nodes.len()) {
            return Err(FactsError::NoNode(lost.name.clone()));
        }
        let mut networks: Vec<_> = owners.into_iter().collect();
        networks.sort_by_key(|(net, place)| (std::cmp::Reverse(net.prefix_len()), *place));
        Ok(Self { parts, networks })
    }

    /// Returns attributes and bridging functions.
    pub const fn catalogue(&self) -> &Catalogue {
        &self.parts.catalogue
    }

    /// Returns the nodes, in the order of their declaration.
    pub fn nodes(&self) -> &[Node] {
        &self.parts.nodes
    }

    /// Returns the data sets, in the order of their declaration.
    pub fn data(&self) -> &[DataSet] {
        &self.parts.data
    }

    /// Returns the steps of a bridging function.
    pub fn steps(&self, function: &str) -> Option<&Steps> {
        self.parts.steps.get(function)
    }

    /// Returns all bridging functions with their steps.
    pub fn steps_of_all(&self) -> impl Iterator<Item = (&Arc<str>, &Steps)> {
        self.parts.steps.iter()
    }

    /// Returns the node with this address. If several networks contain it, the narrowest counts.
    pub fn node_at(&self, address: IpAddr) -> Option<usize> {
        let address = address.to_canonical();
        self.networks.iter().find(|(net, _)| net.contains(address)).map(|(_, place)| *place)
    }

    /// Returns the data sets that a connection to this destination may move. If a service has several data sets, the
    /// connection may move any of them.
    pub fn data_at(&self, destination: &Destination) -> Vec<usize> {
        let node = match &destination.host {
            Host::Ip(ip) => match self.node_at(*ip) {
                Some(node) => Some(node),
                None => return Vec::new(),
            },
            Host::Name(_) => None,
        };
        let is_there = |data: &DataSet| {
            data.ports.contains(destination.port)
                && match &destination.host {
                    Host::Ip(_) => node == Some(data.node),
                    Host::Name(name) => data.hosts.iter().any(|pattern| pattern.matches(name)),
                }
        };
        self.parts
            .data
            .iter()
            .enumerate()
            .filter(|(_, data)| is_there(data))
            .map(|(place, _)| place)
            .collect()
    }
}
