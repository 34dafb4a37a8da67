//! Which flows take the fast path, and that their bytes are all there and all counted.

use crate::firewall::{BLOCK, IGNORE, Network, Running, SHUNT};
use sidetrack::shunt::{PathKind, ShuntRecord};
use sidetrack_core::shunt::{Cause, ShuntAction};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, Node, is_root};
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Both ends of a connection, each on its host.
pub(crate) struct Pair {
    pub client: TcpStream,
    pub server: TcpStream,
    pub from: SocketAddr,
    pub to: SocketAddr,
}

/// Connects from the client's host to `port` on the server's.
pub(crate) fn connect(network: &Network, address: &str, port: u16) -> Pair {
    let to = SocketAddr::new(address.parse::<IpAddr>().expect("address"), port);
    let listener = network.server.run(move || TcpListener::bind(to).expect("listen"));
    let client = network.client.run(move || TcpStream::connect_timeout(&to, LIMIT).expect("connect"));
    let (server, from) = listener.accept().expect("accept");
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(LIMIT)).expect("limit");
        stream.set_write_timeout(Some(LIMIT)).expect("limit");
    }
    Pair { client, server, from, to }
}

/// Connects to a port whose flows the policy blocks: the server hears the handshake's first packet and no other.
pub(crate) fn knock(network: &Network, address: &str, port: u16) -> (TcpListener, TcpStream) {
    let to = SocketAddr::new(address.parse::<IpAddr>().expect("address"), port);
    let listener = network.server.run(move || TcpListener::bind(to).expect("listen"));
    let client = network.client.run(move || TcpStream::connect_timeout(&to, LIMIT).expect("connect"));
    (listener, client)
}

impl Pair {
    /// Sends bytes from one end and checks each at the other.
    pub(crate) fn transfer(from: &mut TcpStream, to: &mut TcpStream, length: usize) {
        let byte = |at: usize| u8::try_from((at * 7 + at / 251) % 256).unwrap_or(0);
        let mut sender = from.try_clone().expect("clone");
        let sending = std::thread::spawn(move || {
            let bytes: Vec<_> = (0..length).map(byte).collect();
            sender.write_all(&bytes).expect("send");
        });
        let mut received = vec![0; length];
        to.read_exact(&mut received).expect("receive");
        sending.join().expect("sent");
        assert!(received.iter().enumerate().all(|(at, value)| *value == byte(at)), "other bytes came");
    }

    /// A few bytes each way.
    pub(crate) fn talk(&mut self) {
        Self::transfer(&mut self.client, &mut self.server, 10);
        Self::transfer(&mut self.server, &mut self.client, 10);
    }

    /// Talks until it is on the fast path. Once is enough as a rule; a switch may pass the first words on out of its cache, past
    /// the rules, when it has just let go of the flow.
    pub(crate) fn shunted(&mut self, shunt: &Running) {
        let begun = Instant::now();
        while begun.elapsed() < LIMIT {
            self.talk();
            let talked = Instant::now();
            while talked.elapsed() < Duration::from_secs(2) {
                let flows = shunt.with(|engine| engine.flows());
                if flows.iter().any(|flow| flow.client == self.from && flow.state == "installed") {
                    return;
                }
            }
        }
        shunt.wait_for(self.from, |flow| flow.state == "installed");
    }

    /// Ends it in order, from the client's side.
    pub(crate) fn close(mut self) {
        self.client.shutdown(std::net::Shutdown::Write).expect("end");
        assert_eq!(self.server.read(&mut [0]).expect("end"), 0);
        drop(self.server);
        assert_eq!(self.client.read(&mut [0]).expect("end"), 0);
    }
}

const BYTES: usize = 3_000_000;

fn both_ways(forwarding: Forwarding, path: PathKind) {
    if !is_root() {
        return;
    }
    let network = Network::new(forwarding);
    network.prepare(path);
    let shunt = network.start(path);
    for address in network.server_addresses {
        let mut pair = connect(&network, address, SHUNT);
        pair.shunted(&shunt);
        Pair::transfer(&mut pair.client, &mut pair.server, BYTES);
        Pair::transfer(&mut pair.server, &mut pair.client, BYTES);
        let flow = shunt.wait_for(pair.from, |flow| flow.fast.bytes_down > 1_000_000);
        assert_eq!((flow.state.as_str(), flow.installs, flow.obstacle), ("installed", 1, None));
        let (from, to) = (pair.from, pair.to);
        pair.close();
        forget(&network.firewall);
        let record = shunt.record();
        assert_eq!((record.client, record.server, record.cause), (from, to, Some(Cause::Fin)));
        check_counts(&record);
    }
}

