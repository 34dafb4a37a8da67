//! IP packets that the overlay carries whole (Seamless Overlays, Secs. 2.1 and 2.2): their addresses and ports, their
//! destination node, and whether they may be delivered. TCP and UDP over IPv4 and IPv6.

use super::NodeId;
use super::recent::Recent;
use super::service::Service;
use crate::net::{IpSet, PortSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Most bytes of a packet: the most that NFQUEUE copies (linux/netfilter/nfnetlink_queue.h).
pub const PACKET_MAX: usize = 65_531;

/// Most conversations that are remembered: of those begun here, those begun elsewhere and delivered, and those never
/// delivered, as many each. The one that was silent for longest is forgotten first.
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
        Head::of(packet).map(|head| head.ends)
    }

    /// Returns the endpoints of the answer.
    #[must_use]
    pub const fn reversed(self) -> Self {
        Self { transport: self.transport, source: self.destination, destination: self.source }
    }
}

/// What the headers of a packet say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    ends: Ends,
    /// It continues a conversation: a TCP segment other than the first SYN. UDP does not tell.
    continues: bool,
}

impl Head {
    fn of(packet: &[u8]) -> Option<Self> {
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
        /// The flags SYN and ACK (RFC 9293 Sec. 3.1).
        const SYN: u8 = 0x02;
        const ACK: u8 = 0x10;
        let header = payload.get(..header)?;
        let port = |at: usize| Some(u16::from_be_bytes([*header.get(at)?, *header.get(at + 1)?]));
        let source = SocketAddr::new(source, port(0)?);
        let ends = Ends { transport, source, destination: SocketAddr::new(destination, port(2)?) };
        let continues = transport == Transport::Tcp && *header.get(13)? & (SYN | ACK) != SYN;
        Some(Self { ends, continues })
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
    /// How the packets travel.
    pub service: Service,
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
    /// Neither may that node reach the destination, nor is it the answer to what we sent there.
    Destination,
    /// That node may reach the destination, and a rule of this node denies the conversation.
    Denied,
}

/// What was decided about a conversation that the other side began.
#[derive(Clone, Copy, Debug)]
struct Decided {
    /// The node that sends its packets.
    node: NodeId,
    /// The state of the rules at that time.
    generation: u64,
    verdict: Result<(), Refused>,
}

/// The rules of one interceptor, and the conversations that it has seen.
#[derive(Clone, Debug)]
pub struct Interceptor {
    catches: Vec<Catch>,
    /// Conversations begun here, by the ends of their answers, and the node that they go to.
    ours: Recent<NodeId>,
    /// Conversations begun elsewhere of which a packet was delivered, whatever is decided about them now. What we send in
    /// them asks for no answer; otherwise a denied conversation would go on as the answer to its own answers.
    theirs: Recent<Decided>,
    /// Conversations begun elsewhere of which nothing was delivered. They have a table of their own, so that a flood of them
    /// removes no others.
    denied: Recent<Decided>,
    generation: u64,
}

impl Interceptor {
    /// Makes an interceptor with these rules. The first matching rule counts.
    pub fn new(catches: Vec<Catch>) -> Self {
        let (ours, theirs, denied) =
            (Recent::new(CONVERSATIONS_MAX), Recent::new(CONVERSATIONS_MAX), Recent::new(CONVERSATIONS_MAX));
        Self { catches, ours, theirs, denied, generation: 0 }
    }

    /// The rules that [`Interceptor::incoming`] asks have changed: they are asked again about each conversation.
    pub fn rules_changed(&mut self) {
        self.generation += 1;
    }

    /// Returns the destination node of a packet that was caught here, and how it travels. `None` if no rule
    /// matches. From now on, answers to this packet are accepted.
    pub fn outgoing(&mut self, packet: &[u8]) -> Option<(NodeId, Service)> {
        let head = Head::of(packet)?;
        let ends = head.ends;
        let fits = |catch: &&Catch| catch.to.contains(ends.destination.ip()) && catch.has_port(&ends);
        let Catch { node, service, .. } = *self.catches.iter().find(fits)?;
        let answer = ends.reversed();
        // A first SYN begins a conversation here, whatever was before. UDP of a conversation that the other side was not
        // allowed to begin may be the beginning of one of ours.
        let is_theirs = match ends.transport {
            Transport::Tcp => {
                head.continues && (self.theirs.touch(&answer).is_some() || self.denied.get(&answer).is_some())
            }
            Transport::Udp => self.theirs.touch(&answer).is_some(),
        };
        if !is_theirs {
            self.theirs.remove(&answer);
            self.ours.put(answer, node);
        }
        Some((node, service))
    }

