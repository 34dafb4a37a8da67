//! UDP through hops of kind `http`: CONNECT-UDP (RFC 9298) to a proxy that this test writes from the RFC, without the code of
//! core. It also serves CONNECT, so that chains pass it.

use super::node::{Up, admin};
use super::socks::Associated;
use super::{Echo, LONGEST, client, dropped, echo};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Reads until a head is whole. Byte by byte: what follows belongs to the tunnel.
pub(crate) fn head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    String::from_utf8(head).ok()
}

/// A variable-length integer of RFC 9000 Sec. 16.
pub(crate) fn varint(stream: &mut impl Read) -> Option<usize> {
    let mut first = [0];
    stream.read_exact(&mut first).ok()?;
    let mut rest = vec![0; (1 << (first[0] >> 6)) - 1];
    stream.read_exact(&mut rest).ok()?;
    Some(rest.iter().fold(usize::from(first[0] & 0x3f), |value, byte| value * 256 + usize::from(*byte)))
}

/// The next capsule: its type and value.
pub(crate) fn capsule(stream: &mut impl Read) -> Option<(usize, Vec<u8>)> {
    let (kind, length) = (varint(stream)?, varint(stream)?);
    let mut value = vec![0; length];
    stream.read_exact(&mut value).ok()?;
    Some((kind, value))
}

/// A DATAGRAM capsule, with its length in four bytes and its context in two: lawful, and not as we write it.
pub(crate) fn datagram(payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len() + 2).unwrap() | 0x8000_0000;
    [&[0][..], &length.to_be_bytes(), &[0x40, 0], payload].concat()
}

const ACCEPTED: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: connect-udp\r\nCapsule-Protocol: ?1\r\n\r\n";

/// A proxy that carries datagrams and bytes.
struct Proxy {
    address: SocketAddr,
    /// The heads of requests, with the connection of each.
    asked: Receiver<(String, TcpStream)>,
}

impl Proxy {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, asked) = channel();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let tell = tell.clone();
                std::thread::spawn(move || {
                    let Some(head) = head(&mut stream) else { return };
                    // A test that has ended hears nothing more.
                    let _ = tell.send((head.clone(), stream.try_clone().unwrap()));
                    let target = head.split(' ').nth(1).unwrap().to_owned();
                    match target.strip_prefix("/.well-known/masque/udp/") {
                        Some(rest) => relay(stream, rest),
                        None => tunnel(stream, &target),
                    }
                });
            }
        });
        Self { address, asked }
    }

    fn hop(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Serves CONNECT-UDP until the client ends it.
fn relay(mut stream: TcpStream, path: &str) {
    let path = path.replace("%3A", ":");
    let (host, port) = path.strip_suffix('/').and_then(|path| path.split_once('/')).unwrap();
    let socket = UdpSocket::bind(if host.contains(':') { "[::1]:0" } else { "127.0.0.1:0" }).unwrap();
    socket.connect((host, port.parse::<u16>().unwrap())).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    stream.write_all(ACCEPTED).unwrap();
    let (back, mut writer) = (socket.try_clone().unwrap(), stream.try_clone().unwrap());
    let answers = std::thread::spawn(move || {
        let mut buffer = vec![0; 65_536];
        loop {
            let length = match back.recv(&mut buffer) {
                Ok(length) => length,
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) =>
                {
                    if writer.write(&[]).is_err() || writer.peer_addr().is_err() {
                        return;
                    }
                    continue;
                }
                Err(_) => return,
            };
            // A capsule of a reserved type and a datagram of another context come before each answer.
            let all = [&[0x40, 0x6b, 2, 1, 2, 0, 3, 2, 9, 9][..], &datagram(&buffer[..length])].concat();
            if writer.write_all(&all).is_err() {
                return;
            }
        }
    });
    while let Some((kind, value)) = capsule(&mut stream) {
        assert_eq!(kind, 0);
        let mut value = &value[..];
        assert_eq!(varint(&mut value), Some(0), "the context of UDP");
        let _ = socket.send(value);
    }
    let _ = stream.shutdown(std::net::Shutdown::Both);
    drop(answers);
}

/// Serves CONNECT.
fn tunnel(mut client: TcpStream, target: &str) {
    let mut server = TcpStream::connect(target).unwrap();
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
    let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
    let _ = std::io::copy(&mut client, &mut server);
    let _ = server.shutdown(std::net::Shutdown::Both);
}

