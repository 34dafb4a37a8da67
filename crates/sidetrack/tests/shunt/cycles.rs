//! Entries that come and go under traffic: nothing is lost.

use crate::firewall::{Network, SHUNT};
use crate::flows::connect;
use sidetrack::shunt::PathKind;
use sidetrack_core::shunt::{ShuntAction, Transport, Tuple};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_testkit::{LIMIT, Node, is_root};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Times that the entry is installed and removed; the seed's criterion is 10,000, which `CYCLES` in the environment asks for.
fn cycles() -> usize {
    std::env::var("CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(150)
}

/// Frames that a host's interface has sent, received and dropped.
fn frames(host: &Node) -> (u64, u64, u64) {
    host.run(|| {
        let text = crate::firewall::tool("ip", "-j -s link show eth0", "");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let count = |way: &str, key: &str| value[0]["stats64"][way][key].as_u64().expect("a counter");
        (count("tx", "packets"), count("rx", "packets"), count("rx", "dropped") + count("tx", "dropped"))
    })
}

#[test]
fn a_stream_loses_nothing_while_its_entry_comes_and_goes() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    // The firewall says nothing of its own: every frame that one end counts is the other's.
    network.firewall.run(|| {
        sidetrack_sys::sysctl::write("net/ipv6/conf/all/disable_ipv6", "1").expect("no IPv6 of its own");
    });
    let shunt = network.start(PathKind::Tc);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let before = (frames(&network.client), frames(&network.server));
    let stop = Arc::new(AtomicBool::new(false));
    let (mut sender, halt) = (pair.client.try_clone().expect("clone"), stop.clone());
    let sending = std::thread::spawn(move || {
        let chunk = vec![9; 64 << 10];
        let mut sent = 0_u64;
        while !halt.load(Ordering::Relaxed) {
            sender.write_all(&chunk).expect("send");
            sent += 64 << 10;
        }
        sender.shutdown(std::net::Shutdown::Write).expect("end");
        sent
    });
    let mut receiver = pair.server.try_clone().expect("clone");
    let receiving = std::thread::spawn(move || {
        let (mut buffer, mut received) = (vec![0; 256 << 10], 0_u64);
        loop {
            match receiver.read(&mut buffer).expect("receive") {
                0 => return received,
                length => received += u64::try_from(length).expect("small"),
            }
        }
    });
    for _ in 0..cycles() {
        assert!(shunt.pin(pair.from, pair.to, ShuntAction::Ignore));
        assert!(shunt.pin(pair.from, pair.to, ShuntAction::Shunt));
    }
    stop.store(true, Ordering::Relaxed);
    assert_eq!(sending.join().expect("sent"), receiving.join().expect("received"));
    let flow = shunt.wait_for(pair.from, |flow| flow.installs > 1);
    assert!(usize::try_from(flow.installs).expect("small") > cycles() / 2, "{flow:?}");
    let after = (frames(&network.client), frames(&network.server));
    // Every frame that left one end reached the other; ARP and the like are few and go both ways.
    let (up, arrived) = (after.0.0 - before.0.0, after.1.1 - before.1.1);
    let (down, returned) = (after.1.0 - before.1.0, after.0.1 - before.0.1);
    assert!(up.abs_diff(arrived) <= 4 && down.abs_diff(returned) <= 4, "{up} {arrived} {down} {returned}");
    assert_eq!((after.0.2 - before.0.2, after.1.2 - before.1.2), (0, 0), "dropped");
}

#[test]
fn datagrams_arrive_each_once_while_their_entry_comes_and_goes() {
    if !is_root() {
        return;
    }
    let network = Network::new(Forwarding::Bridged);
    let shunt = network.start(PathKind::Tc);
    let to: SocketAddr = format!("10.0.0.2:{SHUNT}").parse().expect("address");
    let server = network.server.run(move || UdpSocket::bind(to).expect("bound"));
    let client = network.client.run(move || {
        let socket = UdpSocket::bind("10.0.0.1:0").expect("bound");
        socket.connect(to).expect("connected");
        socket
    });
    let from = client.local_addr().expect("address");
    server.set_read_timeout(Some(LIMIT)).expect("limit");
    let stop = Arc::new(AtomicBool::new(false));
    let halt = stop.clone();
    // Each datagram waits for its answer: as many are under way as the receiver's queue always holds.
    let talking = std::thread::spawn(move || {
        let (mut number, mut buffer) = (0_u64, [0; 8]);
        client.set_read_timeout(Some(LIMIT)).expect("limit");
        while !halt.load(Ordering::Relaxed) {
            for ahead in 0..32 {
                client.send(&(number + ahead).to_be_bytes()).expect("sent");
            }
            for ahead in 0..32 {
                client.recv(&mut buffer).expect("each is answered");
                assert_eq!(u64::from_be_bytes(buffer), number + ahead, "in order, and once");
            }
            number += 32;
        }
        client.send(&u64::MAX.to_be_bytes()).expect("sent");
        number
    });
    let answering = std::thread::spawn(move || {
        let (mut buffer, mut next) = ([0; 8], 0);
        loop {
            let (_, peer) = server.recv_from(&mut buffer).expect("received");
            match u64::from_be_bytes(buffer) {
                u64::MAX => return next,
                number => {
                    assert_eq!(number, next, "in order, and once");
                    next += 1;
                    server.send_to(&buffer, peer).expect("answered");
                }
            }
        }
    });
    shunt.wait_for(from, |flow| flow.state == "installed");
    let tuple = Tuple::new(from, to, Transport::Udp, 0);
    for _ in 0..cycles() {
        assert!(shunt.with(move |engine| engine.pin(&tuple, ShuntAction::Ignore)).expect("asked"));
        assert!(shunt.with(move |engine| engine.pin(&tuple, ShuntAction::Shunt)).expect("asked"));
    }
    stop.store(true, Ordering::Relaxed);
    let sent = talking.join().expect("it talked");
    assert_eq!(sent, answering.join().expect("it answered"));
    assert!(sent > 1000);
}
