//! A flood of SYNs from everywhere: established connections go on, and new clients are served by cookie. A burst that comes while
//! the engine has no CPU is not lost.

use crate::hosts::{eventually, is_root};
use crate::node::peers::{Client, visit};
use crate::site::{ENGINE, Site, WAYS, engine_by};
use rustix::process::Signal;
use sidetrack_core::engine::checksum::Sum;
use sidetrack_sys::raw::RoutedSocket;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};

/// More than the engine keeps half done.
const SYNS: u32 = 6000;

/// A SYN to the engine from a client that does not exist.
fn syn(number: u32) -> Vec<u8> {
    let source = Ipv4Addr::from_bits(u32::from(Ipv4Addr::new(10, 0, 1, 2)) + number % 200);
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
    packet.extend(source.octets());
    packet.extend([10, 0, 1, 254]);
    packet.extend(u16::try_from(2000 + number / 200).expect("a port").to_be_bytes());
    packet.extend(80_u16.to_be_bytes());
    packet.extend(number.to_be_bytes());
    packet.extend([0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0]);
    let sum = Sum::ZERO.bytes(&packet[12..20]).u16(6).u16(20).bytes(&packet[20..]);
    packet.splice(36..38, sum.checksum().to_be_bytes());
    packet
}

fn flooded(way: &str) {
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &engine_by(way, &format!("to = \"{}\"", server.address)));
    let engine: SocketAddr = ENGINE.parse().expect("an address");
    let mut before = site.line.client.run(move || {
        let mut client = Client::connect(engine).expect("greeted");
        client.echo(b"before").expect("echoed");
        client
    });
    let before = site.line.client.run(move || {
        let socket = RoutedSocket::open(0).expect("a socket");
        for number in 0..SYNS {
            // A full queue loses some, as floods do.
            let _ = socket.send(&syn(number), IpAddr::from([10, 0, 1, 254]));
        }
        before.echo(b"meanwhile").expect("it goes on");
        let (_, seen, _) = visit(engine, b"a new one");
        assert_eq!(seen.ip(), IpAddr::from([10, 0, 2, 254]));
        before
    });
    assert_eq!(site.record().text("reason"), "ok", "{way}: the new one");
    before.close().expect("closed in order");
    assert_eq!(site.record().text("reason"), "ok", "{way}: the old one");
    let up = site.up.as_mut().expect("started");
    up.signal(Signal::TERM);
    let line = up.log_line("counters", |line| line.contains("a worker of the packet engine ends"));
    assert!(line.contains("cookies_accepted: 1,"), "{way}: {line}");
}

#[test]
fn a_flood_of_syns_stops_nobody() {
    if is_root() {
        WAYS.into_iter().for_each(flooded);
    }
}

/// Frames that came in by this interface of the calling thread's network namespace.
fn received(interface: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").expect("interfaces");
    let counts = text.lines().find_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'));
    counts.expect("the interface").split_whitespace().nth(1).expect("packets").parse().expect("a number")
}

/// Fewer than the engine keeps half done, more than come between two of its turns.
const BURST: u32 = 2000;

#[test]
fn a_burst_while_the_engine_has_no_cpu_is_not_lost() {
    if !is_root() {
        return;
    }
    let mut site = Site::new();
    site.start("", &engine_by("xdp", "to = \"10.0.2.1:80\""));
    site.up.as_ref().expect("started").signal(Signal::STOP);
    for first in (0..BURST).step_by(100) {
        let before = site.line.router.run(|| received("to-client"));
        site.line.client.run(move || {
            let socket = RoutedSocket::open(0).expect("a socket");
            for number in first..first + 100 {
                socket.send(&syn(number), IpAddr::from([10, 0, 1, 254])).expect("sent");
            }
        });
        // As many at a time as the link itself holds.
        site.line.router.run(move || eventually("all have come", || received("to-client") >= before + 100));
    }
    let up = site.up.as_mut().expect("started");
    up.signal(Signal::CONT);
    let engine: SocketAddr = ENGINE.parse().expect("an address");
    site.line.client.run(move || {
        // Whoever comes last is answered when all before were. Nobody serves there: the reset may be here as soon as the handshake.
        if let Err(error) = TcpStream::connect(engine) {
            assert!(
                matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused),
                "{error}"
            );
        }
    });
    let up = site.up.as_mut().expect("started");
    up.signal(Signal::TERM);
    let line = up.log_line("counters", |line| line.contains("a worker of the packet engine ends"));
    assert!(line.contains(&format!("syns: {},", BURST + 1)) && line.contains("lost=0"), "{line}");
}
