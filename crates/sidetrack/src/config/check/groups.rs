//! `[[overlay.group]]`, and who delivers the packets of an `[[overlay.packets]]`.

use super::super::{At, Group, List, OverlayNode, Target, raw};
use super::Check;
use super::trust::chosen;
use sidetrack_core::net::IpSet;
use sidetrack_core::overlay::group::{GROUPS_MAX, GroupName, rule};
use sidetrack_sys::nft::InterfaceName;

use sidetrack_core::overlay::service::Trust;
use std::sync::Arc;

/// The names that packets can go to.
pub(super) struct Known<'a> {
    /// The nodes of the overlay.
    pub nodes: &'a [OverlayNode],
    /// The groups with an entry.
    pub groups: &'a [Group],
    /// This node.
    pub own: Option<&'a str>,
    /// The trust of entries that name none.
    pub trust: Trust,
}

impl Check<'_> {
    /// Checks the groups, and notes their names for carriers.
    pub(super) fn groups(
        &mut self,
        overlay: &raw::Overlay,
        nodes: &[OverlayNode],
        of_overlay: Trust,
    ) -> Vec<Group> {
        if overlay.group.len() > GROUPS_MAX {
            let help = format!("a node has at most {GROUPS_MAX} groups");
            self.error(0..0, "too many [[overlay.group]] entries", help);
        }
        let mut groups: Vec<Group> = Vec::new();
        for at in &overlay.group {
            let Some(group) = self.group(at, nodes, of_overlay) else { continue };
            if groups.iter().any(|other| other.name == group.name) {
                let help = "write one entry with all addresses of the group";
                self.error(at.span(), format!("the group '{}' has two entries", group.name), help);
                continue;
            }
            groups.push(group);
        }
        self.overlay_groups = groups.iter().map(|group| group.name.clone()).collect();
        groups
    }

    fn group(&mut self, group: &At<raw::Group>, nodes: &[OverlayNode], of_overlay: Trust) -> Option<Group> {
        let Some(name) = &group.name else {
            let help = "write `name = \"…\"`: the same on all nodes";
            self.error(group.span(), "this group has no name", help);
            return None;
        };
        let parsed = name.parse::<GroupName>();
        if let Err(error) = &parsed {
            self.error(
                name.span(),
                format!("'{}' is not the name of a group", name.as_str()),
                error.to_string(),
            );
        }
        let senders = group.senders.as_ref().map(|names| {
            self.not_empty(names);
            names.items().iter().filter_map(|name| self.overlay_node(name, nodes)).collect()
        });
        let to = self.group_addresses(group)?;
        let interfaces = self.group_interfaces(group, &to);
        let ttl = group.ttl.as_ref().map(|ttl| **ttl);
        if let (Some(at), Some(0)) = (&group.ttl, ttl) {
            self.error(at.span(), "`ttl` cannot be 0", "write a number from 1 to 255");
        }
        let join = group.join.as_deref().copied().unwrap_or(false);
        let trust = chosen(group.trust.as_ref(), of_overlay);
        Some(Group { name: parsed.ok()?, join, senders, to, interfaces, ttl, trust })
    }

    fn group_addresses(&mut self, group: &At<raw::Group>) -> Option<IpSet> {
        let Some(list) = &group.to else {
            let help = "write `to = \"239.1.2.3\"`: the addresses that packets to the group have";
            self.error(group.span(), "this group has no addresses", help);
            return None;
        };
        let to = self.networks(list);
        let (multicast, local) = (rule::multicast(), rule::link_local());
        for net in to.intersection(&multicast).nets() {
            if local.covers_net(*net) {
                let help = "routers do not forward these addresses; take one of 239.0.0.0/8 or ff05::/16";
                self.error(list.span(), format!("{net} is for one link only"), help);
            } else if net.prefix_len() != if net.is_v6() { 128 } else { 32 } {
                let help = "list the IP multicast addresses one by one: this node listens to each of them";
                self.error(list.span(), format!("{net} is more than one multicast address"), help);
            }
        }
        Some(to)
    }

    fn group_interfaces(&mut self, group: &At<raw::Group>, to: &IpSet) -> Vec<InterfaceName> {
        let words = self.words(group.interface.as_ref());
        let is_multicast = to.overlaps(&rule::multicast());
        if is_multicast && words.is_empty() {
            let help = "write `interface = \"eth1\"`: where the senders and receivers of this site are";
            self.error(group.span(), "a group with IP multicast addresses needs an interface", help);
        }
        if let (Some(at), false) = (&group.interface, is_multicast) {
            let help = "take it out: packets to other addresses go where the kernel's routes lead";
            self.error(at.span(), "`interface` is for IP multicast addresses", help);
        }
        words.iter().filter_map(|word| word.parse().ok()).collect()
    }

    /// Returns who delivers these packets.
    pub(super) fn target(&mut self, packets: &At<raw::Packets>, known: &Known<'_>) -> Option<Target> {
        match (&packets.node, &packets.group, &packets.nearest) {
            (Some(name), None, None) => {
                let node = self.overlay_node(name, known.nodes)?;
                if known.own == Some(&*node) {
                    let help =
                        "name the node at the other side; what may come here is in [[overlay.deliver]]";
                    self.error(name.span(), "packets for this node itself need no overlay", help);
                    return None;
                }
                Some(Target::Node(node))
            }
            (None, Some(name), None) => self.group_named(name).map(Target::Group),
            (None, None, Some(name)) => self.group_named(name).map(Target::Nearest),
            (None, None, None) => {
                let help = "write `node = \"…\"`: the node that delivers them; or `group` or `nearest`";
                self.error(packets.span(), "this entry does not say which node delivers the packets", help);
                None
            }
            _ => {
                let help = "write one of `node`, `group` and `nearest`, and another entry for other packets";
                self.error(packets.span(), "this entry names more than one receiver", help);
                None
            }
        }
    }

    fn group_named(&mut self, name: &At<String>) -> Option<GroupName> {
        let known = self.overlay_groups.iter().find(|group| group.as_str() == name.as_str()).cloned();
        if known.is_none() {
            let near = super::nearest(name, self.overlay_groups.iter().map(GroupName::as_str));
            let help = match near {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => "write an [[overlay.group]] with its name and addresses".to_owned(),
            };
            self.error(name.span(), format!("the overlay has no group '{}'", name.as_str()), help);
        }
        known
    }

    /// Reports what packets to a group cannot have.
    pub(super) fn suits(
        &mut self,
        packets: &At<raw::Packets>,
        target: &Target,
        to: &IpSet,
        of_overlay: Trust,
    ) {
        if matches!(target, Target::Node(_)) {
            return;
        }
        let is_reliable = matches!(packets.link.as_deref(), None | Some(raw::PacketsLink::Reliable));
        if is_reliable && chosen(packets.trust.as_ref(), of_overlay) == Trust::Members {
            let help = "write `link = \"best-effort\"`, or \"real-time\" with a `deadline_ms`";
            let span = packets.link.as_ref().map_or(packets.span(), At::span);
            self.error(span, "packets to a group travel in datagrams", help);
        }
        if matches!(target, Target::Nearest(_)) && to.overlaps(&rule::multicast()) {
            let help =
                "write `group` for IP multicast addresses; the nearest member needs an address of one host";
            let span = packets.to.as_ref().map_or(packets.span(), List::span);
            self.error(span, "packets to an IP multicast address are for all members", help);
        }
    }

    /// Returns the carrier `overlay:nearest:GROUP`.
    pub(super) fn group_carrier(&mut self, text: &At<String>, word: &str, group: &str) -> Option<Arc<str>> {
        let known = self.overlay_groups.iter().any(|name| name.as_str() == group);
        if !known {
            let near = super::nearest(group, self.overlay_groups.iter().map(GroupName::as_str));
            let help = match near {
                Some(near) => format!("did you mean \"overlay:{word}:{near}\"?"),
                None => "write an [[overlay.group]] with its name and addresses".to_owned(),
            };
            self.error(text.span(), format!("the overlay has no group '{group}'"), help);
        }
        known.then(|| format!("{word}:{group}").into())
    }
}
