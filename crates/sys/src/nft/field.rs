//! What a rule can look at, the kinds of data that are there, and single values of them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::InterfaceName;

/// A property of a packet, its socket or its connection. The variants carry nft's own spelling in their `Display`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// `meta nfproto`: the IP version, in tables of family inet.
    NfProto,
    /// `meta l4proto`: the transport protocol.
    L4Proto,
    /// `iifname`: the interface the packet came in by.
    InputInterface,
    /// `oifname`: the interface it will leave by.
    OutputInterface,
    /// `meta mark`: the packet mark (SO_MARK of the sending socket).
    Mark,
    /// `meta skuid`: the user who owns the sending socket.
    SocketUser,
    /// `socket cgroupv2 level N`: id of the ancestor at depth N of the socket's cgroup.
    SocketCgroup {
        /// Depth below the root of the cgroup2 tree; its children have level 1.
        level: u32,
    },
    /// `socket transparent`: whether a local IP_TRANSPARENT socket awaits the packet.
    SocketTransparent,
    /// `socket wildcard`: whether the socket that awaits it is bound to every address.
    SocketWildcard,
    /// `ip saddr`.
    Ip4Source,
    /// `ip daddr`.
    Ip4Destination,
    /// `ip6 saddr`.
    Ip6Source,
    /// `ip6 daddr`.
    Ip6Destination,
    /// `tcp sport`.
    TcpSource,
    /// `tcp dport`.
    TcpDestination,
    /// `th sport`: the source port of whatever transport the rule has asked for.
    TransportSource,
    /// `th dport`.
    TransportDestination,
    /// `udp dport`.
    UdpDestination,
    /// `tcp flags`: bits of [`super::tcp_flag`].
    TcpFlags,
    /// `ct state`: bits of [`super::ct_state`].
    CtState,
    /// `ct mark`.
    CtMark,
    /// `ct direction`: whether the packet goes as the first one of its connection, or is an answer.
    CtDirection,
    /// `fib daddr type`: what the routing table says of the destination; see [`super::RTN_LOCAL`].
    DestinationType,
}

/// The kind of data a field holds; sets and maps are declared with these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DataKind {
    /// IP version.
    NfProto,
    /// IPv4 address.
    Ipv4,
    /// IPv6 address.
    Ipv6,
    /// IP protocol number.
    Protocol,
    /// TCP port.
    Port,
    /// TCP flag bits.
    TcpFlags,
    /// Packet or connection mark.
    Mark,
    /// User id.
    User,
    /// Interface name.
    InterfaceName,
    /// Id of a cgroup of the second generation.
    Cgroup,
    /// Connection state bits.
    CtState,
    /// Direction of a packet in its connection.
    CtDirection,
    /// Address type of the routing table.
    AddressType,
    /// Yes or no.
    Boolean,
}

impl DataKind {
    /// Bytes of a value.
    pub const fn bytes(self) -> usize {
        match self {
            Self::NfProto | Self::Protocol | Self::Boolean | Self::TcpFlags | Self::CtDirection => 1,
            Self::Port => 2,
            Self::Ipv4 | Self::Mark | Self::User | Self::CtState | Self::AddressType => 4,
            Self::Cgroup => 8,
            Self::Ipv6 | Self::InterfaceName => 16,
        }
    }

    /// Bytes a value takes inside a concatenation or a register: whole 32-bit words.
    pub const fn padded(self) -> usize {
        self.bytes().next_multiple_of(4)
    }

    /// Whether values stand in host order; what comes from packets stands in network order.
    pub const fn is_host_order(self) -> bool {
        matches!(
            self,
            Self::Mark | Self::User | Self::CtState | Self::AddressType | Self::Cgroup | Self::InterfaceName
        )
    }

    /// The number by which the nft tool knows the type (nft's `enum datatypes`; the kernel only stores it).
    pub const fn number(self) -> u32 {
        match self {
            Self::NfProto => 2,
            Self::Ipv4 => 7,
            Self::Ipv6 => 8,
            Self::Protocol => 12,
            Self::Port => 13,
            Self::TcpFlags => 15,
            Self::Mark => 19,
            Self::User => 24,
            Self::CtState => 26,
            Self::CtDirection => 27,
            Self::AddressType => 38,
            Self::Boolean => 39,
            Self::InterfaceName => 41,
            Self::Cgroup => 46,
        }
    }
}

