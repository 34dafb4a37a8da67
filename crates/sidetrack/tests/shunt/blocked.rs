//! What is denied does not pass: not the first packet, not after a pause, not where the fast path takes no entry.

use crate::firewall::{BLOCK, Network, Running, rule_set, tool};
use crate::flows::{Pair, connect};
use sidetrack::config::{Config, Shunt};
use sidetrack::shunt::{Counts, Path, PathKind, Settings};
use sidetrack_core::shunt::ShuntAction;
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, is_root};
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

const OPEN: u16 = 7000;
const DENIED: u16 = 7023;

/// A shunt whose only rules these are.
fn shunt(forwarding: Forwarding, fast_path: &str, default: &str, rules: &str) -> Shunt {
    let word = if forwarding == Forwarding::Bridged { "bridged" } else { "routed" };
    let text = format!(
        "version = 1\ndefault = \"{default}\"\n[shunt]\nforwarding = \"{word}\"\nfast_path = \"{fast_path}\"\n\
         idle_timeout_ms = 600000\nblock_idle_timeout_ms = 100\n\
         [[shunt.port]]\nnumber = 1\ninterface = \"to-client\"\n[[shunt.port]]\nnumber = 2\ninterface = \"to-server\"\n{rules}"
    );
    Config::from_text("test", &text).expect("a configuration").shunt.expect("a shunt")
}

fn deny(extra: &str) -> String {
    format!("[[rule]]\nname = \"no\"\nmatch = {{ port = {DENIED}{extra} }}\naction = \"deny\"\n")
}

/// The rules that `sidetrack shunt rules` prints, loaded.
fn load(network: &Network, shunt: &Shunt, iptables: bool) {
    if iptables {
        return network.load(&shunt.with_rules(|rules| rules.iptables()));
    }
    let rules = shunt.with_rules(|rules| rules.nft());
    network.firewall.run(move || tool("nft", "-f -", &rules));
}

/// Datagrams from the client: which of these ports lets one through.
fn datagrams_pass(network: &Network, address: &str, ports: [u16; 2]) -> [bool; 2] {
    let to = ports.map(|port| SocketAddr::new(address.parse().expect("an address"), port));
    let sockets = network.server.run(move || to.map(|to| UdpSocket::bind(to).expect("bound")));
    let client = network.client.run(move || {
        let any = if to[0].is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        UdpSocket::bind(any).expect("bound")
    });
    // The second one is sent later and by the same way: when it is there, the first is or never will be.
    let begun = Instant::now();
    let mut passed = [false; 2];
    while !passed[1] && begun.elapsed() < LIMIT {
        for to in &to {
            client.send_to(b"word", to).expect("sent");
        }
        for (socket, passed) in sockets.iter().zip(&mut passed) {
            socket.set_read_timeout(Some(Duration::from_millis(50))).expect("limit");
            *passed |= socket.recv(&mut [0; 8]).is_ok();
        }
    }
    passed
}

fn connects(network: &Network, address: &str, port: u16) -> bool {
    let to = SocketAddr::new(address.parse().expect("an address"), port);
    let _listener = network.server.run(move || TcpListener::bind(to).expect("listen"));
    network.client.run(move || TcpStream::connect_timeout(&to, Duration::from_millis(300)).is_ok())
}

/// A rule that denies stands below the one that shunts, or there is none that shunts: no packet passes, of either family.
fn nothing_passes(forwarding: Forwarding, iptables: bool) {
    if !is_root() {
        return;
    }
    let open = format!(
        "[[rule]]\nname = \"bulk\"\nmatch = {{ port = {OPEN} }}\ncarrier = \"direct\"\nshunt = {{}}\n"
    );
    let nets =
        ", to = [\"10.0.0.0/8\", \"fd00::/16\", \"fd00:2::/64\"], from = [\"10.0.0.0/8\", \"fd00::/8\"]";
    for rules in [format!("{open}{}", deny("")), deny(nets)] {
        let network = Network::bare(forwarding);
        let shunt = shunt(forwarding, "tc", "direct", &rules);
        load(&network, &shunt, iptables);
        let running = network.start_as(Settings::of(&shunt));
        for address in network.server_addresses {
            assert_eq!(datagrams_pass(&network, address, [DENIED, OPEN]), [false, true], "{address}");
            let mut pair = connect(&network, address, OPEN);
            pair.talk();
            assert!(!connects(&network, address, DENIED), "{address}");
            pair.talk();
        }
        drop(running);
    }
}

