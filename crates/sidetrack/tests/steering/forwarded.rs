//! Connections of other hosts, caught on a router.

use crate::hosts::{Line, is_root};
use crate::node::peers::{Server, visit};
use crate::node::traces::Traces;
use crate::node::{Up, at};

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
    assert_eq!(line.router.run(Traces::now), before);
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