    /// Whether a packet that `from` has sent may be delivered. `judge` says whether our rules let that node begin the
    /// conversation; it is asked about the first packet, and again after [`Interceptor::rules_changed`].
    ///
    /// # Errors
    /// Fails with the reason for the refusal.
    pub fn incoming(
        &mut self,
        from: NodeId,
        packet: &[u8],
        judge: impl FnOnce(&Ends) -> Result<(), Refused>,
    ) -> Result<Ends, Refused> {
        let ends = Ends::of(packet).ok_or(Refused::Unreadable)?;
        // Check the source first: a node must not send packets in the name of hosts of another node.
        let is_theirs = |catch: &Catch| {
            catch.node == from && catch.to.contains(ends.source.ip()) && catch.has_port(&ends)
        };
        if !self.catches.iter().any(is_theirs) {
            return Err(Refused::Source);
        }
        // Loopback, multicast and broadcast addresses would reach this host, or many hosts.
        let is_one_host = match ends.destination.ip() {
            IpAddr::V4(ip) => {
                !(ip.is_loopback() || ip.is_multicast() || ip.is_broadcast() || ip.is_unspecified())
            }
            IpAddr::V6(ip) => !(ip.is_loopback() || ip.is_multicast() || ip.is_unspecified()),
        };
        if !is_one_host {
            return Err(Refused::Destination);
        }
        if self.ours.get(&ends).is_some_and(|node| *node == from) {
            return Ok(ends);
        }
        self.decided(from, ends, judge).map(|()| ends)
    }

