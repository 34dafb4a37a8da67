//! The fast path's programs, tried on single packets in the kernel (`BPF_PROG_TEST_RUN`) and on interfaces.

use sidetrack_sys::bpf::{
    FastPath, FlowEntry, FlowKey, FlowState, Forwarding, Hook, ProgramKind, monotonic_ns,
};
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::route;
use sidetrack_testkit::awaited;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

const TC_SLOW: u32 = u32::MAX;
const TC_DROP: u32 = 2;
const TC_SEND: u32 = 7;
const XDP_DROP: u32 = 1;
const XDP_SLOW: u32 = 2;
const XDP_SEND: u32 = 4;

/// No flow of these tests stands still for so long, whatever else the machine does.
const LONG: Duration = Duration::from_secs(3600);

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// A TCP or UDP packet in a frame.
#[derive(Clone)]
struct Packet {
    source: SocketAddr,
    destination: SocketAddr,
    protocol: u8,
    flags: u8,
    sequence: u32,
    acknowledged: u32,
    data: usize,
    link: [u8; 12],
}

impl Packet {
    fn segment(source: &str, destination: &str) -> Self {
        Self {
            source: source.parse().expect(source),
            destination: destination.parse().expect(destination),
            protocol: 6,
            flags: ACK,
            sequence: 1000,
            acknowledged: 5000,
            data: 100,
            link: [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1],
        }
    }

    fn with(mut self, flags: u8, sequence: u32, data: usize) -> Self {
        (self.flags, self.sequence, self.data) = (flags, sequence, data);
        self
    }

    /// The opposite direction: what it sends now, what it has got.
    fn answer(&self, sequence: u32, acknowledged: u32) -> Self {
        let (source, destination) = (self.destination, self.source);
        let mut link = self.link;
        link.rotate_left(6);
        Self { source, destination, sequence, acknowledged, data: 0, link, flags: ACK, ..*self }
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = [self.source.port().to_be_bytes(), self.destination.port().to_be_bytes()].concat();
        if self.protocol == 6 {
            bytes.extend(self.sequence.to_be_bytes());
            bytes.extend(self.acknowledged.to_be_bytes());
            bytes.extend([5 << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        } else {
            bytes.extend([0, 8, 0, 0]);
        }
        bytes.resize(bytes.len() + self.data, 0x55);
        bytes
    }

    fn frame(&self) -> Vec<u8> {
        let transport = self.transport();
        let mut frame = self.link.to_vec();
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                frame.extend([8, 0, 0x45, 0]);
                frame.extend(u16::try_from(20 + transport.len()).expect("short").to_be_bytes());
                frame.extend([0, 1, 0x40, 0, 64, self.protocol, 0, 0]);
                frame.extend(source.octets());
                frame.extend(destination.octets());
                let sum = checksum(&frame[14..34]);
                frame[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                frame.extend(u16::try_from(transport.len()).expect("short").to_be_bytes());
                frame.extend([self.protocol, 64]);
                frame.extend(source.octets());
                frame.extend(destination.octets());
            }
            _ => panic!("one IP version"),
        }
        frame.extend(transport);
        frame
    }
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}

/// A fast path with the two directions of one flow, between two interfaces of a namespace.
struct Bench {
    path: FastPath,
    kind: ProgramKind,
    ports: [u32; 2],
    to: FlowKey,
    back: FlowKey,
}

const GENERATION: u32 = 3;

/// An entry that drops.
const fn entry() -> FlowEntry {
    FlowEntry {
        egress: None,
        mtu: 1500,
        idle: LONG,
        generation: GENERATION,
        redirect_peer: false,
        installed_as: 1,
    }
}

impl Bench {
    /// In a namespace with the two interfaces.
    fn new(kind: ProgramKind, packet: &Packet) -> Self {
        Self::forwarding(kind, Forwarding::Bridged, packet)
    }

    fn forwarding(kind: ProgramKind, forwarding: Forwarding, packet: &Packet) -> Self {
        let path = FastPath::new(kind, forwarding, 64).expect("a fast path");
        let ports = ["left", "right"].map(|name| route::interface_index(name).expect(name));
        let to = FlowKey {
            ingress: ports[0],
            source: packet.source,
            destination: packet.destination,
            protocol: packet.protocol,
        };
        let bench = Self { path, kind, ports, to, back: to.reverse(ports[1]) };
        bench.path.set(GENERATION, u64::MAX).expect("settings");
        bench.install(LONG);
        bench
    }

