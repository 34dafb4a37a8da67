//! Datagrams that the kernel carries alone: where they go, their records, and what a change of the rules does to them.

use crate::datagrams::{client, echo, seen};
use crate::node::traces::Traces;
use crate::node::{Record, Up, admin};
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

const DENY: &str = "default = \"deny\"\n";

/// The reverse ports on the router, and the router's addresses towards the servers.
const DOORS: [(&str, &str); 2] = [("10.0.1.254:53", "10.0.2.254"), ("[fd00:1::fe]:53", "fd00:2::fe")];

struct Scene {
    line: Line,
    servers: [Echo; 2],
}

impl Scene {
    fn new() -> Self {
        let line = Line::new();
        let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Echo::start));
        Self { line, servers }
    }

    /// A reverse listener for each IP version.
    fn reverse(&self, rule: &str) -> String {
        let [v4, v6] = self.servers.each_ref().map(|server| server.address);
        let listen = |name: &str, address: &str, to: SocketAddr| {
            format!(
                "[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"{address}\"\n\
                 to = \"{to}\"\n"
            )
        };
        // A port of every address is known by another map than one of a single address.
        let (four, six) = (listen("port4", DOORS[0].0, v4), listen("port6", "[::]:53", v6));
        format!("[limits]\ndrain_ms = 0\n{four}{six}[[rule]]\nname = \"all\"\n{rule}\n")
    }

    fn on_router(&self, tables: String) -> Up {
        self.line.router.run(move || Up::start(DENY, &tables))
    }

    fn on_client(&self, tables: String) -> Up {
        self.line.client.run(move || Up::start(DENY, &tables))
    }

    fn client(&self, to: SocketAddr) -> UdpSocket {
        self.line.client.run(move || client(to))
    }

    /// A client of each reverse port.
    fn through(&self) -> [UdpSocket; 2] {
        DOORS.map(|(to, _)| self.client(to.parse().expect(to)))
    }
}

/// The record of this client.
fn of<'a>(records: &'a [Record], client: &UdpSocket) -> &'a Record {
    let own = client.local_addr().expect("an address");
    let mut found = records.iter().filter(|record| record.address("client") == own);
    found.next().unwrap_or_else(|| panic!("no record of {own}: {records:?}"))
}

/// Whether no answer comes to a datagram: it is sent a few times, as any of them may be the first of a changed flow.
fn is_silent(client: &UdpSocket) -> bool {
    client.set_read_timeout(Some(Duration::from_millis(50))).expect("a limit");
    let answered = (0..4).any(|_| client.send(b"x").is_ok() && client.recv(&mut [0; 100]).is_ok());
    client.set_read_timeout(Some(LIMIT)).expect("a limit");
    !answered
}

#[test]
fn a_port_for_a_server_becomes_dnat_and_is_recorded() {
    if !is_root() {
        return;
    }
    for keep in [false, true] {
        let scene = Scene::new();
        let before = scene.line.router.run(Traces::now);
        let up =
            scene.on_router(scene.reverse(&format!("carrier = \"direct\"\nkeep_client_address = {keep}")));
        let clients = scene.through();
        for (client, (_, router)) in clients.iter().zip(DOORS) {
            let own = client.local_addr().expect("an address").ip();
            assert_eq!(seen(client).ip(), if keep { own } else { router.parse().expect(router) });
            for length in [0, 1, 1473, 65_507] {
                let payload = vec![7; length];
                assert!(echo(client, &payload) == payload, "{length}");
            }
        }
        let listed = admin::flows(&up);
        assert_eq!(listed.len(), 2, "{listed:?}");
        let (status, records) = up.stop();
        assert!(status.success());
        assert_eq!(records.len(), 2, "once each: {records:?}");
        for (client, server) in clients.iter().zip(&scene.servers) {
            let record = of(&records, client);
            assert_eq!(record.fate(), ("all", "kernel", "shutdown"), "{record:?}");
            assert_eq!((record.text("protocol"), record.text("intercept")), ("udp", "kernel"));
            assert_eq!(record.address("orig_dst"), server.address);
            // Fragments count as packets where conntrack sees them.
            assert!(record.number("packets_up") >= 5 && record.number("packets_down") >= 5, "{record:?}");
            assert!(record.number("bytes_up") > 65_507 && record.number("bytes_down") > 65_507, "{record:?}");
            assert!(is_silent(client), "nothing translates any more");
        }
        scene.line.router.run(move || before.expect_back("after the end"));
    }
}

