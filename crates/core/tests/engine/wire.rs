//! Packets as the model peers see them: built and read without a line of the engine's own code.

use etherparse::{SlicedPacket, TcpOptionElement, TransportSlice};
use std::net::{IpAddr, SocketAddr};

pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const PSH: u8 = 8;
pub(crate) const ACK: u8 = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub src: SocketAddr,
    pub dst: SocketAddr,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub mss: Option<u16>,
    pub scale: Option<u8>,
    pub sack_permitted: bool,
    pub sack: Vec<(u32, u32)>,
    pub stamps: Option<(u32, u32)>,
    pub payload: Vec<u8>,
}

impl Packet {
    pub(crate) fn new(src: SocketAddr, dst: SocketAddr, flags: u8, seq: u32, ack: u32) -> Self {
        Self {
            src,
            dst,
            seq,
            ack,
            flags,
            window: 65_535,
            mss: None,
            scale: None,
            sack_permitted: false,
            sack: Vec::new(),
            stamps: None,
            payload: Vec::new(),
        }
    }

    pub(crate) fn payload(mut self, payload: &[u8]) -> Self {
        self.payload = payload.to_vec();
        self
    }

    pub(crate) fn is(&self, flags: u8) -> bool {
        self.flags & flags == flags
    }

    fn options(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if let Some(mss) = self.mss {
            out.extend([2, 4]);
            out.extend(mss.to_be_bytes());
        }
        if self.sack_permitted {
            out.extend([4, 2]);
        }
        if let Some((value, echo)) = self.stamps {
            out.extend([8, 10]);
            out.extend(value.to_be_bytes());
            out.extend(echo.to_be_bytes());
        }
        if let Some(scale) = self.scale {
            out.extend([3, 3, scale]);
        }
        if !self.sack.is_empty() {
            out.extend([5, 2 + 8 * self.sack.len() as u8]);
            for (from, to) in &self.sack {
                out.extend(from.to_be_bytes());
                out.extend(to.to_be_bytes());
            }
        }
        // Padding in front: options then begin at odd places as well.
        let pad = (4 - out.len() % 4) % 4;
        let mut padded = vec![1; pad];
        padded.append(&mut out);
        padded
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let options = self.options();
        let mut tcp = Vec::new();
        tcp.extend(self.src.port().to_be_bytes());
        tcp.extend(self.dst.port().to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.push((((20 + options.len()) / 4) << 4) as u8);
        tcp.push(self.flags);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(options);
        tcp.extend(&self.payload);
        let sum = checksum(&[&pseudo(self.src.ip(), self.dst.ip(), tcp.len(), 6), &tcp]);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        ip(self.src.ip(), self.dst.ip(), 6, &tcp)
    }

    /// Reads a packet with etherparse, and insists on everything being right about it.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        let (src, dst, protocol, body) = open_ip(bytes);
        assert_eq!(protocol, 6);
        assert_eq!(checksum(&[&pseudo(src, dst, body.len(), 6), body]), 0, "TCP checksum");
        let sliced = SlicedPacket::from_ip(bytes).expect("a packet");
        let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { panic!("no TCP: {sliced:?}") };
        let mut packet = Self::new(
            SocketAddr::new(src, tcp.source_port()),
            SocketAddr::new(dst, tcp.destination_port()),
            tcp.slice()[13],
            tcp.sequence_number(),
            tcp.acknowledgment_number(),
        );
        packet.window = tcp.window_size();
        packet.payload = tcp.payload().to_vec();
        for option in tcp.options_iterator() {
            match option.expect("an option that etherparse knows") {
                TcpOptionElement::Noop => {}
                TcpOptionElement::MaximumSegmentSize(mss) => packet.mss = Some(mss),
                TcpOptionElement::WindowScale(scale) => packet.scale = Some(scale),
                TcpOptionElement::SelectiveAcknowledgementPermitted => packet.sack_permitted = true,
                TcpOptionElement::SelectiveAcknowledgement(first, more) => {
                    packet.sack = std::iter::once(first).chain(more.into_iter().flatten()).collect();
                }
                TcpOptionElement::Timestamp(value, echo) => packet.stamps = Some((value, echo)),
            }
        }
        packet
    }
}

pub(crate) fn ip(src: IpAddr, dst: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            out.extend([0x45, 0]);
            out.extend((20 + payload.len() as u16).to_be_bytes());
            out.extend([0x12, 0x34, 0x40, 0, 61, protocol, 0, 0]);
            out.extend(src.octets());
            out.extend(dst.octets());
            let sum = checksum(&[&out]);
            out[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            out.extend([0x60, 0, 0, 0]);
            out.extend((payload.len() as u16).to_be_bytes());
            out.extend([protocol, 61]);
            out.extend(src.octets());
            out.extend(dst.octets());
        }
        _ => panic!("two families in one packet"),
    }
    out.extend(payload);
    out
}

pub(crate) fn open_ip(bytes: &[u8]) -> (IpAddr, IpAddr, u8, &[u8]) {
    if bytes[0] >> 4 == 4 {
        assert_eq!(checksum(&[&bytes[..20]]), 0, "IP checksum");
        let end = usize::from(u16::from_be_bytes([bytes[2], bytes[3]]));
        assert_eq!(end, bytes.len(), "total length");
        let address = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&bytes[at..at + 4]).expect("4 bytes"));
        (address(12), address(16), bytes[9], &bytes[20..])
    } else {
        assert_eq!(40 + usize::from(u16::from_be_bytes([bytes[4], bytes[5]])), bytes.len(), "payload length");
        let address = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&bytes[at..at + 16]).expect("16 bytes"));
        (address(8), address(24), bytes[6], &bytes[40..])
    }
}

pub(crate) fn pseudo(src: IpAddr, dst: IpAddr, len: usize, protocol: u8) -> Vec<u8> {
    let mut out = Vec::new();
    for ip in [src, dst] {
        match ip {
            IpAddr::V4(ip) => out.extend(ip.octets()),
            IpAddr::V6(ip) => out.extend(ip.octets()),
        }
    }
    out.extend((len as u32).to_be_bytes());
    out.extend([0, 0, 0, protocol]);
    out
}

/// The Internet checksum, word by word; 0 over data that holds its own.
pub(crate) fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += (u32::from(pair[0]) << 8) | u32::from(pair.get(1).copied().unwrap_or(0));
        }
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
