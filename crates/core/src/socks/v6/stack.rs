//! Stack options (kind 1): how the proxy should use the lower protocols, and how it did use them.

use super::super::reader::Reader;

/// The leg of the connection that an option applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leg {
    /// Client to proxy.
    Client,
    /// Proxy to destination.
    Remote,
    /// Both legs.
    Both,
}

/// The requested parity of a UDP port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parity {
    /// Any parity.
    Any,
    /// Even.
    Even,
    /// Odd.
    Odd,
}

/// One stack option. In a request it says what the client wants; in an Operation Reply, what the proxy did. Options
/// without a leg apply to the leg from proxy to destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StackOption {
    /// The TOS byte (IPv4) or traffic class (IPv6).
    Tos(Leg, u8),
    /// Happy Eyeballs (RFC 8305): wanted, or attempted. For names only.
    HappyEyeballs(bool),
    /// TTL or hop limit.
    Ttl(Leg, u8),
    /// Fragmentation should be avoided (DF), or is avoided.
    NoFragmentation(Leg, bool),
    /// TCP Fast Open. In a request: most payload bytes of the SYN, 0 lets the proxy choose. In a reply: the bytes
    /// used, 0 for none.
    Tfo(u16),
    /// Multipath TCP: wanted, or in use.
    Multipath(bool),
    /// Length of the listen backlog of a BIND.
    ListenBacklog(u16),
    /// ICMP errors should be reported, or will be (UDP ASSOCIATE).
    UdpErrors(bool),
    /// Parity of the port of a UDP ASSOCIATE.
    PortParity {
        /// The parity.
        parity: Parity,
        /// Also reserve the neighbouring port: the one above an even port, the one below an odd port.
        reserve: bool,
    },
}

const LEVEL_IP: u8 = 1;
const LEVEL_TCP: u8 = 4;
const LEVEL_UDP: u8 = 5;

const NO: u8 = 1;
const YES: u8 = 2;

const fn availability(byte: u8) -> Option<bool> {
    match byte {
        NO => Some(false),
        YES => Some(true),
        _ => None,
    }
}

const fn wanted(yes: bool) -> u8 {
    if yes { YES } else { NO }
}

impl Leg {
    const fn bits(self) -> u8 {
        match self {
            Self::Client => 1,
            Self::Remote => 2,
            Self::Both => 3,
        }
    }
}

impl StackOption {
    /// Returns leg bits, level, code, and value.
    const fn parts(self) -> (u8, u8, u8, [u8; 2]) {
        let remote = Leg::Remote.bits();
        match self {
            Self::Tos(leg, tos) => (leg.bits(), LEVEL_IP, 1, [tos, 0]),
            Self::HappyEyeballs(yes) => (remote, LEVEL_IP, 2, [wanted(yes), 0]),
            Self::Ttl(leg, ttl) => (leg.bits(), LEVEL_IP, 3, [ttl, 0]),
            Self::NoFragmentation(leg, yes) => (leg.bits(), LEVEL_IP, 4, [wanted(yes), 0]),
            Self::Tfo(len) => (remote, LEVEL_TCP, 1, len.to_be_bytes()),
            Self::Multipath(yes) => (remote, LEVEL_TCP, 2, [wanted(yes), 0]),
            Self::ListenBacklog(len) => (remote, LEVEL_TCP, 3, len.to_be_bytes()),
            Self::UdpErrors(yes) => (remote, LEVEL_UDP, 1, [wanted(yes), 0]),
            Self::PortParity { parity, reserve } => {
                let parity = match parity {
                    Parity::Any => 0,
                    Parity::Even => 1,
                    Parity::Odd => 2,
                };
                (remote, LEVEL_UDP, 2, [parity, reserve as u8])
            }
        }
    }

    /// Returns the four bytes after kind and length.
    pub(super) const fn encode(self) -> [u8; 4] {
        let (leg, level, code, [high, low]) = self.parts();
        [leg << 6 | level, code, high, low]
    }

    /// Decodes the body of a stack option. `None` if the draft does not define it.
    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(body);
        let (place, code) = (reader.u8().ok()?, reader.u8().ok()?);
        let (value, spare) = (reader.u8().ok()?, reader.u8().ok()?);
        if !reader.is_empty() {
            return None;
        }
        let leg = match place >> 6 {
            1 => Leg::Client,
            2 => Leg::Remote,
            3 => Leg::Both,
            _ => return None,
        };
        let number = u16::from_be_bytes([value, spare]);
        match (place & 0x3f, code, leg) {
            (LEVEL_IP, 1, _) => Some(Self::Tos(leg, value)),
            (LEVEL_IP, 2, Leg::Remote) => availability(value).map(Self::HappyEyeballs),
            (LEVEL_IP, 3, _) => Some(Self::Ttl(leg, value)),
            (LEVEL_IP, 4, _) => availability(value).map(|yes| Self::NoFragmentation(leg, yes)),
            (LEVEL_TCP, 1, Leg::Remote) => Some(Self::Tfo(number)),
            (LEVEL_TCP, 2, Leg::Remote) => availability(value).map(Self::Multipath),
            (LEVEL_TCP, 3, Leg::Remote) => Some(Self::ListenBacklog(number)),
            (LEVEL_UDP, 1, Leg::Remote) => availability(value).map(Self::UdpErrors),
            (LEVEL_UDP, 2, Leg::Remote) => {
                let parity = match value {
                    0 => Parity::Any,
                    1 => Parity::Even,
                    2 => Parity::Odd,
                    _ => return None,
                };
                (spare <= 1).then_some(Self::PortParity { parity, reserve: spare == 1 })
            }
            _ => None,
        }
    }

    /// Whether both options set the same thing on a common leg. Then they must not be in one message.
    pub const fn overlaps(self, other: Self) -> bool {
        let (leg, level, code, _) = self.parts();
        let (other_leg, other_level, other_code, _) = other.parts();
        level == other_level && code == other_code && leg & other_leg != 0
    }
}
