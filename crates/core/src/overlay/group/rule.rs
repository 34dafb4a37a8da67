//! Which packets to a group may be delivered here, and with which time to live.
//!
//! The source of a packet is the node that its frame names. Unless a proof came with it, no end-to-end signature protects it: a
//! relay that lies can send packets in another member's name. [`Rule::admit`] is the one place that asks whether a node may send.

use super::super::NodeId;
use super::super::packet::{Ends, Interceptor, Origin, Refused as Judged, Transport};
use super::super::service::Delivery;
use crate::net::{IpNet, IpSet};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What this node's configuration says of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// The nodes that may send. `None`: any.
    pub senders: Option<BTreeSet<NodeId>>,
    /// The addresses of the group. Packets to other addresses are not delivered.
    pub to: IpSet,
    /// The time to live (hop limit) of packets to IP multicast addresses when they are delivered. `None`: one less than they had.
    pub ttl: Option<u8>,
    /// Only packets with a proof of their source are delivered ([`super::super::tolerant`]).
    pub only_proven: bool,
}

/// Why a packet to a group is not delivered here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refused {
    /// It has no valid head, is not a TCP or UDP packet that can be parsed, or is TCP to all members.
    Unreadable,
    /// This node is not a member.
    NotMember,
    /// Its source may not send to the group.
    Sender,
    /// It came without a proof of its source.
    Unproven,
    /// The IP source is not the address of one host.
    Source,
    /// The destination is not an address of the group.
    Destination,
    /// It may not be forwarded any more.
    Ttl,
    /// A rule of this node denies it.
    Denied,
}

impl Refused {
    /// All values.
    pub const ALL: [Self; 8] = [
        Self::Unreadable,
        Self::NotMember,
        Self::Sender,
        Self::Unproven,
        Self::Source,
        Self::Destination,
        Self::Ttl,
        Self::Denied,
    ];

    /// Returns the word for status and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::NotMember => "not_member",
            Self::Sender => "sender",
            Self::Unproven => "unproven",
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Ttl => "ttl",
            Self::Denied => "denied",
        }
    }
}

/// Returns all IP multicast addresses (RFC 5771, RFC 4291 Sec. 2.7).
pub fn multicast() -> IpSet {
    let v4 = IpNet::new(Ipv4Addr::new(224, 0, 0, 0).into(), 4);
    let v6 = IpNet::new(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0).into(), 8);
    [v4, v6].into_iter().collect()
}

/// Returns the IP multicast addresses that are for one link only: routers do not forward them (RFC 5771 Sec. 4, RFC 4291
/// Sec. 2.7).
pub fn link_local() -> IpSet {
    let v4 = IpNet::new(Ipv4Addr::new(224, 0, 0, 0).into(), 24);
    // The scopes 1 (interface) and 2 (link), with all values of the four flags.
    let v6 = (0_u16..16).flat_map(|flags| {
        [1, 2].map(|scope| {
            IpNet::new(Ipv6Addr::new(0xff00 | flags << 4 | scope, 0, 0, 0, 0, 0, 0, 0).into(), 16)
        })
    });
    v6.chain([v4]).collect()
}

impl Rule {
    /// Whether a packet to an IP multicast address may leave the network of its sender.
    pub fn leaves(&self, packet: &[u8]) -> bool {
        self.ttl.is_some() || time_to_live(packet).is_some_and(|ttl| ttl > 1)
    }

