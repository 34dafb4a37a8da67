//! The addresses of an IP packet, and the parts of it that a capture needs.

use crate::engine::checksum::Sum;
use crate::flow::Protocol;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The two ends of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ends {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The sender.
    pub from: SocketAddr,
    /// The receiver.
    pub to: SocketAddr,
}

impl Ends {
    /// Returns the ends of an answer.
    #[must_use]
    pub const fn answer(self) -> Self {
        Self { protocol: self.protocol, from: self.to, to: self.from }
    }
}

/// What [`look`] has found in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Looked {
    /// The ends of the packet. An ICMP error has the ends of an answer to the packet that it quotes.
    pub ends: Ends,
    /// Offset of the payload. `None`: an ICMP error, whose payload is not the flow's.
    pub payload: Option<usize>,
    /// Offset of the transport header.
    transport: usize,
}

/// Most extension headers of IPv6 that are skipped.
const EXTENSIONS_MAX: usize = 8;

/// ICMP has this protocol number over IPv4 (RFC 792), and this one over IPv6 (RFC 4443).
const ICMP: [u8; 2] = [1, 58];

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn ip4(bytes: &[u8], at: usize) -> Option<IpAddr> {
    let octets: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(Ipv4Addr::from(octets).into())
}

fn ip6(bytes: &[u8], at: usize) -> Option<IpAddr> {
    let octets: [u8; 16] = bytes.get(at..at + 16)?.try_into().ok()?;
    Some(Ipv6Addr::from(octets).into())
}

/// The network header of a packet.
struct Network {
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    /// Offset of the transport header.
    transport: usize,
}

/// Reads an IPv4 header (RFC 791) or an IPv6 header with its extensions (RFC 8200). `None` also for all fragments but the first.
fn network(packet: &[u8]) -> Option<Network> {
    match packet.first()? >> 4 {
        4 => {
            let length = usize::from(packet.first()? & 0xf) * 4;
            let is_later = u16_at(packet, 6)? & 0x1fff != 0;
            (length >= 20 && !is_later).then_some(())?;
            let (from, to) = (ip4(packet, 12)?, ip4(packet, 16)?);
            Some(Network { from, to, protocol: *packet.get(9)?, transport: length })
        }
        6 => {
            let (from, to) = (ip6(packet, 8)?, ip6(packet, 24)?);
            let (mut protocol, mut transport) = (*packet.get(6)?, 40);
            for _ in 0..EXTENSIONS_MAX {
                let (next, length) = (packet.get(transport), packet.get(transport + 1));
                match protocol {
                    // Hop-by-hop options, routing, destination options.
                    0 | 43 | 60 => transport += (usize::from(*length?) + 1) * 8,
                    44 if u16_at(packet, transport + 2)? & 0xfff8 == 0 => transport += 8,
                    44 => return None,
                    _ => return Some(Network { from, to, protocol, transport }),
                }
                protocol = *next?;
            }
            None
        }
        _ => None,
    }
}

/// Finds the ends of an IP packet that belongs to TCP or UDP, or of an ICMP error about such a packet.
pub fn look(packet: &[u8]) -> Option<Looked> {
    let seen = network(packet)?;
    if ICMP.contains(&seen.protocol) {
        let kind = *packet.get(seen.transport)?;
        // Errors quote the packet that they are about behind 8 bytes.
        let is_error = if seen.protocol == 1 { matches!(kind, 3 | 11 | 12) } else { kind < 128 };
        let quoted = packet.get(seen.transport + 8..).filter(|_| is_error)?;
        let inner = network(quoted)?;
        let (_, ends) = transport(quoted, &inner)?;
        return Some(Looked { ends: ends.answer(), payload: None, transport: seen.transport });
    }
    let (payload, ends) = transport(packet, &seen)?;
    Some(Looked { ends, payload: Some(payload), transport: seen.transport })
}

fn transport(packet: &[u8], seen: &Network) -> Option<(usize, Ends)> {
    let protocol = Protocol::of_number(seen.protocol)?;
    let at = seen.transport;
    let (from, to) = (u16_at(packet, at)?, u16_at(packet, at + 2)?);
    let length = match protocol {
        Protocol::Udp => 8,
        // An ICMP error may quote 8 bytes only.
        Protocol::Tcp => packet.get(at + 12).map_or(20, |offset| usize::from(offset >> 4) * 4),
    };
    let ends = Ends { protocol, from: (seen.from, from).into(), to: (seen.to, to).into() };
    Some((at + length, ends))
}

/// The random of the TLS ClientHello with which this payload begins (RFC 8446 Sec. 4.1.2, RFC 5246 Sec. 7.4.1.2). Key logs name
/// connections by it.
pub fn hello_random(payload: &[u8]) -> Option<[u8; 32]> {
    let [22, 3, _, _, _, 1, _, _, _, 3, _, ..] = payload else { return None };
    payload.get(11..43)?.try_into().ok()
}

