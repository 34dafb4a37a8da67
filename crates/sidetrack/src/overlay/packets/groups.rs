//! Whole packets to groups: where they are caught, sent and delivered.
//!
//! A packet to an IP multicast address is copied, not taken: receivers in its own network get it from there. Delivered packets bear
//! our mark, and our rules do not catch them again.

use super::{Begin, DELIVERED_MARK, Interception, judge};
use crate::config;
use crate::overlay::datagrams;
use crate::overlay::identity::Identity;
use crate::overlay::shared::Shared;
use anyhow::Context as _;
use sidetrack_core::overlay::group::GroupName;
use sidetrack_core::overlay::group::head::Head;
use sidetrack_core::overlay::group::rule::{Rule, multicast};
use sidetrack_core::overlay::mss;
use sidetrack_core::overlay::packet::{Ends, Origin, Receiver};
use sidetrack_core::overlay::service::{Service, Trust};
use sidetrack_sys::multicast::Listening;
use sidetrack_sys::nfqueue::Verdict;
use sidetrack_sys::nft::{InterfaceName, PacketCatch};
use sidetrack_sys::raw::RoutedSocket;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

/// The networks in which packets to IP multicast addresses are heard and delivered.
#[derive(Default)]
pub(super) struct Networks {
    /// One socket for each interface.
    sockets: BTreeMap<InterfaceName, RoutedSocket>,
    /// The interfaces of each group.
    groups: BTreeMap<GroupName, Vec<InterfaceName>>,
    /// While they exist, network cards and switches let the packets of senders come here.
    _heard: Vec<Listening>,
}

impl Networks {
    /// Opens the sockets, and listens to the addresses of which packets are caught.
    ///
    /// # Errors
    /// Returns the interface that is not there, or what the system refused.
    pub(super) fn open(config: &config::Overlay) -> anyhow::Result<Self> {
        let mut networks = Self::default();
        for group in &config.groups {
            for name in &group.interfaces {
                let text = name.to_string();
                let failed = || format!("[[overlay.group]] '{}': interface = \"{text}\"", group.name);
                if !networks.sockets.contains_key(name) {
                    let socket = RoutedSocket::open_on(DELIVERED_MARK.value, &text).with_context(failed)?;
                    networks.sockets.insert(*name, socket);
                }
                for address in heard(config, group) {
                    networks._heard.push(Listening::join(address, &text).with_context(failed)?);
                }
            }
            networks.groups.insert(group.name.clone(), group.interfaces.clone());
        }
        Ok(networks)
    }

    /// Sends a packet into the networks of a group.
    fn send(&self, group: &GroupName, packet: &[u8], ends: &Ends) -> io::Result<()> {
        let mut failed = Ok(());
        for name in self.groups.get(group).into_iter().flatten() {
            if let Some(socket) = self.sockets.get(name)
                && let Err(error) = socket.send(packet, ends.destination.ip())
            {
                failed = Err(error);
            }
        }
        failed
    }
}

/// Returns the multicast addresses of a group that packets of other hosts are caught for.
fn heard(config: &config::Overlay, group: &config::Group) -> Vec<std::net::IpAddr> {
    let is_caught = |packets: &&config::Packets| {
        !packets.local && matches!(&packets.target, config::Target::Group(name) if *name == group.name)
    };
    let caught = config.packets.iter().filter(is_caught);
    let addresses = caught.flat_map(|packets| packets.to.intersection(&multicast()).nets().to_vec());
    addresses.filter(|net| group.to.covers_net(*net)).map(|net| net.address()).collect()
}

