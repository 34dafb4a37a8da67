//! A flood of SYNs from everywhere: established connections go on, and new clients are served by cookie.

use crate::node::peers::{Client, visit};
use crate::site::{ENGINE, Site, WAYS, engine_by};
use rustix::process::Signal;
use sidetrack_core::engine::checksum::Sum;
use sidetrack_sys::raw::RoutedSocket;
use sidetrack_testkit::is_root;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// More than the engine keeps half done.
const SYNS: u32 = 6000;

/// SYNs that the engine has to handle without a pause.
const AT_ONCE: u32 = 100;

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
            if number % AT_ONCE == 0 {
                // The answer comes after those SYNs: the engine is never overloaded, so it sheds none.
                before.echo(b"meanwhile").expect("it goes on");
            }
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
