//! CONNECT-UDP at an `http` listener (RFC 9298), by a client that this test writes from the RFC, and by our own hop.

use super::masque::{capsule, datagram, head, varint};
use super::node::{Up, admin};
use super::socks::Associated;
use super::{Echo, LONGEST, client, dropped, echo};
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};

pub(crate) const RULES: &str = "[[rule]]\nname = \"no-dns\"\nmatch = { protocol = \"udp\", port = 53 }\naction = \"deny\"\n\
                     [[rule]]\nname = \"all\"\nmatch = { protocol = \"udp\", listener = \"web\" }\ncarrier = \"direct\"\n";

/// A node with an `http` listener. `keys` are lines of it, `rest` other tables.
pub(crate) fn up(keys: &str, rest: &str) -> Up {
    let tables =
        format!("[[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n{keys}\n{rest}");
    Up::start("default = \"deny\"\n", &tables)
}

/// Sends a request for this path, with further lines. Returns the connection and the head of the answer.
fn ask(up: &Up, path: &str, lines: &str) -> (TcpStream, String) {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: proxy.example\r\nConnection: Upgrade\r\nUpgrade: connect-udp\r\n\
         Capsule-Protocol: ?1\r\n{lines}\r\n"
    );
    send(up, request.as_bytes())
}

fn send(up: &Up, request: &[u8]) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(up.addresses("web")[0]).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(request).unwrap();
    let head = head(&mut stream).expect("an answer");
    (stream, head)
}

pub(crate) fn path(host: &str, port: u16) -> String {
    format!("/.well-known/masque/udp/{host}/{port}/")
}

/// An open tunnel.
struct Tunnel(TcpStream);

impl Tunnel {
    fn open(up: &Up, host: &str, port: u16) -> Self {
        let (stream, head) = ask(up, &path(host, port), "");
        accepted(&head);
        Self(stream)
    }

    fn send(&mut self, payload: &[u8]) {
        self.0.write_all(&datagram(payload)).unwrap();
    }

    fn receive(&mut self) -> Vec<u8> {
        let (kind, value) = capsule(&mut self.0).expect("a capsule");
        assert_eq!(kind, 0);
        let mut value = &value[..];
        assert_eq!(varint(&mut value), Some(0), "the context of UDP");
        value.to_vec()
    }

    #[track_caller]
    fn echo(&mut self, payload: &[u8]) {
        self.send(payload);
        assert!(self.receive() == payload);
    }
}

#[track_caller]
fn accepted(head: &str) {
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101 "), "{head}");
    for line in ["connection: upgrade", "upgrade: connect-udp", "capsule-protocol: ?1"] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{head}");
    }
}

#[test]
fn a_tunnel_carries_datagrams_and_is_one_flow_with_one_record() {
    let servers = [Echo::start("127.0.0.1"), Echo::start("::1")];
    let mut up = up("users = [{ user = \"ann\", password = \"secret\" }]", RULES);
    // The URL may be whole, as in the example of RFC 9298 Sec. 3.2.
    for (server, path) in [
        (&servers[0], path("127.0.0.1", servers[0].address.port())),
        (&servers[1], path("%3A%3A1", servers[1].address.port())),
        (&servers[0], format!("https://proxy.example{}", path("localhost", servers[0].address.port()))),
    ] {
        let (stream, head) = ask(&up, &path, "Proxy-Authorization: Basic YW5uOnNlY3JldA==\r\n");
        accepted(&head);
        let mut tunnel = Tunnel(stream);
        for payload in [&b"hello"[..], b"", &[7; 1200]] {
            tunnel.echo(payload);
        }
        let flows = admin::flows(&up);
        assert_eq!((flows.len(), flows[0].text("protocol")), (1, "udp"), "{flows:?}");
        drop(tunnel);
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert_eq!((record.text("intercept"), record.text("user")), ("http", "ann"), "{record:?}");
        assert_eq!((record.text("protocol"), record.number("packets_up")), ("udp", 3));
        assert_eq!((record.number("packets_down"), record.number("bytes_up")), (3, 1205));
        assert_eq!((record.number("bytes_down"), record.number("bytes_up")), (1205, 1205));
        if !path.contains("localhost") {
            assert_eq!(record.address("orig_dst"), server.address);
        }
    }
}

