//! `[[rule]]` with `shunt`, and fast paths that are none or bad ones.

use crate::firewall::{Network, Running, SHUNT, own_rules, tool};
use crate::flows::{Pair, connect, forget};
use sidetrack::config::Config;
use sidetrack::shunt::{Path, PathKind, Settings};
use sidetrack_core::shunt::{Cause, FastPathKind, Obstacle, ShuntAction};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, is_root};
use std::io::Write as _;
use std::time::{Duration, Instant};

/// A port that the packet filter says nothing of.
const BULK: u16 = 7000;
const DENIED: u16 = 7023;

/// A firewall that leaves flows to the rules, and a shunt with these.
fn start(forwarding: Forwarding) -> (Network, Running) {
    let network = Network::bare(forwarding);
    network.load(&own_rules(forwarding == Forwarding::Bridged));
    let word = if forwarding == Forwarding::Bridged { "bridged" } else { "routed" };
    let text = format!(
        "version = 1\ndefault = \"deny\"\n[shunt]\nforwarding = \"{word}\"\nidle_timeout_ms = 600000\n\
         [[shunt.port]]\nnumber = 1\ninterface = \"to-client\"\n[[shunt.port]]\nnumber = 2\ninterface = \"to-server\"\n\
         [[rule]]\nname = \"no\"\nmatch = {{ port = {DENIED} }}\naction = \"deny\"\n\
         [[rule]]\nname = \"bulk\"\nmatch = {{ port = {BULK} }}\ncarrier = \"direct\"\nshunt = {{ after_bytes = 200000 }}\n"
    );
    let config = Config::from_text("test", &text).expect("a configuration");
    let settings = Settings::of(&config.shunt.expect("a shunt"));
    let shunt = network.start_as(settings);
    (network, shunt)
}

fn after_bytes(forwarding: Forwarding) {
    if !is_root() {
        return;
    }
    let (network, shunt) = start(forwarding);
    let address = network.server_addresses[0];
    let mut pair = connect(&network, address, BULK);
    pair.talk();
    let flow = shunt.wait_for(pair.from, |flow| flow.obstacle == Some(Obstacle::TooEarly));
    assert_eq!((flow.state.as_str(), flow.rule.as_deref(), flow.installs), ("slow", Some("bulk"), 0));
    Pair::transfer(&mut pair.client, &mut pair.server, 300_000);
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "installed");
    assert!(flow.slow.bytes_up > 200_000, "{flow:?}");
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 900_000);
    // The packet filter has the last word: denied there, it stops here.
    network.tool("iptables", &format!("-I FORWARD -p tcp --dport {BULK} -j DROP"));
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::RulesChanged));
    let before = flow.fast;
    pair.client.write_all(b"word").expect("queued");
    // It is sent again and again, and counted by conntrack before it is dropped: more than a look at the counts later.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1200) {
        let flow = shunt.wait_for(pair.from, |_| true);
        assert_eq!((flow.installs, flow.fast), (1, before), "{flow:?}");
    }
    network.tool("iptables", &format!("-D FORWARD -p tcp --dport {BULK} -j DROP"));
    let mut word = [0; 4];
    std::io::Read::read_exact(&mut pair.server, &mut word).expect("it comes through");
    pair.shunted(&shunt);
    let mut denied = connect(&network, address, DENIED);
    let _ = denied.client.write_all(b"word");
    let flow = shunt.wait_for(denied.from, |flow| flow.state == "installed");
    assert_eq!((flow.action, flow.rule.as_deref()), (ShuntAction::Block, Some("no")));
    pair.close();
    forget(&network.firewall);
    assert!((0..2).any(|_| shunt.record().rule.as_deref() == Some("bulk")));
}

#[test]
fn a_rule_shunts_after_so_many_bytes_on_a_bridge() {
    after_bytes(Forwarding::Bridged);
}

#[test]
fn a_rule_shunts_after_so_many_bytes_on_a_router() {
    after_bytes(Forwarding::Routed);
}

/// Fast paths side by side: by tc for flows of which nothing says another, by XDP behind the driver, and one that is none.
fn several() -> (Network, Running) {
    let network = Network::bare(Forwarding::Bridged);
    network.prepare(PathKind::XdpGeneric);
    let rule = |name: &str, port: u16, shunt: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nmatch = {{ port = {port} }}\ncarrier = \"direct\"\nshunt = {{ {shunt} }}\n"
        )
    };
    let text = format!(
        "version = 1\ndefault = \"deny\"\n[shunt]\nfast_path = [\"tc\", \"xdp-generic\", \"none\"]\n\
         forwarding = \"bridged\"\nidle_timeout_ms = 600000\n\
         actions = {{ 1 = \"shunt\", 3 = \"rules\", 4 = \"xdp-generic\" }}\n\
         [[shunt.port]]\nnumber = 1\ninterface = \"to-client\"\n[[shunt.port]]\nnumber = 2\ninterface = \"to-server\"\n\
         {}{}{}",
        rule("by-tc", BULK, ""),
        rule("by-xdp", BULK + 1, "fast_path = \"xdp-generic\""),
        rule("shown", BULK + 2, "fast_path = \"none\"")
    );
    let config = Config::from_text("test", &text).expect("a configuration");
    let shunt = config.shunt.expect("a shunt");
    // The examples of the policy are the policy here: 5000 for action 1, 5004 for action 4.
    let rules = shunt.with_rules(|rules| rules.nft()).replace("# tcp", "tcp");
    network.firewall.run(move || tool("nft", "-f -", &rules));
    let running = network.start_as(Settings::of(&shunt));
    (network, running)
}