/// Replaces the sender or the receiver of a TCP or UDP packet by an address of the same family, and corrects the checksums.
/// Does nothing to other packets.
pub fn readdress(packet: &mut [u8], looked: &Looked, from: Option<SocketAddr>, to: Option<SocketAddr>) {
    if looked.payload.is_none() {
        return;
    }
    let is_v4 = packet.first().is_some_and(|first| first >> 4 == 4);
    let places = if is_v4 { [12, 16] } else { [8, 24] };
    let (mut network, mut segment) = (Sum::ZERO, Sum::ZERO);
    for (side, (new, at)) in [from, to].into_iter().zip(places).enumerate() {
        let Some(new) = new.filter(|new| new.is_ipv4() == is_v4) else { continue };
        let octets = match new.ip() {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let port = looked.transport + 2 * side;
        network = network.add(replace(packet, at, &octets));
        segment = segment.add(replace(packet, port, &new.port().to_be_bytes()));
    }
    if is_v4 {
        apply(packet, 10, network);
    }
    let checksum = match looked.ends.protocol {
        Protocol::Tcp => 16,
        Protocol::Udp => 6,
    };
    apply(packet, looked.transport + checksum, network.add(segment));
}

/// Writes these bytes, an even number, and returns the change of the sum.
fn replace(packet: &mut [u8], at: usize, new: &[u8]) -> Sum {
    let mut sum = Sum::ZERO;
    let Some(place) = packet.get_mut(at..at + new.len()) else { return sum };
    for (old, new) in place.as_chunks_mut::<2>().0.iter_mut().zip(new.as_chunks::<2>().0) {
        sum = sum.replace_u16(u16::from_be_bytes(*old), u16::from_be_bytes(*new));
        *old = *new;
    }
    sum
}

fn apply(packet: &mut [u8], at: usize, change: Sum) {
    if let Some(place) = packet.get_mut(at..at + 2)
        && let Some(old) = place.first_chunk::<2>().copied()
    {
        place.copy_from_slice(&change.apply(u16::from_be_bytes(old)).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A packet of TCP over IPv4 from 10.0.0.1:1000 to 10.0.0.2:443 with a right checksum.
    fn packet(payload: &[u8]) -> Vec<u8> {
        let mut ip = vec![0x45, 0, 0, 0, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let length = u16::try_from(40 + payload.len()).unwrap();
        ip[2..4].copy_from_slice(&length.to_be_bytes());
        let sum = Sum::ZERO.bytes(&ip).checksum();
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let mut tcp = vec![0; 20];
        tcp[..4].copy_from_slice(&[3, 0xe8, 1, 0xbb]);
        tcp[12] = 0x50;
        tcp.extend_from_slice(payload);
        let checksum = segment_sum(&ip, &tcp).checksum();
        tcp[16..18].copy_from_slice(&checksum.to_be_bytes());
        ip.extend_from_slice(&tcp);
        ip
    }

    fn segment_sum(ip: &[u8], tcp: &[u8]) -> Sum {
        Sum::ZERO.bytes(&ip[12..20]).u16(6).u16(u16::try_from(tcp.len()).unwrap()).bytes(tcp)
    }

    #[test]
    fn the_ends_of_packets_are_found() {
        let seen = look(&packet(b"hi")).unwrap();
        let ends = Ends {
            protocol: Protocol::Tcp,
            from: "10.0.0.1:1000".parse().unwrap(),
            to: "10.0.0.2:443".parse().unwrap(),
        };
        assert_eq!((seen.ends, seen.payload), (ends, Some(40)));
        // The error of a router quotes 8 bytes of TCP.
        let mut error = vec![0x45, 0, 0, 56, 0, 0, 0, 0, 64, 1, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1];
        error.extend_from_slice(&[3, 4, 0, 0, 0, 0, 5, 0]);
        error.extend_from_slice(&packet(b"")[..28]);
        let seen = look(&error).unwrap();
        assert_eq!((seen.ends, seen.payload), (ends.answer(), None));
        // IPv6 with hop-by-hop options before UDP.
        let mut six = vec![0x60, 0, 0, 0, 0, 16, 0, 64];
        six.extend_from_slice(&Ipv6Addr::LOCALHOST.octets());
        six.extend_from_slice(&Ipv6Addr::LOCALHOST.octets());
        six.extend_from_slice(&[17, 0, 0, 0, 0, 0, 0, 0, 0, 53, 0, 54, 0, 8, 0, 0]);
        let seen = look(&six).unwrap();
        assert_eq!(
            (seen.ends.from, seen.ends.to),
            ("[::1]:53".parse().unwrap(), "[::1]:54".parse().unwrap())
        );
        assert_eq!((seen.ends.protocol, seen.payload), (Protocol::Udp, Some(56)));
        // A later fragment has no ports.
        let mut later = packet(b"hi");
        later[7] = 1;
        assert_eq!(look(&later), None);
    }

    #[test]
    fn cut_packets_and_random_ones_are_survived() {
        for whole in [packet(b"hello"), vec![0x60; 80], vec![0x4f; 80]] {
            for end in 0..whole.len() {
                let mut cut = whole[..end].to_vec();
                if let Some(seen) = look(&cut) {
                    readdress(&mut cut, &seen, Some("1.2.3.4:5".parse().unwrap()), None);
                }
            }
        }
    }

    #[test]
    fn other_addresses_have_right_checksums() {
        let mut packet = packet(b"odd");
        let seen = look(&packet).unwrap();
        readdress(&mut packet, &seen, None, Some("192.0.2.77:8443".parse().unwrap()));
        let again = look(&packet).unwrap().ends;
        assert_eq!((again.from, again.to), (seen.ends.from, "192.0.2.77:8443".parse().unwrap()));
        assert_eq!(Sum::ZERO.bytes(&packet[..20]).checksum(), 0);
        assert_eq!(segment_sum(&packet[..20], &packet[20..]).checksum(), 0);
    }

    #[test]
    fn a_hello_has_its_random() {
        let mut hello = vec![22, 3, 1, 0, 60, 1, 0, 0, 56, 3, 3];
        hello.extend(0..32);
        let random: [u8; 32] = std::array::from_fn(|at| u8::try_from(at).unwrap());
        assert_eq!(hello_random(&hello), Some(random));
        assert!((0..hello.len()).all(|end| hello_random(&hello[..end]).is_none()));
        hello[5] = 2;
        assert_eq!(hello_random(&hello), None, "a ServerHello");
    }
}