#[test]
fn the_longest_datagrams_bursts_and_those_that_come_with_the_request_pass() {
    let server = Echo::start("127.0.0.1");
    let up = up("", RULES);
    let longest: Vec<u8> = (0..LONGEST).map(|at| (at % 251) as u8).collect();
    let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.address.port());
    tunnel.echo(&longest);
    let burst: Vec<u8> = (0..40_u8).flat_map(|number| datagram(&[number])).collect();
    tunnel.0.write_all(&burst).unwrap();
    for number in 0..40_u8 {
        assert_eq!(tunnel.receive(), [number]);
    }
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: p\r\nConnection: Upgrade\r\nUpgrade: connect-udp\r\n\r\n",
        path("127.0.0.1", server.address.port())
    );
    let (stream, head) = send(&up, &[request.as_bytes(), &datagram(b"early")].concat());
    accepted(&head);
    assert_eq!(Tunnel(stream).receive(), b"early");
}

#[test]
fn what_is_unknown_is_skipped_and_what_is_broken_ends_the_tunnel() {
    let server = Echo::start("127.0.0.1");
    let mut up = up("", RULES);
    // A capsule of a reserved type, a datagram of another context, and one cut at every byte.
    let stream = [&[0x40, 0x6b, 2, 1, 2, 0, 3, 2, 9, 9][..], &datagram(b"whole")].concat();
    let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.address.port());
    for cut in 0..=stream.len() {
        let (one, other) = stream.split_at(cut);
        tunnel.0.write_all(one).unwrap();
        tunnel.0.write_all(other).unwrap();
        assert_eq!(tunnel.receive(), b"whole", "cut at {cut}");
    }
    drop(tunnel);
    assert_eq!(up.record().text("reason"), "ok");
    for (bytes, says) in [
        (&[0, 0x80, 1, 0, 0][..], "longer than UDP carries"),
        (&[0, 0xff, 255, 255, 255, 255, 255, 255, 255], "longer than UDP carries"),
        (&[0, 0], "ends in its context ID"),
        (&[0, 3, 0, 1], "ended in a capsule"),
        (&[0x2a, 3, 0, 1], "ended in a capsule"),
    ] {
        let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.address.port());
        tunnel.echo(b"before");
        tunnel.0.write_all(bytes).unwrap();
        // It may have been reset already.
        let _ = tunnel.0.shutdown(Shutdown::Write);
        let mut rest = Vec::new();
        // The end of the connection, in order or by a reset.
        let _ = tunnel.0.read_to_end(&mut rest);
        assert_eq!(rest, b"");
        let record = up.record();
        assert_eq!(record.text("reason"), "bad_request", "{record:?}");
        assert!(record.text("detail").contains(says), "{record:?}");
    }
}

#[test]
fn a_refusal_has_its_status_and_its_record() {
    let far = "[[rule]]\nname = \"far\"\nmatch = { port = 9 }\ncarrier = \"socks6+socksx://127.0.0.1:9\"\n\
               [[rule]]\nname = \"all\"\nmatch = { port = [5, 7] }\ncarrier = \"direct\"\n";
    let mut up = up("", far);
    for (path, status, reason) in [
        (path("192.0.2.1", 53), 403, "policy_denied"),
        (path("192.0.2.1", 9), 502, "unsupported"),
        (path("no-such-host.invalid", 7), 502, "dns"),
        (path("192.0.2.1", 0), 400, "bad_request"),
        (path("192.0.2.1%2f", 7), 400, "bad_request"),
        (path("fe80%3A%3A1%25eth0", 7), 400, "bad_request"),
        ("/.well-known/masque/udp/192.0.2.1/7".to_owned(), 400, "bad_request"),
        ("/elsewhere".to_owned(), 400, "bad_request"),
    ] {
        let (_stream, head) = ask(&up, &path, "");
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {head}");
        let record = up.record();
        assert_eq!(record.text("reason"), reason, "{path}: {record:?}");
    }
    let (_stream, head) = ask(&up, &path("192.0.2.1", 7), "Content-Length: 1\r\n");
    assert!(head.starts_with("HTTP/1.1 400 "), "{head}");
    // Without the upgrade it is a request for a page that a proxy does not have.
    let (_stream, head) = send(&up, format!("GET {} HTTP/1.1\r\nHost: p\r\n\r\n", path("h", 7)).as_bytes());
    assert!(head.starts_with("HTTP/1.1 400 "), "{head}");
}