/// A node with both kinds of listeners, whose datagrams pass these hops.
fn entry(server: &str, hops: &[String], more: &str) -> Up {
    let tables = format!(
        "[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
         [[rule]]\nname = \"far\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = {hops:?}\n{more}"
    );
    // The harness gives `@` another meaning.
    Up::start("default = \"deny\"\n", &tables.replace('@', "\\u0040"))
}

/// A node that relays for SOCKS clients.
fn exit() -> Up {
    super::socks::up("", "[[rule]]\nname = \"all\"\nmatch = { listener = \"proxy\" }\ncarrier = \"direct\"\n")
}

#[test]
fn a_proxy_carries_datagrams_of_both_kinds_of_listeners_and_in_chains() {
    let servers = [Echo::start("127.0.0.1"), Echo::start("::1")];
    let (proxies, exits) = ([Proxy::start(), Proxy::start()], [exit(), exit()]);
    let socks: Vec<_> = exits.iter().map(|exit| format!("socks5://{}", exit.addresses("proxy")[0])).collect();
    let socks6 = socks[0].replace("socks5", "socks6");
    let http: Vec<_> = proxies.iter().map(Proxy::hop).collect();
    for hops in [
        vec![&http[0]],
        vec![&http[0], &http[1]],
        vec![&socks[0], &http[0]],
        vec![&socks6, &http[0]],
        vec![&http[0], &socks[0]],
        vec![&http[0], &socks[0], &socks[1]],
        vec![&socks[0], &http[0], &socks[1]],
        vec![&socks6],
        vec![&socks6, &socks[1]],
        vec![&socks[1], &socks6],
        vec![&http[0], &socks6],
    ] {
        let hops: Vec<String> = hops.into_iter().cloned().collect();
        let server = servers[0].address;
        let mut up = entry(&server.to_string(), &hops, "");
        let asking = client(up.addresses("dns")[0]);
        for payload in [&b"hello"[..], b"", &[7; 1200]] {
            assert_eq!(echo(&asking, payload), payload, "through {hops:?}");
        }
        let associated = Associated::new(up.addresses("proxy")[0]);
        for server in &servers {
            associated.echo(server.address, b"both families");
        }
        let name = format!("localhost:{}", server.port());
        associated.send(&name, b"by name");
        let (from, payload) = associated.receive();
        assert_eq!(payload, b"by name");
        // CONNECT-UDP does not tell the address: the answer comes from the name.
        let is_last = hops.last().is_some_and(|hop| hop.starts_with("http"));
        assert_eq!(from.to_string(), if is_last { name } else { server.to_string() });
        drop(associated);
        for record in (0..4).map(|_| up.record()).filter(|record| record.text("protocol") == "udp") {
            assert_eq!((record.text("rule"), record.text("reason")), ("far", "ok"), "{record:?}");
        }
    }
    eventually("no exit has a flow left", || exits.iter().all(|exit| admin::flows(exit).is_empty()));
}

#[test]
fn the_request_is_that_of_the_rfc_and_the_longest_datagrams_and_bursts_pass() {
    let (server, proxy) = (Echo::start("::1"), Proxy::start());
    let hop = proxy.hop().replace("http://", "http://ann:secret@");
    let up = entry(&server.address.to_string(), &[hop], "");
    let asking = client(up.addresses("dns")[0]);
    let longest: Vec<u8> = (0..LONGEST).map(|at| (at % 251) as u8).collect();
    assert!(echo(&asking, &longest) == longest);
    let (head, _) = proxy.asked.recv_timeout(LIMIT).unwrap();
    assert_eq!(
        head,
        format!(
            "GET /.well-known/masque/udp/%3A%3A1/{}/ HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\n\
             Upgrade: connect-udp\r\nCapsule-Protocol: ?1\r\nProxy-Authorization: Basic YW5uOnNlY3JldA==\r\n\r\n",
            server.address.port(),
            proxy.address
        )
    );
    for round in 0..4_u8 {
        for number in 0..40_u8 {
            asking.send(&[round, number]).unwrap();
        }
        for number in 0..40_u8 {
            let mut answer = [0; 4];
            assert_eq!(asking.recv(&mut answer).expect("all are echoed"), 2);
            assert_eq!(answer[..2], [round, number]);
        }
    }
    assert!(proxy.asked.try_recv().is_err(), "one association, one tunnel");
}

