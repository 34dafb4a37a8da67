//! IP packets that the overlay carries whole (Seamless Overlays, Secs. 2.1 and 2.2): their addresses and ports, their
//! destination node, and whether they may be delivered. TCP and UDP over IPv4 and IPv6.

use super::NodeId;
use super::frame::LinkKind;
use crate::net::{IpSet, PortSet};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Most bytes of a packet: the most that NFQUEUE copies (linux/netfilter/nfnetlink_queue.h).
pub const PACKET_MAX: usize = 65_531;

/// Most conversations whose answers are accepted. When there are more, the one that was idle for longest is
/// forgotten.
pub const CONVERSATIONS_MAX: usize = 65_536;

/// The transport protocol of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// The two endpoints of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ends {
    /// The transport protocol.
    pub transport: Transport,
    /// The source.
    pub source: SocketAddr,
    /// The destination.
    pub destination: SocketAddr,
}

impl Ends {
    /// Reads the endpoints of a whole IP packet. `None` if it is neither TCP nor UDP, is a fragment, or is truncated.
    pub fn of(packet: &[u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 => Self::of_v4(packet),
            6 => Self::of_v6(packet),
            _ => None,
        }
    }

    /// Reads an IPv4 packet (RFC 791 Sec. 3.1).
    fn of_v4(packet: &[u8]) -> Option<Self> {
        let (head, _) = packet.split_first_chunk::<20>()?;
        let length = usize::from(u16::from_be_bytes([head[2], head[3]]));
        // Either more fragments follow, or this is not the first one.
        let is_fragment = u16::from_be_bytes([head[6], head[7]]) & 0x3fff != 0;
        if length != packet.len() || is_fragment {
            return None;
        }
        let header = usize::from(head[0] & 0xf) * 4;
        let payload = packet.get(header.max(20)..)?;
        let source = Ipv4Addr::new(head[12], head[13], head[14], head[15]);
        let destination = Ipv4Addr::new(head[16], head[17], head[18], head[19]);
        Self::with_ports(head[9], source.into(), destination.into(), payload)
    }

    /// Reads an IPv6 packet (RFC 8200 Sec. 3). Skips extension headers except the fragment header.
    fn of_v6(packet: &[u8]) -> Option<Self> {
        const EXTENSIONS: [u8; 3] = [0, 43, 60];
        let (head, mut payload) = packet.split_first_chunk::<40>()?;
        if usize::from(u16::from_be_bytes([head[4], head[5]])) != payload.len() {
            return None;
        }
        let address = |at: usize| {
            let bytes: [u8; 16] = head.get(at..at + 16)?.try_into().ok()?;
            Some(IpAddr::from(Ipv6Addr::from(bytes)))
        };
        let mut next = head[6];
        while EXTENSIONS.contains(&next) {
            next = *payload.first()?;
            payload = payload.get(8 + usize::from(*payload.get(1)?) * 8..)?;
        }
        Self::with_ports(next, address(8)?, address(24)?, payload)
    }

    fn with_ports(protocol: u8, source: IpAddr, destination: IpAddr, payload: &[u8]) -> Option<Self> {
        let (transport, header) = match protocol {
            6 => (Transport::Tcp, 20),
            17 => (Transport::Udp, 8),
            _ => return None,
        };
        let ports = payload.get(..header)?;
        let port = |at: usize| Some(u16::from_be_bytes([*ports.get(at)?, *ports.get(at + 1)?]));
        let source = SocketAddr::new(source, port(0)?);
        Some(Self { transport, source, destination: SocketAddr::new(destination, port(2)?) })
    }

    /// Returns the endpoints of the answer.
    #[must_use]
    pub const fn reversed(self) -> Self {
        Self { transport: self.transport, source: self.destination, destination: self.source }
    }
}

/// A rule: which packets go to which node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catch {
    /// The node that delivers the packets.
    pub node: NodeId,
    /// The destination addresses.
    pub to: IpSet,
    /// The packet must have one of these ports at either end. `None`: any port.
    pub ports: Option<PortSet>,
    /// The kind of links that the packets use.
    pub kind: LinkKind,
}

impl Catch {
    fn has_port(&self, ends: &Ends) -> bool {
        self.ports
            .as_ref()
            .is_none_or(|ports| ports.contains(ends.destination.port()) || ports.contains(ends.source.port()))
    }
}

/// Why a packet from another node is not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refused {
    /// The packet is not a TCP or UDP packet that can be parsed.
    Unreadable,
    /// The rules would not send packets for this source address to that node, so the source is forged.
    Source,
    /// The rules do not let that node reach the destination, and the packet does not answer a packet from here.
    Destination,
}