    /// Checks a packet of the node `from`, and sets its time to live if it goes to an IP multicast address. `judge` says whether
    /// our rules let that node begin the conversation; its answer is remembered as for packets to one node.
    ///
    /// # Errors
    /// Fails with the reason for the refusal.
    pub fn admit(
        &self,
        interceptor: &mut Interceptor,
        (from, delivery): (Origin, Delivery),
        packet: &mut [u8],
        judge: impl FnOnce(&Ends) -> Result<(), Judged>,
    ) -> Result<Ends, Refused> {
        if self.only_proven && !from.is_proven {
            return Err(Refused::Unproven);
        }
        if self.senders.as_ref().is_some_and(|senders| !senders.contains(&from.node)) {
            return Err(Refused::Sender);
        }
        let ends = Ends::of(packet).ok_or(Refused::Unreadable)?;
        // A TCP connection has one server.
        if delivery == Delivery::Group && ends.transport == Transport::Tcp {
            return Err(Refused::Unreadable);
        }
        if !is_host(ends.source.ip()) {
            return Err(Refused::Source);
        }
        let to = ends.destination.ip();
        let may_be_reached = is_host(to) || (to.is_multicast() && delivery == Delivery::Group);
        if !self.to.contains(to) || !may_be_reached {
            return Err(Refused::Destination);
        }
        if to.is_multicast() {
            let left = self.ttl.or_else(|| time_to_live(packet)?.checked_sub(1));
            let left = left.filter(|left| *left > 0).ok_or(Refused::Ttl)?;
            set_time_to_live(packet, left);
        }
        interceptor.decided(from.node, ends, judge).map_err(|_| Refused::Denied)?;
        Ok(ends)
    }
}

/// Whether this is the address of one host on a network.
fn is_host(ip: IpAddr) -> bool {
    let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    !(ip.is_loopback() || ip.is_multicast() || ip.is_unspecified() || is_broadcast)
}

/// The byte with the time to live: RFC 791 Sec. 3.1, RFC 8200 Sec. 3.
fn place(packet: &[u8]) -> Option<usize> {
    match packet.first()? >> 4 {
        4 => Some(8),
        6 => Some(7),
        _ => None,
    }
}

fn time_to_live(packet: &[u8]) -> Option<u8> {
    packet.get(place(packet)?).copied()
}