#[test]
fn a_user_is_asked_for() {
    let up = up("users = [{ user = \"ann\", password = \"secret\" }]", RULES);
    for lines in ["", "Proxy-Authorization: Basic YW5uOndyb25n\r\n"] {
        let (_stream, head) = ask(&up, &path("192.0.2.1", 7), lines);
        assert!(head.starts_with("HTTP/1.1 407 ") && head.contains("Proxy-Authenticate: Basic"), "{head}");
    }
}

#[test]
fn a_tunnel_that_is_idle_killed_or_whose_server_is_not_there_ends_with_its_connection() {
    let server = Echo::start("127.0.0.1");
    let mut up = up("", &format!("{RULES}[limits]\nudp_idle_timeout_ms = 300\n"));
    let ended =
        |tunnel: &mut Tunnel| assert_eq!(tunnel.0.read(&mut [0; 16]).unwrap(), 0, "the client learns it");
    let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.address.port());
    tunnel.echo(b"x");
    ended(&mut tunnel);
    let record = up.record();
    assert_eq!((record.fate(), record.number("packets_up")), (("all", "direct", "idle"), 1));
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = closed.local_addr().unwrap().port();
    drop(closed);
    let mut tunnel = Tunnel::open(&up, "127.0.0.1", port);
    tunnel.send(b"anybody");
    ended(&mut tunnel);
    let record = up.record();
    assert_eq!(record.fate(), ("all", "direct", "refused"), "no answer came: {record:?}");
    assert_eq!((record.number("packets_up"), record.number("packets_down")), (1, 0));
}

#[test]
fn tunnels_are_killed_and_end_with_the_program() {
    let server = Echo::start("127.0.0.1");
    let mut up = up("", RULES);
    let mut tunnels = [(); 2].map(|()| Tunnel::open(&up, "127.0.0.1", server.address.port()));
    tunnels.iter_mut().for_each(|tunnel| tunnel.echo(b"x"));
    let first = tunnels[0].0.local_addr().unwrap();
    let flow = admin::flows(&up).into_iter().find(|flow| flow.address("client") == first).unwrap();
    assert_eq!(admin::ask(&up, "DELETE", &format!("/v1/flows/{}", flow.number("flow"))).0, 200);
    let record = up.record();
    assert_eq!((record.text("reason"), record.address("client")), ("killed", first));
    assert_eq!(tunnels[0].0.read(&mut [0; 16]).unwrap(), 0);
    tunnels[1].echo(b"goes on");
    up.signal(Signal::TERM);
    let (status, rest) = up.gone();
    assert!(status.success(), "{status}");
    let reasons: Vec<_> = rest.iter().map(|record| record.text("reason")).collect();
    assert_eq!(reasons, ["shutdown"]);
}

#[test]
fn a_tunnel_that_changed_rules_deny_ends_before_another_datagram_passes() {
    let server = Echo::start("127.0.0.1");
    let mut up = up("", RULES);
    let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.address.port());
    tunnel.echo(b"x");
    let listener = "[[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n";
    let deny = "[[rule]]\nname = \"no\"\nmatch = { protocol = \"udp\" }\naction = \"deny\"\n";
    up.reload("default = \"deny\"\n", &format!("{listener}{RULES}"));
    tunnel.echo(b"y");
    up.reload("default = \"deny\"\n", &format!("{listener}{deny}"));
    // The connection may be closed already.
    let _ = tunnel.0.write_all(&datagram(b"z"));
    let record = up.record();
    assert_eq!(record.fate(), ("all", "direct", "policy_denied"));
    assert_eq!((record.number("packets_up"), record.number("packets_down")), (2, 2));
    assert!(record.text("detail").contains("has changed"), "{record:?}");
}

