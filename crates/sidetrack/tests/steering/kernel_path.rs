//! Flows that the kernel carries alone: where they go, and their records.

use crate::node::peers::{Client, Server, visit};
use crate::node::{Up, admin};
use sidetrack_testkit::{Line, is_root};
use std::net::SocketAddr;

/// A reverse listener for each IP version on the router.
fn reverse(servers: &[Server; 2], keep: bool) -> String {
    let [v4, v6] = servers.each_ref().map(|server| server.address);
    format!(
        "[[listen]]\nname = \"port4\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"{v4}\"\n\
         [[listen]]\nname = \"port6\"\nkind = \"reverse\"\naddress = \"[::]:80\"\nto = \"{v6}\"\n\
         [[rule]]\nname = \"four\"\nmatch = {{ listener = \"port4\" }}\ncarrier = \"direct\"\n\
         keep_client_address = {keep}\n\
         [[rule]]\nname = \"six\"\ncarrier = \"direct\"\nkeep_client_address = {keep}\n"
    )
}

const DOORS: [(&str, &str, &str); 2] =
    [("10.0.1.254:80", "four", "10.0.2.254"), ("[fd00:1::fe]:80", "six", "fd00:2::fe")];

#[test]
fn reverse_becomes_dnat_and_is_recorded() {
    if !is_root() {
        return;
    }
    for keep in [false, true] {
        let line = Line::new();
        let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
        let tables = reverse(&servers, keep);
        let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        for ((to, rule, router), server) in DOORS.into_iter().zip(&servers) {
            let (client, seen, down) = line.client.run(move || visit(to.parse().expect(to), &[1; 3000]));
            assert_eq!(seen.ip(), if keep { client.ip() } else { router.parse().expect(router) });
            let record = up.record();
            assert_eq!(record.fate(), (rule, "kernel", "kernel_closed"), "{record:?}");
            assert_eq!((record.address("client"), record.address("orig_dst")), (client, server.address));
            // Bytes of the kernel are those of packets, headers and what is sent again on a busy machine included.
            assert!((3000..6000).contains(&record.number("bytes_up")), "{record:?}");
            assert!((down..2 * down).contains(&record.number("bytes_down")), "{record:?}");
        }
        let (status, rest) = up.stop();
        assert!(status.success());
        assert_eq!(rest.len(), 0, "once each: {rest:?}");
    }
}

#[test]
fn flows_in_flight_are_listed_and_end_with_us() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
    let tables = reverse(&servers, false);
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let mut clients = line.client.run(|| {
        DOORS.map(|(to, ..)| {
            let mut client = Client::connect(to.parse().expect(to)).expect("connect");
            client.echo(&[2; 5000]).expect("echo");
            client
        })
    });
    let listed = admin::flows(&up);
    assert_eq!(listed.len(), 2, "{listed:?}");
    for (record, client) in listed.iter().zip(&clients) {
        assert_eq!(record.address("client"), client.address);
        assert!(record.number("bytes_up") >= 5000 && record.0["reason"].is_null(), "{record:?}");
    }
    let again = admin::flows(&up);
    let numbers =
        |records: &[crate::node::Record]| -> Vec<_> { records.iter().map(|r| r.number("flow")).collect() };
    assert_eq!(numbers(&again), numbers(&listed), "a flow keeps its number");
    let (status, records) = up.stop();
    assert!(status.success());
    assert_eq!(numbers(&records), numbers(&listed), "{records:?}");
    for (record, client) in records.iter().zip(&mut clients) {
        assert_eq!(record.text("reason"), "shutdown", "{record:?}");
        assert!(record.text("detail").contains("rewritten by our rules"), "{record:?}");
        assert!(record.number("bytes_down") >= 5000);
        client.echo(b"?").expect_err("nobody rewrites addresses in this namespace any more");
    }
}

/// A connection that a rule lets go where it was going anyway.
fn left_alone(
    up: &mut Up,
    (client, seen, down): (SocketAddr, SocketAddr, u64),
    to: SocketAddr,
    masqueraded: bool,
) {
    assert_eq!(client != seen, masqueraded, "{client} seen as {seen}");
    let record = up.record();
    assert_eq!(record.fate(), ("left", "kernel", "kernel_closed"), "{record:?}");
    assert_eq!((record.address("client"), record.address("orig_dst")), (client, to));
    assert!((down..2 * down).contains(&record.number("bytes_down")), "{record:?}");
    assert_eq!(record.text("listener"), "out");
}

const RULES: &str = "[[rule]]\nname = \"by-name\"\nmatch = { to = \"192.0.2.0/24\", host = \"www.example\" }\n\
                     action = \"deny\"\n[[rule]]\nname = \"left\"\nmatch = { to = [\"10.0.2.0/24\", \"fd00:2::/64\"] }\n\
                     carrier = \"direct\"\n";

#[test]
fn direct_rules_of_a_redirect_listener_stay_in_the_kernel() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
    let tables = format!("[[listen]]\nname = \"out\"\nkind = \"redirect\"\nports = \"1-65535\"\n{RULES}");
    let mut up = line.client.run(move || Up::start("default = \"deny\"\n", &tables));
    for server in &servers {
        let to = server.address;
        let seen = line.client.run(move || visit(to, &[3; 4000]));
        left_alone(&mut up, seen, to, false);
    }
    let to = servers[0].address;
    let mut client = line.client.run(move || Client::connect(to).expect("connect"));
    let (status, records) = up.stop();
    assert!(status.success());
    let [record] = records.as_slice() else { panic!("one: {records:?}") };
    assert_eq!(record.fate(), ("left", "kernel", "shutdown"));
    assert!(record.text("detail").contains("carries it on"), "{record:?}");
    client.echo(b"and on it goes").expect("it needs us no more");
}

#[test]
fn direct_rules_of_a_tproxy_listener_stay_in_the_kernel() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Server::start));
    for keep in [false, true] {
        let tables = format!(
            "[[listen]]\nname = \"out\"\nkind = \"tproxy\"\ninterfaces = \"to-client\"\n{RULES}\
             keep_client_address = {keep}\n"
        );
        let mut up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
        for server in &servers {
            let to = server.address;
            let seen = line.client.run(move || visit(to, &[3; 4000]));
            left_alone(&mut up, seen, to, !keep);
        }
        assert!(up.stop().0.success());
    }
}
