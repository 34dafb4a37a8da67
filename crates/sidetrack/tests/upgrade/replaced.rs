//! What goes on with the new process: connections, records and their numbers, counters, the admin socket, the next upgrade.

use crate::load::Load;
use crate::node::peers::{Client, Server, visit};
use crate::node::{Up, admin};
use crate::{Upgrade, runs, stop};
use sidetrack_testkit::eventually;
use std::collections::BTreeSet;
use std::net::SocketAddr;

pub(crate) const TOP: &str = "workers = 2\ndefault = \"deny\"\n";

pub(crate) fn tables(server: SocketAddr) -> String {
    format!(
        "[limits]\ndrain_ms = 3600000\n[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n"
    )
}

/// The value of a counter, summed over its series.
fn counter(up: &Up, name: &str) -> u64 {
    let (status, text) = admin::ask(up, "GET", "/metrics");
    assert_eq!(status, 200);
    let of = |line: &str| line.strip_prefix(name)?.split_whitespace().last()?.parse::<u64>().ok();
    text.lines().filter_map(of).sum()
}

#[test]
fn a_node_is_replaced_twice_under_load_and_no_connection_is_refused() {
    let server = Server::start("127.0.0.1");
    let mut up = Up::start(TOP, &tables(server.address));
    let entry = up.addresses("reverse")[0];
    let folder = up.folder();
    visit(entry, b"before");
    assert_eq!(up.record().number("flow"), 1);
    let load = Load::start(entry, 4, false);
    // A flow is counted a moment after its end.
    while counter(&up, "sidetrack_flows_total") < 10 {
        load.goes_on();
    }
    let before = counter(&up, "sidetrack_flows_total");
    let mut upgrade = Upgrade::start(&folder, &[]);
    let first = upgrade.started();
    upgrade.until("serves new connections");
    load.goes_on();
    assert!(runs(first.0));
    let counted = counter(&up, "sidetrack_flows_total");
    assert!(counted >= before, "the counters go on: {counted} after {before}");
    let (mut flows, visits) = load.finish();
    let (success, said) = upgrade.ended();
    assert!(success && said.contains("the upgrade is done"), "{said}");
    let (status, body) = admin::ask(&up, "GET", "/v1/status");
    assert!(
        status == 200 && body.contains(&format!("\"pid\":{}", first.0)),
        "the new process answers: {body}"
    );

    // The process that was started last is replaced again, with the program that is named.
    let load = Load::start(entry, 2, false);
    let mut upgrade = Upgrade::start(&folder, &[crate::SIDETRACK]);
    let second = upgrade.started();
    upgrade.until("serves new connections");
    load.goes_on();
    let (more, more_visits) = load.finish();
    flows.extend(more);
    assert!(upgrade.ended().0);
    crate::ends(&first);
    let total = 1 + flows.len() as u64 + visits + more_visits;
    eventually("every flow is counted once", || counter(&up, "sidetrack_flows_total") == total);
    let records = stop(up, &second);
    let numbers: BTreeSet<_> = records.iter().map(|record| record.number("flow")).collect();
    assert_eq!((records.len() as u64, numbers.len() as u64), (total - 1, total - 1), "one record each");
    for address in flows {
        let ours: Vec<_> = records.iter().filter(|record| record.address("client") == address).collect();
        assert!(ours.len() == 1 && ours[0].text("reason") == "ok", "{ours:?}");
    }
    assert!(!folder.join("admin.sock").exists() && !folder.join("admin.sock.upgrade").exists());
}

#[test]
fn a_confirmed_upgrade_stays_and_the_record_file_and_the_history_have_every_flow_once() {
    let server = Server::start("127.0.0.1");
    let tables = tables(server.address) + "[history]\npath = \"@/history\"\n";
    let up = Up::start(&format!("{TOP}#record-to @/flows.jsonl\n"), &tables);
    let entry = up.addresses("reverse")[0];
    let folder = up.folder();
    visit(entry, b"one");
    let mut waits = Client::connect(entry).expect("a connection");
    let mut upgrade = Upgrade::start(&folder, &["--confirm", "60s"]);
    let new = upgrade.started();
    upgrade.until("serves new connections");
    // This one ends in the old process before the change is final, this one in the new process, and the last one after it.
    visit(entry, b"two");
    let (success, said) = Upgrade::start(&folder, &["--confirmed"]).ended();
    assert!(success && said.contains("confirmed"), "{said}");
    // It is still open when flows move.
    let moved = upgrade.until("flows have moved");
    assert!(moved.contains("1 flows have moved"), "{moved}");
    waits.echo(b"three").expect("the flow goes on");
    waits.close().expect("an orderly end");
    let (success, said) = upgrade.ended();
    assert!(success, "{said}");
    let (success, said) = Upgrade::start(&folder, &["--confirmed"]).ended();
    assert!(!success && said.contains("no upgrade to confirm"), "{said}");
    let read = || std::fs::read_to_string(folder.join("flows.jsonl")).unwrap_or_default();
    eventually("three records", || read().lines().count() == 3);
    let history = || admin::ask(&up, "GET", "/v1/history").1;
    eventually("three flows in the history", || history().matches("\"reason\":\"ok\"").count() == 3);
    let copy = read();
    stop(up, &new);
    let numbers: BTreeSet<_> =
        copy.lines().map(|line| line.split("\"flow\":").nth(1).map(str::to_owned)).collect();
    assert_eq!(numbers.len(), 3, "{copy}");
}