/// A proxy that answers its first client with these bytes, and then does as the test says.
fn scripted(answer: Vec<u8>, then: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        head(&mut stream).unwrap();
        stream.write_all(&answer).unwrap();
        then(stream);
    });
    address
}

#[test]
fn what_a_proxy_refuses_is_the_reason_and_names_the_hop() {
    for (answer, reason, says) in [
        ("200 OK", "hop_failed", "does not serve CONNECT-UDP"),
        ("404 Not Found", "hop_failed", "does not serve CONNECT-UDP"),
        ("101 Switching\r\nUpgrade: websocket", "hop_failed", "without a request"),
        ("403 Forbidden", "hop_failed", "403 Forbidden"),
        ("407 No\r\nProxy-Authenticate: Basic", "auth_failed", "it asks for Basic"),
        ("502 Bad\r\nProxy-Status: p; error=dns_error", "dns", "dns_error"),
        ("504 Late", "connect_timeout", "504"),
    ] {
        let proxy = scripted(format!("HTTP/1.1 {answer}\r\n\r\n").into_bytes(), drop);
        let mut up = entry("192.0.2.1:9", &[format!("http://{proxy}")], "");
        client(up.addresses("dns")[0]).send(b"x").unwrap();
        let record = up.record();
        assert_eq!(record.text("reason"), reason, "{record:?}");
        assert!(
            record.text("detail").contains(says) && record.text("detail").contains("hop 1 of 1"),
            "{record:?}"
        );
    }
}

#[test]
fn a_tunnel_that_ends_or_breaks_ends_the_flow_and_the_next_datagram_asks_again() {
    let whole = datagram(b"whole");
    for (bytes, says) in [
        (vec![], "it has ended the tunnel"),
        (whole[..4].to_vec(), "the stream ended in a capsule"),
        (vec![0x2a, 9, 1], "the stream ended in a capsule"),
        (vec![0, 0x80, 1, 0, 0], "longer than UDP carries"),
        (vec![0, 0xff, 255, 255, 255, 255, 255, 255, 255], "longer than UDP carries"),
        (vec![0, 0], "ends in its context ID"),
    ] {
        let sent = [ACCEPTED, &whole, &bytes].concat();
        let proxy = scripted(sent, |mut stream| {
            // What it has not read would turn its end into a reset.
            stream.shutdown(Shutdown::Write).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let mut up = entry("192.0.2.1:9", &[format!("http://{proxy}")], "");
        let asking = client(up.addresses("dns")[0]);
        asking.send(b"x").unwrap();
        let mut answer = [0; 16];
        assert_eq!(asking.recv(&mut answer).expect("what was whole has passed"), 5);
        let record = up.record();
        assert_eq!(record.text("reason"), "hop_failed", "{record:?}");
        assert!(
            record.text("detail").contains(says) && record.text("detail").contains("hop 1 of 1"),
            "{record:?}"
        );
        assert_eq!(record.number("packets_down"), 1);
    }
    let (server, proxy) = (Echo::start("127.0.0.1"), Proxy::start());
    let mut up = entry(&server.address.to_string(), &[proxy.hop()], "");
    let asking = client(up.addresses("dns")[0]);
    assert_eq!(echo(&asking, b"one"), b"one");
    let (_, connection) = proxy.asked.recv_timeout(LIMIT).unwrap();
    connection.shutdown(Shutdown::Both).unwrap();
    assert_eq!(up.record().text("reason"), "hop_failed");
    assert_eq!(echo(&asking, b"two"), b"two");
}

#[test]
fn a_proxy_that_reads_nothing_costs_datagrams_and_no_memory() {
    let (tell, done) = channel::<()>();
    let proxy = scripted(ACCEPTED.to_vec(), move |stream| {
        // Waits until the test has ended.
        let _ = done.recv();
        drop(stream);
    });
    let up = entry("192.0.2.1:9", &[format!("http://{proxy}")], "");
    let asking = client(up.addresses("dns")[0]);
    let payload = vec![1; 60_000];
    eventually("datagrams are dropped", || {
        for _ in 0..20 {
            let _ = asking.send(&payload);
        }
        dropped(&up, "unsent") > 0
    });
    drop(tell);
}