#[test]
fn marks_and_rules_say_which_of_several_fast_paths_a_flow_takes() {
    if !is_root() {
        return;
    }
    let (network, shunt) = several();
    let mut pairs = Vec::new();
    for (port, kind) in [
        (5000, FastPathKind::Tc),
        (5004, FastPathKind::XdpGeneric),
        (BULK, FastPathKind::Tc),
        (BULK + 1, FastPathKind::XdpGeneric),
    ] {
        let mut pair = connect(&network, "10.0.0.2", port);
        pair.shunted(&shunt);
        Pair::transfer(&mut pair.client, &mut pair.server, 300_000);
        let flow = shunt.wait_for(pair.from, |flow| flow.fast.bytes_up > 250_000);
        assert_eq!(flow.fast_path, Some(kind), "port {port}");
        pairs.push(pair);
    }
    let mut shown = connect(&network, "10.0.0.2", BULK + 2);
    shown.talk();
    let flow = shunt.wait_for(shown.from, |flow| flow.state == "failed");
    assert_eq!((flow.obstacle, flow.fast_path), (Some(Obstacle::NoPath), Some(FastPathKind::None)));
    // A change of the rules is one for all of them.
    network.tool("nft", "add rule inet sidetrack_shunt shunt_policy udp dport 9 accept");
    for pair in &mut pairs {
        let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
        assert_eq!(flow.cause, Some(Cause::RulesChanged));
        pair.talk();
        shunt.wait_for(pair.from, |flow| flow.state == "installed" && flow.installs == 2);
    }
}

#[test]
fn without_a_fast_path_it_is_shown_what_would_be_shunted() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    let shunt = network.start(Path::None);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.talk();
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "failed");
    assert_eq!((flow.obstacle, flow.installs), (Some(Obstacle::NoPath), 0));
    Pair::transfer(&mut pair.client, &mut pair.server, 100_000);
}

#[test]
fn a_fast_path_that_refuses_forgets_and_is_late_costs_no_byte() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    let shunt = network.start(Path::Chaos(PathKind::Tc, 7));
    let mut installs = 0;
    for _ in 0..12 {
        let mut pair = connect(&network, "10.0.0.2", SHUNT);
        pair.talk();
        Pair::transfer(&mut pair.client, &mut pair.server, 300_000);
        Pair::transfer(&mut pair.server, &mut pair.client, 300_000);
        installs += shunt.wait_for(pair.from, |_| true).installs;
        pair.close();
    }
    assert!(installs > 0, "none was ever on the fast path");
    forget(&network.firewall);
    // Every flow that was there ends with one record, and its bytes are all counted.
    let record = shunt.record();
    assert!(record.slow.bytes_up + record.fast.bytes_up > 300_000, "{record:?}");
}

/// What becomes of a flow while the shunt hangs for longer than the program in the kernel takes its word.
fn hang(keep: bool) {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    let mut settings = network.settings(PathKind::Tc, Duration::from_secs(600));
    settings.keep_when_stalled = keep;
    let shunt = network.start_as(settings);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let before = shunt.wait_for(pair.from, |_| true).fast;
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let (hangs, hung) = std::sync::mpsc::channel();
    let (client, server) = (&mut pair.client, &mut pair.server);
    std::thread::scope(|scope| {
        let talking = scope.spawn(move || {
            let since: Instant = hung.recv_timeout(LIMIT).expect("it hangs");
            // That it hangs is the case: the time that the program grants is to pass.
            while since.elapsed() < Duration::from_millis(3500) {
                std::thread::sleep(Duration::from_millis(100));
            }
            Pair::transfer(client, server, 500_000);
            done.send(()).expect("it hangs still");
        });
        shunt.with(move |engine| {
            hangs.send(Instant::now()).expect("the test waits");
            wait.recv_timeout(LIMIT).expect("the test says so");
            engine.count().expect("counted");
        });
        talking.join().expect("it talked");
    });
    let stalled = shunt.wait_for(pair.from, |_| true);
    let fast = stalled.fast.bytes_up - before.bytes_up;
    assert_eq!(fast > 400_000, keep, "{stalled:?}");
}

#[test]
fn while_the_shunt_hangs_its_flows_take_the_slow_path() {
    hang(false);
}

#[test]
fn while_the_shunt_hangs_its_flows_go_on_where_that_is_wanted() {
    hang(true);
}
