//! More flows than entries: the fastest ones have them.

use crate::firewall::{Network, SHUNT};
use crate::flows::{Pair, connect};
use sidetrack::shunt::PathKind;
use sidetrack_core::shunt::{Cause, Obstacle};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, is_root};
use std::time::Instant;

fn the_fastest_have_the_entries(forwarding: Forwarding) {
    if !is_root() {
        return;
    }
    let network = Network::new(forwarding);
    let mut settings = network.settings(PathKind::Tc, LIMIT * 10);
    settings.core.entries_max = 2;
    let shunt = network.start_as(settings);
    let address = network.server_addresses[0];
    let mut mice = [connect(&network, address, SHUNT), connect(&network, address, SHUNT)];
    mice.iter_mut().for_each(|pair| pair.shunted(&shunt));
    let mut elephant = connect(&network, address, SHUNT);
    elephant.talk();
    let waits = shunt.wait_for(elephant.from, |flow| flow.obstacle == Some(Obstacle::Full));
    assert_eq!((waits.state.as_str(), waits.installs), ("failed", 0));
    let begun = Instant::now();
    loop {
        Pair::transfer(&mut elephant.client, &mut elephant.server, 1_000_000);
        let flow = shunt.wait_for(elephant.from, |_| true);
        if flow.state == "installed" {
            assert!(flow.bytes_per_s > Some(0), "{flow:?}");
            break;
        }
        assert!(begun.elapsed() < LIMIT, "it waits for ever: {flow:?}");
    }
    let capacity = shunt.with(|engine| engine.capacity());
    assert_eq!((capacity.entries, capacity.entries_max, capacity.evicted), (2, 2, 1));
    let flows = shunt.with(|engine| engine.flows());
    let evicted = flows.iter().filter(|flow| flow.cause == Some(Cause::Evicted)).count();
    assert_eq!(evicted, 1, "{flows:?}");
    // All go on, whatever path they take.
    mice.iter_mut().for_each(Pair::talk);
    Pair::transfer(&mut elephant.server, &mut elephant.client, 1_000_000);
    let flow = shunt.wait_for(elephant.from, |flow| flow.fast.bytes_down > 900_000);
    assert_eq!(flow.installs, 1);
}

#[test]
fn the_fastest_flows_of_a_bridge_have_the_entries() {
    the_fastest_have_the_entries(Forwarding::Bridged);
}

#[test]
fn the_fastest_flows_of_a_router_have_the_entries() {
    the_fastest_have_the_entries(Forwarding::Routed);
}