/// Returns what the packet filter catches for an entry: IP multicast addresses apart from all others.
pub(super) fn catches(packets: &config::Packets, groups: &[config::Group]) -> Vec<PacketCatch> {
    let interfaces = match &packets.target {
        config::Target::Group(name) => groups.iter().find(|group| group.name == *name),
        config::Target::Node(_) | config::Target::Nearest(_) => None,
    };
    let Some(group) = interfaces else {
        let (local, to, ports) = (packets.local, packets.to.clone(), packets.port.clone());
        return vec![PacketCatch { local, to, ports, heard_on: None }];
    };
    let all = multicast();
    let one = |to, heard_on| PacketCatch { local: packets.local, to, ports: packets.port.clone(), heard_on };
    let both = [
        one(packets.to.difference(&all), None),
        one(packets.to.intersection(&all), Some(group.interfaces.clone())),
    ];
    both.into_iter().filter(|catch| !catch.to.is_empty()).collect()
}

/// Returns what may be delivered, by group.
pub(super) fn rules(groups: &[config::Group], identity: &Identity) -> BTreeMap<GroupName, Rule> {
    let rule = |group: &config::Group| {
        let senders = group.senders.as_ref();
        let senders =
            senders.map(|names| names.iter().filter_map(|name| identity.node_named(name)).collect());
        (
            group.name.clone(),
            Rule {
                senders,
                to: group.to.clone(),
                ttl: group.ttl,
                only_proven: group.trust == Trust::Tolerant,
            },
        )
    };
    groups.iter().map(rule).collect()
}

/// Whether a packet goes to an IP multicast address.
pub(super) fn is_multicast(packet: &[u8]) -> bool {
    Ends::of(packet).is_some_and(|ends| ends.destination.ip().is_multicast())
}

impl Begin {
    /// Sends a caught packet to a group.
    pub(super) fn to_group(
        &self,
        packet: &[u8],
        receiver: Receiver,
        service: &Service,
        without_way: Verdict,
    ) -> Verdict {
        let shared = &*self.shared;
        let stays = |group| shared.member.counters(group).unsent.fetch_add(1, Relaxed);
        let (group, member) = match receiver {
            Receiver::Here | Receiver::Node(_) => return Verdict::Accept,
            Receiver::Group(group) => (group, None),
            Receiver::Nearest { group, kept } => match datagrams::nearest(shared, &group, kept, true) {
                // The kernel delivers it: this node has the address, or a host behind it.
                Some(node) if node == shared.identity.own() => return Verdict::Accept,
                Some(node) => {
                    self.interception.rules().keep(packet, node);
                    (group, Some(node))
                }
                None => {
                    stays(&group);
                    return without_way;
                }
            },
        };
        let shrink = |packet: &mut [u8], most| {
            mss::clamp(packet, most);
        };
        let sent = datagrams::send_to_group(shared, (&group, member), service, packet.to_vec(), shrink);
        let counters = shared.member.counters(&group);
        let became = if sent > 0 { &counters.sent } else { &counters.unsent };
        became.fetch_add(1, Relaxed);
        if is_multicast(packet) { Verdict::Accept } else { Verdict::Drop }
    }
}

/// Delivers a packet that `from` has sent to a group of which this node is a member.
pub(in crate::overlay) fn deliver_to_group(
    shared: &Shared,
    interception: &Interception,
    from: Origin,
    head: &Head,
    mut packet: Vec<u8>,
) {
    interception.look_at_rules(shared);
    let name = shared.identity.name(from.node);
    let counters = shared.member.counters(&head.group);
    let admitted =
        interception.rules().incoming_to_group((from, head.delivery), &head.group, &mut packet, |ends| {
            judge::of_group(shared, &name, ends)
        });
    let ends = match admitted {
        Ok(ends) => ends,
        Err(refused) => {
            tracing::debug!(from = name, group = %head.group, ?refused, "a packet to a group is not delivered");
            return counters.refuse(refused);
        }
    };
    let sent = if ends.destination.ip().is_multicast() {
        interception.networks.send(&head.group, &packet, &ends)
    } else {
        interception.raw.send(&packet, ends.destination.ip())
    };
    let became = match sent {
        Ok(()) => &counters.delivered,
        Err(error) => {
            tracing::debug!(to = %ends.destination, %error, "a packet to a group cannot be delivered");
            &counters.failed
        }
    };
    became.fetch_add(1, Relaxed);
}
