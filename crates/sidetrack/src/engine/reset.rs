//! Builds resets for connections whose client and server use their own sequence numbers.

use sidetrack_core::engine::checksum::Sum;
use sidetrack_sys::bpf::{DecidedFlow, DecidedSide};
use std::net::{IpAddr, SocketAddr};

const RST: u8 = 4;
const ACK: u8 = 16;
const TTL: u8 = 64;
const TCP: u8 = 6;

/// Returns the resets for the client, and for the server. A receiver accepts the one whose number it expects next. That
/// is the number it acknowledged last or, if an acknowledgement is still to come, the last number that the other side
/// sent.
pub(super) fn both(flow: &DecidedFlow) -> [Vec<Vec<u8>>; 2] {
    let [client, server] = &flow.sides;
    [
        resets(flow.local, flow.client, client, server),
        // A server that has not answered yet has sent nothing that could be acknowledged.
        resets(flow.source, flow.server, server, client),
    ]
}

fn resets(from: SocketAddr, to: SocketAddr, receiver: &DecidedSide, other: &DecidedSide) -> Vec<Vec<u8>> {
    let mut numbers = vec![other.sent];
    if receiver.packets > 0 && receiver.acknowledged != other.sent {
        numbers.push(receiver.acknowledged);
    }
    numbers.into_iter().map(|seq| packet(from, to, seq, receiver.sent)).collect()
}

/// Returns an IP packet with a reset.
fn packet(from: SocketAddr, to: SocketAddr, seq: u32, ack: u32) -> Vec<u8> {
    let mut tcp = [from.port().to_be_bytes(), to.port().to_be_bytes()].concat();
    tcp.extend(seq.to_be_bytes());
    tcp.extend(ack.to_be_bytes());
    tcp.extend([0x50, RST | ACK, 0, 0, 0, 0, 0, 0]);
    let (mut packet, addresses) = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let addresses = [from.octets(), to.octets()].concat();
            let total = (20 + tcp.len()) as u16;
            let mut ip = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, TTL, TCP, 0, 0];
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            ip.extend(&addresses);
            let sum = Sum::ZERO.bytes(&ip).checksum();
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            (ip, addresses)
        }
        (from, to) => {
            let octets = |ip| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            let addresses = [octets(from), octets(to)].concat();
            let mut ip = vec![0x60, 0, 0, 0, 0, tcp.len() as u8, TCP, TTL];
            ip.extend(&addresses);
            (ip, addresses)
        }
    };
    let sum = Sum::ZERO.bytes(&addresses).u16(TCP.into()).u16(tcp.len() as u16).bytes(&tcp).checksum();
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    packet.extend(tcp);
    packet
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidetrack_core::engine::Checksums;
    use sidetrack_core::engine::packet::{Header, Ip, flags};

    #[test]
    fn a_reset_can_be_read_and_has_its_numbers() {
        for (from, to) in [("10.0.0.1:80", "10.0.0.2:4000"), ("[fd00::1]:80", "[fd00::2]:4000")] {
            let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
            let bytes = packet(from, to, 7, 9);
            let header = Header::parse(&bytes, &Ip::parse(&bytes).unwrap(), Checksums::Verify).unwrap();
            assert_eq!((header.flags, header.seq.0, header.ack.0), (flags::RST | flags::ACK, 7, 9));
            let side = DecidedSide { sent: 5, acknowledged: 6, packets: 1, ..DecidedSide::default() };
            let other = DecidedSide { sent: 8, ..DecidedSide::default() };
            assert_eq!(resets(from, to, &side, &other).len(), 2);
            assert_eq!(resets(from, to, &side, &DecidedSide { sent: 6, ..other }).len(), 1);
        }
    }
}
