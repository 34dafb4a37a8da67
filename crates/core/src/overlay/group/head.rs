//! What a packet to a group carries ahead of the IP packet: how it is delivered, which nodes of its subgraph deliver it, and
//! the name of the group.
//!
//! | | bytes |
//! |---|---|
//! | delivery: 1 group, 2 nearest | 1 |
//! | bit i, from the lowest one: node i of the subgraph delivers the packet | 4 |
//! | length of the name, 1 to 32 | 1 |
//! | name | |
//! | IP packet | |
//!
//! A subgraph names at most 32 nodes. If a group has more members, the source sends one packet for each part of them. The bits
//! say who delivers which, so a node that is on the links of two of them delivers one.

use super::super::frame::SUBGRAPH_NODES_MAX;
use super::super::service::Delivery;
use super::{GroupName, NAME_MAX};

/// The nodes of a subgraph that deliver the packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deliverers(pub u32);

const _: () = assert!(SUBGRAPH_NODES_MAX <= u32::BITS as usize);

impl Deliverers {
    /// Adds the node at this index of the subgraph.
    pub fn add(&mut self, index: usize) {
        self.0 |= u32::try_from(index).ok().and_then(|index| 1_u32.checked_shl(index)).unwrap_or(0);
    }

    /// Whether the node at this index delivers the packet.
    pub fn has(self, index: usize) -> bool {
        let bit = u32::try_from(index).ok().and_then(|index| 1_u32.checked_shl(index));
        bit.is_some_and(|bit| self.0 & bit != 0)
    }
}

/// The head of a packet to a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// To all members or to one.
    pub delivery: Delivery,
    /// The nodes that deliver the packet, at least one.
    pub deliverers: Deliverers,
    /// The group.
    pub group: GroupName,
}

/// The codes of deliveries. A packet to a node has no head.
const GROUP: u8 = 1;
const NEAREST: u8 = 2;

/// Bytes ahead of the name.
const FIXED_BYTES: usize = 6;

/// Most bytes of a head.
pub const BYTES_MAX: usize = FIXED_BYTES + NAME_MAX;

impl Head {
    /// Returns the payload of a packet: the head and the IP packet.
    pub fn payload(&self, ip: &[u8]) -> Vec<u8> {
        let name = self.group.as_str().as_bytes();
        let code = if self.delivery == Delivery::Nearest { NEAREST } else { GROUP };
        let length = u8::try_from(name.len()).unwrap_or(0);
        [&[code], &self.deliverers.0.to_be_bytes()[..], &[length], name, ip].concat()
    }

    /// Splits a payload into the head and the IP packet. `None` if it has no valid head.
    pub fn split(payload: &[u8]) -> Option<(Self, &[u8])> {
        let (fixed, rest) = payload.split_first_chunk::<FIXED_BYTES>()?;
        let [code, a, b, c, d, length] = *fixed;
        let (name, ip) = rest.split_at_checked(usize::from(length))?;
        let deliverers = Deliverers(u32::from_be_bytes([a, b, c, d]));
        let delivery = match code {
            GROUP => Delivery::Group,
            // One node delivers it, whatever the source has marked.
            NEAREST if deliverers.0.count_ones() == 1 => Delivery::Nearest,
            _ => return None,
        };
        let group = GroupName::from_bytes(name).filter(|_| deliverers.0 != 0)?;
        Some((Self { delivery, deliverers, group }, ip))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_bytes_and_no_others() {
        let head = Head {
            delivery: Delivery::Group,
            deliverers: Deliverers(0x8000_0006),
            group: "tv".parse().unwrap(),
        };
        let payload = head.payload(&[0x45, 7]);
        assert_eq!(payload, [1, 0x80, 0, 0, 6, 2, b't', b'v', 0x45, 7]);
        assert_eq!(Head::split(&payload), Some((head.clone(), &[0x45, 7][..])));
        for length in 0..8 {
            assert_eq!(Head::split(&payload[..length]), None, "{length}");
        }
        let changed = |at: usize, to: u8| {
            let mut payload = payload.clone();
            payload[at] = to;
            Head::split(&payload).map(|(head, _)| head)
        };
        for (at, to) in [(0, 0), (0, 3), (5, 0), (5, 200), (6, b' '), (7, 0xff)] {
            assert_eq!(changed(at, to), None, "byte {at} is {to}");
        }
        // The nearest member is one.
        assert_eq!(changed(0, NEAREST), None);
        let one = Head { delivery: Delivery::Nearest, deliverers: Deliverers(1 << 31), ..head };
        assert_eq!(Head::split(&one.payload(b"")), Some((one.clone(), &b""[..])));
        let none = Head { deliverers: Deliverers(0), ..one };
        assert_eq!(Head::split(&none.payload(b"")), None);
    }

    #[test]
    fn a_bit_beyond_the_subgraph_is_no_node() {
        let mut deliverers = Deliverers::default();
        for index in [0, 31, 32, usize::MAX] {
            deliverers.add(index);
        }
        assert_eq!(deliverers.0, 0x8000_0001);
        assert!(
            deliverers.has(31) && !deliverers.has(1) && !deliverers.has(32) && !deliverers.has(usize::MAX)
        );
    }
}
