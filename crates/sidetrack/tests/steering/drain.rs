//! SIGTERM while the kernel leads connections to our listeners: flows go on, and new connections pass as if we did not run.

use crate::datagrams;
use crate::node::Up;
use crate::node::peers::{Client, Server, visit};
use crate::node::traces::Traces;
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{Line, Node, eventually, is_root};
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

const LOCAL: &str = "kind = \"redirect\"\n";
const FORWARDED: &str =
    "kind = \"redirect\"\nlocal = false\nforwarded = true\ninterfaces = [\"to-client\"]\n";
const TPROXY: &str = "kind = \"tproxy\"\ninterfaces = [\"to-client\"]\n";

fn up(host: &Node, top: &str, listen: &str, to: SocketAddr) -> Up {
    let top = format!("default = \"deny\"\n{top}");
    let tables = format!(
        "[limits]\ndrain_ms = 3600000\n[[listen]]\n{listen}ports = {}\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
        to.port()
    );
    host.run(move || Up::start(&top, &tables))
}

/// Visits from a host: whether the connection was caught.
fn caught(client: &Node, to: SocketAddr) -> bool {
    let (client, seen, _) = client.run(move || visit(to, b"word"));
    client != seen
}

/// Told to stop, sidetrack on `host` keeps the flow of `client`, and all that `client` connects meanwhile reaches the server.
fn new_connections_pass(host: &Node, client: &Node, listen: &str, to: SocketAddr) {
    let before = host.run(Traces::now);
    let mut up = up(host, "", listen, to);
    let mut flow = client.run(move || Client::connect(to)).expect("a connection");
    flow.echo(b"before").expect("an echo");
    assert_ne!(flow.address, flow.seen_as, "it is caught");
    let is_over = Arc::new(AtomicBool::new(false));
    let until = is_over.clone();
    // None of them fails, at whatever moment it comes.
    let visits = client.run(move || {
        std::thread::spawn(move || {
            let mut visits = 0_u32;
            while !until.load(Relaxed) {
                visit(to, b"meanwhile");
                visits += 1;
            }
            visits
        })
    });
    up.signal(Signal::TERM);
    up.log_line("that it drains", |line| line.contains("draining"));
    for _ in 0..3 {
        assert!(!caught(client, to), "as if it did not run");
    }
    is_over.store(true, Relaxed);
    assert!(visits.join().expect("every visit went well") > 0);
    flow.echo(&[7; 100_000]).expect("the flow goes on");
    let address = flow.address;
    flow.close().expect("an orderly end");
    let (status, records) = up.gone();
    let ours: Vec<_> = records.iter().filter(|record| record.address("client") == address).collect();
    assert!(status.success() && ours.len() == 1 && ours[0].text("reason") == "ok", "{status} {records:?}");
    assert!(records.iter().all(|record| record.text("reason") == "ok"), "{records:?}");
    host.run(move || before.expect_back("after the end"));
}

#[test]
fn new_connections_of_this_host_pass_and_flows_go_on() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    for server in line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start)) {
        new_connections_pass(&line.client, &line.client, LOCAL, server.address);
    }
}

#[test]
fn new_forwarded_connections_pass_and_flows_go_on() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    for server in line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start)) {
        for listen in [FORWARDED, TPROXY] {
            new_connections_pass(&line.router, &line.client, listen, server.address);
        }
    }
}

#[test]
fn with_on_crash_closed_new_connections_are_refused_until_the_end() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| Server::start("10.0.2.1"));
    let to = server.address;
    let mut up = up(&line.client, "on_crash = \"closed\"\n", LOCAL, to);
    let mut flow = line.client.run(move || Client::connect(to)).expect("a connection");
    up.signal(Signal::TERM);
    up.log_line("that it drains", |line| line.contains("draining"));
    // A worker may be busy, and close its listener a moment later.
    eventually("new connections are refused", || line.client.run(move || Client::connect(to).is_err()));
    flow.echo(b"still").expect("the flow goes on");
    flow.close().expect("an orderly end");
    assert!(up.gone().0.success());
    assert!(!caught(&line.client, to), "nothing is left");
}

/// Told to stop, sidetrack on `host` keeps the association of `client`, and another one that begins meanwhile passes directly.
fn associations_go_on(host: &Node, client: &Node, listen: &str, to: SocketAddr) {
    let before = host.run(Traces::now);
    let listen = format!("name = \"out\"\nprotocol = \"udp\"\n{listen}");
    let mut up = up(host, "", &listen, to);
    let [flow, new] = client.run(move || [datagrams::client(to), datagrams::client(to)]);
    let own = |socket: &UdpSocket| socket.local_addr().expect("an address");
    let seen_as = datagrams::seen(&flow);
    assert_ne!(seen_as, own(&flow), "it is caught");
    up.signal(Signal::TERM);
    up.log_line("that it drains", |line| line.contains("draining"));
    assert_eq!(datagrams::seen(&new), own(&new), "as if it did not run");
    assert_eq!(datagrams::seen(&flow), seen_as, "the association goes on");
    assert_eq!(datagrams::seen(&new), own(&new), "its second datagram, too");
    up.signal(Signal::TERM);
    let (status, records) = up.gone();
    assert!(status.success() && records.len() == 1, "{status} {records:?}");
    assert_eq!((records[0].address("client"), records[0].text("reason")), (own(&flow), "shutdown"));
    assert_eq!((records[0].number("packets_up"), records[0].number("packets_down")), (2, 2));
    host.run(move || before.expect_back("after the end"));
}

#[test]
fn associations_go_on_and_new_ones_pass() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    for server in line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Echo::start)) {
        associations_go_on(&line.client, &line.client, LOCAL, server.address);
        associations_go_on(&line.router, &line.client, TPROXY, server.address);
    }
}
