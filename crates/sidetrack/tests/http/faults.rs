//! Heads without end, bodies that do not come, servers that stall, lie and leave, clients by the ten thousand: each costs its
//! own request, in bounded time and memory, and is never stored nor taken for another's.

use crate::client::{Client, Response};
use crate::disk_crash::{Up, config, folder};
use crate::node::Node;
use crate::origin::{Act, Origin, ok};
use crate::proxy::node;
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::{LIMIT, awaited};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// A wait of these tests that is to be over soon, and no pause of the machine meets too early: what is waited for is the end.
const SHORT_MS: u64 = 300;

/// A node that gives requests for paths that end with `/slow` no time.
fn impatient(listener: &str) -> Node {
    let rule = format!(
        "[[rule]]\nname = 'slow'\nmatch = {{ url = ['*/slow'] }}\ncarrier = 'direct'\nidle_timeout_ms = {SHORT_MS}\n"
    );
    node(listener, &rule)
}

/// A server that sends these bytes for each connection, and then does `then` with it.
fn raw(bytes: &'static [u8], then: fn(TcpStream)) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    match stream.read(&mut byte) {
                        Ok(1) => head.push(byte[0]),
                        _ => return,
                    }
                }
                if stream.write_all(bytes).is_ok() {
                    then(stream);
                }
            });
        }
    });
    address
}

/// Says nothing more, until the other end has gone.
fn silent(mut stream: TcpStream) {
    while let Ok(1..) = stream.read(&mut [0; 1024]) {}
}

/// Ends the connection by a reset.
fn reset(stream: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
}

fn refused(node: &Node, bytes: &[u8]) -> Response {
    let mut client = Client::new(node.entry());
    client.send(bytes);
    let response = client.response(false);
    assert!(client.is_closed(), "{response:?}");
    node.ends_with(EndReason::BadRequest);
    response
}

#[test]
fn heads_without_end_are_refused() {
    let origin = Origin::start(|_| ok("", "reached"));
    let node = node("", "");
    let request = format!("GET {} HTTP/1.1\r\nHost: {}\r\n", origin.url("/"), origin.address);
    let many = format!("{request}{}\r\n", "X: 1\r\n".repeat(101));
    assert_eq!(refused(&node, many.as_bytes()).status, 431);
    let long = format!("{request}X: {}", "x".repeat(64 << 10));
    assert_eq!(refused(&node, long.as_bytes()).status, 431);
    let target = format!("GET {}{} HTTP/1.1\r\n", origin.url("/"), "x".repeat(9 << 10));
    assert_eq!(refused(&node, target.as_bytes()).status, 414);
    for body in [
        format!("3;{}\r\nabc\r\n0\r\n\r\n", "x".repeat(5 << 10)),
        format!("0\r\nX: {}\r\n\r\n", "x".repeat(17 << 10)),
        format!("0\r\n{}\r\n", "X: 1\r\n".repeat(101)),
    ] {
        let mut client = Client::new(node.entry());
        let post = request.replacen("GET", "POST", 1);
        client.send(format!("{post}Transfer-Encoding: chunked\r\n\r\n{body}"));
        assert_eq!(client.response(false).status, 400, "{body:.20}");
        assert!(client.is_closed());
        node.ends_with(EndReason::BadRequest);
    }
    assert!(origin.asked().is_empty(), "{:?}", origin.asked());
}

