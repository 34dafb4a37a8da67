//! Flows of UDP through the program itself, on loopback: what passes, what does not, and one record for each.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

mod between;
mod bind;
mod configuration;
mod functions;
mod hops;
mod masque;
mod multiplexed;
#[path = "../node/mod.rs"]
mod node;
mod programs;
mod run;
mod socks;
mod socks6;
mod socks_shared;
mod tunnelled;

use node::{Up, admin};
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, eventually};
use std::net::{SocketAddr, UdpSocket};

/// The longest payload of UDP over IPv4 (RFC 768: 65,535 bytes with its header; 20 bytes of IP header).
const LONGEST: usize = 65_507;

/// A client that takes answers only from the address it asks.
fn client(to: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind((to.ip(), 0)).unwrap();
    socket.connect(to).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

fn echo(client: &UdpSocket, payload: &[u8]) -> Vec<u8> {
    client.send(payload).unwrap();
    let mut buffer = vec![0; 65_536];
    let length = client.recv(&mut buffer).expect("an answer");
    buffer.truncate(length);
    buffer
}

/// A node with a UDP port for this server. `limits` are lines of its table.
fn up(server: &str, limits: &str, rules: &str) -> Up {
    let drain = if limits.contains("drain_ms") { "" } else { "drain_ms = 0\n" };
    let tables = format!(
        "[limits]\n{drain}{limits}\n[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\n\
         address = \"127.0.0.1:0\"\nto = \"{server}\"\n{rules}"
    );
    Up::start("default = \"deny\"\n", &tables)
}

const DIRECT: &str = "[[rule]]\nname = \"all\"\nmatch = { protocol = \"udp\", listener = \"dns\" }\ncarrier = \"direct\"\nkernel = \"never\"\n";

fn dropped(up: &Up, why: &str) -> u64 {
    let text = admin::show(up, "/metrics");
    let name = format!("sidetrack_datagrams_dropped_total{{reason=\"{why}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |number| number.parse().unwrap())
}

#[test]
fn a_port_leads_to_its_server_and_each_client_is_one_flow() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(&server.address.to_string(), "", DIRECT);
    let entry = up.addresses("dns")[0];
    let clients = [client(entry), client(entry)];
    for payload in [&b"hello"[..], b"", &[7; 1200]] {
        for client in &clients {
            assert_eq!(echo(client, payload), payload);
        }
    }
    let flows = admin::flows(&up);
    assert_eq!(flows.len(), 2);
    assert!(flows.iter().all(|flow| flow.text("protocol") == "udp"), "{flows:?}");
    up.signal(Signal::TERM);
    let records = up.records(2);
    for client in clients {
        let record = &records[&client.local_addr().unwrap()];
        assert_eq!(record.fate(), ("all", "direct", "shutdown"));
        assert_eq!((record.text("intercept"), record.text("listener")), ("reverse", "dns"));
        assert_eq!(record.address("orig_dst"), server.address);
        assert_eq!((record.text("protocol"), record.number("packets_up")), ("udp", 3));
        assert_eq!((record.number("packets_down"), record.number("bytes_up")), (3, 1205));
        assert_eq!(record.number("bytes_down"), 1205);
    }
}

#[test]
fn an_association_that_is_idle_ends() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(&server.address.to_string(), "udp_idle_timeout_ms = 200", DIRECT);
    let client = client(up.addresses("dns")[0]);
    client.send(b"x").unwrap();
    let record = up.record();
    assert_eq!(record.fate(), ("all", "direct", "idle"));
    assert_eq!(record.address("client"), client.local_addr().unwrap());
}

#[test]
fn the_longest_datagrams_pass_and_bursts_are_complete_and_in_order() {
    let server = Echo::start("127.0.0.1");
    let up = up(&server.address.to_string(), "", DIRECT);
    let client = client(up.addresses("dns")[0]);
    let longest: Vec<u8> = (0..LONGEST).map(|at| (at % 251) as u8).collect();
    assert!(echo(&client, &longest) == longest);
    // More than a batch, and less than what the socket buffers of this test hold.
    for round in 0..8_u8 {
        for number in 0..40_u8 {
            client.send(&[round, number]).unwrap();
        }
        for number in 0..40_u8 {
            let mut answer = [0; 4];
            assert_eq!(client.recv(&mut answer).expect("all are echoed"), 2);
            assert_eq!(answer[..2], [round, number]);
        }
    }
}

