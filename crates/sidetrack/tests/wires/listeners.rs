//! Every kind of listener whose flows have two sockets.

use crate::node::Up;
use crate::{NO_PINS, RULE, address, metric, on_the_wire};
use sidetrack_testkit::streams::both_ways;
use sidetrack_testkit::{Line, eventually, is_root};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// How the client asks for the server.
#[derive(Clone, Copy)]
pub(crate) enum Door {
    /// A port for this server.
    Reverse,
    Socks5,
    Connect,
    /// The server itself: the router catches it.
    Caught,
}

impl Door {
    pub(crate) fn connect(self, door: SocketAddr, to: SocketAddr) -> TcpStream {
        let mut stream =
            TcpStream::connect(if matches!(self, Self::Caught) { to } else { door }).expect("connected");
        match self {
            Self::Reverse | Self::Caught => {}
            Self::Socks5 => {
                let octets = match to.ip() {
                    IpAddr::V4(ip) => [&[1][..], &ip.octets()].concat(),
                    IpAddr::V6(ip) => [&[4][..], &ip.octets()].concat(),
                };
                let request = [&[5, 1, 0, 5, 1, 0][..], &octets, &to.port().to_be_bytes()].concat();
                stream.write_all(&request).expect("sent");
                // The bound address is ours, of the same version.
                let mut answer = vec![0; 2 + 3 + octets.len() + 2];
                stream.read_exact(&mut answer).expect("an answer");
                assert_eq!(answer[..5], [5, 0, 5, 0, 0], "{answer:?}");
            }
            Self::Connect => {
                write!(stream, "CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").expect("sent");
                let mut answer = [0; 39];
                stream.read_exact(&mut answer).expect("an answer");
                assert_eq!(&answer, b"HTTP/1.1 200 Connection established\r\n\r\n");
            }
        }
        stream
    }
}

/// The kinds of listeners: how the client asks, the table, and whether the listener has an address.
pub(crate) const DOORS: [(Door, &str, bool); 5] = [
    (Door::Reverse, "kind = \"reverse\"\n", true),
    (Door::Socks5, "kind = \"socks\"\n", true),
    (Door::Connect, "kind = \"http\"\n", true),
    (
        Door::Caught,
        "kind = \"redirect\"\nlocal = false\nforwarded = true\ninterfaces = [\"to-client\"]\n",
        false,
    ),
    (Door::Caught, "kind = \"tproxy\"\ninterfaces = [\"to-client\"]\n", false),
];

/// Flows of both IP versions, busy in both directions, through a listener. `then_do` is called when the kernel carries them.
pub(crate) fn through((door, listen, has_address): (Door, &str, bool), then_do: fn(&Up)) {
    if !is_root() {
        return;
    }
    let line = Line::new();
    for (server_at, router_at) in [("10.0.2.1:0", "10.0.1.254:81"), ("[fd00:2::1]:0", "[fd00:1::fe]:81")] {
        let listener = line.server.run(move || TcpListener::bind(server_at).expect("bound"));
        let (to, router_at): (_, SocketAddr) = (address(&listener), router_at.parse().expect("an address"));
        let place = if has_address { format!("address = \"{router_at}\"\n") } else { String::new() };
        let target = if matches!(door, Door::Reverse) { format!("to = \"{to}\"\n") } else { String::new() };
        let tables = format!("{NO_PINS}[[listen]]\nname = \"door\"\n{listen}{place}{target}{RULE}");
        let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        let client = line.client.run(move || door.connect(router_at, to));
        let server = line.server.run(move || listener.accept().expect("accepted").0);
        let enough = Arc::new(AtomicBool::new(false));
        let pause = Some(Duration::from_millis(1));
        let (of_client, of_server) = (enough.clone(), enough.clone());
        let client = std::thread::spawn(move || both_ways(client, [1, 2], &of_client, pause));
        let server = std::thread::spawn(move || both_ways(server, [2, 1], &of_server, pause));
        let then = on_the_wire(&up);
        eventually("the kernel carries more", || {
            let now = on_the_wire(&up);
            ["bytes_up", "bytes_down"].iter().all(|key| now.number(key) > then.number(key) + 1_000_000)
        });
        assert_eq!(metric(&up, "sidetrack_wire_flows "), 1);
        then_do(&up);
        enough.store(true, Relaxed);
        let [sent, received] = client.join().expect("the client");
        assert_eq!(server.join().expect("the server"), [received, sent]);
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (sent, received));
        assert_eq!(record.0["shunted"], true, "{record:?}");
        assert_eq!(metric(&up, "sidetrack_wire_taken_flows_total "), 1);
        assert_eq!(metric(&up, "sidetrack_wire_freeze_seconds_count "), 1);
        let (status, rest) = up.stop();
        assert!(status.success() && rest.is_empty(), "{rest:?}");
    }
}

#[test]
fn a_port_for_a_server() {
    through(DOORS[0], |_| {});
}

#[test]
fn socks() {
    through(DOORS[1], |_| {});
}

#[test]
fn http_connect() {
    through(DOORS[2], |_| {});
}

#[test]
fn redirect() {
    through(DOORS[3], |_| {});
}

#[test]
fn tproxy() {
    through(DOORS[4], |_| {});
}
