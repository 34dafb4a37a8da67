//! A node with `[shunt]` is replaced by a new process: its flows stay on the fast path, with their numbers and one record each.

use crate::binary::{Node, start};
use crate::firewall::SHUNT;
use crate::flows::{Pair, connect, forget};
use crate::node::admin::flows;
use crate::node::upgrading::{Started, Upgrade, ends};
use crate::node::{Up, send};
use rustix::process::Signal;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{awaited, is_root};

/// A firewall, and a flow on its fast path that has a number.
fn shunted(forwarding: Forwarding) -> (Node, Pair, u64) {
    let node = start(forwarding);
    let mut pair = connect(&node.network, node.network.server_addresses[0], SHUNT);
    node.shunted(&mut pair);
    let number = number(&node.up);
    (node, pair, number)
}

/// The number of the only flow.
fn number(up: &Up) -> u64 {
    awaited("a flow", || flows(up).pop()).number("flow")
}

/// A new process goes on. It is started in the firewall's network.
fn upgraded(node: &Node, words: &'static [&str], then: impl FnOnce()) -> (Started, bool, String) {
    let folder = node.folder.clone();
    let mut upgrade = node.network.firewall.run(move || Upgrade::start(&folder, words));
    let new = upgrade.started();
    if !words.is_empty() {
        upgrade.until("serves new connections");
    }
    then();
    let (success, said) = upgrade.ended();
    (new, success, said)
}

/// How often the flow got an entry, as its record's detail says.
const ONCE: &str = "fast path 1 times";

fn goes_on(forwarding: Forwarding) {
    if !is_root() {
        return;
    }
    let (node, mut pair, first) = shunted(forwarding);
    let mut last = None;
    for _ in 0..2 {
        Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
        let (new, success, said) = upgraded(&node, &[], || {});
        assert!(success, "{said}");
        assert_eq!(number(&node.up), first);
        node.shunted(&mut pair);
        last = Some(new);
    }
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    // The new process asks the shunt as the old one did.
    let flow = format!("{} {}", pair.from, pair.to);
    let why = node.shunt(&format!("why {flow}")).expect("why");
    assert!(why.contains("on the fast path"), "{why}");
    pair.close();
    forget(&node.network.firewall);
    let Node { mut up, network, before, .. } = node;
    let record = up.record();
    assert_eq!((record.number("flow"), record.text("reason")), (first, "kernel_closed"), "{record:?}");
    assert!(record.number("bytes_up") > 3_000_000 && record.text("detail").contains(ONCE), "{record:?}");
    let last = last.expect("two");
    send(last.0, Signal::TERM);
    let (status, rest) = up.gone();
    assert!(status.success() && rest.is_empty(), "{status} {rest:?}");
    ends(&last);
    network.firewall.run(move || before.expect_back("after the end"));
}

#[test]
fn flows_of_a_bridge_stay_on_the_fast_path() {
    goes_on(Forwarding::Bridged);
}

#[test]
fn flows_of_a_router_stay_on_the_fast_path() {
    goes_on(Forwarding::Routed);
}

#[test]
fn what_is_not_confirmed_comes_back() {
    if !is_root() {
        return;
    }
    let (node, mut pair, first) = shunted(Forwarding::Bridged);
    let (_new, success, said) = upgraded(&node, &["--confirm", "3s"], || {
        Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
        assert_eq!(number(&node.up), first);
    });
    assert!(!success && said.contains("not confirmed"), "{said}");
    node.shunted(&mut pair);
    assert_eq!(number(&node.up), first);
    pair.close();
    forget(&node.network.firewall);
    let Node { mut up, network, before, .. } = node;
    let record = up.record();
    assert_eq!((record.number("flow"), record.text("reason")), (first, "kernel_closed"), "{record:?}");
    let (status, rest) = up.stop();
    assert!(status.success() && rest.is_empty(), "{status} {rest:?}");
    network.firewall.run(move || before.expect_back("after the end"));
}

#[test]
fn another_shunt_takes_a_restart() {
    if !is_root() {
        return;
    }
    let (node, mut pair, first) = shunted(Forwarding::Bridged);
    let file = node.folder.join("sidetrack.toml");
    let text = std::fs::read_to_string(&file).expect("the file");
    std::fs::write(&file, text.replace("idle_timeout_ms = 600000", "idle_timeout_ms = 500000"))
        .expect("written");
    let (_new, success, said) = upgraded(&node, &[], || {});
    assert!(!success && said.contains("[shunt] has changed"), "{said}");
    node.shunted(&mut pair);
    assert_eq!(number(&node.up), first);
}
