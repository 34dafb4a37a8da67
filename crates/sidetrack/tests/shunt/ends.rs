//! How flows leave the fast path, and come back.

use crate::firewall::{IDLE, Network, SHUNT};
use crate::flows::{Pair, connect, forget};
use sidetrack::shunt::PathKind;
use sidetrack_core::shunt::{Cause, Obstacle, ShuntAction};
use sidetrack_sys::bpf::Forwarding;
use sidetrack_sys::conntrack::Conntrack;
use sidetrack_sys::sysctl;
use sidetrack_testkit::{LIMIT, eventually, is_root};
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

fn bridged() -> Option<Network> {
    is_root().then(|| Network::new(Forwarding::Bridged))
}

#[test]
fn a_flow_that_stood_still_is_inspected_and_shunted_again() {
    let Some(network) = bridged() else { return };
    let shunt = network.start_with(PathKind::Tc, IDLE);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(
        (flow.cause, flow.mark & 0x1000_0000),
        (Some(Cause::Idle), 0),
        "the rules are to be asked again"
    );
    assert!(flow.installed_seconds >= Some(IDLE.as_secs_f64()));
    pair.shunted(&shunt);
    let flow = shunt.wait_for(pair.from, |flow| flow.installs == 2);
    assert_eq!(flow.state, "installed");
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    pair.close();
    forget(&network.firewall);
    assert_eq!(shunt.record().installs, 2);
}

#[test]
fn a_reset_ends_it_and_the_next_connection_on_the_ports_is_another() {
    let Some(network) = bridged() else { return };
    let shunt = network.start(PathKind::Tc);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    pair.talk();
    let from = pair.from;
    sidetrack_sys::sockopt::reset_on_close(&pair.client).expect("linger");
    drop(pair.client);
    let flow = shunt.wait_for(from, |flow| flow.state == "slow");
    assert_eq!(flow.cause, Some(Cause::Rst));
    drop(pair.server);
    // The same addresses and ports again, at once.
    let to = pair.to;
    let listener = network.server.run(move || std::net::TcpListener::bind(to).expect("listen"));
    let client = network.client.run(move || {
        let socket = sidetrack_sys::sockopt::stream_socket(&to).expect("socket");
        socket.set_nonblocking(false).expect("blocking");
        socket.set_reuse_address(true).expect("reuse");
        socket.bind(&from.into()).expect("the same port");
        socket.connect(&to.into()).expect("connect");
        std::net::TcpStream::from(socket)
    });
    let (server, again) = listener.accept().expect("accept");
    assert_eq!(again, from);
    let mut pair = Pair { client, server, from, to };
    pair.shunted(&shunt);
    Pair::transfer(&mut pair.client, &mut pair.server, 1_000_000);
    let first = shunt.record();
    assert_eq!((first.client, first.cause), (from, Some(Cause::Rst)));
    assert!(first.fast.bytes_up < 10_000, "the second connection's bytes are not the first's");
}

#[test]
fn withdrawn_released_and_blocked_by_hand() {
    let Some(network) = bridged() else { return };
    let shunt = network.start(PathKind::Tc);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    let transport = sidetrack_core::shunt::Transport::Tcp;
    let tuple = sidetrack_core::shunt::Tuple::new(pair.from, pair.to, transport, 0);
    assert!(shunt.with(move |engine| engine.withdraw(&tuple)).expect("asked"));
    shunt.wait_for(pair.from, |flow| flow.cause == Some(Cause::Withdrawn));
    pair.shunted(&shunt);
    assert!(shunt.pin(pair.from, pair.to, ShuntAction::Ignore));
    pair.talk();
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "slow");
    assert_eq!(flow.obstacle, Some(Obstacle::Held));
    assert!(shunt.pin(pair.from, pair.to, ShuntAction::Block));
    let flow = shunt.wait_for(pair.from, |flow| flow.state == "installed");
    assert_eq!(flow.action, ShuntAction::Block);
    assert!(!shunt.pin(pair.to, pair.from, ShuntAction::Block), "no such connection");
}

#[test]
fn when_the_shunt_goes_the_flow_goes_on_and_a_new_one_finds_it() {
    let Some(network) = bridged() else { return };
    let shunt = network.start(PathKind::Tc);
    let mut pair = connect(&network, "10.0.0.2", SHUNT);
    pair.shunted(&shunt);
    Pair::transfer(&mut pair.client, &mut pair.server, 3_000_000);
    drop(shunt);
    // Conntrack saw none of those bytes and takes the next all the same.
    Pair::transfer(&mut pair.client, &mut pair.server, 3_000_000);
    let shunt = network.start(PathKind::Tc);
    pair.shunted(&shunt);
    pair.close();
}

/// Connections at a time, and one after the other.
const CONNECTIONS: [usize; 2] = [4, 100];

/// Many are over before the shunt is done with them.
#[test]
fn conntrack_forgets_short_connections_as_soon_as_others() {
    let Some(network) = bridged() else { return };
    network.firewall.run(|| {
        sysctl::write("net/netfilter/nf_conntrack_tcp_timeout_time_wait", "1").expect("set");
    });
    let _shunt = network.start(PathKind::Tc);
    let to: SocketAddr = (network.server_addresses[0].parse::<IpAddr>().expect("an address"), SHUNT).into();
    let listener = network.server.run(move || TcpListener::bind(to).expect("listen"));
    let [at_a_time, each] = CONNECTIONS;
    let server = std::thread::spawn(move || {
        for _ in 0..at_a_time * each {
            let (mut end, _) = listener.accept().expect("accept");
            let mut word = [0; 4];
            end.read_exact(&mut word).expect("a word");
            end.write_all(&word).expect("sent");
        }
    });
    let client = move || {
        let one = |_| {
            let mut end = TcpStream::connect_timeout(&to, LIMIT).expect("connect");
            end.set_read_timeout(Some(LIMIT)).expect("limit");
            end.write_all(b"word").expect("sent");
            end.read_exact(&mut [0; 4]).expect("a word");
            assert_eq!(end.read(&mut [0]).expect("the end"), 0);
        };
        (0..each).for_each(one);
    };
    network.client.run(move || {
        let clients: Vec<_> = (0..at_a_time).map(|_| std::thread::spawn(client)).collect();
        clients.into_iter().for_each(|client| client.join().expect("all"));
    });
    server.join().expect("all");
    let left = || {
        let list = || Conntrack::open().expect("conntrack").list(None).expect("a list");
        network.firewall.run(list).into_iter().map(|entry| entry.tcp_state).collect::<Vec<_>>()
    };
    eventually("conntrack has none", || left().is_empty());
}
