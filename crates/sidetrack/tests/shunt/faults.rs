//! What goes wrong around a shunted flow: reports that are lost, forged packets, frames with tags.

use crate::firewall::{Network, SHUNT, tool};
use crate::flows::{Pair, connect};
use sidetrack::shunt::PathKind;
use sidetrack_core::shunt::Cause;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_sys::conntrack::{Change, Conntrack};
use sidetrack_sys::nft::MarkBits;
use sidetrack_sys::raw::{PacketSocket, RoutedSocket, VNET_HEADER_BYTES};
use sidetrack_sys::sysctl;
use sidetrack_testkit::{LIMIT, Node, eventually, is_root};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::mpsc::channel;

/// Changes of a connection, each of which is a report: more than the buffer of a shunt that does not read holds.
const CHANGES: u32 = 80_000;

#[test]
fn a_flow_whose_reports_were_lost_is_found_by_a_list() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    let shunt = network.start(PathKind::Tc);
    let (hangs, hung) = channel();
    let (done, wait) = channel::<()>();
    let mut pair = std::thread::scope(|scope| {
        let network = &network;
        let lost = scope.spawn(move || {
            hung.recv_timeout(LIMIT).expect("it hangs");
            let first = connect(network, "10.0.0.2", SHUNT + 1);
            network.firewall.run(flood);
            // Nothing will ever be reported of this one again: it only stands there.
            let mut pair = connect(network, "10.0.0.2", SHUNT);
            pair.talk();
            done.send(()).expect("it hangs still");
            drop(first);
            pair
        });
        shunt.with(move |_| {
            hangs.send(()).expect("the test waits");
            wait.recv_timeout(LIMIT).expect("the test says so");
        });
        lost.join().expect("talked")
    });
    shunt.wait_for(pair.from, |flow| flow.state == "installed");
    Pair::transfer(&mut pair.client, &mut pair.server, 100_000);
    shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 90_000);
}

/// Changes a bit of the administrator's in every connection's mark, there and back.
fn flood() {
    let mut table = Conntrack::open().expect("conntrack");
    let entries = table.list(None).expect("a list");
    let entry = entries.first().expect("a connection");
    for number in 0..CHANGES {
        let mark = Some(MarkBits { value: number & 1, mask: 1 });
        assert!(
            table.update(&entry.original, entry.zone, Change { mark, ..Change::default() }).expect("changed")
        );
    }
}

