//! How flows on the wire end.

use crate::node::admin::ask;
use crate::node::peers::{Client, Server};
use crate::node::{self, Up};
use crate::{Flow, NO_PINS, RULE, flow, flow_to, metric, on_the_wire};
use sidetrack_sys::sysctl;
use sidetrack_testkit::{LIMIT, Line, Node, eventually, is_root, nft};
use std::io::{ErrorKind, Read, Write};

fn is_reset(stream: &mut impl Read) {
    assert_eq!(stream.read(&mut [0]).expect_err("reset").kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_killed_flow_is_reset_at_both_hosts_and_counted_to_the_byte() {
    if !is_root() {
        return;
    }
    for v6 in [false, true] {
        let mut flow = flow(v6, "", RULE).wired();
        flow.exchange(30_000);
        let id = on_the_wire(&flow.up).0["flow"].clone();
        let (status, body) = ask(&flow.up, "DELETE", &format!("/v1/flows/{id}"));
        assert_eq!(status, 200, "{body}");
        is_reset(&mut flow.client);
        is_reset(&mut flow.server);
        let record = flow.up.record();
        assert_eq!(record.text("reason"), "killed", "{record:?}");
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (180_000, 8));
        eventually("it is gone", || metric(&flow.up, "sidetrack_wire_flows ") == 0);
    }
}

/// The reset has to be at the number that the host expects, which is not the one that it has acknowledged.
#[test]
fn a_host_whose_acknowledgement_was_lost_is_reset() {
    if !is_root() {
        return;
    }
    let Flow { mut client, mut server, mut up, line } = flow(false, "", RULE).wired();
    let rules = "add table inet lost; add chain inet lost out { type filter hook output priority 0; }; \
                 add rule inet lost out tcp flags & (fin | syn | rst | psh | ack) == ack meta length < 100 drop";
    line.server.run(|| nft(rules).expect("rules"));
    client.write_all(&[7; 1000]).expect("sent");
    server.set_read_timeout(Some(LIMIT)).expect("set");
    server.read_exact(&mut [0; 1000]).expect("received");
    let id = on_the_wire(&up).0["flow"].clone();
    assert_eq!(ask(&up, "DELETE", &format!("/v1/flows/{id}")).0, 200);
    is_reset(&mut server);
    is_reset(&mut client);
    assert_eq!(up.record().text("reason"), "killed");
}

#[test]
fn a_reset_of_a_host_reaches_the_other_one() {
    if !is_root() {
        return;
    }
    let Flow { client, mut server, mut up, line: _line } = flow(false, "", RULE).wired();
    sidetrack_sys::sockopt::reset_on_close(&client).expect("set");
    drop(client);
    is_reset(&mut server);
    assert_eq!(up.record().text("reason"), "client_reset");
}

#[test]
fn an_idle_flow_ends() {
    if !is_root() {
        return;
    }
    let rule = format!("{RULE}idle_timeout_ms = 1500\n");
    let mut flow = flow(false, "", &rule).wired();
    is_reset(&mut flow.client);
    is_reset(&mut flow.server);
    let record = flow.up.record();
    assert_eq!((record.text("reason"), record.0["shunted"] == true), ("idle", true));
}

#[test]
fn half_a_flow_goes_on() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE).wired();
    flow.client.shutdown(std::net::Shutdown::Write).expect("closed");
    assert_eq!(flow.server.read(&mut [0]).expect("the end"), 0);
    flow.server.write_all(&[3; 70_000]).expect("sent");
    flow.client.read_exact(&mut [0; 70_000]).expect("received");
    drop(flow.server);
    assert_eq!(flow.client.read(&mut [0]).expect("the end"), 0);
    let record = flow.up.record();
    assert_eq!(record.text("reason"), "ok", "{record:?}");
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (150_000, 70_008));
}

/// A FIN may come at any moment of the hand-over, also between two looks at a socket.
#[test]
fn flows_that_end_when_they_would_go_to_the_wire_end() {
    const AT_ONCE: usize = 4;
    const FLOWS_OF_EACH: usize = 400;
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| Server::start("10.0.2.1"));
    let listen = format!(
        "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"{}\"\n",
        server.address
    );
    // Both directions together have this in the last piece, or just not.
    let tables = format!("{NO_PINS}{listen}{}", RULE.replace("100000", "50000"));
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    line.client.run(move || {
        let flows = |thread: usize| {
            for number in 0..FLOWS_OF_EACH {
                let mut client = Client::connect(node::at("10.0.1.254", 80)).expect("connected");
                let bytes = vec![number as u8; 24_000 + (number * AT_ONCE + thread) * 7919 % 3000];
                bytes.chunks(8192).for_each(|piece| client.echo(piece).expect("an echo"));
                client.close().expect("the end");
            }
        };
        std::thread::scope(|scope| (0..AT_ONCE).for_each(|thread| drop(scope.spawn(move || flows(thread)))));
    });
    let (status, records) = up.stop();
    assert!(status.success());
    assert_eq!(records.len(), AT_ONCE * FLOWS_OF_EACH);
    assert!(records.iter().all(|record| record.text("reason") == "ok"), "{records:?}");
    assert!(records.iter().any(|record| record.0["shunted"] == true), "none went to the wire");
}

