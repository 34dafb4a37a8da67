//! A real switch (Open vSwitch) as the fast path.

use crate::firewall::{BLOCK, IDLE, SHUNT};
use crate::flows::{Pair, connect, forget, knock};
use crate::switch::{OpenVSwitch, network, settings};
use sidetrack::shunt::{Path, PathKind};
use sidetrack_core::openflow::Version;
use sidetrack_core::shunt::{Cause, FastPathKind, Obstacle, ShuntAction};
use sidetrack_testkit::is_root;
use std::io::Write as _;
use std::time::Duration;

const CONTROL: u16 = 6653;
const BYTES: usize = 1_000_000;

fn path(versions: &[Version]) -> Path {
    Path::OpenFlow(settings(versions, CONTROL))
}

/// Connected, and the pairs of ports lead everything to the firewall.
fn ready(switch: &OpenVSwitch) {
    switch.connect(CONTROL);
    // 32768 is the default, which is not written.
    switch.wait_for_entries(|entries| entries.matches("in_port=").count() == 4);
}

fn lead(versions: &[Version]) {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    let shunt = network.start(path(versions));
    ready(&switch);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let entries = switch.ofctl("dump-flows", "");
    assert_eq!(entries.matches("priority=33000").count(), 2, "{entries}");
    Pair::transfer(&mut pair.client, &mut pair.server, BYTES);
    Pair::transfer(&mut pair.server, &mut pair.client, BYTES);
    shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 900_000 && flow.fast.bytes_down > 900_000);
    let (from, closes) = (pair.from, versions == [Version::V1_3]);
    pair.close();
    if closes {
        // FIN goes to the firewall, conntrack reports it, the entries go.
        let flow = shunt.wait_for(from, |flow| flow.state == "slow");
        assert_eq!(flow.cause, Some(Cause::Fin));
    }
    forget(&network.firewall);
    let record = shunt.record();
    let total = u64::try_from(BYTES).expect("small");
    for (slow, fast) in
        [(record.slow.bytes_up, record.fast.bytes_up), (record.slow.bytes_down, record.fast.bytes_down)]
    {
        assert!(slow + fast > total && slow + fast < total + total / 4, "{record:?}");
        assert!(slow < total / 2, "most of it by the switch: {record:?}");
    }
    let entries = switch.wait_for_entries(|entries| !entries.contains("priority=33000"));
    assert_eq!(entries.matches("in_port=").count(), 4, "the pairs stay: {entries}");
}

#[test]
fn flows_of_1_3_are_led_by_the_switch_and_end_with_their_connection() {
    lead(&[Version::V1_3]);
}

#[test]
fn flows_of_1_0_are_led_by_the_switch() {
    lead(&[Version::V1_0]);
}

#[test]
fn a_switch_and_a_program_of_this_host_stand_side_by_side() {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    let mut settings = network.settings(path(&Version::ALL), Duration::from_secs(600));
    settings.paths.insert(0, PathKind::Tc.into());
    assert!(settings.core.actions.set(4, FastPathKind::OpenFlow));
    network.tool(
        "iptables",
        "-t mangle -A SHUNT_POLICY -p tcp --dport 5004 -m conntrack --ctstate RELATED,ESTABLISHED -j MARK --set-xmark \
         0x10040000/0x100f0000",
    );
    let shunt = network.start_as(settings);
    ready(&switch);
    for (port, kind, entries) in [(SHUNT, FastPathKind::Tc, 0), (5004, FastPathKind::OpenFlow, 2)] {
        let mut pair = connect(&network, "10.0.0.2", port);
        pair.shunted(&shunt);
        Pair::transfer(&mut pair.client, &mut pair.server, 300_000);
        let flow = shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 250_000);
        assert_eq!(flow.fast_path, Some(kind));
        let dump = switch.ofctl("dump-flows", "");
        assert_eq!(dump.matches("priority=33000").count(), entries, "{dump}");
        pair.close();
        // Conntrack is told of the end by the one as by the other.
        shunt.wait_for(flow.client, |flow| flow.cause == Some(Cause::Fin));
    }
}

