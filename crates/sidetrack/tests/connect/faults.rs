//! What goes wrong while connections are held: slow far sides, clients that give up, too many of them, and our own end.

use crate::node::{Up, admin};
use rustix::process::Signal;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root, nft};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

/// A SOCKS5 proxy beside the far side that answers a request only when the test says so.
pub(crate) struct Gate {
    requests: Receiver<TcpStream>,
}

const GATE: &str = "10.0.2.1:1080";

impl Gate {
    pub(crate) fn open(line: &Line) -> Self {
        // Hundreds of clients, and as many requests.
        sidetrack_sys::caps::raise_open_files_limit().expect("a limit");
        let (tell, requests) = channel();
        line.server.run(move || {
            let listener = TcpListener::bind(GATE).expect("listen");
            std::thread::spawn(move || {
                for mut client in listener.incoming().map_while(Result::ok) {
                    let mut greeting = [0; 3];
                    if client.read_exact(&mut greeting).is_err() || client.write_all(&[5, 0]).is_err() {
                        continue;
                    }
                    // CONNECT to an IPv4 address.
                    if client.read_exact(&mut [0; 10]).is_ok() && tell.send(client).is_err() {
                        return;
                    }
                }
            });
        });
        Self { requests }
    }

    /// The next request, which waits for its answer.
    pub(crate) fn request(&self) -> TcpStream {
        self.requests.recv_timeout(LIMIT).expect("a request in time")
    }
}

pub(crate) fn answer(request: &mut TcpStream, code: u8) {
    request.write_all(&[5, code, 0, 1, 0, 0, 0, 0, 0, 0]).expect("the proxy's client is there");
}

/// The node whose flows go to the gate.
pub(crate) fn gated(line: &Line, top: &'static str) -> Up {
    line.router.run(move || Up::start(top, &tables("")))
}

pub(crate) fn tables(more: &str) -> String {
    format!(
        "[limits]\nconnect_timeout_ms = 60000\ndrain_ms = 0\n[[listen]]\nname = \"r\"\nkind = \"redirect\"\ndst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n[[rule]]\nname = \"all\"\n\
         carrier = \"socks5://{GATE}\"\nconnect = \"faithful\"\n{more}"
    )
}

pub(crate) const OPEN: &str = "default = \"deny\"\n";
pub(crate) const TO: &str = "10.0.2.1:7001";

pub(crate) fn to() -> SocketAddr {
    TO.parse().expect("an address")
}

/// A client that connects in a thread of this host.
fn connecting(line: &Line) -> JoinHandle<std::io::Result<TcpStream>> {
    line.router.run(|| std::thread::spawn(|| TcpStream::connect(to())))
}

/// A client that begins to connect from this port, and goes on.
pub(crate) fn begin(line: &Line, port: u16) -> Socket {
    line.router.run(move || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("set");
        socket.bind(&SockAddr::from(SocketAddr::from(([10, 0, 2, 254], port)))).expect("bind");
        socket.set_nonblocking(true).expect("set");
        let error = socket.connect(&to().into()).expect_err("in progress");
        assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS));
        socket
    })
}

/// The value of a metric.
pub(crate) fn metric(up: &Up, name: &str) -> u64 {
    let text = admin::show(up, "/metrics");
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or(" 0");
    line.trim().parse().expect("a number")
}

#[test]
fn a_far_side_that_takes_longer_than_retransmissions_is_waited_for() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let mut up = gated(&line, OPEN);
    let (accepted, refused) = (connecting(&line), connecting(&line));
    let mut requests = [gate.request(), gate.request()];
    // The client's kernel sends its SYN again after 1 s and 3 s.
    eventually("both SYNs came three times", || metric(&up, "sidetrack_held_repeated_total") >= 4);
    assert!(!accepted.is_finished() && !refused.is_finished(), "no answer before the far side's");
    assert_eq!(metric(&up, "sidetrack_held_connections"), 2);
    answer(&mut requests[0], 0);
    answer(&mut requests[1], 5);
    let results = [accepted, refused].map(|client| client.join().expect("a thread"));
    let accepted = results.iter().filter(|result| result.is_ok()).count();
    let refused = results.iter().filter_map(|result| result.as_ref().err()?.raw_os_error());
    assert_eq!((accepted, refused.collect::<Vec<_>>()), (1, vec![libc::ECONNREFUSED]));
    drop((results, requests));
    let reasons = [up.record(), up.record()].map(|record| {
        assert!(record.0["held_seconds"].as_f64().is_some_and(|held| held > 2.0), "{record:?}");
        record.text("reason").to_owned()
    });
    assert!(reasons.contains(&"refused".to_owned()), "{reasons:?}");
    assert!(up.stop().0.success());
}

