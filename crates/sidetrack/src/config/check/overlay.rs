//! `[overlay]`.

use super::super::{At, Deliver, List, Overlay, OverlayNode, Packets, Target, raw};
use super::Check;
use super::groups::Known;
use sidetrack_core::net::PortSet;
use sidetrack_core::overlay::NODES_MAX;
use sidetrack_core::overlay::key::{PublicKey, SecretKey};
use sidetrack_core::overlay::legs::LEGS_MAX;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

impl Check<'_> {
    /// Checks the overlay, if the file has one.
    pub(super) fn overlay(&mut self, overlay: Option<&At<raw::Overlay>>) -> Option<Overlay> {
        let overlay = overlay?;
        let nodes = self.overlay_nodes(overlay);
        let name = self.overlay_name(overlay, &nodes);
        let key = self.overlay_key(overlay);
        let listen = overlay.listen.as_ref().map(|list| self.addresses(list)).unwrap_or_default();
        let dials = nodes.iter().any(|node| !node.addresses.is_empty() && Some(&node.name) != name.as_ref());
        if listen.is_empty() && !dials {
            let help = "write `listen = \"0.0.0.0:8100\"`, or give an `address` to a node to be dialled";
            self.error(overlay.span(), "this node neither listens nor dials: it would have no links", help);
        }
        let edges = self.overlay_topology(overlay, &nodes);
        let trust = self.overlay_trust(overlay);
        self.overlay_trust = trust;
        let deliver = overlay.deliver.iter().filter_map(|deliver| self.deliver(deliver, &nodes)).collect();
        let groups = self.groups(overlay, &nodes, trust);
        let known = Known { nodes: &nodes, groups: &groups, own: name.as_deref(), trust };
        let packets = overlay.packets.iter().filter_map(|packets| self.packets(packets, &known)).collect();
        let links = self.overlay_links(overlay, &nodes);
        let tolerant_rate = self.tolerant_rate(overlay);
        let congestion = overlay.congestion.as_ref().map_or("bbr", |name| name.as_str()).into();
        let uplinks = overlay.uplinks.as_ref().map(|list| self.uplinks(list)).unwrap_or_default();
        let all_legs = overlay.legs.as_deref() == Some(&raw::OverlayLegs::Both);
        let (name, key) = (name?, key?);
        Some(Overlay {
            name,
            key,
            listen,
            uplinks,
            all_legs,
            nodes,
            links,
            deliver,
            congestion,
            trust,
            tolerant_rate,
            edges,
            packets,
            groups,
        })
    }

    /// Parses the addresses of a node: at most as many as a link has legs.
    fn node_addresses(&mut self, list: &List<String>) -> Vec<SocketAddr> {
        self.not_empty(list);
        self.at_most_legs(list);
        list.items().iter().filter_map(|at| self.address(at)).collect()
    }

    /// Parses the addresses that this node dials from.
    fn uplinks(&mut self, list: &List<String>) -> Vec<IpAddr> {
        self.not_empty(list);
        self.at_most_legs(list);
        let mut uplinks: Vec<IpAddr> = Vec::new();
        for at in list.items() {
            match at.parse::<IpAddr>() {
                Ok(ip) if ip.is_unspecified() || ip.is_multicast() => {
                    let help = "write an address of an interface of this host, or remove it";
                    self.error(at.span(), format!("'{}' cannot be dialled from", at.as_str()), help);
                }
                Ok(ip) if uplinks.contains(&ip) => {
                    self.error(at.span(), format!("'{}' is there twice", at.as_str()), "remove one of them");
                }
                Ok(ip) => uplinks.push(ip),
                Err(_) => {
                    let help = "write an address without a port, such as \"192.0.2.7\"";
                    self.error(at.span(), format!("'{}' is not an IP address", at.as_str()), help);
                }
            }
        }
        uplinks
    }

    fn at_most_legs(&mut self, list: &List<String>) {
        if list.items().len() > LEGS_MAX.into() {
            let help = format!("write at most {LEGS_MAX}: more legs than a link may have");
            self.error(list.span(), "too many addresses", help);
        }
    }

    fn overlay_nodes(&mut self, overlay: &raw::Overlay) -> Vec<OverlayNode> {
        if overlay.node.len() > NODES_MAX {
            let help = format!("an overlay has at most {NODES_MAX} nodes");
            self.error(0..0, "too many [overlay.node] tables", help);
        }
        let mut nodes: Vec<OverlayNode> = Vec::new();
        for (name, node) in &overlay.node {
            let addresses = node.address.as_ref().map(|list| self.node_addresses(list)).unwrap_or_default();
            let Some(at) = &node.key else {
                let help = "write `key = \"ed25519:…\"`; 'sidetrack overlay key FILE' prints it on that node";
                self.error(node.span(), format!("the node '{name}' has no key"), help);
                continue;
            };
            match at.parse::<PublicKey>() {
                Ok(key) if nodes.iter().any(|other| other.key == key) => {
                    let help = "each node makes a key of its own: 'sidetrack overlay key FILE'";
                    self.error(at.span(), "two nodes have the same key", help);
                }
                Ok(key) => nodes.push(OverlayNode { name: name.as_str().into(), key, addresses }),
                Err(error) => {
                    let help = "'sidetrack overlay key FILE' on that node prints it";
                    self.error(at.span(), error.to_string(), help);
                }
            }
        }
        nodes
    }

    fn overlay_name(&mut self, overlay: &At<raw::Overlay>, nodes: &[OverlayNode]) -> Option<Arc<str>> {
        let Some(name) = &overlay.name else {
            let help = "write `name = \"…\"`: one of the names of [overlay.node]";
            self.error(overlay.span(), "the overlay does not say which of its nodes this is", help);
            return None;
        };
        self.overlay_node(name, nodes)
    }

    /// Returns one of the nodes, by name. Reports an error if there is none.
    pub(super) fn overlay_node(&mut self, name: &At<String>, nodes: &[OverlayNode]) -> Option<Arc<str>> {
        let known = nodes.iter().find(|node| *node.name == **name);
        if known.is_none() {
            let near = super::nearest(name, nodes.iter().map(|node| &*node.name));
            let help = match near {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => format!("write a table [overlay.node.{}] with its key", name.as_str()),
            };
            self.error(name.span(), format!("the overlay has no node '{}'", name.as_str()), help);
        }
        known.map(|node| node.name.clone())
    }

    fn overlay_key(&mut self, overlay: &At<raw::Overlay>) -> Option<SecretKey> {
        let Some(file) = &overlay.key_file else {
            let help = "make a key with 'sidetrack overlay key FILE' and write `key_file = \"FILE\"`";
            self.error(overlay.span(), "the overlay lacks this node's key", help);
            return None;
        };
        let lines = self.secret_lines(file, file.span())?;
        match lines.first().map(|line| line.parse::<SecretKey>()) {
            Some(Ok(key)) => Some(key),
            Some(Err(error)) => {
                self.error(
                    file.span(),
                    format!("'{}': {error}", file.as_str()),
                    "make one with 'sidetrack overlay key FILE'",
                );
                None
            }
            None => {
                self.error(
                    file.span(),
                    format!("'{}' is empty", file.as_str()),
                    "make one with 'sidetrack overlay key FILE'",
                );
                None
            }
        }
    }

    fn deliver(&mut self, deliver: &At<raw::Deliver>, nodes: &[OverlayNode]) -> Option<Deliver> {
        let from = deliver.from.as_ref().map(|names| {
            self.not_empty(names);
            names.items().iter().filter_map(|name| self.overlay_node(name, nodes)).collect()
        });
        let Some(to) = &deliver.to else {
            let help = "write `to = \"192.0.2.0/24\"`: nothing is delivered to where no entry says so";
            self.error(deliver.span(), "this entry does not say where to", help);
            return None;
        };
        let to = self.networks(to);
        let to = self.deliverable(&to);
        let port: Option<PortSet> = deliver.port.as_ref().map(|ports| self.ports(ports));
        Some(Deliver { from, to, port })
    }

    fn packets(&mut self, packets: &At<raw::Packets>, known: &Known<'_>) -> Option<Packets> {
        let target = self.target(packets, known)?;
        let to = match (&packets.to, &target) {
            (Some(to), _) => self.networks(to),
            (None, Target::Group(name) | Target::Nearest(name)) => {
                known.groups.iter().find(|group| group.name == *name).map(|group| group.to.clone())?
            }
            (None, Target::Node(_)) => {
                let help = "write `to = \"192.0.2.0/24\"`: the addresses behind that node";
                self.error(packets.span(), "this entry does not say which packets it is about", help);
                return None;
            }
        };
        self.suits(packets, &target, &to, known.trust);
        let port = packets.port.as_ref().map(|ports| self.ports(ports));
        let local = packets.at.as_deref().is_none_or(|at| *at == raw::PacketsAt::Local);
        let service = self.service(packets, known.trust);
        Some(Packets { target, to, port, local, service })
    }

    /// Returns the node that the carrier `overlay:NAME` means, or `nearest:GROUP` or `group:GROUP`.
    pub(super) fn overlay_carrier(&mut self, text: &At<String>, name: &str) -> Option<Arc<str>> {
        let Some(nodes) = self.overlay_names.clone() else {
            let help = "write an [overlay] section: who this node is, and who the others are";
            self.error(text.span(), "this file has no overlay", help);
            return None;
        };
        for word in ["nearest", "group"] {
            if let Some(group) = name.strip_prefix(word).and_then(|rest| rest.strip_prefix(':')) {
                return self.group_carrier(text, word, group);
            }
        }
        if nodes.iter().any(|node| **node == *name) {
            return Some(name.into());
        }
        let near = super::nearest(name, nodes.iter().map(|node| &**node));
        let help = match near {
            Some(near) => format!("did you mean \"overlay:{near}\"?"),
            None => format!("write a table [overlay.node.{name}] with its key"),
        };
        self.error(text.span(), format!("the overlay has no node '{name}'"), help);
        None
    }
}
