//! The engine's reader of packets against etherparse, which reads the same formats and shares no code with it.

use crate::wire::{ACK, FIN, PSH, Packet, RST, SYN};
use etherparse::{NetSlice, SlicedPacket, TcpSlice, TransportSlice};
use proptest::collection::vec;
use proptest::prelude::*;
use sidetrack_core::engine::Checksums;
use sidetrack_core::engine::packet::{Header, Ip, Malformed};
use std::net::{IpAddr, SocketAddr};

/// The TCP segment of a packet, and its ends.
fn sliced<'a>(packet: &SlicedPacket<'a>) -> Option<(SocketAddr, SocketAddr, TcpSlice<'a>)> {
    let (src, dst): (IpAddr, IpAddr) = match packet.net.as_ref()? {
        NetSlice::Ipv4(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        NetSlice::Ipv6(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
        NetSlice::Arp(_) => return None,
    };
    let TransportSlice::Tcp(tcp) = packet.transport.clone()? else { return None };
    let ends = [(src, tcp.source_port()), (dst, tcp.destination_port())];
    let [src, dst] = ends.map(|(address, port)| SocketAddr::new(address, port));
    Some((src, dst, tcp))
}

/// Returns true if etherparse computes the checksums that the packet has.
fn sums_hold(packet: &SlicedPacket<'_>, tcp: &TcpSlice<'_>) -> bool {
    let sum = match packet.net.as_ref() {
        Some(NetSlice::Ipv4(ip)) => {
            let header = ip.header();
            if header.to_header().calc_header_checksum() != header.header_checksum() {
                return false;
            }
            tcp.calc_checksum_ipv4(header.source(), header.destination())
        }
        Some(NetSlice::Ipv6(ip)) => tcp.calc_checksum_ipv6(ip.header().source(), ip.header().destination()),
        _ => return false,
    };
    sum.is_ok_and(|sum| sum == tcp.checksum())
}

fn read(bytes: &[u8], checksums: Checksums) -> Result<Header, Malformed> {
    Header::parse(bytes, &Ip::parse(bytes)?, checksums)
}

/// Holds both readers against each other.
fn compare(bytes: &[u8]) -> Result<(), TestCaseError> {
    // Extension headers, and a length of 0 (a jumbogram for etherparse), are read differently on purpose.
    let is_v6 = bytes[0] >> 4 == 6;
    if is_v6 && (bytes[6] != 6 || bytes[4..6] == [0, 0]) || !is_v6 && bytes[9] != 6 {
        return Ok(());
    }
    // etherparse computes the checksum of an IPv4 header as if its reserved flag (RFC 791 Sec. 3.1) were 0.
    if !is_v6 && bytes[6] & 0x80 != 0 {
        return Ok(());
    }
    let packet = SlicedPacket::from_ip(bytes);
    let theirs = packet.as_ref().ok().and_then(|packet| Some((packet, sliced(packet)?)));
    match (read(bytes, Checksums::Verified), theirs) {
        (Ok(ours), Some((packet, (src, dst, tcp)))) => {
            prop_assert_eq!((ours.tuple.remote_addr(), ours.tuple.local_addr()), (src, dst));
            prop_assert_eq!((ours.seq.0, ours.ack.0), (tcp.sequence_number(), tcp.acknowledgment_number()));
            prop_assert_eq!((ours.window, ours.flags), (tcp.window_size(), tcp.slice()[13] & 0x3f));
            prop_assert_eq!((ours.options(bytes), ours.payload(bytes)), (tcp.options(), tcp.payload()));
            prop_assert_eq!(read(bytes, Checksums::Verify).is_ok(), sums_hold(packet, &tcp));
        }
        (Err(Malformed::Flags | Malformed::Address), _) | (Err(_), None) => {}
        (ours, theirs) => prop_assert!(false, "{ours:?} and {theirs:?} of {bytes:02x?}"),
    }
    Ok(())
}

fn packet(is_v6: bool, ports: [u16; 2], flags: u8, numbers: [u32; 2], payload: &[u8]) -> Packet {
    let addresses = if is_v6 { ["2001:db8::1", "2001:db8::2"] } else { ["10.0.0.1", "10.0.0.2"] };
    let [src, dst] = addresses.map(|address| address.parse::<IpAddr>().unwrap());
    let (src, dst) = (SocketAddr::new(src, ports[0]), SocketAddr::new(dst, ports[1]));
    Packet::new(src, dst, flags, numbers[0], numbers[1]).payload(payload)
}

proptest! {
    #[test]
    fn a_packet_is_read_as_etherparse_reads_it(
        is_v6 in any::<bool>(),
        ports in any::<[u16; 2]>(),
        flags in prop::sample::select(vec![SYN, SYN | ACK, ACK, PSH | ACK, FIN | ACK, RST, RST | ACK, 0, SYN | FIN]),
        numbers in any::<[u32; 2]>(),
        (mss, scale, stamps) in (any::<Option<u16>>(), any::<Option<u8>>(), any::<Option<(u32, u32)>>()),
        payload in vec(any::<u8>(), 0..64),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        kept in any::<prop::sample::Index>(),
        is_cut in any::<bool>(),
    ) {
        let whole = Packet { mss, scale, stamps, ..packet(is_v6, ports, flags, numbers, &payload) };
        let mut bytes = whole.encode();
        compare(&bytes)?;
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        compare(&bytes)?;
        if is_cut {
            bytes.truncate(20 + kept.index(bytes.len() - 20));
            compare(&bytes)?;
        }
    }
}

#[test]
fn a_whole_packet_is_accepted_by_both() {
    for is_v6 in [false, true] {
        let bytes = packet(is_v6, [4000, 80], PSH | ACK, [1, 2], b"hello").encode();
        let sliced_packet = SlicedPacket::from_ip(&bytes).unwrap();
        let (_, _, tcp) = sliced(&sliced_packet).expect("a segment");
        assert!(read(&bytes, Checksums::Verify).is_ok() && sums_hold(&sliced_packet, &tcp));
        let mut wrong = bytes.clone();
        *wrong.last_mut().unwrap() ^= 1;
        assert_eq!(read(&wrong, Checksums::Verify), Err(Malformed::Checksum));
    }
}
