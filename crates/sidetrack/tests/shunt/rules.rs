//! Rules that change under a shunted flow.

use crate::firewall::{Network, SHUNT};
use crate::flows::{Pair, connect};
use sidetrack::shunt::PathKind;
use sidetrack_core::shunt::Cause;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::is_root;
use std::io::Write as _;

#[test]
fn a_flow_that_is_denied_now_stops() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    let shunt = network.start(PathKind::Tc);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    network.tool("iptables", &format!("-I FORWARD -p tcp --dport {SHUNT} -j DROP"));
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::RulesChanged));
    let before = flow.fast;
    pair.client.write_all(b"word").expect("queued");
    pair.server.set_read_timeout(Some(std::time::Duration::from_millis(300))).expect("limit");
    assert!(std::io::Read::read(&mut pair.server, &mut [0; 4]).is_err(), "the firewall drops it");
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!((flow.fast, flow.installs), (before, 1));
    // Allowed again: TCP sends the word once more, the policy says shunt, and it is.
    network.tool("iptables", &format!("-D FORWARD -p tcp --dport {SHUNT} -j DROP"));
    pair.server.set_read_timeout(Some(sidetrack_testkit::LIMIT)).expect("limit");
    let mut word = [0; 4];
    std::io::Read::read_exact(&mut pair.server, &mut word).expect("it comes through");
    pair.shunted(&shunt);
}
