//! Frames of TCP, made by hand, for programs that are tried on them.
#![allow(dead_code, reason = "each test file uses its own part")]

use sidetrack_sys::bpf::{Map, MapKind, MapShape, Own, Program};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

pub(crate) const DROP: u32 = 1;
pub(crate) const PASS: u32 = 2;
pub(crate) const REDIRECT: u32 = 4;
pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

pub(crate) const CLIENT_LINK: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const OWN_LINK: [u8; 6] = [2, 0, 0, 0, 0, 2];
pub(crate) const SERVER_LINK: [u8; 6] = [2, 0, 0, 0, 0, 3];

pub(crate) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (pairs, last) = bytes.as_chunks::<2>();
    let whole: u64 = pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum();
    whole + last.first().map_or(0, |byte| u64::from(*byte) << 8)
}

pub(crate) fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// A frame with all checksums; the one of TCP is left to the card if it is not `finished`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame<'a> {
    pub link: ([u8; 6], [u8; 6]),
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    /// Of TCP, a multiple of four bytes.
    pub options: &'a [u8],
    pub payload: &'a [u8],
    pub ttl: u8,
    pub finished: bool,
}

impl Frame<'_> {
    /// What most have in common.
    pub(crate) const BARE: Self = Frame {
        link: ([0; 6], [0; 6]),
        from: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        to: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        seq: 0,
        ack: 0,
        flags: 0,
        options: &[],
        payload: &[],
        ttl: 64,
        finished: true,
    };

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut tcp = [self.from.port().to_be_bytes(), self.to.port().to_be_bytes()].concat();
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        let header = ((20 + self.options.len() as u8) / 4) << 4;
        tcp.extend([header, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        tcp.extend(self.options);
        tcp.extend(self.payload);
        let (source, target) = (octets(self.from.ip()), octets(self.to.ip()));
        let pseudo = sum(&source) + sum(&target) + 6 + tcp.len() as u64;
        let check = if self.finished { !fold(pseudo + sum(&tcp)) } else { fold(pseudo) };
        tcp[16..18].copy_from_slice(&check.to_be_bytes());
        let mut frame = [self.link.0, self.link.1].concat();
        if self.from.is_ipv4() {
            let total = (20 + tcp.len() as u16).to_be_bytes();
            let mut ip = vec![0x45, 0, total[0], total[1], 0, 1, 0x40, 0, self.ttl, 6, 0, 0];
            ip.extend([source, target].concat());
            let check = !fold(sum(&ip));
            ip[10..12].copy_from_slice(&check.to_be_bytes());
            frame.extend([8, 0]);
            frame.extend(ip);
        } else {
            let length = (tcp.len() as u16).to_be_bytes();
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, length[0], length[1], 6, self.ttl]);
            frame.extend([source, target].concat());
        }
        frame.extend(tcp);
        frame
    }
}

/// Client, where it connects to, server, and where connections to it come from.
pub(crate) fn addresses(v6: bool) -> [SocketAddr; 4] {
    let all = if v6 {
        ["[fd00:1::1]:4000", "[fd00:1::fe]:80", "[fd00:2::1]:8080", "[fd00:2::fe]:61000"]
    } else {
        ["10.0.1.1:4000", "10.0.1.254:80", "10.0.2.1:8080", "10.0.2.254:61000"]
    };
    all.map(|text| text.parse().expect("an address"))
}

/// The engine's program between these, for trials: the frames for user space are not taken.
pub(crate) fn program(change: impl FnOnce(&mut Own), listen: Option<IpAddr>, source: IpAddr) -> Program {
    let mut own = Own::new(1, 0).expect("maps");
    own.listen(listen, 80).expect("an entry");
    own.source(source, &(61_000..=61_015), Some(0)).expect("an entry");
    change(&mut own);
    let shape =
        MapShape { kind: MapKind::Xsk, name: "sockets", key_bytes: 4, value_bytes: 4, entries_max: 1 };
    own.xdp_program(&Map::create(shape).expect("a map")).expect("loaded")
}
