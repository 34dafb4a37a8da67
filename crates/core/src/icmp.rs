//! ICMP errors about datagrams: what a client is told when its datagram cannot be carried (RFC 792, RFC 4443, RFC 1812
//! Sec. 5.2.7).

use crate::flow::EndReason;

/// Bytes of the IP and UDP headers of a datagram.
const HEADERS_V4: usize = 28;
/// The same for IPv6.
const HEADERS_V6: usize = 48;

/// Why a datagram does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unreachable {
    /// There is no route to the network.
    Network,
    /// The host does not answer.
    Host,
    /// The port is closed. A connected socket reports it as `ECONNREFUSED`.
    Port,
    /// A rule forbids it.
    Prohibited,
    /// It is too long for the path. A connected socket reports it as `EMSGSIZE`.
    TooBig {
        /// The longest packet that the path carries, bytes with the IP header.
        mtu_bytes: u32,
    },
}

impl Unreachable {
    /// Returns the error for a path that carries payloads of at most this length.
    pub fn too_long(is_v4: bool, payload_bytes: usize) -> Self {
        let headers = if is_v4 { HEADERS_V4 } else { HEADERS_V6 };
        Self::TooBig { mtu_bytes: u32::try_from(payload_bytes.saturating_add(headers)).unwrap_or(u32::MAX) }
    }

    /// Returns what a failure on the way to the server means for its client, if it is about the way.
    pub const fn of_reason(reason: EndReason) -> Option<Self> {
        match reason {
            EndReason::Refused => Some(Self::Port),
            EndReason::Unreachable => Some(Self::Host),
            _ => None,
        }
    }

    /// Reads type and code of a message. `mtu_bytes`: the MTU in it. `None`: it is another message.
    pub const fn read(is_v4: bool, kind: u8, code: u8, mtu_bytes: u32) -> Option<Self> {
        Some(match (is_v4, kind, code) {
            (true, 3, 4) | (false, 2, _) => Self::TooBig { mtu_bytes },
            (true, 3, 0 | 6 | 11) | (false, 1, 0) => Self::Network,
            (true, 3, 3) | (false, 1, 4) => Self::Port,
            (true, 3, 9 | 10 | 13) | (false, 1, 1 | 5) => Self::Prohibited,
            (true, 3, _) | (false, 1, _) => Self::Host,
            _ => return None,
        })
    }

    /// Returns the first 8 bytes of the message, with the checksum 0. The headers of the datagram follow.
    pub fn header(self, is_v4: bool) -> [u8; 8] {
        let (kind, code) = match (is_v4, self) {
            (true, Self::Network) => (3, 0),
            (true, Self::Host) => (3, 1),
            (true, Self::Port) => (3, 3),
            (true, Self::TooBig { .. }) => (3, 4),
            (true, Self::Prohibited) => (3, 13),
            (false, Self::Network) => (1, 0),
            (false, Self::Prohibited) => (1, 1),
            (false, Self::Host) => (1, 3),
            (false, Self::Port) => (1, 4),
            (false, Self::TooBig { .. }) => (2, 0),
        };
        let rest = match self {
            // RFC 1191 Sec. 4: the lower half of the word.
            Self::TooBig { mtu_bytes } if is_v4 => mtu_bytes.min(u16::MAX.into()),
            Self::TooBig { mtu_bytes } => mtu_bytes,
            _ => 0,
        };
        let [a, b, c, d] = rest.to_be_bytes();
        [kind, code, 0, 0, a, b, c, d]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        use Unreachable::{Host, Network, Port, Prohibited, TooBig};
        for is_v4 in [true, false] {
            for error in [Network, Host, Port, Prohibited, TooBig { mtu_bytes: 1300 }] {
                let [kind, code, sum, low, rest @ ..] = error.header(is_v4);
                assert_eq!((sum, low), (0, 0));
                assert_eq!(Unreachable::read(is_v4, kind, code, u32::from_be_bytes(rest)), Some(error));
            }
        }
    }

    #[test]
    fn every_type_and_code_means_one_error_or_none() {
        for (kind, code) in (0..=255_u8).flat_map(|kind| (0..=255_u8).map(move |code| (kind, code))) {
            let v4 = Unreachable::read(true, kind, code, 1300);
            assert_eq!(v4.is_some(), kind == 3, "IPv4 type {kind} code {code}");
            let v6 = Unreachable::read(false, kind, code, 1300);
            assert_eq!(v6.is_some(), kind == 1 || kind == 2, "IPv6 type {kind} code {code}");
            // What is passed on is read in the same way.
            for (is_v4, error) in [(true, v4), (false, v6)] {
                let [kind, code, _, _, rest @ ..] = error.unwrap_or(Unreachable::Host).header(is_v4);
                let read = Unreachable::read(is_v4, kind, code, u32::from_be_bytes(rest));
                assert_eq!(read, error.or(Some(Unreachable::Host)));
            }
        }
    }

    #[test]
    fn messages_are_those_of_the_rfcs() {
        assert_eq!(Unreachable::Port.header(true), [3, 3, 0, 0, 0, 0, 0, 0], "RFC 792");
        assert_eq!(Unreachable::Port.header(false), [1, 4, 0, 0, 0, 0, 0, 0], "RFC 4443 Sec. 3.1");
        assert_eq!(Unreachable::Prohibited.header(true), [3, 13, 0, 0, 0, 0, 0, 0], "RFC 1812 Sec. 5.2.7.1");
        let too_big = Unreachable::TooBig { mtu_bytes: 1300 };
        assert_eq!(too_big.header(true), [3, 4, 0, 0, 0, 0, 5, 20], "RFC 1191 Sec. 4");
        assert_eq!(too_big.header(false), [2, 0, 0, 0, 0, 0, 5, 20], "RFC 4443 Sec. 3.2");
        let jumbo = Unreachable::TooBig { mtu_bytes: 70_000 };
        assert_eq!(jumbo.header(true), [3, 4, 0, 0, 0, 0, 255, 255]);
        assert_eq!(Unreachable::too_long(true, 1272), Unreachable::TooBig { mtu_bytes: 1300 });
        assert_eq!(Unreachable::too_long(false, 1252), Unreachable::TooBig { mtu_bytes: 1300 });
        assert_eq!(Unreachable::read(true, 11, 0, 0), None, "time exceeded");
        assert_eq!(Unreachable::read(false, 128, 0, 0), None, "echo request");
        assert_eq!(Unreachable::read(false, 1, 3, 0), Some(Unreachable::Host));
        assert_eq!(Unreachable::of_reason(EndReason::Refused), Some(Unreachable::Port));
        assert_eq!(Unreachable::of_reason(EndReason::Limit), None);
    }
}