#[test]
fn an_idle_flow_has_its_record_after_our_idle_time() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let tables =
        scene.reverse("carrier = \"direct\"").replace("drain_ms", "udp_idle_timeout_ms = 1000\ndrain_ms");
    let mut up = scene.on_router(tables);
    for client in scene.through() {
        client.send(b"x").expect("sent");
        let record = up.record();
        assert_eq!(record.fate(), ("all", "kernel", "kernel_closed"), "{record:?}");
        assert_eq!(record.address("client"), client.local_addr().expect("an address"));
        assert_eq!(record.number("packets_up"), 1);
    }
    eventually("the bytes are counted", || {
        let text = admin::show(&up, "/metrics");
        let bytes = text.lines().find(|line| {
            line.starts_with("sidetrack_flow_bytes_total") && line.contains("up") && line.contains("kernel")
        });
        let packets =
            text.lines().find(|line| line.starts_with("sidetrack_datagrams_total{direction=\"up\"}"));
        bytes.is_some_and(|line| !line.ends_with(" 0")) && packets.is_some_and(|line| line.ends_with(" 2"))
    });
}

#[test]
fn changed_rules_apply_to_flows_that_the_kernel_carries() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let mut up = scene.on_router(scene.reverse("carrier = \"direct\""));
    let clients = scene.through();
    for client in &clients {
        assert_eq!(echo(client, b"x"), b"x");
    }
    // The same verdict under another name: nothing ends.
    up.reload(DENY, &scene.reverse("carrier = \"direct\"").replace("\"all\"", "\"same\""));
    for client in &clients {
        assert_eq!(echo(client, b"y"), b"y");
    }
    assert_eq!(admin::flows(&up).len(), 2);
    // To user space: the same client is served by us, and the kernel's flow has its record.
    up.reload(DENY, &scene.reverse("carrier = \"direct\"\nkernel = \"never\""));
    for client in &clients {
        assert_eq!(echo(client, b"z"), b"z");
    }
    let records: Vec<_> = (0..2).map(|_| up.record()).collect();
    for client in &clients {
        let record = of(&records, client);
        assert_eq!(record.fate(), ("all", "kernel", "kernel_closed"), "{record:?}");
        assert!(record.number("packets_up") >= 2, "{record:?}");
    }
    // Back to the kernel, with other clients; then denied, while they go on.
    up.reload(DENY, &scene.reverse("carrier = \"direct\""));
    let clients = scene.through();
    for client in &clients {
        assert_eq!(echo(client, b"x"), b"x");
    }
    let asked: Vec<_> = scene.servers.iter().map(|server| server.address).collect();
    up.reload(DENY, &scene.reverse("action = \"deny\""));
    for client in &clients {
        assert!(is_silent(client), "{asked:?}");
    }
    let (status, records) = up.stop();
    assert!(status.success());
    for client in &clients {
        let own = client.local_addr().expect("an address");
        let mut fates: Vec<_> =
            records.iter().filter(|record| record.address("client") == own).map(Record::fate).collect();
        fates.sort_unstable();
        assert_eq!(fates, [("all", "", "policy_denied"), ("all", "kernel", "kernel_closed")]);
    }
}

