//! Builds whole packets from the datagrams of a flow.

use crate::engine::checksum::Sum;
use std::net::{IpAddr, SocketAddr};

/// Bytes of a header of UDP (RFC 768).
const UDP_BYTES: usize = 8;
const UDP: u8 = 17;
/// The hop limit that hosts use (RFC 1700).
const TTL: u8 = 64;

/// Returns an IP packet with this datagram of UDP. `None` if the addresses are of different families, or the packet would be
/// longer than IP allows.
pub fn datagram(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Option<Vec<u8>> {
    let length = u16::try_from(UDP_BYTES + payload.len()).ok()?;
    let (mut packet, pseudo) = match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let total = length.checked_add(20)?;
            let [a, b] = total.to_be_bytes();
            // RFC 791 Sec. 3.1; "don't fragment", so the identification means nothing (RFC 6864 Sec. 4).
            let mut head = vec![0x45, 0, a, b, 0, 0, 0x40, 0, TTL, UDP, 0, 0];
            head.extend(source.octets().into_iter().chain(destination.octets()));
            let sum = Sum::ZERO.bytes(&head).checksum();
            head[10..12].copy_from_slice(&sum.to_be_bytes());
            (head, Sum::ZERO.bytes(&source.octets()).bytes(&destination.octets()))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            // RFC 8200 Sec. 3.
            let [a, b] = length.to_be_bytes();
            let mut head = vec![0x60, 0, 0, 0, a, b, UDP, TTL];
            head.extend(source.octets().into_iter().chain(destination.octets()));
            (head, Sum::ZERO.bytes(&source.octets()).bytes(&destination.octets()))
        }
        _ => return None,
    };
    let ports = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    let sum = pseudo.u16(UDP.into()).u16(length).bytes(&ports).u16(length).bytes(payload).checksum();
    // RFC 768: 0 would mean that there is no checksum.
    let sum = if sum == 0 { u16::MAX } else { sum };
    packet.extend_from_slice(&ports);
    packet.extend_from_slice(&length.to_be_bytes());
    packet.extend_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(payload);
    Some(packet)
}

#[cfg(test)]
mod tests {
    use super::super::{Ends, Transport};
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn it_is_read_back_and_its_checksums_fit() {
        let cases = [("192.0.2.1:4000", "239.1.2.3:5000", 20), ("[2001:db8::1]:4000", "[ff3e::7]:5000", 40)];
        for (from, to, header) in cases {
            for length in [0, 1, 2, 3, 4, 5, 1200] {
                let (source, destination) = (at(from), at(to));
                let payload: Vec<u8> = (0..length).map(|at| (at * 7) as u8).collect();
                let packet = datagram(source, destination, &payload).expect("one family");
                let ends = Ends { transport: Transport::Udp, source, destination };
                assert_eq!(Ends::of(&packet), Some(ends));
                assert_eq!(packet[header + 8..], payload);
                if header == 20 {
                    assert_eq!(Sum::ZERO.bytes(&packet[..20]).folded(), 0xffff);
                }
                let addresses = if header == 20 { &packet[12..20] } else { &packet[8..40] };
                let sum = Sum::ZERO.bytes(addresses).u16(17).u16(8 + length).bytes(&packet[header..]);
                assert_eq!(sum.folded(), 0xffff, "{from} {length}");
            }
        }
    }

    #[test]
    fn a_known_packet() {
        let packet = datagram(at("10.0.0.1:1"), at("10.0.0.2:2"), b"hi").expect("a packet");
        let hex: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "4500001e000040004011 26cd 0a000001 0a000002 0001 0002 000a 836b 6869".replace(' ', "")
        );
    }

    #[test]
    fn what_ip_cannot_carry_is_none() {
        assert_eq!(datagram(at("10.0.0.1:1"), at("[::1]:2"), b""), None);
        assert!(datagram(at("10.0.0.1:1"), at("10.0.0.2:2"), &[0; 65_507]).is_some());
        assert_eq!(datagram(at("10.0.0.1:1"), at("10.0.0.2:2"), &[0; 65_508]), None);
    }
}
