//! Stack options (kind 1): what the proxy is asked to do, and says it did, with the protocols below.

use super::super::reader::Reader;

/// Which leg of the connection an option is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leg {
    /// Client to proxy.
    Client,
    /// Proxy to destination.
    Remote,
    /// Both.
    Both,
}

/// Wanted parity of a UDP port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parity {
    /// None in particular.
    Any,
    /// Even.
    Even,
    /// Odd.
    Odd,
}

/// One stack option. In a request: what the client wants; in an Operation Reply: what the proxy did. Options without a
/// leg are about the leg from proxy to destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StackOption {
    /// The TOS byte (IPv4) or traffic class (IPv6).
    Tos(Leg, u8),
    /// Happy Eyeballs (RFC 8305): wanted, attempted. For names only.
    HappyEyeballs(bool),
    /// TTL or hop limit.
    Ttl(Leg, u8),
    /// Fragmentation is to be avoided (DF), is avoided.
    NoFragmentation(Leg, bool),
    /// TCP Fast Open: most payload bytes of the SYN, 0 as the proxy likes; in a reply the bytes used, 0 none.
    Tfo(u16),
    /// Multipath TCP: wanted, in use.
    Multipath(bool),
    /// Length of the listen backlog of a BIND.
    ListenBacklog(u16),
    /// ICMP errors are to be reported, will be (UDP ASSOCIATE).
    UdpErrors(bool),
    /// Parity of the port of a UDP ASSOCIATE.
    PortParity {
        /// Which.
        parity: Parity,
        /// Also reserve the port's counterpart: the one above an even, the one below an odd port.
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
    /// Leg bits, level, code, value.
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

    /// The four bytes after kind and length.
    pub(super) const fn encode(self) -> [u8; 4] {
        let (leg, level, code, [high, low]) = self.parts();
        [leg << 6 | level, code, high, low]
    }

    /// Reads the body of a stack option; `None` if it is none that the draft defines.
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

    /// Do both speak about the same thing on a common leg? Then they may not be in one message.
    pub const fn overlaps(self, other: Self) -> bool {
        let (leg, level, code, _) = self.parts();
        let (other_leg, other_level, other_code, _) = other.parts();
        level == other_level && code == other_code && leg & other_leg != 0
    }
}