#[test]
fn the_end_of_the_node_is_the_end_of_its_flows() {
    if !is_root() {
        return;
    }
    let Flow { mut client, mut server, up, line: _line } = flow(false, "", RULE).wired();
    let (status, records) = up.stop();
    assert!(status.success());
    let reasons: Vec<_> = records.iter().map(|record| record.text("reason")).collect();
    assert_eq!(reasons, ["shutdown"]);
    is_reset(&mut client);
    is_reset(&mut server);
}

#[test]
fn a_flow_follows_the_route_to_its_server() {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE).wired();
    // The same server by another cable, and the first one is gone.
    let (router, server) = (&flow.line.router, &flow.line.server);
    router.ip(&format!("link add by-the-other type veth peer name eth1 netns {}", server.thread_id()));
    router.ip("link set by-the-other up");
    server.ip("link set eth1 up");
    server.carries("eth1");
    router.carries("by-the-other");
    router.ip("addr add 10.0.2.253/32 dev by-the-other");
    server.ip("addr add 10.0.2.2/32 dev eth1");
    router.ip("route add 10.0.2.1/32 dev by-the-other src 10.0.2.254");
    server.ip("route add 10.0.2.254/32 dev eth1 src 10.0.2.1");
    server.ip("route change default via 10.0.2.254 dev eth1 onlink");
    server.ip("link set eth0 down");
    server.ip("addr add 10.0.2.1/32 dev eth1");
    flow.exchange(500_000);
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    let record = up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("ok", 650_000), "{record:?}");
}

#[test]
fn a_host_learns_that_its_packets_are_too_large_behind_us() {
    if !is_root() {
        return;
    }
    let (line, hop) = (Line::new(), Node::new());
    let (router, server) = (&line.router, &line.server);
    router.ip(&format!("link add to-hop type veth peer name eth0 netns {}", hop.thread_id()));
    hop.ip(&format!("link add to-far type veth peer name far netns {}", server.thread_id()));
    for (node, interface, address) in [
        (router, "to-hop", "10.0.8.254"),
        (&hop, "eth0", "10.0.8.1"),
        (&hop, "to-far", "10.0.9.254"),
        (server, "far", "10.0.9.1"),
    ] {
        node.ip(&format!("addr add {address}/24 dev {interface}"));
        node.ip(&format!("link set {interface} up"));
    }
    router.carries("to-hop");
    hop.carries("to-far");
    router.ip("route add 10.0.9.0/24 via 10.0.8.1");
    server.ip("route add 10.0.8.0/24 via 10.0.9.254");
    hop.run(|| sysctl::write("net/ipv4/ip_forward", "1").expect("forwarding"));
    let mut flow = flow_to(line, "10.0.9.1:0", "10.0.1.254:80", "", RULE).wired();
    hop.ip("link set to-far mtu 1300");
    flow.exchange(1_000_000);
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    let record = up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("ok", 1_150_000), "{record:?}");
    assert_eq!(record.0["shunted"], true);
}

#[test]
fn a_reload_that_changes_the_chain_of_its_rule_ends_it_if_the_rule_says_so() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let listener = line.server.run(|| std::net::TcpListener::bind("10.0.2.1:0").expect("bound"));
    let to = listener.local_addr().expect("an address");
    let tables = |rule: &str| {
        format!(
            "{NO_PINS}[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"{to}\"\n\
             [function.counts]\nkind = \"count\"\n{rule}"
        )
    };
    let (top, before) = ("default = \"deny\"\n", tables(RULE));
    let up = line.router.run(move || Up::start(top, &before));
    let client = line.client.run(|| std::net::TcpStream::connect("10.0.1.254:80").expect("connected"));
    let server = listener.accept().expect("accepted").0;
    let mut flow = Flow { line, up, client, server }.wired();
    // A rule that denies now leaves running flows alone, also those on the wire.
    flow.up.reload(top, &tables("[[rule]]\nname = \"all\"\naction = \"deny\"\n"));
    flow.exchange(1000);
    let chain =
        "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nchain = [\"counts\"]\non_chain_change = \"cut\"\n";
    flow.up.reload(top, &tables(chain));
    is_reset(&mut flow.client);
    is_reset(&mut flow.server);
    let record = flow.up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("chain_changed", 151_000), "{record:?}");
}
