//! The packet engine's sockets and programs: its packets reach only the engine, and all others go to the kernel.

use sidetrack_sys::bpf::{Hook, Own, XdpOn};
use sidetrack_sys::link;
use sidetrack_sys::raw::{FRAME_ROOM, Frames, PacketSocket, RoutedSocket};
use sidetrack_sys::xsk::{Copying, Descriptor, FrameSize, Umem, XskSocket};
use sidetrack_testkit::{LIMIT, Node, eventually, is_root, readable};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

/// Time without an answer that shows that none comes: long enough for an answer on this machine to arrive.
const SILENCE: Duration = Duration::from_millis(300);

/// host (10.0.0.1, fd00::1) with the engine's interface `engine0`, and its neighbour (10.0.0.2, fd00::2).
fn pair() -> (Node, Node) {
    let (host, neighbour) = (Node::new(), Node::new());
    host.ip(&format!("link add engine0 type veth peer name eth0 netns {}", neighbour.thread_id()));
    for (node, name, number) in [(&host, "engine0", 1), (&neighbour, "eth0", 2)] {
        node.ip(&format!("addr add 10.0.0.{number}/24 dev {name}"));
        node.ip(&format!("addr add fd00::{number}/64 dev {name} nodad"));
        node.ip(&format!("link set {name} up"));
    }
    (host, neighbour)
}

fn own() -> Own {
    let own = Own::new(2, 100).expect("maps");
    own.listen(Some(IpAddr::from([10, 0, 0, 1])), 80).expect("an entry");
    own.listen(None, 81).expect("an entry");
    own.source(IpAddr::from([10, 0, 0, 1]), &(61_000..=61_199), None).expect("an entry");
    own
}

/// What a neighbour meets at a port.
fn knock(neighbour: &Node, to: &str) -> ErrorKind {
    let to: SocketAddr = to.parse().expect("an address");
    neighbour.run(move || TcpStream::connect_timeout(&to, SILENCE).expect_err("nobody listens").kind())
}

/// The destination port of a frame.
fn port(frame: &[u8]) -> u16 {
    let at = if frame[12..14] == [8, 0] { 14 + 20 } else { 14 + 40 };
    u16::from_be_bytes([frame[at + 2], frame[at + 3]])
}

#[test]
fn a_packet_socket_gets_the_engines_packets_and_the_kernel_the_others() {
    if !is_root() {
        return;
    }
    let (host, neighbour) = pair();
    let (socket, kept) = host.run(|| {
        let (own, index) = (own(), link::interface("engine0").expect("there").index);
        let socket = PacketSocket::open(index, &own.socket_filter().expect("loaded")).expect("a socket");
        (socket, own.keep_from_kernel(index).expect("attached"))
    });
    assert_eq!(knock(&neighbour, "10.0.0.1:79"), ErrorKind::ConnectionRefused, "the kernel's own");
    for (to, wanted) in [("10.0.0.1:80", 80), ("10.0.0.1:61042", 61_042), ("[fd00::1]:81", 81)] {
        assert_eq!(knock(&neighbour, to), ErrorKind::TimedOut, "{to}: the kernel answers nothing");
        assert!(readable(&socket, LIMIT));
        let mut frames = Frames::default();
        assert!(socket.receive(&mut frames).expect("frames") > 0);
        for number in 0..frames.len() {
            assert!(frames.with_header(number).len() < FRAME_ROOM);
            assert_eq!(port(frames.frame(number).1), wanted, "only what is the engine's");
        }
    }
    drop(kept);
    eventually("the kernel answers again", || {
        knock(&neighbour, "10.0.0.1:80") == ErrorKind::ConnectionRefused
    });
}

#[test]
fn packets_of_a_worker_come_to_its_socket() {
    if !is_root() {
        return;
    }
    let (host, neighbour) = pair();
    let (sockets, _kept) = host.run(|| {
        let (own, index) = (own(), link::interface("engine0").expect("there").index);
        let (filter, fanout) = (own.socket_filter().expect("loaded"), own.fanout().expect("loaded"));
        let mut group = None;
        let sockets = [0, 1].map(|_| {
            let socket = PacketSocket::open(index, &filter).expect("a socket");
            group = Some(socket.join(group, &fanout).expect("joined"));
            socket
        });
        (sockets, own.keep_from_kernel(index).expect("attached"))
    });
    // The first hundred ports are the first worker's.
    for (to, worker) in
        [("10.0.0.1:61000", 0), ("10.0.0.1:61099", 0), ("10.0.0.1:61100", 1), ("10.0.0.1:61199", 1)]
    {
        assert_eq!(knock(&neighbour, to), ErrorKind::TimedOut);
        let counts = sockets.each_ref().map(|socket| socket.receive(&mut Frames::default()).expect("frames"));
        assert!(counts[worker] > 0 && counts[1 - worker] == 0, "{to}: {counts:?}");
    }
}