    fn install(&self, idle: Duration) {
        for (key, egress) in [(self.to, self.ports[1]), (self.back, self.ports[0])] {
            let _ = self.path.take(&key).expect("take");
            let entry = FlowEntry { egress: Some(egress), idle, installed_as: 77, ..entry() };
            self.path.install(&key, entry).expect("install");
        }
    }

    fn verdict_on(&self, frame: &[u8], ingress: u32) -> u32 {
        self.path.program().try_on(frame, ingress).expect("a trial").verdict
    }

    fn to(&self, packet: &Packet) -> u32 {
        self.verdict_on(&packet.frame(), self.ports[0])
    }

    fn back(&self, packet: &Packet) -> u32 {
        self.verdict_on(&packet.frame(), self.ports[1])
    }

    fn state(&self, key: &FlowKey) -> FlowState {
        self.path.state(key).expect("look-up").expect("an entry")
    }

    const fn slow(&self) -> u32 {
        if matches!(self.kind, ProgramKind::Tc) { TC_SLOW } else { XDP_SLOW }
    }
}

const V4: (&str, &str) = ("192.0.2.1:4000", "198.51.100.2:80");
const V6: (&str, &str) = ("[2001:db8::1]:4000", "[2001:db8::2]:80");

/// Runs `test` in a namespace with two interfaces, `left` and `right`.
fn between_ports(test: impl FnOnce() + Send + 'static) {
    sidetrack_testkit::in_namespace(|| {
        let made = Command::new("ip")
            .args(["link", "add", "name", "left", "type", "veth", "peer", "name", "right"])
            .status();
        assert!(made.expect("the ip tool").success());
        ["left", "right"].into_iter().for_each(|name| route::link_up(name).expect(name));
        test();
    });
}

/// Runs `test` for a TCP flow over each of these addresses.
fn for_each(addresses: &'static [(&str, &str)], test: impl Fn(Bench, Packet) + Send + 'static) {
    between_ports(move || {
        for (source, destination) in addresses {
            let packet = Packet::segment(source, destination);
            test(Bench::new(ProgramKind::Tc, &packet), packet);
        }
    });
}

#[test]
fn every_program_passes_the_verifier() {
    if !sidetrack_testkit::is_root() {
        return;
    }
    // No more rights than the shunt's process has; rights are those of the thread.
    let rights = CapabilitySet::NET_ADMIN | CapabilitySet::BPF;
    sidetrack_sys::caps::keep_only(rights).expect("fewer rights");
    for kind in [ProgramKind::Tc, ProgramKind::Xdp] {
        for forwarding in [Forwarding::Bridged, Forwarding::Routed] {
            FastPath::new(kind, forwarding, 16).unwrap_or_else(|e| panic!("{kind:?} {forwarding:?}: {e}"));
        }
    }
}

#[test]
fn packets_of_installed_flows_are_sent_and_counted() {
    for_each(&[V4, V6], |bench, packet| {
        let frame = packet.frame();
        let trial = bench.path.program().try_on(&frame, bench.ports[0]).unwrap();
        assert_eq!((trial.verdict, &trial.packet), (TC_SEND, &frame), "sent as it came");
        assert_eq!(bench.to(&packet.clone().with(ACK, 1100, 0)), TC_SEND);
        assert_eq!(bench.back(&packet.answer(5000, 1100)), TC_SEND);
        let state = bench.state(&bench.to);
        let header = u64::try_from(frame.len() - 14 - 100).unwrap();
        assert_eq!((state.packets, state.bytes), (2, 2 * header + 100));
        assert_eq!(state.installed_as, 77);
        assert_eq!(bench.state(&bench.back).packets, 1);
        assert!(!state.ended.any());
    });
}

#[test]
fn only_the_very_flow_is_sent() {
    for_each(&[V4, V6], |bench, packet| {
        let mut other = packet.clone();
        other.source.set_port(4001);
        assert_eq!(bench.to(&other), TC_SLOW, "another port");
        assert_eq!(bench.back(&packet), TC_SLOW, "came in elsewhere");
        let mut udp = packet.clone();
        udp.protocol = 17;
        assert_eq!(bench.to(&udp), TC_SLOW, "another protocol");
        assert_eq!(bench.to(&packet), TC_SEND);
        let mut moved = packet.clone();
        moved.link[11] = 9;
        assert_eq!(bench.to(&moved), TC_SLOW, "another source on the link than the first packet's");
        assert_eq!(bench.to(&packet), TC_SEND);
    });
}

#[test]
fn fragments_options_tags_and_broken_headers_take_the_slow_path() {
    for_each(&[V4], |bench, packet| {
        let change = |at: usize, value: u8| {
            let mut frame = packet.frame();
            frame[at] = value;
            bench.verdict_on(&frame, bench.ports[0])
        };
        assert_eq!(change(20, 0x20), TC_SLOW, "more fragments");
        assert_eq!(change(21, 1), TC_SLOW, "a later fragment");
        assert_eq!(change(20, 0x40), TC_SEND, "don't fragment");
        assert_eq!(change(14, 0x46), TC_SLOW, "IP options");
        assert_eq!(change(14, 0x65), TC_SLOW, "another version");
        assert_eq!(bench.verdict_on(&tagged(&packet, VLAN_5), bench.ports[0]), TC_SLOW, "a VLAN tag");
        for end in 34..54 {
            assert_eq!(bench.verdict_on(&packet.frame()[..end], bench.ports[0]), TC_SLOW, "cut at {end}");
        }
    });
}

/// The frame with tags (of 802.1Q unless they say otherwise) in front of its type.
fn tagged(packet: &Packet, tags: &[u8]) -> Vec<u8> {
    let mut frame = packet.frame();
    frame.splice(12..12, tags.iter().copied());
    frame
}

const VLAN_5: &[u8] = &[0x81, 0, 0, 5];
/// The same, with a priority.
const VLAN_5_FIRST: &[u8] = &[0x81, 0, 0xe0, 5];
const VLAN_6: &[u8] = &[0x81, 0, 0, 6];

#[test]
fn frames_of_one_vlan_both_ways_are_sent_with_their_tags() {
    between_ports(|| {
        for (kind, sent) in [(ProgramKind::Tc, TC_SEND), (ProgramKind::Xdp, XDP_SEND)] {
            for (source, destination) in [V4, V6] {
                let packet = Packet::segment(source, destination);
                let mut bench = Bench::new(kind, &packet);
                if kind == ProgramKind::Xdp {
                    // So that the ports are in its map of devices.
                    // The process of another test may hold the programs of the round before for a moment.
                    for port in bench.ports {
                        awaited("the port takes a program", || {
                            bench.path.attach(port, Hook::XdpGeneric).ok()
                        });
                    }
                }
                let to = |tags: &[u8]| bench.verdict_on(&tagged(&packet, tags), bench.ports[0]);
                assert_eq!(to(VLAN_5), bench.slow(), "the other direction's tag is unknown");
                let answer = tagged(&packet.answer(5000, 1100), VLAN_5);
                assert_eq!(bench.verdict_on(&answer, bench.ports[1]), sent);
                let frame = tagged(&packet, VLAN_5_FIRST);
                let trial = bench.path.program().try_on(&frame, bench.ports[0]).unwrap();
                assert_eq!((trial.verdict, &trial.packet), (sent, &frame), "sent as it came");
                assert_eq!(bench.state(&bench.to).bytes, u64::try_from(packet.frame().len() - 14).unwrap());
                assert_eq!(to(VLAN_6), bench.slow(), "another VLAN");
                assert_eq!(to(&[]), bench.slow(), "none");
                assert_eq!(to(&[0x88, 0xa8, 0, 5]), bench.slow(), "802.1ad");
                assert_eq!(to(&[VLAN_5, VLAN_6].concat()), bench.slow(), "two tags");
                assert_eq!(to(VLAN_5), sent);
            }
        }
    });
}

#[test]
fn a_flow_whose_tags_a_bridge_changes_takes_the_slow_path() {
    for_each(&[V4, V6], |bench, packet| {
        let answer = packet.answer(5000, 1100);
        assert_eq!(bench.to(&packet), TC_SEND, "untagged, and nothing says otherwise");
        assert_eq!(bench.verdict_on(&tagged(&answer, VLAN_5), bench.ports[1]), TC_SLOW);
        for _ in 0..2 {
            assert_eq!(bench.to(&packet), TC_SLOW, "the tag has to be added");
            assert_eq!(bench.verdict_on(&tagged(&answer, VLAN_5), bench.ports[1]), TC_SLOW, "and removed");
        }
    });
}

#[test]
fn tags_of_blocked_flows_and_on_routers_take_the_slow_path() {
    for_each(&[V4, V6], |bench, packet| {
        bench.path.take(&bench.to).unwrap();
        bench.path.install(&bench.to, entry()).unwrap();
        assert_eq!(bench.verdict_on(&tagged(&packet, VLAN_5), bench.ports[0]), TC_SLOW);
        assert_eq!(bench.to(&packet), TC_DROP);
        let router = Bench::forwarding(ProgramKind::Tc, Forwarding::Routed, &packet);
        for _ in 0..2 {
            let answer = tagged(&packet.answer(5000, 1100), VLAN_5);
            assert_eq!(router.verdict_on(&tagged(&packet, VLAN_5), router.ports[0]), TC_SLOW);
            assert_eq!(router.verdict_on(&answer, router.ports[1]), TC_SLOW);
        }
    });
}

#[test]
fn extension_headers_take_the_slow_path() {
    for_each(&[V6], |bench, packet| {
        let mut frame = packet.frame();
        frame[20] = 44;
        assert_eq!(bench.verdict_on(&frame, bench.ports[0]), TC_SLOW, "a fragment header");
    });
}

#[test]
fn an_end_that_fits_goes_to_conntrack_and_stops_the_direction() {
    for flag in [FIN, RST] {
        for_each(&[V4, V6], move |bench, packet| {
            assert_eq!(bench.to(&packet), TC_SEND);
            assert_eq!(bench.back(&packet.answer(5000, 1100)), TC_SEND);
            // The next byte of the stream is 1100.
            assert_eq!(bench.to(&packet.clone().with(flag | ACK, 1100, 0)), TC_SLOW);
            let ended = bench.state(&bench.to).ended;
            assert_eq!((ended.fin, ended.rst), (flag == FIN, flag == RST));
            assert_eq!(bench.to(&packet), TC_SLOW, "stopped");
            assert_eq!(bench.back(&packet.answer(5000, 1100)), TC_SEND, "the other side has not ended");
        });
    }
}

#[test]
fn an_end_out_of_the_window_is_left_to_the_end_host() {
    for flag in [FIN, RST] {
        for_each(&[V4, V6], move |bench, packet| {
            assert_eq!(bench.to(&packet), TC_SEND);
            assert_eq!(bench.back(&packet.answer(5000, 1100)), TC_SEND);
            for sequence in [0, 999, 1101, 70_000, 0x8000_0000] {
                let forged = packet.clone().with(flag | ACK, sequence, 0);
                assert_eq!(bench.to(&forged), TC_SEND, "passed on past conntrack: {sequence}");
            }
            assert!(!bench.state(&bench.to).ended.any(), "the entry stays");
            assert_eq!(bench.to(&packet), TC_SEND);
        });
    }
}

#[test]
fn a_fin_sent_again_with_data_in_flight_fits() {
    for_each(&[V4], |bench, packet| {
        assert_eq!(bench.to(&packet.clone().with(ACK, 1000, 1000)), TC_SEND);
        assert_eq!(bench.back(&packet.answer(5000, 1500)), TC_SEND, "500 are not acknowledged");
        assert_eq!(bench.to(&packet.clone().with(FIN | ACK, 1500, 500)), TC_SLOW);
    });
}

#[test]
fn a_syn_is_conntracks_business_and_stops_the_direction() {
    for_each(&[V4, V6], |bench, packet| {
        assert_eq!(bench.to(&packet), TC_SEND);
        assert_eq!(bench.to(&packet.clone().with(SYN, 9, 0)), TC_SLOW);
        assert_eq!(bench.to(&packet), TC_SLOW);
        assert!(bench.state(&bench.to).ended.syn);
    });
}

#[test]
fn far_out_of_any_window_is_the_slow_paths() {
    for_each(&[V4], |bench, packet| {
        assert_eq!(bench.to(&packet), TC_SEND);
        assert_eq!(bench.to(&packet.clone().with(ACK, 1000 + (1 << 30) + 200, 0)), TC_SLOW);
        assert_eq!(bench.to(&packet.clone().with(ACK, 1000u32.wrapping_sub(1 << 30), 0)), TC_SLOW);
        assert_eq!(bench.to(&packet.clone().with(ACK, 1100, 50)), TC_SEND, "the entry stays");
    });
}

#[test]
fn larger_than_the_egress_takes_is_the_slow_paths() {
    for_each(&[V4], |bench, packet| {
        assert_eq!(bench.to(&packet.clone().with(ACK, 1000, 1460)), TC_SEND);
        assert_eq!(bench.to(&packet.clone().with(ACK, 1000, 1461)), TC_SLOW);
    });
}

#[test]
fn what_stood_still_is_over() {
    for_each(&[V4], |bench, packet| {
        bench.install(Duration::ZERO);
        // The program's clock is as exact as the kernel's tick.
        let begun = Instant::now();
        while bench.to(&packet) == TC_SEND {
            assert!(begun.elapsed() < sidetrack_testkit::LIMIT, "it never stands still");
        }
        assert_eq!(bench.to(&packet), TC_SLOW);
        assert!(bench.state(&bench.to).ended.idle);
    });
}

#[test]
fn older_rules_and_a_dead_user_space_stop_everything() {
    for_each(&[V4], |bench, packet| {
        bench.path.set(GENERATION + 1, u64::MAX).unwrap();
        assert_eq!(bench.to(&packet), TC_SLOW);
        bench.path.set(GENERATION, monotonic_ns() - 1_000_000_000).unwrap();
        assert_eq!(bench.to(&packet), TC_SLOW);
        bench.path.set(GENERATION, monotonic_ns() + 60_000_000_000).unwrap();
        assert_eq!(bench.to(&packet), TC_SEND);
        assert!(!bench.state(&bench.to).ended.any());
    });
}

#[test]
fn a_blocked_flow_is_dropped_and_counted() {
    for_each(&[V4, V6], |bench, packet| {
        let _ = bench.path.take(&bench.to).unwrap();
        bench.path.install(&bench.to, entry()).unwrap();
        for flags in [ACK, SYN, FIN, RST] {
            assert_eq!(bench.to(&packet.clone().with(flags, 1000, 0)), TC_DROP);
        }
        assert_eq!(bench.state(&bench.to).packets, 4);
    });
}

#[test]
fn udp_is_sent_whatever_its_bytes() {
    for_each(&[V4, V6], |_, mut packet| {
        packet.protocol = 17;
        let bench = Bench::new(ProgramKind::Tc, &packet);
        assert_eq!(bench.to(&packet), TC_SEND);
        packet.data = 0;
        assert_eq!(bench.to(&packet), TC_SEND);
    });
}

#[test]
fn xdp_decides_as_tc_does() {
    between_ports(|| {
        let packet = Packet::segment(V4.0, V4.1);
        let mut bench = Bench::new(ProgramKind::Xdp, &packet);
        assert_eq!(bench.to(&packet), XDP_SLOW, "no such device in the map: the slow path");
        bench.path.attach(bench.ports[1], Hook::XdpGeneric).unwrap();
        assert_eq!(bench.to(&packet), XDP_SEND);
        assert_eq!(bench.to(&packet.clone().with(SYN, 1, 0)), bench.slow());
        let _ = bench.path.take(&bench.to).unwrap();
        bench.path.install(&bench.to, entry()).unwrap();
        assert_eq!(bench.to(&packet), XDP_DROP);
    });
}

/// Runs `ip` in this thread's namespace.
fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.expect("the ip tool").success(), "ip {arguments}");
}

