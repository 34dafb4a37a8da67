//! The SYN that is held, and the packets that answer it: RST (RFC 9293 Sec. 3.5.2), ICMP (RFC 792) and ICMPv6 (RFC 4443).

use super::Answer;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const TCP: u8 = 6;
const ICMP: u8 = 1;
const ICMP_V6: u8 = 58;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

const V4_HEADER: usize = 20;
const V6_HEADER: usize = 40;
const TCP_HEADER: usize = 20;
const ICMP_HEADER: usize = 8;

/// TTL and hop limit of answers.
const TTL: u8 = 64;

/// The opening segment of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Syn {
    /// The client's address and port.
    pub client: SocketAddr,
    /// The destination that the client dials.
    pub server: SocketAddr,
    /// The initial sequence number. A retransmitted SYN has the same; a new attempt has another one.
    pub isn: u32,
    /// The IP header and the first 20 bytes of the TCP header, which an ICMP message quotes.
    quote: Box<[u8]>,
}

impl Syn {
    /// Reads an IP packet, or its beginning. `None`: it is not the opening segment of a TCP connection between two hosts,
    /// or it has IPv6 extension headers.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        let (client, server, header) = match packet.first()? >> 4 {
            4 => v4(packet)?,
            6 => v6(packet)?,
            _ => return None,
        };
        let tcp = packet.get(header..header + TCP_HEADER)?;
        let word = |at: usize| Some(u16::from_be_bytes([*tcp.get(at)?, *tcp.get(at + 1)?]));
        let isn = u32::from_be_bytes(*tcp.get(4..8)?.first_chunk()?);
        if tcp.get(13)? & (FIN | SYN | RST | ACK) != SYN || tcp.get(12)? >> 4 < 5 {
            return None;
        }
        let client = SocketAddr::new(client, word(0)?);
        let server = SocketAddr::new(server, word(2)?);
        let quote = packet.get(..header + TCP_HEADER)?.into();
        (client.port() != 0 && server.port() != 0).then_some(Self { client, server, isn, quote })
    }

    /// Builds the packet that tells the client this answer. `None` for [`Answer::Silent`].
    pub fn answered(&self, answer: Answer) -> Option<Vec<u8>> {
        match answer.icmp(self.client.is_ipv6()) {
            Some((kind, code)) => self.icmp(kind, code),
            None if answer == Answer::Reset => self.reset(),
            None => None,
        }
    }

    /// RFC 9293 Sec. 3.10.7.1: sequence number 0; the SYN is acknowledged.
    fn reset(&self) -> Option<Vec<u8>> {
        let mut tcp = Vec::with_capacity(TCP_HEADER);
        tcp.extend(self.server.port().to_be_bytes());
        tcp.extend(self.client.port().to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(self.isn.wrapping_add(1).to_be_bytes());
        tcp.extend([5 << 4, RST | ACK, 0, 0, 0, 0, 0, 0]);
        self.in_ip(TCP, tcp, 16, true)
    }

    fn icmp(&self, kind: u8, code: u8) -> Option<Vec<u8>> {
        let is_v6 = self.client.is_ipv6();
        let mut message = Vec::with_capacity(ICMP_HEADER + self.quote.len());
        message.extend([kind, code, 0, 0, 0, 0, 0, 0]);
        message.extend_from_slice(&self.quote);
        self.in_ip(if is_v6 { ICMP_V6 } else { ICMP }, message, 2, is_v6)
    }

    /// Puts the IP header before a payload, and the checksum at `at` of the payload.
    fn in_ip(&self, protocol: u8, mut payload: Vec<u8>, at: usize, pseudo: bool) -> Option<Vec<u8>> {
        let length = u16::try_from(payload.len()).ok()?;
        let mut sum = Sum::default();
        if pseudo {
            sum.address(self.server.ip());
            sum.address(self.client.ip());
            sum.word(u16::from(protocol));
            sum.word(length);
        }
        sum.bytes(&payload);
        payload.get_mut(at..at + 2)?.copy_from_slice(&sum.finish().to_be_bytes());
        let mut packet = match (self.server.ip(), self.client.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => v4_header(protocol, length, from, to)?,
            (IpAddr::V6(from), IpAddr::V6(to)) => v6_header(protocol, length, from, to),
            _ => return None,
        };
        packet.extend(payload);
        Some(packet)
    }
}

fn v4(packet: &[u8]) -> Option<(IpAddr, IpAddr, usize)> {
    let header = usize::from(packet.first()? & 15) * 4;
    let fragment = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]);
    if header < V4_HEADER || *packet.get(9)? != TCP || fragment & 0x3fff != 0 {
        return None;
    }
    let address = |at: usize| Some(Ipv4Addr::from(*packet.get(at..)?.first_chunk::<4>()?));
    Some((address(12)?.into(), address(16)?.into(), header))
}

fn v6(packet: &[u8]) -> Option<(IpAddr, IpAddr, usize)> {
    let address = |at: usize| Some(Ipv6Addr::from(*packet.get(at..)?.first_chunk::<16>()?));
    (*packet.get(6)? == TCP).then_some(())?;
    Some((address(8)?.into(), address(24)?.into(), V6_HEADER))
}

fn v4_header(protocol: u8, length: u16, from: Ipv4Addr, to: Ipv4Addr) -> Option<Vec<u8>> {
    let total = length.checked_add(20)?;
    let [high, low] = total.to_be_bytes();
    // Do not fragment; the kernel chooses the identification.
    let mut header = vec![0x45, 0, high, low, 0, 0, 0x40, 0, TTL, protocol, 0, 0];
    header.extend(from.octets());
    header.extend(to.octets());
    let mut sum = Sum::default();
    sum.bytes(&header);
    header.get_mut(10..12)?.copy_from_slice(&sum.finish().to_be_bytes());
    Some(header)
}

fn v6_header(protocol: u8, length: u16, from: Ipv6Addr, to: Ipv6Addr) -> Vec<u8> {
    let [high, low] = length.to_be_bytes();
    let mut header = vec![0x60, 0, 0, 0, high, low, protocol, TTL];
    header.extend(from.octets());
    header.extend(to.octets());
    header
}

/// The Internet checksum (RFC 1071).
#[derive(Default)]
struct Sum(u32);

impl Sum {
    fn word(&mut self, word: u16) {
        self.0 += u32::from(word);
    }

    /// At most some hundred bytes: the sum does not overflow.
    fn bytes(&mut self, bytes: &[u8]) {
        for pair in bytes.chunks(2) {
            self.word(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
    }

    fn address(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(ip) => self.bytes(&ip.octets()),
            IpAddr::V6(ip) => self.bytes(&ip.octets()),
        }
    }

    fn finish(self) -> u16 {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        // Two folded halves fit into 16 bits.
        !u16::try_from(sum).unwrap_or(u16::MAX)
    }
}