#[test]
fn a_name_is_resolved_and_a_stranger_is_not_heard() {
    let server = Echo::start("127.0.0.1");
    let up = up(&format!("localhost:{}", server.address.port()), "", DIRECT);
    let client = client(up.addresses("dns")[0]);
    let outside: SocketAddr = String::from_utf8(echo(&client, b"who")).unwrap().parse().unwrap();
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(b"forged", outside).unwrap();
    assert_eq!(echo(&client, b"next"), b"next", "the forged answer would have come first");
    eventually("both answers are counted", || admin::flows(&up)[0].number("packets_down") == 2);
}

#[test]
fn a_denied_client_has_one_record_however_often_it_sends() {
    let server = Echo::start("127.0.0.1");
    let rule = "[[rule]]\nname = \"no\"\nmatch = { protocol = \"udp\" }\naction = \"deny\"\n";
    let mut up = up(&server.address.to_string(), "", rule);
    let client = client(up.addresses("dns")[0]);
    for _ in 0..20 {
        client.send(b"let me in").unwrap();
    }
    let record = up.record();
    assert_eq!(record.fate(), ("no", "", "policy_denied"));
    assert_eq!((record.number("packets_up"), record.number("bytes_up")), (0, 0));
    eventually("the others are counted as dropped", || dropped(&up, "refused") == 19);
    up.signal(Signal::TERM);
    let (status, rest) = up.gone();
    assert!(status.success() && rest.is_empty(), "{status} {rest:?}");
}

#[test]
fn a_rule_that_cannot_carry_datagrams_refuses_them() {
    let rule = "[[rule]]\nname = \"far\"\nmatch = { listener = \"dns\" }\ncarrier = \"socks6+socksx://127.0.0.1:9\"\n";
    let mut up = up("127.0.0.1:9", "", rule);
    let client = client(up.addresses("dns")[0]);
    client.send(b"x").unwrap();
    let record = up.record();
    assert_eq!(record.text("reason"), "unsupported", "{record:?}");
}

#[test]
fn a_server_that_is_not_there_is_the_reason_of_the_end() {
    // Bound and never read: closed below, so that the kernel answers with an ICMP error.
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    let mut up = up(&address.to_string(), "udp_idle_timeout_ms = 1000", DIRECT);
    let client = client(up.addresses("dns")[0]);
    client.send(b"anybody").unwrap();
    let record = up.record();
    assert_eq!(record.fate(), ("all", "direct", "refused"), "no answer came: {record:?}");
    assert_eq!((record.number("packets_up"), record.number("packets_down")), (1, 0));
}

#[test]
fn a_full_table_ends_the_association_that_is_idle_for_longest() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(&server.address.to_string(), "max_associations = 2", DIRECT);
    let entry = up.addresses("dns")[0];
    let [first, second, third] = [(); 3].map(|()| client(entry));
    for client in [&first, &second] {
        assert_eq!(echo(client, b"a"), b"a");
    }
    assert_eq!(echo(&first, b"b"), b"b");
    assert_eq!(echo(&third, b"c"), b"c");
    let record = up.record();
    assert_eq!(record.address("client"), second.local_addr().unwrap(), "the first was used since");
    assert_eq!(record.text("reason"), "limit");
    assert_eq!(echo(&second, b"d"), b"d", "it may begin again");
}

#[test]
fn a_new_association_is_served_when_there_is_no_room_for_flows() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(&server.address.to_string(), "max_flows = 3", DIRECT);
    let entry = up.addresses("dns")[0];
    let clients: Vec<_> = (0..40_u8).map(|_| client(entry)).collect();
    for (number, client) in (0..).zip(&clients) {
        assert_eq!(echo(client, &[number]), [number], "no first datagram is lost");
    }
    let records = up.records(37);
    for client in &clients[..37] {
        let record = &records[&client.local_addr().unwrap()];
        assert_eq!((record.text("reason"), record.number("packets_down")), ("limit", 1));
        assert!(record.text("detail").contains("left for a newer one"), "{record:?}");
    }
    assert_eq!(admin::flows(&up).len(), 3);
}

