//! The tests of "Heigh performance proxy", Sec. 3.1: six suites (a module each) with 18 assertions (a test each).
//! `make test-seed003` runs them and prints the document's tables.
//!
//! The document does not list its assertions. This is our reading: a client's sudden exit before sending, after
//! sending and after receiving, each by GET and by CONNECT (6); connections, GET, CONNECT and both mixed, each one by
//! one and at once (8); bad requests: incomplete, random, for a host that does not exist, and many at once (4). After
//! each of them the proxy still serves.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Origin, ok};
use crate::proxy::node;
use std::net::SocketAddr;

/// Clients of one assertion, one by one or at once.
const CLIENTS: usize = 16;

struct Scene {
    origin: Origin,
    node: Node,
}

impl Scene {
    fn new() -> Self {
        Self { origin: Origin::start(|request| ok("", request.path())), node: node("", "") }
    }

    fn client(&self) -> Client {
        Client::new(self.node.entry())
    }

    /// The proxy serves one more client.
    fn still_serves(&self) {
        get(self.node.entry(), self.origin.address, 0);
    }

    /// Runs `one` for each client, one after the other. Then the proxy still serves.
    fn one_by_one(&self, one: One) {
        (0..CLIENTS).for_each(|number| one(self.node.entry(), self.origin.address, number));
        self.still_serves();
    }

    /// Runs `one` for all clients at once. Then the proxy still serves.
    fn at_once(&self, one: One) {
        let (proxy, to) = (self.node.entry(), self.origin.address);
        std::thread::scope(|scope| {
            (0..CLIENTS).for_each(|number| drop(scope.spawn(move || one(proxy, to, number))));
        });
        self.still_serves();
    }
}

/// What one client does: with the proxy, for a server, as the client with this number. It panics if it is not served.
type One = fn(SocketAddr, SocketAddr, usize);

fn get(proxy: SocketAddr, to: SocketAddr, number: usize) {
    let response = Client::new(proxy).fetch(&format!("http://{to}/{number}"));
    assert_eq!((response.status, response.text()), (200, format!("/{number}")));
}

fn connect(proxy: SocketAddr, to: SocketAddr, number: usize) {
    let mut client = Client::new(proxy);
    client.send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    assert_eq!(client.response(true).status, 200);
    client.send(format!("GET /{number} HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    assert_eq!(client.response(false).text(), format!("/{number}"));
}

fn get_or_connect(proxy: SocketAddr, to: SocketAddr, number: usize) {
    if number.is_multiple_of(2) { get(proxy, to, number) } else { connect(proxy, to, number) }
}

/// The client connects and leaves.
fn visit(proxy: SocketAddr, _: SocketAddr, _: usize) {
    drop(Client::new(proxy));
}

/// The client sends what is not a request, and gets the document's answer.
fn nonsense(proxy: SocketAddr, _: SocketAddr, number: usize) {
    refused(Client::new(proxy), format!("{number} nonsense\r\n\r\n").as_bytes());
}

fn refused(mut client: Client, bytes: &[u8]) {
    client.send(bytes);
    let response = client.response(false);
    assert!(response.status == 400 && response.text().contains("Bad Request!"), "{response:?}");
}

mod sudden_exit {
    use super::Scene;

    /// When the client exits.
    #[derive(PartialEq, PartialOrd)]
    enum Exit {
        BeforeSending,
        AfterSending,
        AfterReceiving,
    }

    fn exit(method: &str, when: Exit) {
        let scene = Scene::new();
        let to = scene.origin.address;
        let target = if method == "GET" { format!("http://{to}/x") } else { to.to_string() };
        let request = format!("{method} {target} HTTP/1.1\r\nHost: {to}\r\n\r\n");
        let mut client = scene.client();
        // Before sending all of it: a request that stops in its head.
        let sent = if when == Exit::BeforeSending { method.len() } else { request.len() };
        client.send(&request[..sent]);
        if when == Exit::AfterReceiving {
            assert_eq!(client.response(method == "CONNECT").status, 200);
        }
        drop(client);
        scene.still_serves();
    }

    #[test]
    fn get_before_sending() {
        exit("GET", Exit::BeforeSending);
    }

    #[test]
    fn get_after_sending() {
        exit("GET", Exit::AfterSending);
    }

    #[test]
    fn get_after_receiving() {
        exit("GET", Exit::AfterReceiving);
    }

    #[test]
    fn connect_before_sending() {
        exit("CONNECT", Exit::BeforeSending);
    }

    #[test]
    fn connect_after_sending() {
        exit("CONNECT", Exit::AfterSending);
    }

    #[test]
    fn connect_after_receiving() {
        exit("CONNECT", Exit::AfterReceiving);
    }
}

mod multiple_connections {
    use super::{Scene, visit};

    #[test]
    fn one_by_one() {
        Scene::new().one_by_one(visit);
    }

    #[test]
    fn at_once() {
        Scene::new().at_once(visit);
    }
}

mod multiple_gets {
    use super::{Scene, get};

    #[test]
    fn one_by_one() {
        Scene::new().one_by_one(get);
    }

    #[test]
    fn at_once() {
        Scene::new().at_once(get);
    }
}

mod multiple_connects {
    use super::{Scene, connect};

    #[test]
    fn one_by_one() {
        Scene::new().one_by_one(connect);
    }

    #[test]
    fn at_once() {
        Scene::new().at_once(connect);
    }
}

mod multiple_bad_requests {
    use super::{Scene, nonsense, refused};

    #[test]
    fn incomplete() {
        let scene = Scene::new();
        refused(scene.client(), b"GET / HTTP/1.1\r\n\r\n");
        scene.still_serves();
    }

    #[test]
    fn random() {
        let scene = Scene::new();
        refused(scene.client(), b"\x01\x02random\r\n\r\n");
        scene.still_serves();
    }

    #[test]
    fn no_such_host() {
        let scene = Scene::new();
        let nowhere = scene.client().fetch("http://no-such-host.invalid/");
        assert_eq!(nowhere.status, 502, "{nowhere:?}");
        scene.still_serves();
    }

    #[test]
    fn at_once() {
        Scene::new().at_once(nonsense);
    }
}

mod multiple_gets_and_connects {
    use super::{Scene, get_or_connect};

    #[test]
    fn one_by_one() {
        Scene::new().one_by_one(get_or_connect);
    }

    #[test]
    fn at_once() {
        Scene::new().at_once(get_or_connect);
    }
}
