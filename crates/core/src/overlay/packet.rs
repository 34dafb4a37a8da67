//! IP packets that the overlay carries whole (Seamless Overlays, Secs. 2.1 and 2.2): their addresses and ports, their
//! destination node, and whether they may be delivered. TCP and UDP over IPv4 and IPv6.

mod build;
mod known;

pub use build::datagram;
pub use known::{KNOWN_MAX, KnownError};

use super::NodeId;
use super::group::GroupName;
use super::group::rule::{self, Rule};
use super::recent::Recent;
use super::service::{Delivery, Service, Trust};
use crate::net::{IpSet, PortSet};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

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

/// Which nodes deliver packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// This node.
    Node(NodeId),
    /// All members of a group.
    Group(GroupName),
    /// The nearest member of a group.
    Nearest(GroupName),
}

/// Where a caught packet goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Receiver {
    /// To this node.
    Node(NodeId),
    /// To all members of a group.
    Group(GroupName),
    /// To the nearest member of a group.
    Nearest {
        /// The group.
        group: GroupName,
        /// The member that has got the packets of this conversation so far ([`Interceptor::keep`]).
        kept: Option<NodeId>,
    },
    /// Nowhere: it stays in the network of its sender.
    Here,
}

/// A rule: which packets go to which node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catch {
    /// Who delivers the packets.
    pub target: Target,
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

/// Where a packet came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The node that sends it.
    pub node: NodeId,
    /// The packet carries a proof that this node made it. Otherwise a relay could have forged it.
    pub is_proven: bool,
}

impl From<NodeId> for Origin {
    fn from(node: NodeId) -> Self {
        Self { node, is_proven: false }
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
    /// The state of the rules at that time. `None`: those of another process.
    generation: Option<u64>,
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
    /// The groups that this node has entries for.
    groups: Arc<BTreeMap<GroupName, Rule>>,
}

impl Interceptor {
    /// Makes an interceptor with these rules. The first matching rule counts.
    pub fn new(catches: Vec<Catch>) -> Self {
        let (ours, theirs, denied) =
            (Recent::new(CONVERSATIONS_MAX), Recent::new(CONVERSATIONS_MAX), Recent::new(CONVERSATIONS_MAX));
        Self { catches, ours, theirs, denied, generation: 0, groups: Arc::default() }
    }

    /// Sets what the configuration says of groups.
    #[must_use]
    pub fn with_groups(self, groups: BTreeMap<GroupName, Rule>) -> Self {
        Self { groups: Arc::new(groups), ..self }
    }

    /// The rules that [`Interceptor::incoming`] asks have changed: they are asked again about each conversation.
    pub fn rules_changed(&mut self) {
        self.generation += 1;
    }

    /// Returns where a packet that was caught here goes, and how it travels. `None` if no rule matches. From now on, answers
    /// to this packet are accepted; those of a nearest member after [`Interceptor::keep`].
    pub fn outgoing(&mut self, packet: &[u8]) -> Option<(Receiver, Service)> {
        let head = Head::of(packet)?;
        let ends = head.ends;
        let fits = |catch: &&Catch| catch.to.contains(ends.destination.ip()) && catch.has_port(&ends);
        let Catch { target, service, .. } = self.catches.iter().find(fits)?;
        let (answer, service) = (ends.reversed(), *service);
        let node = match target {
            Target::Node(node) => *node,
            Target::Group(group) => return Some((self.to_group(group, packet, &ends), service)),
            Target::Nearest(group) => {
                let group = group.clone();
                let kept = self.ours.touch(&answer).copied();
                return Some((Receiver::Nearest { group, kept }, service));
            }
        };
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
        Some((Receiver::Node(node), service))
    }

    fn to_group(&self, group: &GroupName, packet: &[u8], ends: &Ends) -> Receiver {
        // Another gateway of this network may have delivered it: if both sent it on, it would go in a circle.
        let is_elsewhere =
            |catch: &Catch| matches!(catch.target, Target::Node(_)) && catch.to.contains(ends.source.ip());
        let leaves = self.groups.get(group).is_some_and(|rule| rule.leaves(packet));
        if self.catches.iter().any(is_elsewhere) || (ends.destination.ip().is_multicast() && !leaves) {
            return Receiver::Here;
        }
        Receiver::Group(group.clone())
    }

    /// Notes that the packets of this conversation, which begins here, go to this member of a group. Its answers are accepted.
    pub fn keep(&mut self, packet: &[u8], member: NodeId) {
        if let Some(ends) = Ends::of(packet) {
            self.ours.put(ends.reversed(), member);
        }
    }

    /// Checks a packet that `from` has sent to a group, and sets its time to live.
    ///
    /// # Errors
    /// Fails with the reason for the refusal.
    pub fn incoming_to_group(
        &mut self,
        (from, delivery): (Origin, Delivery),
        group: &GroupName,
        packet: &mut [u8],
        judge: impl FnOnce(&Ends) -> Result<(), Refused>,
    ) -> Result<Ends, rule::Refused> {
        let groups = self.groups.clone();
        let rule = groups.get(group).ok_or(rule::Refused::NotMember)?;
        rule.admit(self, (from, delivery), packet, judge)
    }

    /// Whether a packet that `from` has sent may be delivered. If the entry for `from` is intrusion-tolerant, its source must be
    /// proven: otherwise a relay that lies could send packets in the name of `from`. `judge` says whether our rules let that
    /// node begin the conversation; it is asked about the first packet, and again after [`Interceptor::rules_changed`].
    ///
    /// # Errors
    /// Fails with the reason for the refusal.
    pub fn incoming(
        &mut self,
        from: impl Into<Origin>,
        packet: &[u8],
        judge: impl FnOnce(&Ends) -> Result<(), Refused>,
    ) -> Result<Ends, Refused> {
        let Origin { node: from, is_proven } = from.into();
        let ends = Ends::of(packet).ok_or(Refused::Unreadable)?;
        // Check the source first: a node must not send packets in the name of hosts of another node.
        let answers = self.ours.get(&ends).is_some_and(|node| *node == from);
        let is_theirs = |catch: &Catch| {
            let fits = match catch.target {
                Target::Node(node) => node == from,
                // A member may answer, and begin nothing: the address is not behind it alone.
                Target::Nearest(_) => answers,
                Target::Group(_) => false,
            };
            let is_enough = is_proven || catch.service.trust == Trust::Members;
            fits && is_enough && catch.to.contains(ends.source.ip()) && catch.has_port(&ends)
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
        if answers {
            return Ok(ends);
        }
        self.decided(from, ends, judge).map(|()| ends)
    }

    /// Returns what the rules say of a conversation that `from` has begun.
    pub(super) fn decided(
        &mut self,
        from: NodeId,
        ends: Ends,
        judge: impl FnOnce(&Ends) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let (generation, was_delivered) = (Some(self.generation), self.theirs.get(&ends).is_some());
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
mod tests;
