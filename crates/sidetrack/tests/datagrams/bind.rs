//! BIND at a `socks` listener: a port that waits for one connection (RFC 1928 Sec. 6).

use super::node::Up;
use rustix::process::Signal;
use sidetrack_core::socks::v5::udp::{Datagram, put_header};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

const RULE: &str = "[[rule]]\nname = \"all\"\nmatch = { protocol = \"tcp\" }\ncarrier = \"direct\"\n";

fn up(rest: &str) -> Up {
    super::socks::up("bind = true", rest)
}

fn reply(control: &mut TcpStream) -> (u8, SocketAddr) {
    let mut reply = [0; 10];
    control.read_exact(&mut reply).unwrap();
    assert_eq!((reply[0], reply[3]), (5, 1));
    let bytes = [&[0, 0, 0, 1], &reply[4..]].concat();
    (reply[1], Datagram::parse(&bytes).unwrap().remote.socket_addr().unwrap())
}

/// Asks for BIND for this host. Returns the connection with the first answer.
fn ask(up: &Up, peer: &str) -> (TcpStream, u8, SocketAddr) {
    let mut control = TcpStream::connect(up.addresses("proxy")[0]).unwrap();
    control.set_read_timeout(Some(LIMIT)).unwrap();
    control.write_all(&[5, 1, 0]).unwrap();
    control.read_exact(&mut [0; 2]).unwrap();
    let mut header = Vec::new();
    put_header(&mut header, &peer.parse::<SocketAddr>().unwrap().into());
    control.write_all(&[&[5, 2], &header[2..]].concat()).unwrap();
    let (code, bound) = reply(&mut control);
    (control, code, bound)
}

#[test]
fn the_expected_host_connects_and_bytes_pass_both_ways() {
    let mut up = up(RULE);
    let (mut control, code, bound) = ask(&up, "127.0.0.1:0");
    assert_eq!(code, 0);
    // Bytes that the client sends before the peer has come are for the peer.
    control.write_all(b"early ").unwrap();
    let mut peer = TcpStream::connect(bound).unwrap();
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    assert_eq!(reply(&mut control), (0, peer.local_addr().unwrap()));
    peer.write_all(b"from the peer").unwrap();
    let mut bytes = [0; 13];
    control.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"from the peer");
    control.write_all(b"late").unwrap();
    let mut bytes = [0; 10];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"early late");
    eventually("the port is closed", || TcpListener::bind(bound).is_ok());
    drop((control, peer));
    let record = up.record();
    assert_eq!((record.text("rule"), record.text("intercept")), ("all", "socks"));
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (10, 13), "{record:?}");
    up.signal(Signal::TERM);
    assert!(up.gone().1.is_empty(), "one record");
}

#[test]
fn others_are_reset_and_the_wait_goes_on() {
    let up = up(RULE);
    // Nothing on this host has this address.
    let (mut control, code, bound) = ask(&up, "127.0.0.2:0");
    assert_eq!(code, 0);
    let mut stranger = TcpStream::connect(bound).unwrap();
    stranger.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(stranger.read(&mut [0; 1]).is_err(), "it is reset");
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.2:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.connect(&bound.into()).unwrap();
    let (code, peer) = reply(&mut control);
    assert_eq!((code, peer.ip()), (0, "127.0.0.2".parse().unwrap()));
}

#[test]
fn rules_decide_who_may_connect_and_the_wait_is_limited() {
    let deny = "[[rule]]\nname = \"no\"\nmatch = { to = \"127.0.0.3\" }\naction = \"deny\"\n";
    let mut up = up(&format!("[limits]\nconnect_timeout_ms = 500\n{deny}{RULE}"));
    let (_control, code, _) = ask(&up, "127.0.0.3:0");
    assert_eq!(code, 2);
    assert_eq!(up.record().fate(), ("no", "", "policy_denied"));
    // It is not denied by its name, zeros, but by the address that comes.
    let (mut control, code, bound) = ask(&up, "0.0.0.0:0");
    assert_eq!(code, 0);
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.3:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.connect(&bound.into()).unwrap();
    let (code, _) = reply(&mut control);
    assert_eq!(code, 6, "SOCKS5 has no other code for: timed out");
    assert_eq!(up.record().text("reason"), "connect_timeout");
}

#[test]
fn it_is_refused_unless_the_listener_serves_it_and_the_path_is_direct() {
    let mut up = super::socks::up("", RULE);
    assert_eq!(ask(&up, "127.0.0.1:0").1, 7);
    assert_eq!(up.record().text("reason"), "unsupported");
    let hop = "[[rule]]\nname = \"far\"\ncarrier = \"socks5://127.0.0.1:9\"\n";
    let mut up = self::up(hop);
    assert_eq!(ask(&up, "127.0.0.1:0").1, 7);
    let record = up.record();
    assert_eq!((record.text("rule"), record.text("reason")), ("far", "unsupported"));
    assert!(record.text("detail").contains("BIND"), "{record:?}");
}