#[test]
fn a_routed_packet_finds_its_neighbour() {
    if !is_root() {
        return;
    }
    let (host, neighbour) = pair();
    let receiver = neighbour.run(|| std::net::UdpSocket::bind("10.0.0.2:7").expect("bound"));
    host.run(|| {
        // An IP packet with a UDP datagram without a checksum, which is allowed.
        let mut packet = vec![0x45, 0, 0, 32, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        packet.extend([0, 9, 0, 7, 0, 12, 0, 0]);
        packet.extend(b"word");
        RoutedSocket::open(7).expect("a socket").send(&packet, IpAddr::from([10, 0, 0, 2])).expect("sent");
    });
    assert!(readable(&receiver, LIMIT));
    let mut buffer = [0; 8];
    let (length, from) = receiver.recv_from(&mut buffer).expect("a datagram");
    assert_eq!((&buffer[..length], from), (&b"word"[..], "10.0.0.1:9".parse().expect("an address")));
}

#[test]
fn frames_come_and_go_by_af_xdp() {
    if !is_root() {
        return;
    }
    for hook in [Hook::XdpNative, Hook::XdpGeneric] {
        let (host, neighbour) = pair();
        let (mut socket, _program) = host.run(move || {
            let (own, index) = (own(), link::interface("engine0").expect("there").index);
            let program = own.take_by_xdp(index, hook, 1).expect("attached");
            let umem = Umem::new(64, FrameSize::Page).expect("memory");
            let mut socket = XskSocket::open(&umem, index, 0, Copying::Copy, None).expect("a socket");
            let frames: Vec<_> = (0..32).map(|frame| frame * 4096).collect();
            assert_eq!(socket.give(&frames), 32);
            program.serve(0, socket.as_fd()).expect("served");
            (socket, program)
        });
        assert!(!socket.zero_copy().expect("known"), "it was asked to copy");
        assert_eq!(
            knock(&neighbour, "10.0.0.1:79"),
            ErrorKind::ConnectionRefused,
            "{hook:?}: the kernel's own"
        );
        assert_eq!(knock(&neighbour, "10.0.0.1:80"), ErrorKind::TimedOut, "{hook:?}");
        assert!(readable(&socket, LIMIT));
        let mut taken = [Descriptor::default(); 8];
        let count = socket.receive(&mut taken);
        assert!(count > 0);
        let frame = socket.frame(taken[0]);
        assert_eq!(port(frame), 80);
        // Sent back to where it came from: the neighbour's kernel resets a SYN to a closed port of its own.
        let (to, from): ([u8; 6], [u8; 6]) =
            (frame[..6].try_into().unwrap(), frame[6..12].try_into().unwrap());
        frame[..6].copy_from_slice(&from);
        frame[6..12].copy_from_slice(&to);
        assert_eq!(socket.send(&taken[..1]), 1);
        let socket = std::cell::RefCell::new(socket);
        eventually("it is sent", || {
            let mut socket = socket.borrow_mut();
            socket.wake().expect("up");
            socket.finished(&mut [0; 8]) == 1
        });
    }
}

/// An AF_XDP socket on this interface for packets to port 80 of 10.0.0.1, with frames to fill.
fn afxdp(interface: &str, fill: usize) -> (XskSocket, XdpOn) {
    let (own, index) = (own(), link::interface(interface).expect("there").index);
    let program = own.take_by_xdp(index, Hook::XdpNative, 1).expect("attached");
    let umem = Umem::new(2 * BURST, FrameSize::Half).expect("memory");
    let mut socket = XskSocket::open(&umem, index, 0, Copying::Copy, None).expect("a socket");
    let frames: Vec<_> = (0..fill as u64).map(|frame| frame * 2048).collect();
    assert_eq!((socket.give(&frames), socket.to_fill()), (fill, fill));
    program.serve(0, socket.as_fd()).expect("served");
    (socket, program)
}

/// More than one system call sends.
const BURST: usize = 1000;

/// A TCP segment to port 80 of 10.0.0.1, in Ethernet; its checksums are not checked.
fn to_the_engine(to: [u8; 6]) -> Vec<u8> {
    let mut frame = to.to_vec();
    frame.extend([2, 0, 0, 0, 0, 9, 8, 0]);
    frame.extend([0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
    frame.extend([0x10, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0]);
    frame.resize(60, 0);
    frame
}

#[test]
fn a_burst_goes_out_at_once_and_what_there_is_no_room_for_is_counted() {
    if !is_root() {
        return;
    }
    let (host, neighbour) = pair();
    let to = host.run(|| link::interface("engine0").expect("there").address.expect("Ethernet"));
    let (mut sender, _kept) = neighbour.run(|| afxdp("eth0", 0));
    let mut burst = |count: usize| {
        let frame = to_the_engine(to);
        let descriptor = |n: usize| Descriptor { address: n as u64 * 2048, length: 60, options: 0 };
        let all: Vec<_> = (0..count).map(descriptor).collect();
        all.iter().for_each(|at| sender.frame(*at).copy_from_slice(&frame));
        assert_eq!(sender.send(&all), count);
        sender.wake().expect("up");
        let mut addresses = vec![0; count];
        eventually("all are sent", || {
            let done = sender.finished(&mut addresses);
            addresses.truncate(addresses.len() - done);
            addresses.is_empty()
        });
    };
    let (mut receiver, _program) = host.run(|| afxdp("engine0", BURST));
    burst(BURST);
    let (mut taken, mut received) = (vec![Descriptor::default(); BURST], 0);
    eventually("every frame comes", || {
        received += receiver.receive(&mut taken);
        received == BURST
    });
    assert_eq!((receiver.to_fill(), receiver.lost().expect("counted")), (0, 0));
    // Nothing is left to fill now.
    burst(7);
    eventually("they are counted", || receiver.lost().expect("counted") == 7);
    assert_eq!(receiver.receive(&mut taken), 0);
}
