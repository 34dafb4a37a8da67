//! Neighbours. A [`Hop`] is a link-layer address with the number of the interface that leads to it. The worker learns
//! from the server's own answers which neighbour leads to a server. While the neighbour is unknown, the kernel routes the
//! packets and resolves the neighbour's address.

use sidetrack_core::engine::Hop;
use sidetrack_core::time::Instant;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

/// The hop of packets that the kernel routes.
pub(super) const ROUTED: Hop = Hop(0);

/// How long a learnt neighbour is used: routes change, and neighbours move.
const BELIEVED: Duration = Duration::from_secs(30);

/// Most servers remembered.
const SERVERS_MAX: usize = 4096;

/// Bytes of an Ethernet header.
pub(super) const ETHERNET: usize = 14;

/// Returns the hop of the neighbour with this address at the interface with this number.
pub(super) fn hop(interface: usize, address: [u8; 6]) -> Hop {
    let [a, b, c, d, e, f] = address;
    let number = (interface as u64 + 1) << 48;
    Hop(number | u64::from_be_bytes([0, 0, a, b, c, d, e, f]))
}

/// Returns the interface's number and the address; none for [`ROUTED`].
pub(super) fn neighbour(hop: Hop) -> Option<(usize, [u8; 6])> {
    let [_, _, a, b, c, d, e, f] = hop.0.to_be_bytes();
    let interface = usize::try_from(hop.0 >> 48).ok()?.checked_sub(1)?;
    Some((interface, [a, b, c, d, e, f]))
}

/// Returns an Ethernet header for an IP packet.
pub(super) fn header(to: [u8; 6], from: [u8; 6], packet: &[u8]) -> [u8; ETHERNET] {
    let kind: [u8; 2] = if packet.first().is_some_and(|byte| byte >> 4 == 6) { [0x86, 0xdd] } else { [8, 0] };
    let mut header = [0; ETHERNET];
    header[..6].copy_from_slice(&to);
    header[6..12].copy_from_slice(&from);
    header[12..].copy_from_slice(&kind);
    header
}

/// Returns the sender of a frame, if it is an Ethernet frame with an IP packet.
pub(super) fn sender(frame: &[u8]) -> Option<[u8; 6]> {
    let header: &[u8; ETHERNET] = frame.first_chunk()?;
    matches!(header[12..], [8, 0] | [0x86, 0xdd])
        .then(|| [header[6], header[7], header[8], header[9], header[10], header[11]])
}

/// Returns the server whose answer this is: the source address, if the packet is a SYN-ACK.
pub(super) fn answering(packet: &[u8]) -> Option<IpAddr> {
    const SYN_ACK: u8 = 0x12;
    let (source, tcp): (IpAddr, usize) = match packet.first()? >> 4 {
        4 => {
            let source: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
            (source.into(), usize::from(packet[0] & 0xf) * 4)
        }
        _ => {
            let source: [u8; 16] = packet.get(8..24)?.try_into().ok()?;
            (source.into(), 40)
        }
    };
    (packet.get(tcp + 13)? & 0x3f == SYN_ACK).then_some(source)
}

/// The neighbours that lead to servers.
#[derive(Debug, Default)]
pub(super) struct Hops {
    servers: HashMap<IpAddr, (Hop, Instant)>,
}

impl Hops {
    /// Returns the neighbour that leads to a server, or [`ROUTED`] if it is not known.
    pub(super) fn to(&self, server: IpAddr, now: Instant) -> Hop {
        let known = self.servers.get(&server).filter(|(_, learnt)| *learnt + BELIEVED > now);
        known.map_or(ROUTED, |(hop, _)| *hop)
    }

    /// Notes that a server answered through this neighbour.
    pub(super) fn learn(&mut self, server: IpAddr, hop: Hop, now: Instant) {
        if self.servers.len() >= SERVERS_MAX && !self.servers.contains_key(&server) {
            self.servers.retain(|_, (_, learnt)| *learnt + BELIEVED > now);
            if self.servers.len() >= SERVERS_MAX {
                return;
            }
        }
        match self.servers.get_mut(&server) {
            // It was learnt through the kernel's route. Our own use of it proves nothing new about that route.
            Some(known) if known.0 == hop && known.1 + BELIEVED > now => {}
            _ => {
                self.servers.insert(server, (hop, now));
            }
        }
    }

    /// Removes the neighbour of a server that could not be reached: another one may lead to it now.
    pub(super) fn forget(&mut self, server: IpAddr) {
        self.servers.remove(&server);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hop_gives_back_what_it_was_made_from() {
        assert_eq!(neighbour(ROUTED), None);
        for (interface, address) in [(0, [0; 6]), (7, [0xff; 6]), (1, [2, 0, 0, 0, 0, 9])] {
            assert_eq!(neighbour(hop(interface, address)), Some((interface, address)));
        }
    }

    #[test]
    fn what_was_learnt_is_asked_again_after_a_while() {
        let mut hops = Hops::default();
        let (server, way) = (IpAddr::from([10, 0, 0, 1]), hop(0, [1; 6]));
        assert_eq!(hops.to(server, Instant::ZERO), ROUTED);
        hops.learn(server, way, Instant::ZERO);
        hops.learn(server, way, Instant::from_millis(20_000));
        assert_eq!(hops.to(server, Instant::from_millis(29_000)), way);
        assert_eq!(
            hops.to(server, Instant::from_millis(31_000)),
            ROUTED,
            "the kernel is asked for the route again"
        );
        hops.learn(server, way, Instant::from_millis(31_000));
        assert_eq!(hops.to(server, Instant::from_millis(32_000)), way);
        hops.forget(server);
        assert_eq!(hops.to(server, Instant::from_millis(32_000)), ROUTED);
    }

    #[test]
    fn only_answers_of_servers_teach() {
        let mut packet = [0_u8; 60];
        packet[0] = 0x45;
        packet[12..16].copy_from_slice(&[10, 0, 0, 9]);
        assert_eq!(answering(&packet), None);
        packet[33] = 0x12;
        assert_eq!(answering(&packet), Some(IpAddr::from([10, 0, 0, 9])));
        assert_eq!(answering(&packet[..33]), None, "cut off");
        assert_eq!(sender(&header([1; 6], [2; 6], &packet)), Some([2; 6]));
        assert_eq!(sender(&[0; 60]), None, "no IP packet");
    }
}