/// Between two networks: what leaves by `right` goes to 198.51.100.2 at the link address 02:00:00:00:00:99.
fn routed(test: impl Fn(Bench, Packet) + Send + 'static) {
    between_ports(move || {
        ip("addr add 192.0.2.254/24 dev left");
        ip("addr add 198.51.100.254/24 dev right");
        ip("neigh replace 198.51.100.2 lladdr 02:00:00:00:00:99 dev right");
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("forwarding");
        let packet = Packet::segment(V4.0, V4.1);
        test(Bench::forwarding(ProgramKind::Tc, Forwarding::Routed, &packet), packet);
    });
}

/// Where a routed packet goes on the link, if it takes the fast path.
fn next_hop(bench: &Bench, packet: &Packet) -> Option<[u8; 6]> {
    let trial = bench.path.program().try_on(&packet.frame(), bench.ports[0]).expect("a trial");
    assert!(matches!(trial.verdict, TC_SEND | TC_SLOW));
    let hop = trial.packet.first_chunk().copied();
    hop.filter(|_| trial.verdict == TC_SEND)
}

/// Tries a packet again and again until it goes there.
fn wait_for_next_hop(bench: &Bench, packet: &Packet, wanted: Option<[u8; 6]>) {
    let begun = Instant::now();
    while next_hop(bench, packet) != wanted {
        assert!(begun.elapsed() < sidetrack_testkit::LIMIT, "it never takes {wanted:?}");
    }
}