#[test]
fn flows_are_killed_and_end_with_the_program() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(&server.address.to_string(), "", DIRECT);
    let entry = up.addresses("dns")[0];
    let clients = [client(entry), client(entry)];
    for client in &clients {
        assert_eq!(echo(client, b"x"), b"x");
    }
    let first = clients[0].local_addr().unwrap();
    let flow = admin::flows(&up).into_iter().find(|flow| flow.address("client") == first).unwrap();
    let (status, body) = admin::ask(&up, "DELETE", &format!("/v1/flows/{}", flow.number("flow")));
    assert_eq!(status, 200, "{body}");
    let record = up.record();
    assert_eq!((record.text("reason"), record.address("client")), ("killed", first));
    assert_eq!(echo(&clients[0], b"again"), b"again", "the next datagram begins another flow");
    up.signal(Signal::TERM);
    let (status, rest) = up.gone();
    assert!(status.success(), "{status}");
    let reasons: Vec<_> = rest.iter().map(|record| record.text("reason")).collect();
    assert_eq!(reasons, ["shutdown", "shutdown"]);
}

#[test]
fn an_association_that_changed_rules_deny_ends_and_one_that_waits_for_the_stop_goes_on() {
    let server = Echo::start("127.0.0.1");
    let limits = "drain_ms = 3600000";
    let mut up = up(&server.address.to_string(), limits, DIRECT);
    let entry = up.addresses("dns")[0];
    let [first, second] = [(); 2].map(|()| client(entry));
    for client in [&first, &second] {
        assert_eq!(echo(client, b"x"), b"x");
    }
    let deny = format!(
        "[[rule]]\nname = \"no\"\nmatch = {{ from = \"127.0.0.1\", listener = \"dns\" }}\naction = \"deny\"\n{DIRECT}"
    );
    let tables = |rules: &str| {
        format!(
            "[limits]\n{limits}\n[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\n\
             address = \"127.0.0.1:0\"\nto = \"{}\"\n{rules}",
            server.address
        )
    };
    // A rule that allows in another way changes nothing.
    up.reload("default = \"deny\"\n", &tables(&DIRECT.replace("\"all\"", "\"other\"")));
    assert_eq!(echo(&first, b"y"), b"y");
    assert_eq!(admin::flows(&up).len(), 2);
    up.reload("default = \"deny\"\n", &tables(&deny));
    for client in [&first, &second] {
        client.send(b"z").unwrap();
    }
    let records: Vec<_> = (0..4).map(|_| up.record()).collect();
    for client in [&first, &second] {
        let own = records.iter().filter(|record| record.address("client") == client.local_addr().unwrap());
        let mut own: Vec<_> = own.collect();
        own.sort_by_key(|record| record.text("rule"));
        assert_eq!(
            (own[0].fate(), own[1].fate()),
            (("all", "direct", "policy_denied"), ("no", "", "policy_denied"))
        );
        assert!(own[0].number("packets_down") > 0 && own[1].number("packets_up") == 0, "{own:?}");
        assert!(own[0].text("detail").contains("has changed"), "{own:?}");
    }
    up.reload("default = \"deny\"\n", &tables(DIRECT));
    let third = client(entry);
    assert_eq!(echo(&third, b"a"), b"a");
    up.signal(Signal::TERM);
    up.log_line("that it drains", |line| line.contains("draining"));
    assert_eq!(echo(&third, b"b"), b"b", "it goes on");
    let late = client(entry);
    late.send(b"anybody").unwrap();
    let record = up.record();
    assert_eq!((record.address("client"), record.text("reason")), (late.local_addr().unwrap(), "shutdown"));
    up.signal(Signal::TERM);
    let (status, rest) = up.gone();
    assert!(status.success(), "{status}");
    let rest: Vec<_> =
        rest.iter().filter(|record| record.address("client") == third.local_addr().unwrap()).collect();
    assert!(rest.len() == 1 && rest[0].number("packets_down") == 2, "{rest:?}");
}

#[test]
fn a_reload_changes_rules_for_new_flows_and_a_removed_listener_frees_its_port() {
    let server = Echo::start("127.0.0.1");
    let mut up = up(&server.address.to_string(), "", DIRECT);
    let entry = up.addresses("dns")[0];
    let client = client(entry);
    assert_eq!(echo(&client, b"x"), b"x");
    up.reload("default = \"deny\"\n", "");
    let record = up.record();
    assert_eq!(record.text("reason"), "shutdown");
    eventually("the port is free", || UdpSocket::bind(entry).is_ok());
}
