//! Delayed binding: which bytes decide, and that they are all delivered, at once.

use crate::node::peers::{Client, visit};
use crate::site::{ENGINE, ENGINE6, SOURCE, Site, WAYS, engine_by};
use sidetrack_testkit::{LIMIT, is_root};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

fn to(address: &str) -> SocketAddr {
    address.parse().expect("an address")
}

/// A request, and the reader behind the greeting.
fn ask(host: &str, filler: usize) -> Client {
    let stream = TcpStream::connect_timeout(&to(ENGINE), LIMIT).expect("connected");
    let request = format!("GET / HTTP/1.1\r\nHost: {host}\r\nX-Fill: {}\r\n\r\n", "x".repeat(filler));
    (&stream).write_all(request.as_bytes()).expect("sent");
    stream.set_read_timeout(Some(LIMIT)).expect("limit");
    let mut client = Client::over(stream).expect("greeted");
    // The request comes back.
    client.expect(request.as_bytes()).expect("the request, whole");
    client
}

#[test]
fn the_server_is_chosen_by_the_name_in_the_request() {
    if is_root() {
        WAYS.into_iter().for_each(by_name);
    }
}

fn by_name(way: &str) {
    let mut site = Site::new();
    let servers = [site.server("10.0.2.1"), site.server("10.0.2.1")];
    let names = format!(
        "names = {{ \"a.example\" = \"{}\", \"*.b.example\" = \"{}\" }}",
        servers[0].address, servers[1].address
    );
    site.start("", &engine_by(way, &names));
    for (host, server) in [("a.example", 0), ("x.b.example", 1)] {
        let seen = site.line.client.run(move || {
            let client = ask(host, 10);
            let seen = client.seen_as;
            client.close().expect("closed in order");
            seen
        });
        assert_eq!(seen.ip().to_string(), SOURCE);
        assert!(seen.port() >= 61_000, "a port of the engine's own: {seen}");
        let record = site.record();
        assert_eq!(record.text("intercept"), "engine");
        assert_eq!(record.fate(), ("", "direct", "ok"));
        assert_eq!((record.text("host"), record.address("orig_dst")), (host, servers[server].address));
        assert!(record.number("bytes_up") > 40, "{record:?}");
        assert!(record.0["connect_seconds"].as_f64().is_some(), "{record:?}");
    }
    let refused = site.line.client.run(|| {
        let mut stream = TcpStream::connect_timeout(&to(ENGINE), LIMIT).expect("connected");
        stream.set_read_timeout(Some(LIMIT)).expect("limit");
        stream.write_all(b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n").expect("sent");
        stream.read(&mut [0; 1]).expect_err("a reset").kind()
    });
    assert_eq!(refused, std::io::ErrorKind::ConnectionReset);
    assert_eq!(site.record().text("reason"), "bad_request");
}

#[test]
fn a_first_request_of_several_segments_is_forwarded_at_once() {
    if is_root() {
        WAYS.into_iter().for_each(at_once);
    }
}

fn at_once(way: &str) {
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &engine_by(way, &format!("names = {{ \"a.example\" = \"{}\" }}", server.address)));
    site.be_patient();
    let before = site.retransmitted();
    site.line.client.run(|| {
        for filler in [1500, 6000, 11_000] {
            ask("a.example", filler).close().expect("closed in order");
        }
    });
    assert_eq!(site.retransmitted(), before, "{way}: nobody had to send anything twice");
}

#[test]
fn a_fixed_server_may_speak_first_and_ipv6_reaches_ipv4() {
    if is_root() {
        WAYS.into_iter().for_each(fixed);
    }
}

fn fixed(way: &str) {
    let mut site = Site::new();
    let server = site.server("10.0.2.1");
    site.start("", &engine_by(way, &format!("to = \"{}\"", server.address)));
    for engine in [ENGINE, ENGINE6] {
        let (_, seen, _) = site.line.client.run(move || visit(to(engine), b"hello"));
        assert_eq!(seen.ip().to_string(), SOURCE, "by {engine}");
        let record = site.record();
        assert_eq!((record.text("reason"), record.number("bytes_up")), ("ok", 5));
    }
}

#[test]
fn ipv6_reaches_ipv6() {
    if is_root() {
        WAYS.into_iter().for_each(ipv6);
    }
}

fn ipv6(way: &str) {
    let mut site = Site::new();
    let server = site.server("fd00:2::1");
    site.start("", &engine_by(way, &format!("to = \"{}\"", server.address)));
    let (_, seen, _) = site.line.client.run(|| visit(to(ENGINE6), b"hello"));
    assert_eq!(seen.ip().to_string(), "fd00:2::fe");
    assert_eq!(site.record().text("reason"), "ok");
}