/// A segment without data between two addresses of IPv4, with its checksum (RFC 9293 Sec. 3.1).
fn segment(from: SocketAddr, to: SocketAddr, flags: u8, sequence: u32) -> Vec<u8> {
    let octets = |address: SocketAddr| match address.ip() {
        std::net::IpAddr::V4(ip) => ip.octets(),
        std::net::IpAddr::V6(_) => panic!("IPv4"),
    };
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
    packet.extend(octets(from));
    packet.extend(octets(to));
    packet.extend(from.port().to_be_bytes());
    packet.extend(to.port().to_be_bytes());
    packet.extend(sequence.to_be_bytes());
    packet.extend([0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    // Addresses, protocol and length: the pseudo-header.
    let pseudo = sum(&packet[12..]) + 6 + 20;
    let folded = (pseudo & 0xffff) + (pseudo >> 16);
    let checksum = !u16::try_from((folded & 0xffff) + (folded >> 16)).expect("16 bits");
    packet[36..38].copy_from_slice(&checksum.to_be_bytes());
    let header = sum(&packet[..20]);
    let checksum = !u16::try_from((header & 0xffff) + (header >> 16)).expect("16 bits");
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum()
}

/// Sends it from the client's host.
fn forge(network: &Network, packet: Vec<u8>, to: SocketAddr) {
    network.client.run(move || {
        RoutedSocket::open(0).expect("a raw socket").send(&packet, to.ip()).expect("sent");
    });
}

fn forged(forwarding: Forwarding, path: PathKind) {
    const FIN: u8 = 1;
    const SYN: u8 = 2;
    const RST: u8 = 4;
    if !is_root() {
        return;
    }
    let network = Network::new(forwarding);
    network.prepare(path);
    let shunt = network.start(path);
    let mut pair = connect(&network, network.server_addresses[0], SHUNT);
    pair.shunted(&shunt);
    pair.talk();
    let before = shunt.wait_for(pair.from, |flow| flow.fast.packets_up > 0).fast;
    // A guess: 64 numbers all over the space, of which one fits with a chance of one in a million.
    for number in 0..64_u32 {
        let sequence = number.wrapping_mul(0x0400_0000).wrapping_add(0x0123_4567);
        for flags in [RST, FIN] {
            forge(&network, segment(pair.from, pair.to, flags, sequence), pair.to);
        }
    }
    // They were passed on, and the end host was not impressed.
    let flow = shunt.wait_for(pair.from, |flow| flow.fast.packets_up >= before.packets_up + 128);
    assert_eq!((flow.state.as_str(), flow.installs, flow.cause), ("installed", 1, None));
    Pair::transfer(&mut pair.client, &mut pair.server, 100_000);
    // A SYN is never the fast path's: policy is asked again, and says the same.
    forge(&network, segment(pair.from, pair.to, SYN, 0x0123_4567), pair.to);
    let flow = shunt.wait_for(pair.from, |flow| flow.cause.is_some());
    assert_eq!(flow.cause, Some(Cause::Syn));
    pair.shunted(&shunt);
    Pair::transfer(&mut pair.client, &mut pair.server, 100_000);
    Pair::transfer(&mut pair.server, &mut pair.client, 100_000);
}

#[test]
fn forged_ends_do_not_end_it_by_tc() {
    forged(Forwarding::Bridged, PathKind::Tc);
}

#[test]
fn forged_ends_do_not_end_it_by_xdp() {
    forged(Forwarding::Bridged, PathKind::Xdp);
}

#[test]
fn forged_ends_do_not_end_it_on_a_router() {
    forged(Forwarding::Routed, PathKind::Tc);
}

/// What `ip` says of an interface or a neighbour of a host, as a link address.
fn link_address(host: &Node, arguments: &'static str, key: &str) -> Vec<u8> {
    let text = host.run(move || tool("ip", arguments, ""));
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let text = value[0][key].as_str().expect("an address").to_owned();
    text.split(':').map(|byte| u8::from_str_radix(byte, 16).expect("hexadecimal")).collect()
}

fn received(host: &Node) -> u64 {
    let text = host.run(|| tool("ip", "-j -s link show eth0", ""));
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    value[0]["stats64"]["rx"]["packets"].as_u64().expect("a counter")
}

/// Frames with a VLAN tag and the addresses of a shunted flow pass as without a shunt, whether netfilter looks into them
/// or not.
fn tagged(path: PathKind, looked_into: bool) {
    const COUNT: u64 = 50;
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    network.prepare(path);
    network.firewall.run(move || {
        let value = if looked_into { "1" } else { "0" };
        sysctl::write("net/bridge/bridge-nf-filter-vlan-tagged", value).expect("br_netfilter");
    });
    let shunt = network.start(path);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    pair.talk();
    let before = shunt.wait_for(pair.from, |flow| flow.fast.packets_up > 0);
    let mut frame = vec![0; VNET_HEADER_BYTES];
    frame.extend(link_address(&network.client, "-j neigh show 10.0.0.2", "lladdr"));
    frame.extend(link_address(&network.client, "-j link show eth0", "address"));
    // 802.1Q, network 5, then an acknowledgement of the flow's.
    frame.extend([0x81, 0, 0, 5, 8, 0]);
    frame.extend(segment(pair.from, pair.to, 0x10, 0x0123_4567));
    let arrived = received(&network.server);
    network.client.run(move || {
        let index = sidetrack_sys::link::interface("eth0").expect("eth0").index;
        let socket = PacketSocket::sender(index).expect("a packet socket");
        for _ in 0..COUNT {
            assert_eq!(socket.send(&[IoSlice::new(&frame)]).expect("sent"), 1);
        }
    });
    eventually("they pass", || received(&network.server) >= arrived + COUNT);
    shunt.with(|engine| engine.count().expect("counted"));
    let after = shunt.wait_for(pair.from, |_| true);
    assert!(
        after.fast.packets_up < before.fast.packets_up + COUNT,
        "tagged frames took the fast path: {after:?}"
    );
    assert_eq!((after.state.as_str(), after.installs), ("installed", 1));
    Pair::transfer(&mut pair.client, &mut pair.server, 300_000);
    Pair::transfer(&mut pair.server, &mut pair.client, 300_000);
    pair.close();
}

#[test]
fn tagged_frames_take_the_slow_path_beside_tc() {
    tagged(PathKind::Tc, false);
    tagged(PathKind::Tc, true);
}

#[test]
fn tagged_frames_take_the_slow_path_beside_xdp() {
    tagged(PathKind::Xdp, false);
    tagged(PathKind::Xdp, true);
}