#[test]
fn a_rule_that_denies_holds_on_a_bridge() {
    nothing_passes(Forwarding::Bridged, false);
}

#[test]
fn a_rule_that_denies_holds_on_a_router() {
    nothing_passes(Forwarding::Routed, false);
}

#[test]
fn a_rule_that_denies_holds_on_a_bridge_by_iptables() {
    nothing_passes(Forwarding::Bridged, true);
}

#[test]
fn a_rule_that_denies_holds_on_a_router_by_iptables() {
    nothing_passes(Forwarding::Routed, true);
}

/// Sends until the shunt has dropped packets for longer than any of its times, and looks that none came through.
fn stays_blocked(shunt: &Running, pair: &mut Pair) {
    let _ = pair.client.write_all(b"first");
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "installed");
    assert_eq!(flow.action, ShuntAction::Block);
    // What came before the entry is not the question: now it is there.
    pair.server.set_nonblocking(true).expect("set");
    let mut bytes = [0; 64];
    while matches!(std::io::Read::read(&mut pair.server, &mut bytes), Ok(1..)) {}
    pair.server.set_nonblocking(false).expect("set");
    // TCP sends this again after pauses that grow: past 200 ms each is longer than the idle time.
    pair.client.write_all(b"second").expect("queued");
    let flow = shunt.wait_for(pair.from, |flow| flow.dropped.packets_up >= 4);
    assert_eq!(
        (flow.fast, flow.installs, flow.state.as_str()),
        (Counts::default(), 1, "installed"),
        "{flow:?}"
    );
    pair.server.set_read_timeout(Some(Duration::from_millis(50))).expect("limit");
    assert!(std::io::Read::read(&mut pair.server, &mut bytes).is_err(), "it trickles through");
}

#[test]
fn a_blocked_flow_does_not_trickle() {
    if !is_root() {
        return;
    }
    let network = Network::bare(Forwarding::Bridged);
    // As in rule sets of older versions, and NFShunt's: nothing in the packet filter drops what is marked.
    let rules: Vec<_> =
        rule_set(true).lines().filter(|line| !line.ends_with("-j DROP")).map(str::to_owned).collect();
    network.load(&(rules.join("\n") + "\n"));
    let shunt = network.start_with(PathKind::Tc, Duration::from_millis(100));
    stays_blocked(&shunt, &mut connect(&network, "10.0.0.2", BLOCK));
}

#[test]
fn what_the_default_denies_stays_blocked() {
    if !is_root() {
        return;
    }
    let network = Network::bare(Forwarding::Routed);
    let shunt = shunt(Forwarding::Routed, "tc", "deny", "");
    load(&network, &shunt, false);
    let running = network.start_as(Settings::of(&shunt));
    stays_blocked(&running, &mut connect(&network, "10.0.2.1", OPEN));
}

#[test]
fn where_no_fast_path_blocks_the_packet_filter_does() {
    if !is_root() {
        return;
    }
    let network = Network::bare(Forwarding::Routed);
    let shunt = shunt(Forwarding::Routed, "none", "deny", "");
    load(&network, &shunt, false);
    let mut settings = Settings::of(&shunt);
    settings.paths = vec![Path::None];
    let running = network.start_as(settings);
    let mut pair = connect(&network, "10.0.2.1", OPEN);
    let _ = pair.client.write_all(b"first");
    // Marked: whatever comes now is dropped on the slow path.
    running.wait_for(pair.from, |flow| flow.mark >> 16 & 0xf == 2);
    pair.server.set_read_timeout(Some(Duration::from_millis(50))).expect("limit");
    while matches!(std::io::Read::read(&mut pair.server, &mut [0; 64]), Ok(1..)) {}
    pair.client.write_all(b"second").expect("queued");
    // Conntrack counts them before they are dropped.
    let counted = |least: u64| {
        running.with(|engine| engine.count()).expect("counted");
        running.wait_for(pair.from, |_| true).slow.packets_up >= least
    };
    let begun = Instant::now();
    let before = (0..).find(|packets| !counted(packets + 1)).expect("a number");
    while !counted(before + 3) {
        assert!(begun.elapsed() < LIMIT, "it is not sent again");
    }
    assert!(std::io::Read::read(&mut pair.server, &mut [0; 64]).is_err(), "it passes");
}