#[test]
fn a_blocked_flow_is_dropped_by_the_switch_and_ipv6_and_udp_are_led_by_1_3() {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    let shunt = network.start(path(&Version::ALL));
    ready(&switch);
    let (_listener, mut blocked) = knock(&network, "10.0.0.2", BLOCK);
    let from = blocked.local_addr().expect("address");
    let _ = blocked.write_all(b"word");
    let flow = shunt.wait_for(from, |flow| flow.state == "installed");
    assert_eq!(flow.action, ShuntAction::Block);
    let entries = switch.ofctl("dump-flows", "");
    assert_eq!(entries.matches("actions=drop").count(), 2, "{entries}");
    let _ = blocked.write_all(b"another");
    shunt.wait_for(from, |flow| flow.dropped.packets_up > 0);
    let mut pair = connect(&network, "fd00::2", SHUNT);
    pair.shunted(&shunt);
    // On a busy machine the switch applies the entry a moment after it was installed: the first of these may pass the host.
    for _ in 0..3 {
        Pair::transfer(&mut pair.client, &mut pair.server, 100_000);
    }
    shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 100_000);
    let mut datagrams = crate::frames::Datagrams::new(&network, "10.0.0.2", SHUNT);
    datagrams.shunted(&shunt);
    datagrams.send(100);
    shunt.wait_for(datagrams.from, |flow| flow.fast.packets_up > 0);
}

#[test]
fn a_full_table_is_said_and_tried_again() {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    switch.vsctl(
        "-- --id=@table create Flow_Table flow_limit=6 overflow_policy=refuse -- set bridge sw flow_tables:0=@table",
    );
    let shunt = network.start(path(&Version::ALL));
    ready(&switch);
    let mut first = connect(&network, "10.0.0.2", SHUNT);
    first.shunted(&shunt);
    let mut second = connect(&network, "10.0.0.2", SHUNT + 1);
    assert!(shunt.pin(second.from, second.to, ShuntAction::Shunt));
    second.talk();
    let flow = shunt.wait_for(second.from, |flow| flow.state == "failed");
    assert_eq!(flow.obstacle, Some(Obstacle::Full));
    assert_eq!(switch.ofctl("dump-flows", "").matches("priority=33000").count(), 2, "no half entry");
    first.close();
    second.shunted(&shunt);
}

#[test]
fn a_flow_that_is_denied_now_leaves_the_switch() {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    let shunt = network.start(path(&Version::ALL));
    ready(&switch);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    network.tool("iptables", &format!("-I FORWARD -p tcp --dport {SHUNT} -j DROP"));
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::RulesChanged));
    assert!(!switch.ofctl("dump-flows", "").contains("priority=33000"));
    pair.client.write_all(b"word").expect("queued");
    pair.server.set_read_timeout(Some(std::time::Duration::from_millis(300))).expect("limit");
    assert!(std::io::Read::read(&mut pair.server, &mut [0; 4]).is_err(), "the firewall drops it");
}

#[test]
fn a_flow_that_stood_still_is_inspected_and_shunted_again() {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    let shunt = network.start_with(path(&[Version::V1_0]), IDLE);
    ready(&switch);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::Idle));
    pair.shunted(&shunt);
    shunt.wait_for(pair.from, |flow| flow.installs == 2);
}

#[test]
fn while_the_switch_is_away_its_flows_go_on_and_new_ones_wait_for_it() {
    if !is_root() {
        return;
    }
    let (network, switch) = network();
    let shunt = network.start(path(&Version::ALL));
    ready(&switch);
    let mut old = connect(&network, "10.0.0.2", SHUNT);
    old.shunted(&shunt);
    // An address without a listener: without any controller it would forget its entries.
    switch.connect(1);
    let mut new = connect(&network, "10.0.0.2", SHUNT);
    new.talk();
    let flow = shunt.wait_for(new.from, |flow| flow.state == "failed");
    assert_eq!(flow.obstacle, Some(Obstacle::Unreachable));
    Pair::transfer(&mut old.client, &mut old.server, BYTES);
    switch.connect(CONTROL);
    new.shunted(&shunt);
    let flow = shunt.wait_for(old.from, |flow| flow.fast.bytes_up > 900_000);
    assert_eq!((flow.state.as_str(), flow.installs), ("installed", 1), "it never left");
}