/// Makes conntrack forget what has ended, as it does by itself after two minutes.
pub(crate) fn forget(firewall: &Node) {
    firewall.run(|| {
        let mut table = sidetrack_sys::conntrack::Conntrack::open().expect("conntrack");
        for entry in table.list(None).expect("list") {
            table.delete(&entry).expect("deleted");
        }
    });
}

/// All bytes were counted, and nearly all of them on the fast path.
fn check_counts(record: &ShuntRecord) {
    let total = u64::try_from(BYTES).expect("small");
    for (slow, fast) in
        [(record.slow.bytes_up, record.fast.bytes_up), (record.slow.bytes_down, record.fast.bytes_down)]
    {
        assert!(slow + fast > total, "bytes are missing: {record:?}");
        assert!(slow + fast < total + total / 5, "bytes were counted twice: {record:?}");
        assert!(slow < 10_000, "the slow path carried too much: {record:?}");
    }
}

/// Frames that left the firewall towards the server by its own interface, while there was talk both ways.
fn left_by_the_interface(network: &Network, pair: &mut Pair) -> u64 {
    let sent = || {
        let text = network.tool("ip", "-j -s link show to-server");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        value[0]["stats64"]["tx"]["packets"].as_u64().expect("a count")
    };
    let before = sent();
    pair.talk();
    sent() - before
}

#[test]
fn packets_are_put_at_the_other_end_of_a_pair_unless_that_is_unwanted() {
    if !is_root() {
        return;
    }
    for forwarding in [Forwarding::Bridged, Forwarding::Routed] {
        let network = Network::new(forwarding);
        let mut settings = network.settings(PathKind::Tc, LIMIT * 10);
        settings.redirect_peer = false;
        let shunt = network.start_as(settings);
        let mut pair = connect(&network, network.server_addresses[0], SHUNT);
        pair.shunted(&shunt);
        for _ in 0..3 {
            // Longer than a direction is silent before nothing of it can be on its way: that nothing changes then is the case.
            std::thread::sleep(Duration::from_millis(60));
            assert!(left_by_the_interface(&network, &mut pair) > 0);
        }
        drop(shunt);
        let shunt = network.start(PathKind::Tc);
        pair.shunted(&shunt);
        // Neighbours may be asked for meanwhile, which are frames too.
        let begun = Instant::now();
        while left_by_the_interface(&network, &mut pair) > 0 {
            assert!(begun.elapsed() < LIMIT, "they never skip it");
            std::thread::sleep(Duration::from_millis(20));
        }
        let flow = shunt.wait_for(pair.from, |_| true);
        Pair::transfer(&mut pair.client, &mut pair.server, BYTES);
        Pair::transfer(&mut pair.server, &mut pair.client, BYTES);
        let moved = shunt.wait_for(pair.from, |now| now.fast.bytes_down > flow.fast.bytes_down + 1_000_000);
        assert_eq!((moved.state.as_str(), moved.installs), ("installed", flow.installs));
    }
}

#[test]
fn bridged_by_tc() {
    both_ways(Forwarding::Bridged, PathKind::Tc);
}

#[test]
fn routed_by_tc() {
    both_ways(Forwarding::Routed, PathKind::Tc);
}

#[test]
fn bridged_by_xdp() {
    both_ways(Forwarding::Bridged, PathKind::Xdp);
}

#[test]
fn routed_by_xdp() {
    both_ways(Forwarding::Routed, PathKind::Xdp);
}

#[test]
fn bridged_by_xdp_behind_the_driver() {
    both_ways(Forwarding::Bridged, PathKind::XdpGeneric);
}

#[test]
fn what_policy_ignores_stays_on_the_slow_path_and_what_it_blocks_stops() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    let shunt = network.start(PathKind::Tc);
    let mut ignored = connect(&network, "10.0.0.2", IGNORE);
    ignored.talk();
    let flow = shunt.wait_for(ignored.from, |flow| flow.state == "slow");
    assert_eq!((flow.installs, flow.fast.bytes_up), (0, 0));
    ignored.close();
    // The packet that the policy decides about passes; those behind it do not.
    let (_listener, mut blocked) = knock(&network, "10.0.0.2", BLOCK);
    let from = blocked.local_addr().expect("address");
    let _ = blocked.write_all(b"word");
    let flow = shunt.wait_for(from, |flow| flow.state == "installed");
    assert_eq!(flow.action, ShuntAction::Block);
    blocked.write_all(b"another").expect("queued");
    let flow = shunt.wait_for(from, |flow| flow.dropped.packets_up > 0);
    assert_eq!(flow.fast.packets_up, 0, "what is dropped has not moved");
}
