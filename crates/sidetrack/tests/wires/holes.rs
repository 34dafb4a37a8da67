//! Hosts that have bytes with holes, or packets that were joined (GRO), when their flow goes to the wire.

use crate::{Flow, RULE, flow, flow_on, metric, on_the_wire};
use sidetrack_testkit::streams::both_ways;
use sidetrack_testkit::{Line, Node, awaited, eventually, is_root, nft};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Bytes before the hole: less than half of what leads a flow to the wire, which gets there after some more pieces of both directions.
const FIRST: usize = 20_000;

/// Time between two pieces of 20,000 bytes. What waits behind the hole stays less than the wire allows.
const PAUSE: Duration = Duration::from_millis(200);

/// From now on one segment of the client's that comes to this interface is lost, whenever it is sent.
fn loses_one(node: &Node, interface: &str) {
    let large = format!("add rule inet holes in iifname {interface} ip protocol tcp meta length > 1000");
    let rules = format!(
        "add table inet holes; \
         add set inet holes lost {{ typeof tcp sequence; size 1; flags dynamic; }}; \
         add chain inet holes in {{ type filter hook prerouting priority -300; }}; \
         {large} tcp sequence @lost drop; \
         {large} numgen inc mod 4 == 1 add @lost {{ tcp sequence }} drop"
    );
    node.run(move || nft(&rules).expect("rules"));
}

/// The number of the lost segment.
fn lost(node: &Node) -> String {
    let listed = || nft("-n list set inet holes lost").expect("a list");
    awaited("a segment is lost", || {
        let text = node.run(listed);
        let (_, elements) = text.split_once("elements = {")?;
        Some(elements.split('}').next()?.trim().to_owned())
    })
}

/// A flow goes to the wire while a segment is missing at the router or at the server. Its sender knows that what followed has come (SACK).
/// Both directions go on until it is there: a side that had closed would keep it with its sockets.
fn with_a_hole(at: fn(&Flow) -> (&Node, &'static str)) {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE);
    flow.exchange(FIRST);
    let (node, interface) = at(&flow);
    loses_one(node, interface);
    let enough = Arc::new(AtomicBool::new(false));
    let [client, server] = [&flow.client, &flow.server].map(|end| end.try_clone().expect("a copy"));
    let ends = [(client, [1, 2]), (server, [2, 1])].map(|(end, seeds)| {
        let enough = enough.clone();
        std::thread::spawn(move || both_ways(end, seeds, &enough, Some(PAUSE)))
    });
    let missing = lost(node);
    eventually("the kernel passes packets on", || {
        metric(&flow.up, "sidetrack_wire_freeze_seconds_count") == 1
    });
    assert_eq!(lost(node), missing);
    node.run(|| nft("delete table inet holes").expect("no rules"));
    // Its sockets stay until both hosts have what was written into them.
    on_the_wire(&flow.up);
    enough.store(true, Relaxed);
    let [client, server] = ends.map(|end| end.join().expect("an end"));
    assert_eq!(client, [server[1], server[0]]);
    let Flow { client: client_end, server: server_end, mut up, line: _line } = flow;
    drop((client_end, server_end));
    let record = up.record();
    assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
    assert_eq!(
        (record.number("bytes_up"), record.number("bytes_down")),
        (FIRST as u64 + client[0], client[1]),
        "{record:?}"
    );
}

#[test]
fn a_hole_in_what_the_client_has_sent() {
    with_a_hole(|flow| (&flow.line.router, "to-client"));
}

#[test]
fn a_hole_in_what_the_server_has_got() {
    with_a_hole(|flow| (&flow.line.server, "eth0"));
}

/// How many packets this interface has sent. A joined packet counts once.
fn sent(node: &Node, interface: &str) -> u64 {
    let start = format!("{interface}:");
    let text = node.run(|| std::fs::read_to_string("/proc/thread-self/net/dev").expect("counts"));
    let counts = text.lines().find_map(|line| line.trim().strip_prefix(&start)).expect("the interface");
    counts.split_whitespace().nth(9).and_then(|count| count.parse().ok()).expect("a count")
}

#[test]
fn packets_that_the_kernel_has_joined_on_arrival_go_on_joined() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    line.client.ethtool("-K eth0 tso off gso off");
    line.router.ethtool("-K to-client gro on");
    let mut flow = flow_on(line, false, "", RULE).wired();
    let before = [sent(&flow.line.client, "eth0"), sent(&flow.line.router, "to-server")];
    flow.exchange(20_000_000);
    let after = [sent(&flow.line.client, "eth0"), sent(&flow.line.router, "to-server")];
    let [came, left] = [0, 1].map(|at| after[at] - before[at]);
    assert!(came > 10_000, "the client has sent {came} packets");
    assert!(left < came / 2, "{came} packets came, and {left} left");
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    let record = up.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("ok", 20_150_000), "{record:?}");
}