/// Sets the time to live. The kernel works out the checksum of an IPv4 header when the packet is sent (raw(7)).
fn set_time_to_live(packet: &mut [u8], ttl: u8) {
    if let Some(byte) = place(packet).and_then(|at| packet.get_mut(at)) {
        *byte = ttl;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: NodeId = NodeId(7);
    const PLAIN: Origin = Origin { node: FROM, is_proven: false };
    const OTHER: Origin = Origin { node: NodeId(8), is_proven: false };
    const TO_ALL: (Origin, Delivery) = (PLAIN, Delivery::Group);
    const TO_ONE: (Origin, Delivery) = (PLAIN, Delivery::Nearest);

    /// UDP from 10.1.0.2:5000 to 239.1.2.3:5004 with a time to live of 16.
    const UDP: [u8; 29] = [
        0x45, 0, 0, 29, 0, 0, 0, 0, 16, 17, 0, 0, 10, 1, 0, 2, 239, 1, 2, 3, // IPv4
        0x13, 0x88, 0x13, 0x8c, 0, 9, 0, 0, 0xaa, // UDP
    ];

    fn changed(at: usize, bytes: &[u8]) -> [u8; 29] {
        let mut packet = UDP;
        packet[at..at + bytes.len()].copy_from_slice(bytes);
        packet
    }

    fn rule() -> Rule {
        let to = ["239.1.2.3", "10.99.0.1", "127.0.0.0/8"].iter().map(|net| net.parse().unwrap()).collect();
        Rule { senders: Some(BTreeSet::from([FROM])), to, ttl: None, only_proven: false }
    }

    fn admit(rule: &Rule, way: (Origin, Delivery), mut packet: [u8; 29]) -> Result<u8, Refused> {
        let mut interceptor = Interceptor::new(Vec::new());
        rule.admit(&mut interceptor, way, &mut packet, |_| Ok(())).map(|_| packet[8])
    }

    #[test]
    fn only_what_the_group_allows_is_delivered() {
        assert_eq!(admit(&rule(), TO_ALL, UDP), Ok(15), "one less");
        assert_eq!(admit(&rule(), (OTHER, Delivery::Group), UDP), Err(Refused::Sender));
        let any = Rule { senders: None, ..rule() };
        assert_eq!(admit(&any, (OTHER, Delivery::Group), UDP), Ok(15));
        let strict = Rule { only_proven: true, ..rule() };
        assert_eq!(admit(&strict, TO_ALL, UDP), Err(Refused::Unproven));
        let proven = Origin { is_proven: true, ..PLAIN };
        assert_eq!(admit(&strict, (proven, Delivery::Group), UDP), Ok(15));
        let proven = Origin { is_proven: true, ..OTHER };
        assert_eq!(
            admit(&strict, (proven, Delivery::Group), UDP),
            Err(Refused::Sender),
            "a proof gives no right"
        );
        assert_eq!(admit(&rule(), TO_ONE, UDP), Err(Refused::Destination), "multicast is for all");
        assert_eq!(admit(&rule(), TO_ONE, changed(16, &[10, 99, 0, 1])), Ok(16), "as it came");
        assert_eq!(admit(&rule(), TO_ALL, changed(16, &[10, 99, 0, 1])), Ok(16));
        for to in [[239, 1, 2, 4], [127, 0, 0, 1], [10, 99, 0, 2]] {
            assert_eq!(admit(&rule(), TO_ALL, changed(16, &to)), Err(Refused::Destination), "{to:?}");
        }
        for from in [[239, 9, 9, 9], [127, 0, 0, 1], [0, 0, 0, 0], [255, 255, 255, 255]] {
            assert_eq!(admit(&rule(), TO_ALL, changed(12, &from)), Err(Refused::Source), "{from:?}");
        }
        assert_eq!(admit(&rule(), TO_ALL, changed(9, &[1])), Err(Refused::Unreadable), "ICMP");
        let mut interceptor = Interceptor::new(Vec::new());
        let denied = rule().admit(&mut interceptor, TO_ALL, &mut UDP.clone(), |_| Err(Judged::Denied));
        assert_eq!(denied, Err(Refused::Denied));
    }

    #[test]
    fn a_packet_that_was_cut_anywhere_is_unreadable() {
        for length in 0..UDP.len() {
            let mut interceptor = Interceptor::new(Vec::new());
            let mut packet = UDP[..length].to_vec();
            let admitted = rule().admit(&mut interceptor, TO_ALL, &mut packet, |_| Ok(()));
            assert_eq!(admitted, Err(Refused::Unreadable), "{length}");
        }
    }

    #[test]
    fn a_time_to_live_ends_at_one_unless_the_group_sets_it() {
        let last = changed(8, &[1]);
        assert!(!rule().leaves(&last) && rule().leaves(&UDP) && !rule().leaves(&[]));
        assert_eq!(admit(&rule(), TO_ALL, last), Err(Refused::Ttl));
        assert_eq!(admit(&rule(), TO_ALL, changed(8, &[0])), Err(Refused::Ttl));
        let sets = Rule { ttl: Some(4), ..rule() };
        assert!(sets.leaves(&last));
        assert_eq!((admit(&sets, TO_ALL, last), admit(&sets, TO_ALL, UDP)), (Ok(4), Ok(4)));
    }

    #[test]
    fn addresses_of_one_link_are_known() {
        let (all, local) = (multicast(), link_local());
        for ip in ["224.0.0.251", "ff02::fb", "ff12::1", "ff01::1"] {
            let ip = ip.parse().unwrap();
            assert!(local.contains(ip) && all.contains(ip), "{ip}");
        }
        for ip in ["239.1.2.3", "224.0.1.1", "ff05::2", "ff3e::1"] {
            let ip = ip.parse().unwrap();
            assert!(!local.contains(ip) && all.contains(ip), "{ip}");
        }
        assert!(!all.contains("10.0.0.1".parse().unwrap()) && !all.contains("fd00::1".parse().unwrap()));
    }
}