#[test]
fn datagrams_of_this_host_leave_as_they_are_and_follow_the_rules() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let before = scene.line.client.run(Traces::now);
    let tables = |rule: &str| {
        let [v4, v6] = scene.servers.each_ref().map(|server| server.address.port());
        format!(
            "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"out\"\nkind = \"redirect\"\nprotocol = \"udp\"\n\
             ports = [{v4}, {v6}]\n[[rule]]\nname = \"left\"\nmatch = {{ to = [\"10.0.2.0/24\", \"fd00:2::/64\"] }}\n{rule}\n"
        )
    };
    let up = scene.on_client(tables("carrier = \"direct\""));
    let clients = scene.servers.each_ref().map(|server| scene.client(server.address));
    for client in &clients {
        assert_eq!(seen(client), client.local_addr().expect("an address"), "its own port");
        for length in [0, 1473, 65_507] {
            let payload = vec![7; length];
            assert!(echo(client, &payload) == payload, "{length}");
        }
    }
    assert_eq!(admin::flows(&up).len(), 2);
    // By us from now on: conntrack's entries of the kernel's flows do not keep them.
    up.reload(DENY, &tables("carrier = \"direct\"\nkernel = \"never\""));
    for client in &clients {
        assert_ne!(seen(client), client.local_addr().expect("an address"), "through us");
    }
    // A flow that we carry goes on as it is; a new one is the kernel's.
    up.reload(DENY, &tables("carrier = \"direct\""));
    for (client, server) in clients.iter().zip(&scene.servers) {
        assert_ne!(seen(client), client.local_addr().expect("an address"), "still through us");
        let other = scene.client(server.address);
        assert_eq!(seen(&other), other.local_addr().expect("an address"));
    }
    let (status, records) = up.stop();
    assert!(status.success());
    assert_eq!(records.len(), 6, "{records:?}");
    for (client, server) in clients.iter().zip(&scene.servers) {
        let own = client.local_addr().expect("an address");
        let own: Vec<_> = records.iter().filter(|record| record.address("client") == own).collect();
        let mut fates: Vec<_> = own.iter().map(|record| record.fate()).collect();
        fates.sort_unstable();
        assert_eq!(fates, [("left", "direct", "shutdown"), ("left", "kernel", "kernel_closed")]);
        assert!(own.iter().all(|record| record.address("orig_dst") == server.address), "{own:?}");
        assert!(own.iter().all(|record| record.text("listener") == "out"), "{own:?}");
    }
    scene.line.client.run(move || before.expect_back("after the end"));
}

#[test]
fn forwarded_datagrams_keep_their_address_in_the_kernel_or_have_one_port_of_ours() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let tables = |keep: bool| {
        format!(
            "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"out\"\nkind = \"tproxy\"\nprotocol = \"udp\"\n\
             interfaces = \"to-client\"\n[[rule]]\nname = \"left\"\nmatch = {{ protocol = \"udp\" }}\n\
             carrier = \"direct\"\nkeep_client_address = {keep}\n"
        )
    };
    for (keep, carrier) in [(true, "kernel"), (false, "direct")] {
        let text = tables(keep);
        let up = scene.on_router(text);
        let clients = scene.servers.each_ref().map(|server| scene.client(server.address));
        for (client, (_, router)) in clients.iter().zip(DOORS) {
            let own = client.local_addr().expect("an address");
            let (seen, router) = (seen(client), router.parse::<IpAddr>().expect(router));
            assert!(if keep { seen == own } else { seen.ip() == router }, "{seen} of {own}");
        }
        let (status, records) = up.stop();
        assert!(status.success());
        assert_eq!(records.len(), 2, "{records:?}");
        for client in &clients {
            assert_eq!(of(&records, client).fate(), ("left", carrier, "shutdown"));
            assert_eq!(of(&records, client).number("packets_up"), 1);
        }
    }
}

#[test]
fn a_kill_leaves_no_rule_and_no_translation() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let before = scene.line.router.run(Traces::now);
    let mut up = scene.on_router(scene.reverse("carrier = \"direct\""));
    let clients = scene.through();
    for client in &clients {
        assert_eq!(echo(client, b"x"), b"x");
    }
    up.signal(Signal::KILL);
    let _ = up.gone();
    scene.line.router.run(move || before.expect_back("after the kill"));
    for client in &clients {
        assert!(is_silent(client));
    }
}
