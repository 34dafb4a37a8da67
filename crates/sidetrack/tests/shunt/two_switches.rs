//! Two switches in a row, under one controller, and beside another one.

use crate::firewall::SHUNT;
use crate::flows::{Pair, connect, forget};
use crate::shared_switch::{CONTROL, OTHER, Other, wait_for_role};
use crate::switch::{OpenVSwitch, network_of_two, settings_of_two};
use sidetrack::config::ShuntSwitch;
use sidetrack::shunt::Path;
use sidetrack_core::shunt::{Cause, ShuntAction};
use sidetrack_testkit::is_root;

const BYTES: usize = 1_000_000;
const FLOW: &str = "priority=33000";

/// Waits until each switch has the entries that lead its port to the firewall and back.
fn ready(switches: &[OpenVSwitch; 2]) {
    for switch in switches {
        switch.wait_for_entries(|entries| entries.matches("in_port=").count() >= 2);
    }
}

#[test]
fn a_flow_has_entries_on_both_switches_and_leaves_both() {
    if !is_root() {
        return;
    }
    let (network, switches) = network_of_two();
    let shunt = network.start(Path::OpenFlow(settings_of_two(CONTROL)));
    switches.iter().for_each(|switch| switch.connect(CONTROL));
    ready(&switches);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    for switch in &switches {
        let entries = switch.ofctl("dump-flows", "");
        assert_eq!(entries.matches(FLOW).count(), 2, "{entries}");
    }
    Pair::transfer(&mut pair.client, &mut pair.server, BYTES);
    Pair::transfer(&mut pair.server, &mut pair.client, BYTES);
    // The switches report their counts late.
    shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 900_000 && flow.fast.bytes_down > 900_000);
    let from = pair.from;
    pair.close();
    // A FIN goes to the firewall, and the flow leaves both switches.
    let flow = shunt.wait_for(from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::Fin));
    for switch in &switches {
        switch.wait_for_entries(|entries| !entries.contains(FLOW));
    }
    forget(&network.firewall);
    let record = shunt.record();
    assert!(record.fast.bytes_up > 900_000 && record.fast.bytes_down > 900_000, "{record:?}");
}

#[test]
fn a_switch_that_comes_back_empty_takes_the_flow_off_the_other_one() {
    if !is_root() {
        return;
    }
    let (network, switches) = network_of_two();
    let shunt = network.start(Path::OpenFlow(settings_of_two(CONTROL)));
    switches.iter().for_each(|switch| switch.connect(CONTROL));
    ready(&switches);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let [left, right] = &switches;
    let before = left.ofctl("dump-flows", "");
    let cookies = |entries: &str| -> Vec<String> {
        let lines = entries.lines().filter(|line| line.contains(FLOW));
        lines.filter_map(|line| line.trim().split(',').next().map(str::to_owned)).collect()
    };
    // Another program removes everything from the right switch; only the port to the server stays in use.
    right.ofctl("del-flows", "");
    right.vsctl("del-controller sw");
    right.connect(CONTROL);
    // The old entries leave the left switch. The policy may have shunted the flow anew by then.
    left.wait_for_entries(|entries| !cookies(&before).iter().any(|cookie| entries.contains(cookie)));
    ready(&switches);
    pair.shunted(&shunt);
    Pair::transfer(&mut pair.client, &mut pair.server, 100_000);
}

#[test]
fn one_of_both_has_another_controller_too() {
    if !is_root() {
        return;
    }
    let (network, switches) = network_of_two();
    let ours = ShuntSwitch { master: true, shared: true, ..settings_of_two(CONTROL) };
    let shunt = network.start(Path::OpenFlow(ours));
    let [left, right] = &switches;
    left.connect_to(&[CONTROL, OTHER]);
    right.connect(CONTROL);
    wait_for_role(left, CONTROL, "master");
    wait_for_role(right, CONTROL, "master");
    ready(&switches);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    // Another one becomes the master of the left switch: it refuses what we want, and is claimed again.
    let other = Other::start(&network);
    wait_for_role(left, OTHER, "master");
    wait_for_role(left, CONTROL, "slave");
    let mut second = connect(&network, "10.0.0.2", SHUNT + 1);
    assert!(shunt.pin(second.from, second.to, ShuntAction::Shunt));
    second.shunted(&shunt);
    wait_for_role(left, CONTROL, "master");
    for switch in &switches {
        switch.wait_for_entries(|entries| entries.matches(FLOW).count() >= 2);
    }
    Pair::transfer(&mut second.client, &mut second.server, 300_000);
    shunt.wait_for(second.from, |flow| flow.fast.bytes_up > 250_000);
    pair.talk();
    drop(other);
}
