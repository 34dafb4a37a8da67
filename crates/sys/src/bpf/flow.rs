//! Entries of the shunt's flow table as bytes, in the layout of `bpf/shunt.h`.

use super::layout::shunt::{
    ACTION_DROP, ACTION_REDIRECT, ENDED_FIN, ENDED_IDLE, ENDED_RST, ENDED_SYN, PAIR_NONE, PAIR_WAITS, flow,
    key4, key6, settings,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

pub(super) const KEY4: usize = key4::SIZE;
pub(super) const KEY6: usize = key6::SIZE;
pub(super) const FLOW: usize = flow::SIZE;
pub(super) const SETTINGS: usize = settings::SIZE;

/// One direction of a flow, as its packets come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey {
    /// Index of the interface that the packets come in by.
    pub ingress: u32,
    /// Source address; of the same IP version as the destination.
    pub source: SocketAddr,
    /// Destination address.
    pub destination: SocketAddr,
    /// IP protocol number: 6 (TCP) or 17 (UDP).
    pub protocol: u8,
}

/// What happens to packets of one direction of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEntry {
    /// Index of the interface that the packets leave by; `None`: they are dropped.
    pub egress: Option<u32>,
    /// Largest IP packet that the egress takes, bytes. Larger packets take the slow path.
    pub mtu: u32,
    /// After this time without a packet, the flow returns to the slow path.
    pub idle: Duration,
    /// Generation of the rules that allowed it.
    pub generation: u32,
    /// For tc, if the egress is one end of a pair (veth, netkit) whose other end is in another network
    /// namespace: injects packets at the other end (`bpf_redirect_peer`) as soon as no earlier packet of this
    /// direction can be queued any more.
    pub redirect_peer: bool,
    /// The caller's number for the entry.
    pub installed_as: u64,
}

/// Why a direction takes the slow path although its entry exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// A FIN that fits the connection was seen.
    pub fin: bool,
    /// A RST that fits the connection was seen.
    pub rst: bool,
    /// A SYN was seen: another connection uses the same addresses and ports.
    pub syn: bool,
    /// It was idle for its idle time, and a packet came after that.
    pub idle: bool,
}

impl Ended {
    /// True if there is any reason.
    pub const fn any(self) -> bool {
        self.fin || self.rst || self.syn || self.idle
    }
}

/// The state of an entry, as the program updates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowState {
    /// Packets on the fast path. A GSO frame that stands for several segments counts once, as in conntrack.
    pub packets: u64,
    /// Bytes of IP packets on the fast path.
    pub bytes: u64,
    /// Monotonic clock, as exact as the kernel's tick, at the latest packet or at the installation;
    /// nanoseconds.
    pub last_ns: u64,
    /// Generation of the rules that allowed it.
    pub generation: u32,
    /// Whether it has ended, and why.
    pub ended: Ended,
    /// The caller's number for the entry.
    pub installed_as: u64,
}

/// What the program checks first for each packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    /// Entries of another generation take the slow path.
    pub generation: u32,
    /// After this time every packet takes the slow path; monotonic clock, nanoseconds.
    pub alive_until_ns: u64,
}

impl FlowKey {
    /// Returns the opposite direction of a flow whose packets leave by `egress`.
    #[must_use]
    pub const fn reverse(self, egress: u32) -> Self {
        Self { ingress: egress, source: self.destination, destination: self.source, protocol: self.protocol }
    }

