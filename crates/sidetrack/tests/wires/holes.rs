//! Hosts that have bytes with holes, or packets that were joined (GRO), when their flow goes to the wire.

use crate::{Flow, RULE, flow, flow_on, on_the_wire};
use sidetrack_testkit::streams::exchange;
use sidetrack_testkit::{Line, Node, awaited, is_root, nft};

/// Bytes of each direction after the hole.
const BYTES: u64 = 2_000_000;

/// From now on one segment that comes to this host is lost, whenever it is sent.
fn loses_one(node: &Node) {
    let rules = "add table inet holes; \
                 add set inet holes lost { typeof tcp sequence; size 1; flags dynamic; }; \
                 add chain inet holes in { type filter hook prerouting priority -300; }; \
                 add rule inet holes in ip protocol tcp meta length > 1000 tcp sequence @lost drop; \
                 add rule inet holes in ip protocol tcp meta length > 1000 numgen inc mod 8 == 5 add @lost { tcp sequence } drop";
    node.run(move || nft(rules).expect("rules"));
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
fn with_a_hole(at: fn(&Flow) -> &Node) {
    if !is_root() {
        return;
    }
    let mut flow = flow(false, "", RULE);
    // Nearly the limit: the first segments before the hole reach it.
    flow.exchange(98_000);
    loses_one(at(&flow));
    let [client, server] = [&flow.client, &flow.server].map(|end| end.try_clone().expect("a copy"));
    let ends = [(client, [1, 2]), (server, [2, 1])]
        .map(|(end, seeds)| std::thread::spawn(move || exchange(end, seeds, BYTES)));
    let missing = lost(at(&flow));
    on_the_wire(&flow.up);
    assert_eq!(lost(at(&flow)), missing);
    at(&flow).run(|| nft("delete table inet holes").expect("no rules"));
    for end in ends {
        assert_eq!(end.join().expect("an end"), [BYTES; 2]);
    }
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    let record = up.record();
    assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
    assert_eq!(
        (record.number("bytes_up"), record.number("bytes_down")),
        (98_000 + BYTES, BYTES),
        "{record:?}"
    );
}

#[test]
fn a_hole_in_what_the_client_has_sent() {
    with_a_hole(|flow| &flow.line.router);
}

#[test]
fn a_hole_in_what_the_server_has_got() {
    with_a_hole(|flow| &flow.line.server);
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