impl fmt::Display for DataKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NfProto => "nf_proto",
            Self::Ipv4 => "ipv4_addr",
            Self::Ipv6 => "ipv6_addr",
            Self::Protocol => "inet_proto",
            Self::Port => "inet_service",
            Self::TcpFlags => "tcp_flag",
            Self::Mark => "mark",
            Self::User => "uid",
            Self::InterfaceName => "ifname",
            Self::Cgroup => "cgroupsv2",
            Self::CtState => "ct_state",
            Self::CtDirection => "ct_dir",
            Self::AddressType => "fib_addrtype",
            Self::Boolean => "boolean",
        })
    }
}

impl Field {
    /// The kind of data it holds.
    pub const fn kind(self) -> DataKind {
        match self {
            Self::NfProto => DataKind::NfProto,
            Self::L4Proto => DataKind::Protocol,
            Self::InputInterface | Self::OutputInterface => DataKind::InterfaceName,
            Self::Mark | Self::CtMark => DataKind::Mark,
            Self::SocketUser => DataKind::User,
            Self::SocketCgroup { .. } => DataKind::Cgroup,
            Self::SocketTransparent | Self::SocketWildcard => DataKind::Boolean,
            Self::Ip4Source | Self::Ip4Destination => DataKind::Ipv4,
            Self::Ip6Source | Self::Ip6Destination => DataKind::Ipv6,
            Self::TcpSource
            | Self::TcpDestination
            | Self::TransportSource
            | Self::TransportDestination
            | Self::UdpDestination => DataKind::Port,
            Self::TcpFlags => DataKind::TcpFlags,
            Self::CtState => DataKind::CtState,
            Self::CtDirection => DataKind::CtDirection,
            Self::DestinationType => DataKind::AddressType,
        }
    }

    /// The IP version without which the field does not exist.
    pub const fn needs_nfproto(self) -> Option<u8> {
        match self {
            Self::Ip4Source | Self::Ip4Destination => Some(super::NFPROTO_IPV4),
            Self::Ip6Source | Self::Ip6Destination => Some(super::NFPROTO_IPV6),
            _ => None,
        }
    }

    /// Whether the field exists in TCP segments only.
    pub const fn needs_tcp(self) -> bool {
        matches!(self, Self::TcpSource | Self::TcpDestination | Self::TcpFlags)
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NfProto => "meta nfproto",
            Self::L4Proto => "meta l4proto",
            Self::InputInterface => "iifname",
            Self::OutputInterface => "oifname",
            Self::Mark => "meta mark",
            Self::SocketUser => "meta skuid",
            Self::SocketCgroup { level } => return write!(f, "socket cgroupv2 level {level}"),
            Self::SocketTransparent => "socket transparent",
            Self::SocketWildcard => "socket wildcard",
            Self::Ip4Source => "ip saddr",
            Self::Ip4Destination => "ip daddr",
            Self::Ip6Source => "ip6 saddr",
            Self::Ip6Destination => "ip6 daddr",
            Self::TcpSource => "tcp sport",
            Self::TcpDestination => "tcp dport",
            Self::TransportSource => "th sport",
            Self::TransportDestination => "th dport",
            Self::UdpDestination => "udp dport",
            Self::TcpFlags => "tcp flags",
            Self::CtState => "ct state",
            Self::CtMark => "ct mark",
            Self::CtDirection => "ct direction",
            Self::DestinationType => "fib daddr type",
        })
    }
}

/// A value of some [`DataKind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Value {
    /// IP version: [`super::NFPROTO_IPV4`] or [`super::NFPROTO_IPV6`].
    NfProto(u8),
    /// IPv4 address.
    Ipv4(Ipv4Addr),
    /// IPv6 address.
    Ipv6(Ipv6Addr),
    /// IP protocol number.
    Protocol(u8),
    /// TCP port.
    Port(u16),
    /// TCP flag bits.
    TcpFlags(u8),
    /// Packet or connection mark.
    Mark(u32),
    /// User id.
    User(u32),
    /// Interface name.
    Interface(InterfaceName),
    /// Id of a cgroup of the second generation (the inode number of its folder).
    Cgroup(u64),
    /// Connection state bits.
    CtState(u32),
    /// Direction of a packet in its connection: whether it is an answer.
    CtIsAnswer(bool),
    /// Address type of the routing table.
    AddressType(u32),
    /// Yes or no.
    Boolean(bool),
}

