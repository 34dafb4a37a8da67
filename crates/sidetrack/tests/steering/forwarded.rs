//! Connections of other hosts, caught on a router.

use crate::node::peers::{Client, Server, visit};
use crate::node::traces::Traces;
use crate::node::{Up, at};
use sidetrack_testkit::{Line, is_root};

const TPROXY: &str = "[[listen]]\nname = \"router\"\nkind = \"tproxy\"\ninterfaces = [\"to-client\"]\n";
const REDIRECT: &str = "[[listen]]\nname = \"router\"\nkind = \"redirect\"\nlocal = false\nforwarded = true\n\
                        interfaces = [\"to-client\"]\n";

fn rule(keep_client_address: bool) -> String {
    format!(
        "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\nkeep_client_address = {keep_client_address}\n"
    )
}

/// Flows from the client's host through the router to the server, each IP version: whom does the server see?
fn through_the_router(listen: &str, keep_client_address: bool) {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
    let own = line.router.run(|| ["10.0.2.254", "fd00:2::fe"].map(Server::start));
    let before = line.router.run(Traces::now);
    let tables = format!("{listen}{}", rule(keep_client_address));
    let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    for (server, router) in servers.iter().zip(["10.0.2.254", "fd00:2::fe"]) {
        let to = server.address;
        let (client, seen, down) = line.client.run(move || visit(to, &[7; 100_000]));
        let expected = if keep_client_address { client.ip() } else { at(router, 0).ip() };
        assert_eq!(seen.ip(), expected);
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert_eq!((record.address("client"), record.address("orig_dst")), (client, to));
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (100_000, down));
    }
    for server in own {
        // The router's own addresses, and its own connections, are not meant.
        let to = server.address;
        let (client, seen, _) = line.client.run(move || visit(to, b"word"));
        assert_eq!(client, seen);
    }
    let to = servers[0].address;
    let (client, seen, _) = line.router.run(move || visit(to, b"word"));
    assert_eq!(client, seen);
    let (status, rest) = up.stop();
    assert!(status.success());
    assert_eq!(rest.len(), 0, "{rest:?}");
    line.router.run(move || before.expect_back("after the end"));
}

/// A server of another host on the very port that our listener has here.
fn on_our_own_port(listen: &str) {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
    for server in &servers {
        let to = server.address;
        let port = to.port();
        let tables = format!("{listen}address = \"*:{port}\"\n{}", rule(false));
        let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        let (client, seen, _) = line.client.run(move || visit(to, b"word"));
        assert_ne!(client.ip(), seen.ip(), "carried on by us");
        assert_eq!(up.record().fate(), ("all", "direct", "ok"));
        let own = at(if to.is_ipv4() { "10.0.1.254" } else { "fd00:1::fe" }, port);
        line.client.run(move || Client::connect(own).map(drop)).expect_err("a loop");
        assert_eq!(up.record().text("reason"), "loop", "our own address is meant");
        assert!(up.stop().0.success());
    }
}

#[test]
fn redirect_knows_its_own_port_elsewhere_from_a_loop() {
    on_our_own_port(REDIRECT);
}

#[test]
fn tproxy_knows_its_own_port_elsewhere_from_a_loop() {
    on_our_own_port(TPROXY);
}

#[test]
fn a_port_for_a_server_carries_on_from_the_clients_address_in_user_space_too() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
    for (server, door) in servers.iter().zip(["10.0.1.254:80", "[fd00:1::fe]:80"]) {
        let before = line.router.run(Traces::now);
        let tables = format!(
            "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"{door}\"\nto = \"{}\"\n{}",
            server.address,
            rule(true)
        );
        let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        let (client, seen, _) = line.client.run(move || visit(door.parse().expect(door), &[7; 100_000]));
        assert_eq!(client.ip(), seen.ip());
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert!(up.stop().0.success());
        line.router.run(move || before.expect_back("after the end"));
    }
}

#[test]
fn redirect_carries_on_from_the_routers_address() {
    through_the_router(REDIRECT, false);
}

#[test]
fn tproxy_carries_on_from_the_routers_address() {
    through_the_router(TPROXY, false);
}

#[test]
fn tproxy_carries_on_from_the_clients_address() {
    through_the_router(TPROXY, true);
}
