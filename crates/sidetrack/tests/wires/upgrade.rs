//! A node is replaced while it has flows on the wire: they go on without a pause, in whichever process is left.

use crate::RULE;
use crate::crash::{Scene, is_reset};
use crate::node::admin::{ask, flows};
use crate::node::upgrading::{Started, Upgrade, ends, stop};
use crate::node::{Record, Up, send};
use rustix::process::Signal;
use sidetrack_testkit::streams::both_ways;
use sidetrack_testkit::{awaited, eventually, is_root};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Long enough for every test.
const DRAIN: &str = "[limits]\ndrain_ms = 3600000\n";

fn wired(up: &Up, count: usize) -> Vec<Record> {
    awaited("flows on the wire", || {
        let found = flows(up);
        let found: Vec<_> = found.into_iter().filter(|flow| flow.0["shunted"] == true).collect();
        (found.len() == count).then_some(found)
    })
}

fn of(flows: &[Record], number: u64) -> &Record {
    flows.iter().find(|flow| flow.number("flow") == number).unwrap_or_else(|| panic!("{number} in {flows:?}"))
}

/// Replaces the node: the new process, and what was said.
fn replace(up: &Up) -> (Started, String) {
    let mut upgrade = Upgrade::start(&up.folder(), &[]);
    let new = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(success, "{said}");
    (new, said)
}

#[test]
fn flows_go_on_with_two_more_processes_and_have_one_record() {
    if !is_root() {
        return;
    }
    for pins in [true, false] {
        let mut scene = Scene::with_pins(pins, DRAIN, RULE);
        let [client, server] = scene.connect();
        let enough = Arc::new(AtomicBool::new(false));
        let (of_client, of_server) = (enough.clone(), enough.clone());
        let pause = Some(Duration::from_millis(1));
        let client = std::thread::spawn(move || both_ways(client, [1, 2], &of_client, pause));
        let server = std::thread::spawn(move || both_ways(server, [2, 1], &of_server, pause));
        wired(scene.up(), 1);
        let [mut quiet, mut peer] = scene.wired();
        // This one has its sockets, and goes to the wire later.
        let [mut small, mut other] = scene.connect();
        crate::pass(&mut small, &mut other, 10);
        let before = wired(scene.up(), 2);
        let (first, said) = replace(scene.up());
        assert!(
            said.contains("2 flows on the wire go on")
                && said.contains("1 flows have moved")
                && said.contains("no flow is left"),
            "{said}"
        );
        let after = wired(scene.up(), 2);
        for flow in &before {
            let same = of(&after, flow.number("flow"));
            for key in ["ts", "client", "orig_dst", "listener", "connect_seconds", "first_byte_seconds"] {
                assert_eq!(same.0[key], flow.0[key], "{key}");
            }
            assert!(same.number("bytes_up") >= flow.number("bytes_up"));
        }
        crate::pass(&mut small, &mut other, 150_000);
        wired(scene.up(), 3);
        let (second, said) = replace(scene.up());
        assert!(said.contains("3 flows on the wire go on") && said.contains("0 flows have moved"), "{said}");
        ends(&first);
        wired(scene.up(), 3);
        crate::pass(&mut quiet, &mut peer, 1000);
        let busy = wired(scene.up(), 3).iter().map(|flow| flow.number("flow")).min().expect("three");
        let counted = of(&wired(scene.up(), 3), busy).number("bytes_down");
        eventually("its counts go on", || {
            of(&wired(scene.up(), 3), busy).number("bytes_down") > counted + 300_000
        });
        let killed = before.iter().map(|flow| flow.number("flow")).max().expect("two");
        assert_eq!(ask(scene.up(), "DELETE", &format!("/v1/flows/{killed}")).0, 200);
        is_reset(&mut quiet);
        is_reset(&mut peer);
        drop((small, other));
        enough.store(true, Relaxed);
        let [sent, got] = client.join().expect("the client");
        assert_eq!(server.join().expect("the server"), [got, sent]);
        let records: Vec<_> = (0..3).map(|_| scene.record()).collect();
        let up = scene.up.take().expect("started");
        assert!(stop(up, &second).is_empty(), "one record each");
        assert!(!scene.bpf.is_used(), "pins are left");
        let record = of(&records, busy);
        assert_eq!((record.fate(), record.flag("shunted")), (("all", "direct", "ok"), true));
        assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (sent, got));
        let record = of(&records, killed);
        assert_eq!((record.text("reason"), record.number("bytes_up")), ("killed", 151_000), "{record:?}");
        let third = records.iter().find(|record| ![busy, killed].contains(&record.number("flow")));
        assert_eq!(third.expect("three").number("bytes_up"), 150_010, "{third:?}");
    }
}

#[test]
fn a_new_process_that_fails_leaves_them_to_the_old_one() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new(DRAIN, RULE);
    let [mut client, mut server] = scene.wired();
    for (signal, confirm) in [(Some(Signal::KILL), "60s"), (None, "1ms")] {
        let mut upgrade = Upgrade::start(&scene.up().folder(), &["--confirm", confirm]);
        let new = upgrade.started();
        upgrade.until("serves new connections");
        signal.into_iter().for_each(|signal| send(new.0, signal));
        assert!(!upgrade.ended().0);
        ends(&new);
        crate::pass(&mut client, &mut server, 1000);
        crate::pass(&mut server, &mut client, 1000);
        assert_eq!(wired(scene.up(), 1)[0].number("bytes_up") % 1000, 0);
    }
    // Others get there again.
    let others = scene.wired();
    wired(scene.up(), 2);
    drop(others);
    assert_eq!(scene.record().fate(), ("all", "direct", "ok"));
    drop((client, server));
    let record = scene.record();
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (152_000, 2008), "{record:?}");
    let (status, records) = scene.up.take().expect("started").stop();
    assert!(status.success() && records.is_empty(), "{records:?}");
    assert!(!scene.bpf.is_used(), "pins are left");
}

#[test]
fn an_old_process_that_is_killed_leaves_them_to_the_new_one() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new(DRAIN, RULE);
    let [mut client, mut server] = scene.wired();
    let mut upgrade = Upgrade::start(&scene.up().folder(), &["--confirm", "60s"]);
    let new = upgrade.started();
    upgrade.until("serves new connections");
    assert!(flows(scene.up()).is_empty(), "the old process has them until the change is final");
    scene.up().signal(Signal::KILL);
    wired(scene.up(), 1);
    crate::pass(&mut client, &mut server, 1000);
    drop((client, server));
    let record = scene.record();
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (151_000, 8), "{record:?}");
    send(new.0, Signal::TERM);
    let mut up = scene.up.take().expect("started");
    assert!(up.gone().1.is_empty());
    assert!(!scene.bpf.is_used(), "pins are left");
}
