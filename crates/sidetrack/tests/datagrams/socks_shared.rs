//! One UDP port for all clients of a `socks` listener.

use super::node::{Up, admin};
use super::socks::{Associated, RULES, ask, up};
use super::{Echo, dropped};
use sidetrack_core::socks::v5::udp::{Datagram, put_header};
use sidetrack_testkit::{LIMIT, eventually};
use std::net::{SocketAddr, TcpStream, UdpSocket};

const SHARED: &str = "udp_ports = \"shared\"\n";

/// A client at an address of its own, which announces nothing.
fn client_at(proxy: SocketAddr, ip: &str) -> Associated {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::new(ip.parse().unwrap(), 0).into()).unwrap();
    socket.connect(&proxy.into()).unwrap();
    let (control, code, relay) = super::socks::ask_on(socket.into(), "0.0.0.0:0");
    assert_eq!(code, 0);
    let socket = UdpSocket::bind((ip, 0)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    Associated { control, socket, relay: relay.unwrap() }
}

/// A client at the proxy's address, which sends from this socket and says so.
fn announced(proxy: SocketAddr, socket: UdpSocket) -> (TcpStream, u8, Associated) {
    let own = socket.local_addr().unwrap();
    let (control, code, relay) = ask(proxy, &own.to_string());
    let copy = control.try_clone().unwrap();
    (copy, code, Associated { control, socket, relay: relay.unwrap_or(own) })
}

#[test]
fn all_clients_send_to_one_port_and_are_told_apart() {
    let servers = [Echo::start("127.0.0.1"), Echo::start("::1")];
    let up = up(SHARED, RULES);
    let proxy = up.addresses("proxy")[0];
    let clients: Vec<_> = (1..=9).map(|last| client_at(proxy, &format!("127.0.0.{last}"))).collect();
    for client in &clients {
        assert_eq!(client.relay, proxy, "the port of the listener");
    }
    for round in 0..3_u8 {
        for (number, client) in (0..).zip(&clients) {
            for server in &servers {
                client.send(&server.address.to_string(), &[round, number]);
            }
        }
        for (number, client) in (0..).zip(&clients) {
            let mut from: Vec<_> = (0..2).map(|_| client.receive()).collect();
            from.sort();
            let mut all = servers.each_ref().map(|server| (server.address.into(), vec![round, number]));
            all.sort();
            assert_eq!(from, all);
        }
    }
    // One outside port for each client, and another one for the next client.
    let outside: std::collections::BTreeSet<_> = clients
        .iter()
        .map(|client| {
            client.send(&servers[0].address.to_string(), b"who");
            String::from_utf8(client.receive().1).unwrap()
        })
        .collect();
    assert_eq!(outside.len(), clients.len());
    assert_eq!(admin::flows(&up).iter().filter(|flow| flow.text("protocol") == "udp").count(), 18);
}

#[test]
fn clients_that_cannot_be_told_apart_are_refused() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(SHARED, RULES);
    let proxy = up.addresses("proxy")[0];
    let first = Associated::new(proxy);
    let (second, code, _) = ask(proxy, "0.0.0.0:0");
    assert_ne!(code, 0, "both have announced nothing");
    drop(second);
    let record = up.record();
    assert_eq!(record.text("reason"), "unsupported");
    assert!(record.text("detail").contains("told apart"), "{record:?}");
    let sockets = [(); 2].map(|()| {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket
    });
    let same = sockets[0].try_clone().unwrap();
    let known = sockets.map(|socket| announced(proxy, socket));
    for (_, code, client) in &known {
        assert_eq!(*code, 0, "it says from where it sends");
        client.echo(server.address, b"known");
    }
    let (_control, code, _) = announced(proxy, same);
    assert_ne!(code, 0, "this port has an association");
    first.echo(server.address, b"first");
    let second = Associated::new(proxy);
    second.echo(server.address, b"second");
    first.echo(server.address, b"first again");
}

#[test]
fn strangers_are_dropped_and_a_client_that_has_gone_is_one() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(SHARED, RULES);
    let proxy = up.addresses("proxy")[0];
    let client = Associated::new(proxy);
    client.echo(server.address, b"x");
    let mut datagram = Vec::new();
    put_header(&mut datagram, &server.address.into());
    assert!(Datagram::parse(&datagram).is_ok());
    for ip in ["127.0.0.1", "127.0.0.9"] {
        let stranger = UdpSocket::bind((ip, 0)).unwrap();
        stranger.send_to(&datagram, proxy).unwrap();
    }
    eventually("both are counted", || dropped(&up, "stranger") == 2);
    client.echo(server.address, b"y");
    drop(client.control);
    let reasons: Vec<_> = (0..2).map(|_| up.record().text("reason").to_owned()).collect();
    assert_eq!(reasons, ["ok", "ok"]);
    client.socket.send_to(&datagram, client.relay).unwrap();
    eventually("its datagrams are those of a stranger", || dropped(&up, "stranger") == 3);
    let again = Associated::new(proxy);
    again.echo(server.address, b"z");
}

#[test]
fn the_longest_datagrams_pass_and_bursts_before_the_answer() {
    let server = Echo::start("127.0.0.1");
    let up: Up = up(SHARED, RULES);
    let client = Associated::new(up.addresses("proxy")[0]);
    let to = server.address.to_string();
    for number in 0..10_u8 {
        client.send(&to, &[number]);
    }
    // Each is passed once, by the listener's socket or by that of the association.
    let mut came: Vec<_> = (0..10).map(|_| client.receive().1[0]).collect();
    came.sort_unstable();
    assert_eq!(came, (0..10).collect::<Vec<_>>());
    let longest: Vec<u8> = (0..65_497).map(|at| (at % 251) as u8).collect();
    client.echo(server.address, &longest);
}
