//! UDP through SOCKS5 hops: one, and a chain whose datagrams have a header for each hop.

use super::node::{Up, admin};
use super::socks::{Associated, RULES};
use super::{Echo, client, dropped, echo};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};

/// A node that connects and relays directly.
fn exit() -> Up {
    super::socks::up("", "[[rule]]\nname = \"all\"\nmatch = { listener = \"proxy\" }\ncarrier = \"direct\"\n")
}

fn address(up: &Up) -> SocketAddr {
    up.addresses("proxy")[0]
}

/// The tables of a node with both kinds of listeners, whose datagrams pass these hops.
fn through(server: &str, hops: &[SocketAddr], more: &str) -> String {
    let hops: Vec<_> = hops.iter().map(|hop| format!("\"socks5://{hop}\"")).collect();
    format!(
        "[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
         [[rule]]\nname = \"far\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = [{}]\n{more}",
        hops.join(", ")
    )
}

fn entry(server: &str, hops: &[SocketAddr], more: &str) -> Up {
    Up::start("default = \"deny\"\n", &through(server, hops, more))
}

#[test]
fn a_hop_and_a_chain_of_three_carry_datagrams_of_both_kinds_of_listeners() {
    let servers = [Echo::start("127.0.0.1"), Echo::start("::1")];
    let exits = [exit(), exit(), exit()];
    let all: Vec<_> = exits.iter().map(address).collect();
    for count in [1, 3] {
        let server = servers[0].address;
        let mut up = entry(&server.to_string(), &all[..count], "");
        let asking = client(up.addresses("dns")[0]);
        for payload in [&b"hello"[..], b"", &[7; 1200]] {
            assert_eq!(echo(&asking, payload), payload, "through {count}");
        }
        let associated = Associated::new(address(&up));
        for server in &servers {
            associated.echo(server.address, b"both families");
        }
        // The last hop resolves the name.
        associated.send(&format!("localhost:{}", server.port()), b"by name");
        assert_eq!(associated.receive(), (server.into(), b"by name".to_vec()));
        drop(associated);
        let records: Vec<_> = (0..4).map(|_| up.record()).collect();
        assert_eq!(records.iter().filter(|record| record.text("protocol") == "udp").count(), 3);
        for record in records.iter().filter(|record| record.text("protocol") == "udp") {
            assert_eq!((record.text("rule"), record.text("reason")), ("far", "ok"), "{record:?}");
        }
    }
    eventually("no hop has a flow left", || exits.iter().all(|exit| admin::flows(exit).is_empty()));
}

#[test]
fn a_hop_that_refuses_or_is_not_there_is_named() {
    let refusing = super::socks::up("udp_ports = \"off\"", RULES);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = closed.local_addr().unwrap();
    drop(closed);
    let first = exit();
    for (hops, reason, says) in [
        (vec![address(&refusing)], "hop_failed", "hop 1 of 1"),
        (vec![gone], "refused", "hop 1 of 1"),
        (vec![address(&first), address(&refusing)], "hop_failed", "hop 2 of 2"),
    ] {
        let mut up = entry("127.0.0.1:9", &hops, "");
        client(up.addresses("dns")[0]).send(b"x").unwrap();
        let record = up.record();
        assert_eq!(record.text("reason"), reason, "{record:?}");
        assert!(record.text("detail").contains(says), "{record:?}");
    }
}

#[test]
fn a_hop_that_ends_its_connection_ends_the_flows_and_the_next_datagram_asks_again() {
    let server = Echo::start("127.0.0.1");
    let exit = exit();
    let mut up = entry(&server.address.to_string(), &[address(&exit)], "");
    let asking = client(up.addresses("dns")[0]);
    assert_eq!(echo(&asking, b"one"), b"one");
    let flows = admin::flows(&exit);
    let connection = flows.iter().find(|flow| flow.text("protocol") == "tcp").unwrap().number("flow");
    assert_eq!(admin::ask(&exit, "DELETE", &format!("/v1/flows/{connection}")).0, 200);
    let record = up.record();
    assert_eq!((record.text("rule"), record.text("reason")), ("far", "hop_failed"));
    assert!(record.text("detail").contains("ended the association"), "{record:?}");
    assert_eq!(echo(&asking, b"two"), b"two");
}

/// A hop that relays nothing by itself: the test has its relay in hand.
struct Hop {
    relay: UdpSocket,
    _control: std::net::TcpStream,
}

impl Hop {
    fn accept(listener: &TcpListener, relay: UdpSocket, told: SocketAddr) -> Self {
        let (mut control, _) = listener.accept().unwrap();
        control.set_read_timeout(Some(LIMIT)).unwrap();
        control.read_exact(&mut [0; 3]).unwrap();
        control.write_all(&[5, 0]).unwrap();
        let mut request = [0; 10];
        control.read_exact(&mut request).unwrap();
        assert_eq!(request, [5, 3, 0, 1, 0, 0, 0, 0, 0, 0], "zeros: the address is not known");
        let SocketAddr::V4(told) = told else { unreachable!() };
        let port = told.port().to_be_bytes();
        control.write_all(&[&[5, 0, 0, 1], &told.ip().octets()[..], &port].concat()).unwrap();
        Self { relay, _control: control }
    }
}

#[test]
fn a_hop_that_names_no_address_is_used_where_it_was_reached_and_only_it_is_heard() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let up = entry("192.0.2.7:53", &[listener.local_addr().unwrap()], "");
    let asking = client(up.addresses("dns")[0]);
    asking.send(b"question").unwrap();
    let relay = UdpSocket::bind("127.0.0.1:0").unwrap();
    relay.set_read_timeout(Some(LIMIT)).unwrap();
    let told = SocketAddr::new("0.0.0.0".parse().unwrap(), relay.local_addr().unwrap().port());
    let hop = Hop::accept(&listener, relay, told);
    let mut buffer = [0; 64];
    let (length, node) = hop.relay.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], [&[0, 0, 0, 1, 192, 0, 2, 7, 0, 53], &b"question"[..]].concat());
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let answer = |payload: &[u8]| [&[0, 0, 0, 1, 192, 0, 2, 7, 0, 53], payload].concat();
    stranger.send_to(&answer(b"forged"), node).unwrap();
    hop.relay.send_to(&[0, 0, 1, 1, 192, 0, 2, 7, 0, 53, 1], node).unwrap();
    hop.relay.send_to(&answer(b"true"), node).unwrap();
    let length = asking.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"true");
    // The task counts after it has passed on all that came together.
    eventually("the fragment is counted", || dropped(&up, "fragment") == 1);
}