    /// Returns what the rules say of a conversation that `from` has begun.
    fn decided(
        &mut self,
        from: NodeId,
        ends: Ends,
        judge: impl FnOnce(&Ends) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let (generation, was_delivered) = (self.generation, self.theirs.get(&ends).is_some());
        let table = if was_delivered { &mut self.theirs } else { &mut self.denied };
        let known = table.touch(&ends).map(|decided| *decided);
        if let Some(decided) = known
            && decided.node == from
            && decided.generation == generation
        {
            return decided.verdict;
        }
        let verdict = judge(&ends);
        let decided = Decided { node: from, generation, verdict };
        if was_delivered || verdict.is_ok() {
            self.denied.remove(&ends);
            self.theirs.put(ends, decided);
        } else {
            self.denied.put(ends, decided);
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::super::service::LinkKind;
    use super::*;

    const FAR: NodeId = NodeId(7);
    const BEST_EFFORT: Service = Service::new(LinkKind::BestEffort);

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
        Catch { node: FAR, to: nets(to), ports, service: BEST_EFFORT }
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

    /// A node that may reach this destination only.
    fn only(to: &str) -> impl Fn(&Ends) -> Result<(), Refused> {
        let to: SocketAddr = to.parse().unwrap();
        move |ends| if ends.destination == to { Ok(()) } else { Err(Refused::Destination) }
    }

    /// A node that may reach nothing.
    fn nothing(_: &Ends) -> Result<(), Refused> {
        Err(Refused::Destination)
    }

    fn never(_: &Ends) -> Result<(), Refused> {
        panic!("the rules were asked already")
    }

    /// The answer to a TCP packet over IPv4, as a segment with these flags.
    fn answer_to(packet: &[u8; 40], flags: u8) -> [u8; 40] {
        let mut answer = *packet;
        answer[12..16].copy_from_slice(&packet[16..20]);
        answer[16..20].copy_from_slice(&packet[12..16]);
        answer[20..22].copy_from_slice(&packet[22..24]);
        answer[22..24].copy_from_slice(&packet[20..22]);
        answer[33] = flags;
        answer
    }

    const SYN_ACK: u8 = 0x12;
    const ACK: u8 = 0x10;

    #[test]
    fn only_what_the_rules_allow_is_delivered() {
        let ssh = only("10.2.0.3:22");
        // The far side: packets for our ssh come from 10.1/16, whose packets the rules send to the same node.
        let server = || Interceptor::new(vec![catch("10.1.0.0/16", Some(22))]);
        assert!(server().incoming(FAR, &SYN, &ssh).is_ok());
        assert_eq!(server().incoming(FAR, &SYN, nothing), Err(Refused::Destination));
        assert_eq!(server().incoming(NodeId(8), &SYN, &ssh), Err(Refused::Source), "another node");
        assert_eq!(server().incoming(FAR, &SYN[..30], &ssh), Err(Refused::Unreadable));
        let mut elsewhere = Interceptor::new(vec![catch("10.9.0.0/16", None)]);
        assert_eq!(elsewhere.incoming(FAR, &SYN, &ssh), Err(Refused::Source), "a forged source");
        let mut loopback = SYN;
        loopback[16..20].copy_from_slice(&[127, 0, 0, 1]);
        assert_eq!(server().incoming(FAR, &loopback, |_| Ok(())), Err(Refused::Destination));
    }

    #[test]
    fn an_answer_is_let_in_and_nothing_beside_it() {
        let mut client = Interceptor::new(vec![catch("10.2.0.0/16", Some(22))]);
        assert_eq!(client.outgoing(&v6_udp(false)), None);
        let mut answer = answer_to(&SYN, SYN_ACK);
        assert_eq!(client.incoming(FAR, &answer, nothing), Err(Refused::Destination), "nobody asked");
        assert_eq!(client.outgoing(&SYN), Some((FAR, BEST_EFFORT)));
        assert!(client.incoming(FAR, &answer, never).is_ok());
        // From the right port of the right host to another port of ours: this would bypass a firewall.
        answer[22..24].copy_from_slice(&[0, 25]);
        assert_eq!(client.incoming(FAR, &answer, nothing), Err(Refused::Destination));
    }

    #[test]
    fn the_rules_are_asked_once_for_each_conversation_and_again_after_they_changed() {
        let mut server = Interceptor::new(vec![catch("10.1.0.0/16", None)]);
        let mut denied = SYN;
        denied[23] = 23;
        let denies = |_: &Ends| Err(Refused::Denied);
        assert!(server.incoming(FAR, &SYN, |_| Ok(())).is_ok());
        assert_eq!(server.incoming(FAR, &denied, denies), Err(Refused::Denied));
        for _ in 0..3 {
            assert!(server.incoming(FAR, &SYN, never).is_ok());
            assert_eq!(server.incoming(FAR, &denied, never), Err(Refused::Denied));
        }
        server.rules_changed();
        assert_eq!(server.incoming(FAR, &SYN, denies), Err(Refused::Denied));
        assert!(server.incoming(FAR, &denied, |_| Ok(())).is_ok());
        assert_eq!(server.incoming(FAR, &SYN, never), Err(Refused::Denied));
        assert!(server.incoming(FAR, &denied, never).is_ok());
    }

    #[test]
    fn a_denied_conversation_does_not_go_on_as_the_answer_to_its_own_answers() {
        let denies = |_: &Ends| Err(Refused::Denied);
        let mut segment = SYN;
        segment[33] = ACK;
        // Delivered and answered, and then denied by a reload.
        let mut server = Interceptor::new(vec![catch("10.1.0.0/16", None)]);
        assert!(server.incoming(FAR, &SYN, |_| Ok(())).is_ok());
        assert!(server.outgoing(&answer_to(&SYN, SYN_ACK)).is_some());
        server.rules_changed();
        assert_eq!(server.incoming(FAR, &segment, denies), Err(Refused::Denied));
        assert!(server.outgoing(&answer_to(&SYN, ACK)).is_some(), "a retransmission of the server's");
        assert_eq!(server.incoming(FAR, &segment, never), Err(Refused::Denied));
        // The same after a restart, which forgets what was delivered.
        let mut server = Interceptor::new(vec![catch("10.1.0.0/16", None)]);
        assert_eq!(server.incoming(FAR, &segment, denies), Err(Refused::Denied));
        assert!(server.outgoing(&answer_to(&SYN, ACK)).is_some());
        assert_eq!(server.incoming(FAR, &segment, never), Err(Refused::Denied));
        // The same two ends, begun here: their answers are let in.
        assert!(server.outgoing(&answer_to(&SYN, 0x02)).is_some());
        assert!(server.incoming(FAR, &segment, never).is_ok());
    }

    #[test]
    fn a_datagram_that_is_denied_does_not_keep_ours_to_the_same_port_from_being_answered() {
        let mut node = Interceptor::new(vec![catch("fd00::1/128", None)]);
        let theirs = v6_udp(false);
        let mut ours = theirs.clone();
        ours[8..24].copy_from_slice(&theirs[24..40]);
        ours[24..40].copy_from_slice(&theirs[8..24]);
        ours[40..42].copy_from_slice(&theirs[42..44]);
        ours[42..44].copy_from_slice(&theirs[40..42]);
        assert_eq!(node.incoming(FAR, &theirs, |_| Err(Refused::Denied)), Err(Refused::Denied));
        assert!(node.outgoing(&ours).is_some());
        assert!(node.incoming(FAR, &theirs, never).is_ok());
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
        assert_eq!(client.ours.len(), CONVERSATIONS_MAX);
        let knows = |number: u32| client.ours.get(&Ends::of(&packet(number)).unwrap().reversed()).is_some();
        assert!(knows(0) && !knows(1) && knows(2) && knows(most));
    }

    #[test]
    fn a_flood_of_denied_conversations_is_bounded_and_removes_no_others() {
        let mut server = Interceptor::new(vec![catch("10.0.0.0/8", None)]);
        let packet = |number: usize| {
            let mut packet = SYN;
            packet[13..16].copy_from_slice(&number.to_be_bytes()[5..]);
            packet
        };
        let mut answered = SYN;
        answered[13] = 255;
        assert!(server.incoming(FAR, &answered, |_| Ok(())).is_ok());
        server.outgoing(&packet(0));
        for number in 1..CONVERSATIONS_MAX + 10 {
            assert!(server.incoming(FAR, &packet(number), |_| Err(Refused::Denied)).is_err());
        }
        assert_eq!((server.denied.len(), server.theirs.len(), server.ours.len()), (CONVERSATIONS_MAX, 1, 1));
        assert!(server.incoming(FAR, &answered, never).is_ok());
    }
}