#[test]
fn heads_without_end_from_servers_are_bad_answers() {
    let fields: &'static str = "X: 1\r\n".repeat(101).leak();
    let interim: &'static str = "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(20).leak();
    let long: &'static str = "x".repeat(70 << 10).leak();
    let node = node("", "");
    for text in [
        format!("HTTP/1.1 200 OK\r\n{fields}Content-Length: 0\r\n\r\n"),
        format!("HTTP/1.1 200 OK\r\nX: {long}\r\n\r\n"),
        format!("{interim}HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ] {
        let server = raw(text.leak().as_bytes(), silent);
        assert_eq!(Client::new(node.entry()).fetch(&format!("http://{server}/")).status, 502);
        node.ends_with(EndReason::HopFailed);
    }
}

#[test]
fn a_head_that_comes_byte_by_byte_has_its_time() {
    let node = node("", &format!("[limits]\nhandshake_timeout_ms = {SHORT_MS}\n"));
    let mut client = TcpStream::connect(node.entry()).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    client.write_all(b"GET http://web.example/ HTTP/1.1\r\nX: ").unwrap();
    let mut got = Vec::new();
    // One byte whenever there was nothing to read: there is always some progress, and never a whole head.
    for _ in 0..6_000 {
        let mut buffer = [0; 4096];
        match client.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => got.extend_from_slice(&buffer[..n]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if client.write_all(b"x").is_err() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    assert!(got.starts_with(b"HTTP/1.1 408 "), "{:?}", String::from_utf8_lossy(&got));
    node.ends_with(EndReason::HandshakeTimeout);
}

#[test]
fn a_body_that_stops_coming_ends_its_own_request_only() {
    let origin = Origin::start(|request| ok("", &format!("{} bytes", request.content.len())));
    let node = impatient("");
    let mut slow = Client::new(node.entry());
    let (url, host) = (origin.url("/"), origin.address);
    slow.send(format!("POST {url}slow HTTP/1.1\r\nHost: {host}\r\nContent-Length: 10\r\n\r\nabc"));
    let other = Client::new(node.entry()).ask("POST", &url, "Content-Length: 0");
    assert_eq!(other.text(), "0 bytes");
    assert_eq!(slow.response(false).status, 504);
    assert!(slow.is_closed());
    let reasons: Vec<_> = node.ended(2).iter().map(|ended| ended.reason).collect();
    assert!(reasons.contains(&EndReason::Ok) && reasons.contains(&EndReason::Idle), "{reasons:?}");
    // Whatever server's connection has half a body is of no use to the next request.
    assert_eq!(Client::new(node.entry()).fetch(&url).text(), "0 bytes");
}

#[test]
fn a_body_that_comes_too_slowly_ends_where_a_rule_says_how_long_it_may_take() {
    let origin = Origin::start(|_| ok("", "whole"));
    let node = node("", "[[rule]]\nname = 'all'\ncarrier = 'direct'\nlifetime_ms = 400\n");
    let mut client = TcpStream::connect(node.entry()).unwrap();
    client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let head = format!("POST {} HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n", origin.url("/"));
    client.write_all(head.as_bytes()).unwrap();
    let mut is_over = false;
    for _ in 0..6_000 {
        match client.read(&mut [0; 4096]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                is_over = client.write_all(b"x").is_err();
            }
            _ => is_over = true,
        }
        if is_over {
            break;
        }
    }
    assert!(is_over);
    node.ends_with(EndReason::Lifetime);
}

#[test]
fn a_server_that_stalls_is_given_up_and_what_it_sent_is_not_stored() {
    let node = impatient("cache = {}");
    for bytes in [
        &b""[..],
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-",
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    ] {
        let server = raw(bytes, silent);
        let url = format!("http://{server}/slow");
        let answer = Client::new(node.entry()).try_ask(&url);
        let is_cut = bytes.ends_with(b"half") || bytes.ends_with(b"half\r\n");
        assert_eq!(answer.map(|answer| answer.status), (!is_cut).then_some(504), "{bytes:?}");
        node.ends_with(EndReason::Idle);
        let stored = Client::new(node.entry()).ask("GET", &url, "Cache-Control: only-if-cached");
        assert_eq!(stored.status, 504, "{bytes:?}");
        node.ends_with(EndReason::Ok);
    }
}

#[test]
fn a_server_that_resets_leaves_nothing_behind() {
    let node = node("cache = {}", "");
    for bytes in [
        &b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 100\r\n\r\nhalf"[..],
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        // By its close alone the end is known: a reset is none.
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\n\r\nhalf",
    ] {
        let url = format!("http://{}/", raw(bytes, reset));
        for _ in 0..2 {
            let answer = Client::new(node.entry()).try_ask(&url);
            // The reset may be there before we have read what came before it.
            assert!(answer.as_ref().is_none_or(|answer| answer.status == 502), "{answer:?}");
            node.ends_with(EndReason::ServerReset);
        }
    }
}

#[test]
fn a_server_that_lies_about_its_length_is_never_taken_for_another() {
    const POISON: &[u8] =
        b"HTTP/1.1 200 OK\r\nCache-Control: max-age=60\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\
        Cache-Control: max-age=60\r\nContent-Length: 6\r\n\r\npoison";
    let origin = Origin::start(|request| match request.path() {
        "/more" => Act::Send(POISON.to_vec()),
        "/none" => Act::Send(
            b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison".to_vec(),
        ),
        "/head" => Act::Send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison".to_vec()),
        path => ok("Cache-Control: max-age=60", path),
    });
    for listener in ["", "cache = {}"] {
        let node = node(listener, "");
        let mut client = Client::new(node.entry());
        for round in 0..10 {
            assert_eq!(client.fetch(&origin.url("/more")).text(), "ok");
            assert_eq!(client.fetch(&origin.url("/none")).status, 204);
            assert_eq!(client.ask("HEAD", &origin.url("/head"), "").status, 200);
            let path = format!("/right/{round}");
            assert_eq!(client.fetch(&origin.url(&path)).text(), path);
        }
    }
}

#[test]
fn a_client_that_does_not_read_is_given_up() {
    let origin = Origin::start(|_| ok("", &"x".repeat(16 << 20)));
    let node = impatient("");
    let mut client = Client::new(node.entry());
    client.send(format!("GET {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url("/slow")));
    node.ends_with(EndReason::Idle);
    assert!(client.try_response(false).is_none(), "what it has is not all");
}

/// Clients at once.
const CLIENTS: usize = 10_000;
/// A process that may have 20,000 files serves at least this number of them; the others are told at once.
const SERVED_MIN: usize = 9_000;

#[test]
fn ten_thousand_clients_at_once_are_served_or_told_that_they_are_not() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    assert!(
        limit.maximum.is_none_or(|most| most >= 20_000),
        "this test needs 20,000 open files, the hard limit is {:?}: raise it (ulimit -Hn)",
        limit.maximum
    );
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current: limit.maximum, ..limit }).unwrap();
    let folder = folder();
    let origin = Origin::start(|request| ok("Cache-Control: max-age=600", request.path()));
    let up = Up::start(&config(folder.path(), ""));
    let url = origin.url("/page");
    let request = format!("GET {url} HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(Client::new(up.entry).fetch(&url).text(), "/page");
    let open = || {
        let mut stream = TcpStream::connect_timeout(&up.entry, LIMIT).ok()?;
        stream.write_all(request.as_bytes()).ok()?;
        Some(Client::over(stream))
    };
    let clients: Vec<_> = (0..CLIENTS).filter_map(|_| open()).collect();
    let mut served: Vec<Client> = Vec::new();
    for mut client in clients {
        if let Some(response) = client.try_response(false) {
            assert!(response.is_hit() && response.text() == "/page", "{response:?}");
            served.push(client);
        }
    }
    assert!(served.len() >= SERVED_MIN, "{} of {CLIENTS}", served.len());
    // They are kept, and served again; the last of them, since a slow machine may take longer than one may be idle.
    for client in served.iter_mut().rev().take(100) {
        assert!(client.fetch(&url).is_hit());
    }
    assert_eq!(origin.asked().len(), 1);
    drop(served);
    awaited("room for others", || Client::new(up.entry).try_ask(&url));
}

#[test]
fn clients_that_ask_nothing_leave_for_those_that_do() {
    let origin = Origin::start(|_| ok("", "served"));
    let node = node("", "[limits]\nmax_handshakes = 1\nhandshake_timeout_ms = 3600000\n");
    let mut silent = TcpStream::connect(node.entry()).unwrap();
    silent.set_nonblocking(true).unwrap();
    awaited("the silent one leaves", || {
        let mut client = Client::new(node.entry());
        // Where several workers accept, it may come before the silent one, and leave for it.
        if let Some(answer) = client.try_ask(&origin.url("/")) {
            assert_eq!((answer.status, answer.text().as_str()), (200, "served"));
        }
        match silent.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            _ => Some(()),
        }
    });
    let mut kept = Client::new(node.entry());
    kept.fetch(&origin.url("/"));
    // A connection that has asked is not among those that wait.
    Client::new(node.entry()).fetch(&origin.url("/"));
    assert_eq!(kept.fetch(&origin.url("/")).status, 200);
}