/// The rules of one interceptor, and the conversations that it has seen.
#[derive(Clone, Debug, Default)]
pub struct Interceptor {
    catches: Vec<Catch>,
    /// For each expected answer: when its conversation was last used, and the node that it goes to.
    answers: BTreeMap<Ends, (u64, NodeId)>,
    by_age: BTreeMap<u64, Ends>,
    clock: u64,
}

impl Interceptor {
    /// Makes an interceptor with these rules. The first matching rule counts.
    pub fn new(catches: Vec<Catch>) -> Self {
        Self { catches, ..Self::default() }
    }

    /// Returns the destination node of a packet that was caught here, and the kind of links to use. `None` if no rule
    /// matches. From now on, answers to this packet are accepted.
    pub fn outgoing(&mut self, packet: &[u8]) -> Option<(NodeId, LinkKind)> {
        let ends = Ends::of(packet)?;
        let fits = |catch: &&Catch| catch.to.contains(ends.destination.ip()) && catch.has_port(&ends);
        let Catch { node, kind, .. } = *self.catches.iter().find(fits)?;
        self.remember(ends.reversed(), node);
        Some((node, kind))
    }

    /// Whether a packet that `from` has sent may be delivered. `may_reach` tells which destinations the rules allow
    /// that node.
    ///
    /// # Errors
    /// Fails with the reason for the refusal.
    pub fn incoming(
        &self,
        from: NodeId,
        packet: &[u8],
        may_reach: impl Fn(SocketAddr) -> bool,
    ) -> Result<Ends, Refused> {
        let ends = Ends::of(packet).ok_or(Refused::Unreadable)?;
        // Check the source first: a node must not send packets in the name of hosts of another node.
        let is_theirs = |catch: &Catch| {
            catch.node == from && catch.to.contains(ends.source.ip()) && catch.has_port(&ends)
        };
        if !self.catches.iter().any(is_theirs) {
            return Err(Refused::Source);
        }
        let is_answer = self.answers.get(&ends).is_some_and(|(_, node)| *node == from);
        // Loopback, multicast and broadcast addresses would reach this host, or many hosts.
        let is_one_host = match ends.destination.ip() {
            IpAddr::V4(ip) => {
                !(ip.is_loopback() || ip.is_multicast() || ip.is_broadcast() || ip.is_unspecified())
            }
            IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_multicast() || ip.is_unspecified()),
        };
        if is_one_host && (is_answer || may_reach(ends.destination)) {
            Ok(ends)
        } else {
            Err(Refused::Destination)
        }
    }

    fn remember(&mut self, answer: Ends, node: NodeId) {
        self.clock += 1;
        if let Some((age, _)) = self.answers.insert(answer, (self.clock, node)) {
            self.by_age.remove(&age);
        }
        self.by_age.insert(self.clock, answer);
        if self.answers.len() > CONVERSATIONS_MAX
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.answers.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: NodeId = NodeId(7);

    /// A SYN from 10.1.0.2:40000 to 10.2.0.3:22, as Linux sends it (checksums left out).
    const SYN: [u8; 40] = [
        0x45, 0, 0, 40, 0x12, 0x34, 0x40, 0, 64, 6, 0, 0, 10, 1, 0, 2, 10, 2, 0, 3, // IPv4
        0x9c, 0x40, 0, 22, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0, // TCP
    ];

    fn v6_udp(extension: bool) -> Vec<u8> {
        let (next, more) = if extension { (60, &[17, 0, 1, 4, 0, 0, 0, 0][..]) } else { (17, &[][..]) };
        let udp = [0x1f, 0x90, 0, 53, 0, 9, 0, 0, 0xaa];
        let length = u8::try_from(more.len() + udp.len()).unwrap();
        let mut packet = vec![0x60, 0, 0, 0, 0, length, next, 64];
        packet.extend("fd00::1".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend("fd00::2".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend(more);
        packet.extend(udp);
        packet
    }

    fn nets(text: &str) -> IpSet {
        text.split(' ').map(|net| net.parse().unwrap()).collect()
    }

    fn catch(to: &str, port: Option<u16>) -> Catch {
        let ports = port.map(|port| [(port, port)].into_iter().collect());
        Catch { node: FAR, to: nets(to), ports, kind: LinkKind::BestEffort }
    }

    #[test]
    fn ends_of_both_versions() {
        let ends = Ends::of(&SYN).unwrap();
        assert_eq!(ends.transport, Transport::Tcp);
        assert_eq!(
            (ends.source, ends.destination),
            ("10.1.0.2:40000".parse().unwrap(), "10.2.0.3:22".parse().unwrap())
        );
        assert_eq!(ends.reversed().reversed(), ends);
        for extension in [false, true] {
            let ends = Ends::of(&v6_udp(extension)).unwrap();
            assert_eq!(ends.transport, Transport::Udp);
            assert_eq!(ends.destination, "[fd00::2]:53".parse().unwrap());
        }
    }

    #[test]
    fn what_is_cut_changed_or_a_fragment_names_nobody() {
        for packet in [&SYN[..], &v6_udp(false), &v6_udp(true)] {
            for length in 0..packet.len() {
                assert_eq!(Ends::of(&packet[..length]), None, "{length} bytes of {packet:?}");
            }
            // Change any one byte: no panic.
            for at in 0..packet.len() {
                for value in 0..=255 {
                    let mut changed = packet.to_vec();
                    changed[at] = value;
                    let _ = Ends::of(&changed);
                }
            }
        }
        let mut fragment = SYN;
        fragment[6] = 0x20;
        assert_eq!(Ends::of(&fragment), None);
        let mut icmp = SYN;
        icmp[9] = 1;
        assert_eq!(Ends::of(&icmp), None);
    }

    #[test]
    fn only_what_the_rules_allow_is_delivered() {
        let deny = |_: SocketAddr| false;
        let ssh = |to: SocketAddr| to == "10.2.0.3:22".parse().unwrap();
        // The far side: packets for our ssh come from 10.1/16, whose packets the rules send to the same node.
        let server = Interceptor::new(vec![catch("10.1.0.0/16", Some(22))]);
        assert!(server.incoming(FAR, &SYN, ssh).is_ok());
        assert_eq!(server.incoming(FAR, &SYN, deny), Err(Refused::Destination));
        assert_eq!(server.incoming(NodeId(8), &SYN, ssh), Err(Refused::Source), "another node");
        assert_eq!(server.incoming(FAR, &SYN[..30], ssh), Err(Refused::Unreadable));
        let elsewhere = Interceptor::new(vec![catch("10.9.0.0/16", None)]);
        assert_eq!(elsewhere.incoming(FAR, &SYN, ssh), Err(Refused::Source), "a forged source");
        let mut loopback = SYN;
        loopback[16..20].copy_from_slice(&[127, 0, 0, 1]);
        assert_eq!(server.incoming(FAR, &loopback, |_| true), Err(Refused::Destination));
    }

    #[test]
    fn an_answer_is_let_in_and_nothing_beside_it() {
        let mut client = Interceptor::new(vec![catch("10.2.0.0/16", Some(22))]);
        assert_eq!(client.outgoing(&v6_udp(false)), None);
        let mut answer = SYN;
        answer[12..20].copy_from_slice(&[10, 2, 0, 3, 10, 1, 0, 2]);
        answer[20..24].copy_from_slice(&[0, 22, 0x9c, 0x40]);
        let deny = |_: SocketAddr| false;
        assert_eq!(client.incoming(FAR, &answer, deny), Err(Refused::Destination), "nobody asked");
        assert_eq!(client.outgoing(&SYN), Some((FAR, LinkKind::BestEffort)));
        assert!(client.incoming(FAR, &answer, deny).is_ok());
        // From the right port of the right host to another port of ours: this would bypass a firewall.
        answer[22..24].copy_from_slice(&[0, 25]);
        assert_eq!(client.incoming(FAR, &answer, deny), Err(Refused::Destination));
    }

    #[test]
    fn conversations_are_bounded_and_the_silent_ones_go_first() {
        let mut client = Interceptor::new(vec![catch("10.2.0.0/16", None)]);
        let packet = |number: u32| {
            let mut packet = SYN;
            packet[14..16].copy_from_slice(&number.to_be_bytes()[..2]);
            packet[20..22].copy_from_slice(&number.to_be_bytes()[2..]);
            packet
        };
        let most = u32::try_from(CONVERSATIONS_MAX).unwrap();
        for number in 0..most {
            client.outgoing(&packet(number));
        }
        client.outgoing(&packet(0));
        client.outgoing(&packet(most));
        assert_eq!((client.answers.len(), client.by_age.len()), (CONVERSATIONS_MAX, CONVERSATIONS_MAX));
        let knows = |number: u32| client.answers.contains_key(&Ends::of(&packet(number)).unwrap().reversed());
        assert!(knows(0) && !knows(1) && knows(2) && knows(most));
    }
}