#[test]
fn a_client_that_begins_again_from_the_same_port_gets_the_answer_to_its_second_attempt() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let mut up = gated(&line, OPEN);
    let first = begin(&line, 20_001);
    let _first_request = gate.request();
    drop(first);
    let second = begin(&line, 20_001);
    assert_eq!(up.record().text("reason"), "client_gone");
    let mut request = gate.request();
    answer(&mut request, 0);
    eventually("connected", || second.peer_addr().is_ok());
    assert_eq!(metric(&up, "sidetrack_held_total{result=\"replaced\"}"), 1);
    drop((second, request));
    assert_eq!(up.record().text("reason"), "ok");
    assert!(up.stop().0.success());
}

#[test]
fn a_client_that_gave_up_leaves_no_connection_to_the_server() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let mut up = gated(&line, OPEN);
    drop(begin(&line, 20_002));
    let mut request = gate.request();
    answer(&mut request, 0);
    request.set_read_timeout(Some(LIMIT)).expect("limit");
    let ended = request.read(&mut [0]);
    assert!(!matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock), "{ended:?}");
    assert_eq!(up.record().text("reason"), "client_gone");
    assert!(up.stop().0.success());
}

#[test]
fn a_kill_by_hand_and_a_reload_while_connections_are_held() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let mut up = gated(&line, OPEN);
    let killed = connecting(&line);
    let _request = gate.request();
    let flows = admin::flows(&up);
    let (status, body) = admin::ask(&up, "DELETE", &format!("/v1/flows/{}", flows[0].number("flow")));
    assert_eq!(status, 200, "{body}");
    let error = killed.join().expect("a thread").expect_err("refused");
    assert_eq!(error.raw_os_error(), Some(libc::ECONNREFUSED));
    assert_eq!(up.record().text("reason"), "killed");
    // What is held when the configuration changes ends by the rule it began with.
    let held = connecting(&line);
    let mut request = gate.request();
    up.reload(OPEN, &tables("idle_timeout_ms = 5000\n"));
    answer(&mut request, 0);
    let client = held.join().expect("a thread").expect("accepted");
    let again = connecting(&line);
    let mut request = gate.request();
    answer(&mut request, 4);
    let error = again.join().expect("a thread").expect_err("unreachable");
    assert_eq!(error.raw_os_error(), Some(libc::EHOSTUNREACH));
    drop(client);
    assert!(up.stop().0.success());
}

#[test]
fn after_a_kill_the_connect_ends_as_the_network_says() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let server = line.server.run(|| TcpListener::bind(TO).expect("listen"));
    let mut up = gated(&line, OPEN);
    let client = connecting(&line);
    let _request = gate.request();
    up.signal(Signal::KILL);
    up.gone();
    let client = client.join().expect("a thread").expect("the server itself accepts");
    let (_, peer) = server.accept().expect("accept");
    assert_eq!(peer, client.local_addr().expect("an address"), "past us");
    let rules = line.router.run(|| nft("list ruleset"));
    assert!(rules.is_none_or(|rules| !rules.contains("sidetrack")), "no rule is left");
}

#[test]
fn five_hundred_in_a_black_hole_hold_up_no_other() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let mut up = gated(&line, OPEN);
    let clients: Vec<_> = (0..500).map(|number| begin(&line, 21_000 + number)).collect();
    let requests: Vec<_> = clients.iter().map(|_| gate.request()).collect();
    eventually("all are held", || metric(&up, "sidetrack_held_connections") == 500);
    let other = connecting(&line);
    let mut request = gate.request();
    answer(&mut request, 0);
    other.join().expect("a thread").expect("accepted");
    drop((clients, requests, request));
    // A proxy that closes without an answer is a broken way; each flow has its record.
    for _ in 0..501 {
        up.record();
    }
    eventually("none is held", || metric(&up, "sidetrack_held_connections") == 0);
    assert!(up.stop().0.success());
}

#[test]
fn denied_connections_are_told_so() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let gate = Gate::open(&line);
    let denies = "[[rule]]\nname = \"no\"\nmatch = { port = 9 }\naction = \"deny\"\n";
    let tables = tables("");
    let (listen, rule) = tables.split_once("[[rule]]").expect("a rule");
    let tables = format!("{listen}{denies}[[rule]]{rule}");
    let mut up = line.router.run(move || Up::start(OPEN, &tables));
    for (server, expected) in [("10.0.2.1:9", libc::EHOSTUNREACH), ("[fd00:2::1]:9", libc::EACCES)] {
        let error = line.router.run(move || TcpStream::connect(server)).expect_err("denied");
        assert_eq!(error.raw_os_error(), Some(expected), "{server}");
        assert_eq!(up.record().text("reason"), "policy_denied");
    }
    drop(gate);
    assert!(up.stop().0.success());
}
