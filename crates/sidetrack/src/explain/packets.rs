//! Packets that the overlay captures whole: which `[[overlay.packets]]` they match, and how they travel.

use crate::config::{Config, Target};
use serde::Serialize;
use sidetrack_core::flow::Flow;
use sidetrack_core::overlay::service::Delivery;
use std::fmt;

/// How the overlay carries the packets of a flow, if it captures them whole. They reach no listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CapturedPackets {
    /// The number of the `[[overlay.packets]]` in the file, from 1 on: the first one that matches.
    pub entry: usize,
    /// The node that delivers them. `None`: members of a group.
    pub node: Option<String>,
    /// The group whose members deliver them: all, or the nearest one. `None`: a node.
    pub group: Option<String>,
    /// Which nodes deliver them: `node`, `group` (all members) or `nearest`.
    pub delivery: &'static str,
    /// The kind of links.
    pub link: &'static str,
    /// The dissemination.
    pub dissemination: &'static str,
    /// Which nodes they rely on: `members` or `intrusion-tolerant`.
    pub trust: &'static str,
    /// How long a packet may travel, milliseconds. `None`: there is no limit.
    pub deadline_ms: Option<u64>,
    /// The service in words.
    pub service: String,
    /// Whether packets that this host forwards are captured, too.
    pub forwarded: bool,
    /// The links that they use now.
    pub links: Links,
}

/// The links of packets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Links {
    /// No running sidetrack was asked, or it could not tell. Says why.
    Unknown(String),
    /// Each from one node to another.
    Known(Vec<[String; 2]>),
}

/// Returns the entry that captures packets of this flow. `None`: no entry matches, or the destination is not an address.
pub(super) fn of(config: &Config, flow: &Flow) -> Option<CapturedPackets> {
    let to = flow.orig_dst.socket_addr()?;
    let ports = [to.port(), flow.client.port()];
    let entries = &config.overlay.as_ref()?.packets;
    let (index, entry) = entries.iter().enumerate().find(|(_, entry)| {
        let has_port = entry.port.as_ref().is_none_or(|set| ports.iter().any(|port| set.contains(*port)));
        entry.to.contains(to.ip()) && has_port
    })?;
    let service = &entry.service;
    let (node, group, delivery) = match &entry.target {
        Target::Node(node) => (Some(node.to_string()), None, Delivery::Node),
        Target::Group(group) => (None, Some(group.to_string()), Delivery::Group),
        Target::Nearest(group) => (None, Some(group.to_string()), Delivery::Nearest),
    };
    Some(CapturedPackets {
        entry: index + 1,
        node,
        group,
        delivery: delivery.name(),
        link: service.kind.name(),
        dissemination: service.dissemination.name(),
        trust: service.trust.name(),
        deadline_ms: service.deadline.and_then(|deadline| u64::try_from(deadline.as_millis()).ok()),
        service: service.words(),
        forwarded: !entry.local,
        links: Links::Unknown("no running sidetrack was asked".to_owned()),
    })
}

impl fmt::Display for CapturedPackets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry, node, group, delivery, service, forwarded, links, .. } = self;
        let to = match (node, group) {
            (Some(node), _) => format!("node {node}"),
            (None, Some(group)) if *delivery == Delivery::Nearest.name() => {
                format!("the nearest member of group {group}")
            }
            (None, group) => format!("all members of group {}", group.as_deref().unwrap_or_default()),
        };
        let whose = if *forwarded { "sent or forwarded" } else { "sent" };
        writeln!(
            f,
            "packets  {whose} by this host, captured whole by [[overlay.packets]] number {entry}, before any listener; to \
             {to}: {service}"
        )?;
        match links {
            Links::Unknown(why) => writeln!(f, "links    not known: {why}"),
            Links::Known(links) => {
                let links: Vec<_> = links.iter().map(|[from, to]| format!("{from} -> {to}")).collect();
                writeln!(f, "links    {}", links.join(", "))
            }
        }
    }
}