#[test]
fn a_stranger_is_not_heard_and_a_client_that_reads_nothing_costs_datagrams_and_no_memory() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(LIMIT)).unwrap();
    let up = up("", RULES);
    let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.local_addr().unwrap().port());
    tunnel.send(b"who");
    let (_, outside) = server.recv_from(&mut [0; 16]).unwrap();
    UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"forged", outside).unwrap();
    server.send_to(b"true", outside).unwrap();
    assert_eq!(tunnel.receive(), b"true");
    let payload = vec![1; 60_000];
    eventually("datagrams to the client are dropped", || {
        for _ in 0..20 {
            server.send_to(&payload, outside).unwrap();
        }
        dropped(&up, "unsent") > 0 || tunnel_is_over(&up)
    });
    assert!(!tunnel_is_over(&up));
}

fn tunnel_is_over(up: &Up) -> bool {
    admin::flows(up).is_empty()
}

#[test]
fn limits_count_tunnels_as_flows() {
    let server = Echo::start("127.0.0.1");
    let up = up("", &format!("{RULES}[limits]\nmax_flows = 1\n"));
    let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.address.port());
    tunnel.echo(b"x");
    let mut second = TcpStream::connect(up.addresses("web")[0]).unwrap();
    second.set_read_timeout(Some(LIMIT)).unwrap();
    let _ = second.write_all(b"GET");
    let refused = second.read(&mut [0; 16]);
    assert!(matches!(refused, Ok(0) | Err(_)), "{refused:?}");
    tunnel.echo(b"y");
}

/// A node whose datagrams pass these hops.
fn entry(server: &SocketAddr, hops: &[String]) -> Up {
    let tables = format!(
        "[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
         [[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n\
         [[rule]]\nname = \"far\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = {hops:?}\n"
    );
    // The harness gives `@` another meaning.
    Up::start("default = \"deny\"\n", &tables.replace('@', "\\u0040"))
}

#[test]
fn our_hop_and_our_listener_understand_each_other_in_chains_and_from_all_kinds_of_listeners() {
    let server = Echo::start("127.0.0.1");
    let all = "[[rule]]\nname = \"all\"\nmatch = { listener = \"web\" }\ncarrier = \"direct\"\n";
    let users = "users = [{ user = \"ann\", password = \"secret\" }]";
    let exits = [up(users, all), up("", all), up("", all)];
    let hops: Vec<_> = exits.iter().map(|exit| exit.addresses("web")[0].to_string()).collect();
    let hops = [
        format!("http://ann:secret@{}", hops[0]),
        format!("http://{}", hops[1]),
        format!("http://{}", hops[2]),
    ];
    for count in [1, 3] {
        let mut up = entry(&server.address, &hops[..count]);
        let asking = client(up.addresses("dns")[0]);
        for payload in [&b"hello"[..], b"", &[7; 1200]] {
            assert_eq!(echo(&asking, payload), payload, "through {count}");
        }
        let associated = Associated::new(up.addresses("proxy")[0]);
        associated.echo(server.address, b"socks");
        let mut tunnel = Tunnel::open(&up, "127.0.0.1", server.address.port());
        tunnel.echo(b"http");
        drop((associated, tunnel));
        let records: Vec<_> = (0..3).map(|_| up.record()).collect();
        for record in records.iter().filter(|record| record.text("protocol") == "udp") {
            assert_eq!((record.text("rule"), record.text("reason")), ("far", "ok"), "{record:?}");
        }
    }
    let wrong = entry(&server.address, &[hops[0].replace("secret", "other")]);
    let (_stream, head) = ask(&wrong, &path("127.0.0.1", server.address.port()), "");
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    eventually("no exit has a flow left", || exits.iter().all(|exit| admin::flows(exit).is_empty()));
}
