//! The kernel's own flow tables as a fast path, on kernels that have them: `make lab-kernel` runs these on Debian's. Elsewhere
//! the refusal is what is tested.

use crate::firewall::{BLOCK, IDLE, Network, Running, SHUNT};
use crate::flows::{Pair, connect, forget, knock};
use sidetrack::shunt::{Engine, Path};
use sidetrack_core::shunt::{Cause, FastPathKind, Obstacle};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_sys::conntrack::{Conntrack, status};
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{Feature, knows};
use sidetrack_testkit::is_root;
use std::time::Duration;

const BYTES: usize = 1_000_000;

/// Three hosts and a router between them, where the kernel has flow tables. Where it has none, it is checked that this is
/// said.
fn router() -> Option<Network> {
    if !is_root() {
        return None;
    }
    let network = Network::new(Forwarding::Routed);
    let settings = network.settings(Path::Flowtable, IDLE);
    let refusal = network.firewall.run(move || {
        let mut socket = Socket::open(Protocol::Netfilter).expect("netlink");
        let has = knows(&mut socket, Feature::Flowtable).expect("asked");
        (!has).then(|| Engine::start(&settings).err().map(|error| error.to_string()))
    });
    let Some(refusal) = refusal else { return Some(network) };
    assert!(
        std::env::var_os("SIDETRACK_HAS_FLOWTABLES").is_none(),
        "this kernel should have them: {refusal:?}"
    );
    let refusal = refusal.expect("a kernel without flow tables has a shunt by them");
    assert!(refusal.contains("no flow tables") && refusal.contains("use fast_path"), "{refusal}");
    eprintln!("this kernel has no flow tables: only its refusal was tested");
    None
}

/// How many connections the kernel forwards past its rules.
fn offloaded(network: &Network) -> usize {
    network.firewall.run(|| {
        let all = Conntrack::open().expect("conntrack").list(None).expect("list");
        all.iter().filter(|entry| entry.status & status::OFFLOAD != 0).count()
    })
}

fn wait_offloaded(network: &Network, count: usize) {
    sidetrack_testkit::eventually("the kernel forwards it", || offloaded(network) == count);
}

/// Shunted, and taken by the kernel with the packets that follow.
fn forwarded(network: &Network, shunt: &Running, address: &str) -> Pair {
    let mut pair = connect(network, address, SHUNT);
    pair.shunted(shunt);
    pair.talk();
    wait_offloaded(network, 1);
    pair
}

#[test]
fn flowtable_carries_both_ways_and_every_byte_is_counted_once() {
    let Some(network) = router() else { return };
    let shunt = network.start(Path::Flowtable);
    for address in network.server_addresses {
        let mut pair = forwarded(&network, &shunt, address);
        Pair::transfer(&mut pair.client, &mut pair.server, BYTES);
        Pair::transfer(&mut pair.server, &mut pair.client, BYTES);
        let flow = shunt.wait_for(pair.from, |flow| flow.fast.bytes_down > 900_000);
        assert_eq!((flow.state.as_str(), flow.installs), ("installed", 1));
        assert_eq!(flow.fast_path, Some(FastPathKind::Flowtable));
        let (from, to) = (pair.from, pair.to);
        pair.close();
        shunt.wait_for(from, |flow| flow.state == "slow");
        forget(&network.firewall);
        let record = shunt.record();
        assert_eq!((record.client, record.server, record.cause), (from, to, Some(Cause::Fin)));
        let total = u64::try_from(BYTES).expect("small");
        for (slow, fast) in
            [(record.slow.bytes_up, record.fast.bytes_up), (record.slow.bytes_down, record.fast.bytes_down)]
        {
            assert!(slow + fast > total && slow + fast < total + total / 5, "{record:?}");
            assert!(slow < 20_000, "the slow path carried too much: {record:?}");
        }
        wait_offloaded(&network, 0);
    }
}

#[test]
fn flowtable_lets_go_of_what_is_withdrawn_and_of_what_stands_still() {
    let Some(network) = router() else { return };
    let shunt = network.start_with(Path::Flowtable, IDLE);
    let mut pair = forwarded(&network, &shunt, network.server_addresses[0]);
    // It stands still: the entry goes, and the next packet asks the rules, which say the same again.
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::Idle));
    wait_offloaded(&network, 0);
    pair.shunted(&shunt);
    pair.talk();
    wait_offloaded(&network, 1);
    let flow = shunt.wait_for(pair.from, |flow| flow.installs == 2);
    // Withdrawn: the other flow that is there goes on.
    let mut other = connect(&network, network.server_addresses[1], SHUNT);
    other.shunted(&shunt);
    other.talk();
    let tuple = sidetrack_core::shunt::Tuple::new(pair.from, pair.to, flow.transport, 0);
    assert!(shunt.with(move |engine| engine.withdraw(&tuple)).expect("asked"));
    shunt.wait_for(pair.from, |flow| flow.cause == Some(Cause::Withdrawn));
    Pair::transfer(&mut other.client, &mut other.server, BYTES);
    Pair::transfer(&mut pair.client, &mut pair.server, BYTES);
    drop(shunt);
    // It ends, and nothing is forwarded past the rules any more; the flows go on.
    wait_offloaded(&network, 0);
    pair.talk();
    other.talk();
}

#[test]
fn flowtable_passes_nothing_that_the_rules_deny_now() {
    let Some(network) = router() else { return };
    let shunt = network.start(Path::Flowtable);
    let mut pair = forwarded(&network, &shunt, network.server_addresses[0]);
    network.tool("iptables", &format!("-I FORWARD -p tcp --dport {SHUNT} -j DROP"));
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::RulesChanged));
    wait_offloaded(&network, 0);
    pair.server.set_read_timeout(Some(Duration::from_millis(500))).expect("a limit");
    std::io::Write::write_all(&mut pair.client, b"word").expect("queued");
    assert!(std::io::Read::read(&mut pair.server, &mut [0; 4]).is_err(), "it got through");
    network.tool("iptables", &format!("-D FORWARD -p tcp --dport {SHUNT} -j DROP"));
    pair.server.set_read_timeout(Some(sidetrack_testkit::LIMIT)).expect("a limit");
    let mut word = [0; 4];
    std::io::Read::read_exact(&mut pair.server, &mut word).expect("it comes through");
    pair.shunted(&shunt);
}

#[test]
fn flowtable_drops_nothing_by_itself() {
    let Some(network) = router() else { return };
    let shunt = network.start(Path::Flowtable);
    let (_listener, mut blocked) = knock(&network, network.server_addresses[0], BLOCK);
    let _ = std::io::Write::write_all(&mut blocked, b"word");
    let flow = shunt.wait_for(blocked.local_addr().expect("address"), |flow| {
        flow.obstacle.is_some() || flow.state == "failed"
    });
    assert_eq!((flow.state.as_str(), flow.obstacle), ("failed", Some(Obstacle::Unsupported)));
}