impl From<IpAddr> for Value {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self::Ipv4(v4),
            IpAddr::V6(v6) => Self::Ipv6(v6),
        }
    }
}

impl Value {
    /// Its kind.
    pub const fn kind(&self) -> DataKind {
        match self {
            Self::NfProto(_) => DataKind::NfProto,
            Self::Ipv4(_) => DataKind::Ipv4,
            Self::Ipv6(_) => DataKind::Ipv6,
            Self::Protocol(_) => DataKind::Protocol,
            Self::Port(_) => DataKind::Port,
            Self::TcpFlags(_) => DataKind::TcpFlags,
            Self::Mark(_) => DataKind::Mark,
            Self::User(_) => DataKind::User,
            Self::Interface(_) => DataKind::InterfaceName,
            Self::Cgroup(_) => DataKind::Cgroup,
            Self::CtState(_) => DataKind::CtState,
            Self::CtIsAnswer(_) => DataKind::CtDirection,
            Self::AddressType(_) => DataKind::AddressType,
            Self::Boolean(_) => DataKind::Boolean,
        }
    }

    /// The bytes as they stand in a register: what comes from packets in network order, the rest in host order.
    pub fn to_bytes(self) -> Vec<u8> {
        match self {
            Self::Ipv4(address) => address.octets().to_vec(),
            Self::Ipv6(address) => address.octets().to_vec(),
            Self::NfProto(byte) | Self::Protocol(byte) | Self::TcpFlags(byte) => vec![byte],
            Self::Boolean(yes) | Self::CtIsAnswer(yes) => vec![u8::from(yes)],
            Self::Port(port) => port.to_be_bytes().to_vec(),
            Self::Mark(word) | Self::User(word) | Self::CtState(word) | Self::AddressType(word) => {
                word.to_ne_bytes().to_vec()
            }
            Self::Cgroup(id) => id.to_ne_bytes().to_vec(),
            Self::Interface(name) => name.padded().to_vec(),
        }
    }

    /// The value one above, for the exclusive end of an interval; `None` past the highest or for kinds without an order.
    pub fn successor(self) -> Option<Self> {
        match self {
            Self::Ipv4(a) => u32::from(a).checked_add(1).map(|n| Self::Ipv4(n.into())),
            Self::Ipv6(a) => u128::from(a).checked_add(1).map(|n| Self::Ipv6(n.into())),
            Self::Port(port) => port.checked_add(1).map(Self::Port),
            _ => None,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NfProto(super::NFPROTO_IPV4) => f.write_str("ipv4"),
            Self::NfProto(super::NFPROTO_IPV6) => f.write_str("ipv6"),
            Self::Protocol(6) => f.write_str("tcp"),
            Self::Protocol(17) => f.write_str("udp"),
            Self::NfProto(number) | Self::Protocol(number) => number.fmt(f),
            Self::Ipv4(address) => address.fmt(f),
            Self::Ipv6(address) => address.fmt(f),
            Self::Port(port) => port.fmt(f),
            Self::TcpFlags(bits) => super::tcp_flag::fmt(*bits, f),
            Self::Mark(mark) => write!(f, "{mark:#010x}"),
            Self::User(user) => user.fmt(f),
            Self::Interface(name) => write!(f, "\"{name}\""),
            Self::Cgroup(id) => id.fmt(f),
            Self::CtState(bits) => super::ct_state::fmt(*bits, f),
            Self::CtIsAnswer(is_answer) => f.write_str(if *is_answer { "reply" } else { "original" }),
            Self::AddressType(super::RTN_LOCAL) => f.write_str("local"),
            Self::AddressType(super::RTN_BROADCAST) => f.write_str("broadcast"),
            Self::AddressType(super::RTN_MULTICAST) => f.write_str("multicast"),
            Self::AddressType(number) => number.fmt(f),
            Self::Boolean(yes) => u8::from(*yes).fmt(f),
        }
    }
}