    /// Encodes a key of the map; `None` if the addresses are of two IP versions.
    pub(super) fn to_bytes(self) -> Option<Vec<u8>> {
        let mut bytes = self.ingress.to_ne_bytes().to_vec();
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
            }
            _ => return None,
        }
        bytes.extend(self.source.port().to_be_bytes());
        bytes.extend(self.destination.port().to_be_bytes());
        bytes.extend([self.protocol, 0, 0, 0]);
        Some(bytes)
    }

    /// Decodes a key of the map.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let ingress = u32::from_ne_bytes(array(bytes, 0)?);
        let (source, destination, rest) = match bytes.len() {
            KEY4 => {
                let address = |at| Some(IpAddr::V4(Ipv4Addr::from(array::<4>(bytes, at)?)));
                (address(key4::SOURCE)?, address(key4::DESTINATION)?, key4::SOURCE_PORT)
            }
            KEY6 => {
                let address = |at| Some(IpAddr::V6(Ipv6Addr::from(array::<16>(bytes, at)?)));
                (address(key6::SOURCE)?, address(key6::DESTINATION)?, key6::SOURCE_PORT)
            }
            _ => return None,
        };
        let port = |at| Some(u16::from_be_bytes(array(bytes, at)?));
        Some(Self {
            ingress,
            source: SocketAddr::new(source, port(rest)?),
            destination: SocketAddr::new(destination, port(rest + 2)?),
            protocol: *bytes.get(rest + 4)?,
        })
    }
}

impl FlowEntry {
    /// Encodes the value of a new entry.
    pub(super) fn to_bytes(self, now_ns: u64) -> [u8; FLOW] {
        let mut bytes = [0; FLOW];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let idle_ns = u64::try_from(self.idle.as_nanos()).unwrap_or(u64::MAX);
        put(flow::LAST_NS, &now_ns.to_ne_bytes());
        put(flow::IDLE_NS, &idle_ns.to_ne_bytes());
        put(flow::GENERATION, &self.generation.to_ne_bytes());
        put(flow::EGRESS, &self.egress.unwrap_or(0).to_ne_bytes());
        put(flow::MTU, &self.mtu.to_ne_bytes());
        let action = if self.egress.is_none() { ACTION_DROP } else { ACTION_REDIRECT };
        put(flow::ACTION, &action.to_ne_bytes());
        let pair = if self.redirect_peer { PAIR_WAITS } else { PAIR_NONE };
        put(flow::PAIR, &pair.to_ne_bytes());
        put(flow::INSTALLED_AS, &self.installed_as.to_ne_bytes());
        bytes
    }
}

impl FlowState {
    /// Decodes a value of the map.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let u32_at = |at| Some(u32::from_ne_bytes(array(bytes, at)?));
        let u64_at = |at| Some(u64::from_ne_bytes(array(bytes, at)?));
        let ended = u32_at(flow::ENDED)?;
        Some(Self {
            packets: u64_at(flow::PACKETS)?,
            bytes: u64_at(flow::BYTES)?,
            last_ns: u64_at(flow::LAST_NS)?,
            generation: u32_at(flow::GENERATION)?,
            ended: Ended {
                fin: ended & ENDED_FIN != 0,
                rst: ended & ENDED_RST != 0,
                syn: ended & ENDED_SYN != 0,
                idle: ended & ENDED_IDLE != 0,
            },
            installed_as: u64_at(flow::INSTALLED_AS)?,
        })
    }
}

impl Settings {
    pub(super) fn to_bytes(self) -> [u8; SETTINGS] {
        let mut bytes = [0; SETTINGS];
        bytes[settings::GENERATION..][..4].copy_from_slice(&self.generation.to_ne_bytes());
        bytes[settings::ALIVE_UNTIL_NS..][..8].copy_from_slice(&self.alive_until_ns.to_ne_bytes());
        bytes
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_read_back() {
        for (source, destination) in [("192.0.2.1:1", "198.51.100.2:65535"), ("[2001:db8::1]:7", "[::1]:80")]
        {
            let key = FlowKey {
                ingress: 3,
                source: source.parse().unwrap(),
                destination: destination.parse().unwrap(),
                protocol: 6,
            };
            assert_eq!(FlowKey::from_bytes(&key.to_bytes().unwrap()), Some(key));
            assert_eq!(key.reverse(4).reverse(3), key);
        }
        let mixed = FlowKey {
            ingress: 1,
            source: "192.0.2.1:1".parse().unwrap(),
            destination: "[::1]:1".parse().unwrap(),
            protocol: 6,
        };
        assert_eq!(mixed.to_bytes(), None);
        assert_eq!(FlowKey::from_bytes(&[0; 7]), None);
    }
}
