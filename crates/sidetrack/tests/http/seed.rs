//! The tests of "Heigh performance proxy", Sec. 3.1: six suites, 18 assertions, in this reading: a client's sudden exit
//! before sending, after sending and after receiving, each by GET and by CONNECT (6); connections, GET, CONNECT and
//! both mixed, each one by one and at once (8); bad requests: incomplete, random, no such host, and many at once (4).
//! After each the proxy still serves.

use crate::client::Client;
use crate::node::Node;
use crate::origin::{Origin, ok};
use crate::proxy::node;
use std::net::SocketAddr;

struct Scene {
    origin: Origin,
    node: Node,
}

impl Scene {
    fn new() -> Self {
        Self { origin: Origin::start(|request| ok("", request.path())), node: node("", "") }
    }

    fn still_serves(&self) -> bool {
        get(self.node.entry(), self.origin.address, "/still")
    }
}

fn get(proxy: SocketAddr, to: SocketAddr, path: &str) -> bool {
    let response = Client::new(proxy).fetch(&format!("http://{to}{path}"));
    response.status == 200 && response.text() == path
}

fn connect(proxy: SocketAddr, to: SocketAddr, path: &str) -> bool {
    let mut client = Client::new(proxy);
    client.send(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    let opened = client.response(true).status == 200;
    client.send(format!("GET {path} HTTP/1.1\r\nHost: {to}\r\n\r\n"));
    opened && client.response(false).text() == path
}

/// Runs `one` by one and then 16 at once; whether all went well.
fn one_by_one_and_at_once(scene: &Scene, one: fn(SocketAddr, SocketAddr, usize) -> bool) -> (bool, bool) {
    let (proxy, to) = (scene.node.entry(), scene.origin.address);
    let one_by_one = (0..16).all(|number| one(proxy, to, number));
    let threads: Vec<_> = (0..16).map(|number| std::thread::spawn(move || one(proxy, to, number))).collect();
    let at_once = threads.into_iter().map(|thread| thread.join().unwrap()).fold(true, |all, good| all & good);
    (one_by_one, at_once)
}

#[test]
fn a_clients_sudden_exit() {
    let scene = Scene::new();
    let (proxy, to) = (scene.node.entry(), scene.origin.address);
    let requests = [
        format!("GET http://{to}/x HTTP/1.1\r\nHost: {to}\r\n\r\n"),
        format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n"),
    ];
    for request in &requests {
        drop(Client::new(proxy));
        assert!(scene.still_serves(), "before sending");
        let mut client = Client::new(proxy);
        client.send(request);
        drop(client);
        assert!(scene.still_serves(), "after sending");
        let mut client = Client::new(proxy);
        client.send(request);
        client.response(request.starts_with("CONNECT"));
        drop(client);
        assert!(scene.still_serves(), "after receiving");
    }
}

#[test]
fn multiple_connections() {
    let scene = Scene::new();
    let (one_by_one, at_once) = one_by_one_and_at_once(&scene, |proxy, _, _| {
        drop(Client::new(proxy));
        true
    });
    assert!(one_by_one && scene.still_serves());
    assert!(at_once && scene.still_serves());
}

#[test]
fn multiple_get_requests() {
    let (one_by_one, at_once) =
        one_by_one_and_at_once(&Scene::new(), |proxy, to, number| get(proxy, to, &format!("/{number}")));
    assert!(one_by_one);
    assert!(at_once);
}

#[test]
fn multiple_connect_requests() {
    let (one_by_one, at_once) =
        one_by_one_and_at_once(&Scene::new(), |proxy, to, number| connect(proxy, to, &format!("/{number}")));
    assert!(one_by_one);
    assert!(at_once);
}

#[test]
fn multiple_get_and_connect_requests() {
    let (one_by_one, at_once) = one_by_one_and_at_once(&Scene::new(), |proxy, to, number| {
        let path = format!("/{number}");
        if number % 2 == 0 { get(proxy, to, &path) } else { connect(proxy, to, &path) }
    });
    assert!(one_by_one);
    assert!(at_once);
}

#[test]
fn bad_requests() {
    let scene = Scene::new();
    let proxy = scene.node.entry();
    let mut incomplete = Client::new(proxy);
    incomplete.send("GET / HTTP/1.1\r\n\r\n");
    let response = incomplete.response(false);
    assert!(response.status == 400 && response.text().contains("Bad Request!") && scene.still_serves());
    let mut random = Client::new(proxy);
    random.send("\x01\x02random\r\n\r\n");
    assert!(random.response(false).text().contains("Bad Request!") && scene.still_serves());
    let nowhere = Client::new(proxy).fetch("http://no-such-host.invalid/");
    assert!(nowhere.status == 502 && scene.still_serves(), "{nowhere:?}");
    let (_, at_once) = one_by_one_and_at_once(&scene, |proxy, _, number| {
        let mut client = Client::new(proxy);
        client.send(format!("{number} nonsense\r\n\r\n"));
        client.response(false).status == 400
    });
    assert!(at_once && scene.still_serves());
}
