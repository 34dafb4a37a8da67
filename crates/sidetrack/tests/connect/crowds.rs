//! More SYNs than can be held, or read; SYNs of both sides; and clients that do not wait in `connect()`.

use crate::faults::{Gate, OPEN, TO, answer, begin, gated, metric, tables, to};
use crate::node::Up;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use sidetrack_sys::raw::RoutedSocket;
use sidetrack_testkit::{Line, eventually, is_root};
use socket2::{Domain, SockAddr, Socket, Type};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;

/// The error of a socket's connect, once there is one.
fn error_of(socket: &Socket) -> Option<i32> {
    socket.take_error().expect("an option").and_then(|error| error.raw_os_error())
}

fn is_decided(socket: &Socket) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)];
    poll(&mut fds, Some(&Timespec::default())).expect("poll") > 0
}

#[test]
fn a_client_that_does_not_block_learns_it_when_the_far_side_has_answered() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let up = gated(&line, OPEN);
    let clients = [begin(&line, 20_011), begin(&line, 20_012)];
    let mut requests = [gate.request(), gate.request()];
    assert!(!clients.iter().any(is_decided), "no answer before the far side's");
    answer(&mut requests[0], 0);
    answer(&mut requests[1], 5);
    eventually("both have their answers", || clients.iter().all(is_decided));
    let mut errors = clients.each_ref().map(error_of);
    errors.sort_unstable();
    assert_eq!(errors, [None, Some(libc::ECONNREFUSED)]);
    drop((clients, requests));
    assert!(up.stop().0.success());
}

#[test]
fn a_client_with_patience_of_its_own_keeps_to_it() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let up = gated(&line, OPEN);
    let late = line.router.run(|| TcpStream::connect_timeout(&to(), std::time::Duration::from_millis(200)));
    assert_eq!(late.expect_err("late").kind(), std::io::ErrorKind::TimedOut);
    let _request = gate.request();
    assert!(up.stop().0.success());
}

#[test]
#[ignore = "takes half a minute on a busy machine: 5,000 connections"]
fn more_than_are_held_at_once_are_shed_and_the_others_wait() {
    if !is_root() {
        return;
    }
    const HELD: usize = 4096;
    const ALL: usize = 5000;
    let line = Line::new();
    let gate = Gate::open(&line);
    let up = line.router.run(|| Up::start("default = \"deny\"\non_crash = \"closed\"\n", &tables("")));
    let clients: Vec<Socket> = line.router.run(|| {
        let connecting = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            socket.set_nonblocking(true).expect("set");
            socket.connect(&to().into()).expect_err("in progress");
            socket
        };
        (0..ALL).map(|_| connecting()).collect()
    });
    let requests: Vec<TcpStream> = (0..HELD).map(|_| gate.request()).collect();
    eventually("the others were shed", || {
        metric(&up, "sidetrack_held_total{result=\"overflow\"}") >= (ALL - HELD) as u64
    });
    assert_eq!(metric(&up, "sidetrack_held_connections"), HELD as u64);
    let shed = || clients.iter().filter(|client| is_decided(client)).count();
    eventually("they know", || shed() == ALL - HELD);
    let refused = clients.iter().filter(|client| error_of(client) == Some(libc::ECONNREFUSED)).count();
    assert_eq!(refused, ALL - HELD);
    // A proxy that closes without an answer is a broken way.
    drop(requests);
    eventually("every client has its answer", || shed() == ALL);
    eventually("none is held", || metric(&up, "sidetrack_held_connections") == 0);
    let next = begin(&line, 20_013);
    answer(&mut gate.request(), 0);
    eventually("the next is accepted", || next.peer_addr().is_ok());
    drop((clients, next));
    assert!(up.stop().0.success());
}

/// A SYN from 10.0.1.1 to [`TO`].
fn syn(port: u16) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 1, 1, 10, 0, 2, 1];
    packet.extend(port.to_be_bytes());
    packet.extend(to().port().to_be_bytes());
    packet.extend([0, 0, 0, 7, 0, 0, 0, 0, 0x50, 2, 0x72, 0x10, 0, 0, 0, 0]);
    let sum = |bytes: &[u8]| {
        bytes.chunks(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum::<u32>()
    };
    let put = |packet: &mut [u8], at: usize, mut sum: u32| {
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        packet[at..at + 2].copy_from_slice(&(!u16::try_from(sum).expect("folded")).to_be_bytes());
    };
    let (header, pseudo) = (sum(&packet[..20]), sum(&packet[12..20]) + 6 + 20);
    put(&mut packet, 10, header);
    let segment = sum(&packet[20..]) + pseudo;
    put(&mut packet, 36, segment);
    packet
}

#[test]
fn a_reader_that_stood_still_while_the_queue_ran_over_serves_the_next() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let tables = tables("").replace("kind = \"redirect\"", "kind = \"redirect\"\nforwarded = true");
    let up = line.router.run(move || Up::start(OPEN, &tables));
    up.signal(Signal::STOP);
    // More than the queue has room for.
    line.client.run(|| {
        let socket = RoutedSocket::open(0).expect("a raw socket");
        let server: IpAddr = to().ip();
        for port in 20_000..37_000 {
            socket.send(&syn(port), server).expect("sent");
        }
    });
    up.signal(Signal::CONT);
    eventually("it reads again", || metric(&up, "sidetrack_held_connections") > 0);
    // From now on the proxy ends each connection at once.
    drop(gate);
    eventually("none is held", || metric(&up, "sidetrack_held_connections") == 0);
    let next = line.router.run(|| TcpStream::connect(to())).expect_err("the way is broken");
    assert_eq!(next.raw_os_error(), Some(libc::ENETUNREACH));
    assert!(up.stop().0.success());
}

#[test]
fn both_sides_begin_at_the_same_time() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let mut up = gated(&line, OPEN);
    let client = begin(&line, 20_014);
    let mut request = gate.request();
    // The server's SYN from the very address that the client dials: TCP makes one connection of both (RFC 9293 Sec. 3.5).
    let server = line.server.run(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.bind(&SockAddr::from(TO.parse::<SocketAddr>().expect("an address"))).expect("bind");
        socket.connect(&SockAddr::from(SocketAddr::from(([10, 0, 2, 254], 20_014)))).map(|()| socket)
    });
    assert!(server.is_ok(), "{server:?}");
    eventually("the client is connected, too", || client.peer_addr().is_ok());
    // The answer that comes now has no client: the flow ends, and nothing stays.
    answer(&mut request, 0);
    assert_eq!(up.record().text("reason"), "client_gone");
    assert_eq!(metric(&up, "sidetrack_held_connections"), 0);
    assert!(up.stop().0.success());
}