#[test]
fn a_routed_flow_follows_its_next_hop_and_its_route() {
    routed(|bench, packet| {
        let at = |last| Some([2, 0, 0, 0, 0, last]);
        let trial = bench.path.program().try_on(&packet.frame(), bench.ports[0]).unwrap();
        assert_eq!((trial.verdict, trial.packet[22]), (TC_SEND, 63), "one hop less");
        assert_eq!(checksum(&trial.packet[14..34]), 0);
        for _ in 0..100 {
            assert_eq!(next_hop(&bench, &packet), at(0x99), "as found before");
        }
        ip("neigh replace 198.51.100.2 lladdr 02:00:00:00:00:77 dev right");
        wait_for_next_hop(&bench, &packet, at(0x77));
        ip("route add 198.51.100.2/32 dev left");
        wait_for_next_hop(&bench, &packet, None);
        ip("route del 198.51.100.2/32 dev left");
        wait_for_next_hop(&bench, &packet, at(0x77));
    });
}

#[test]
fn a_routed_packet_that_is_larger_than_those_before_is_asked_about() {
    routed(|bench, packet| {
        ip("route add 198.51.100.2/32 dev right mtu lock 700");
        wait_for_next_hop(&bench, &packet, Some([2, 0, 0, 0, 0, 0x99]));
        let large = packet.clone().with(ACK, 1100, 800);
        for _ in 0..100 {
            assert!(next_hop(&bench, &packet).is_some());
            assert_eq!(next_hop(&bench, &large), None, "the route takes 700 bytes, the interface 1500");
        }
        assert!(next_hop(&bench, &packet.clone().with(ACK, 1100, 600)).is_some());
    });
}

#[test]
fn the_table_is_bounded_lists_its_entries_and_gives_them_back() {
    for_each(&[V4], |bench, _| {
        let key = |port| FlowKey { source: SocketAddr::new(bench.to.source.ip(), port), ..bench.to };
        let entry = FlowEntry { egress: Some(1), generation: 1, installed_as: 5, ..entry() };
        let installed = (1..200).take_while(|port| bench.path.install(&key(*port), entry).is_ok()).count();
        assert!((62..200).contains(&installed), "64 entries fit, two were there: {installed}");
        let mut seen = Vec::new();
        bench.path.for_each(|key, state| seen.push((key, state.installed_as))).unwrap();
        assert_eq!(seen.len(), installed + 2);
        assert!(seen.contains(&(key(1), 5)) && seen.contains(&(bench.back, 77)));
        assert!(bench.path.install(&key(1), entry).is_err(), "it is there already");
        for (key, _) in seen {
            assert!(bench.path.take(&key).unwrap().is_some());
            assert!(bench.path.take(&key).unwrap().is_none());
        }
    });
}
