//! What a tunnel does when a path falls silent, comes back, or changes its address, and what records say of it.

use crate::gate::Gate;
use crate::node::Node;
use crate::peers::{Host, Server, connect, expect, expect_echo, expect_end, expect_reset};
use crate::tunnel::{Keys, TRANSPORTS};
use sidetrack::live::{Taken, Transport};
use sidetrack::record::FlowRecord;
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::awaited;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Opens a flow that is echoed; the address of the path that it took. None if it did not get through soon.
fn flow_over(near: &Node) -> Option<(TcpStream, SocketAddr)> {
    let mut client = connect(near.entry());
    client.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    client.write_all(b"x").ok()?;
    client.read_exact(&mut [0]).ok()?;
    let from = client.local_addr().unwrap();
    let is_it =
        |flow: &sidetrack::live::LiveFlow| flow.decided().is_some_and(|decided| decided.flow.client == from);
    let taken = near.live().into_iter().find(|flow| is_it(flow))?.taken()?;
    assert_eq!(taken.transport, Transport::Quic);
    Some((client, taken.address))
}

/// Waits until new flows take the path of this address; the flow that did.
fn await_path(near: &Node, path: SocketAddr) -> TcpStream {
    awaited("a new flow takes the path", || {
        flow_over(near).filter(|(_, taken)| *taken == path).map(|(client, _)| client)
    })
}

#[test]
fn new_flows_leave_a_path_that_falls_silent_and_come_back() {
    let (keys, server) = (Keys::new(), Server::echo());
    let far = keys.far("carrier = 'direct'");
    let [first, second] = [Gate::to(far.entry()), Gate::to(far.entry())];
    let text = keys.near_text(
        server.address,
        &[first.address, second.address],
        "transport = 'quic'\nkeepalive_ms = 300\nlost_after_ms = 8000",
    );
    let near = Node::start(&format!("workers = 1\n{text}"));
    // Both stand: the second carries flows while the first is cut.
    drop(await_path(&near, first.address));
    first.loses.store(100, Relaxed);
    drop(await_path(&near, second.address));
    first.loses.store(0, Relaxed);
    let mut running: Vec<_> = (0..3).map(|_| await_path(&near, first.address)).collect();
    near.all_ended_but(3);
    first.loses.store(100, Relaxed);
    let mut moved = await_path(&near, second.address);
    // Long before the path counts as lost: its flows might still go on.
    let waiting = near.live().into_iter().filter_map(|flow| flow.taken());
    assert!(waiting.filter(|taken| taken.address == first.address).count() >= 3);
    for client in &mut running {
        client.set_read_timeout(Some(sidetrack_testkit::LIMIT)).unwrap();
        expect_reset(client);
    }
    let mut lost = Vec::new();
    awaited("their records are there", || {
        lost.extend(near.ended_so_far().into_iter().filter(|ended| ended.reason == EndReason::ServerReset));
        (lost.len() >= running.len()).then_some(())
    });
    for ended in lost {
        assert!(
            ended.detail.as_deref().unwrap().contains("the tunnel's connection is lost: timed out"),
            "{ended:?}"
        );
        assert_eq!(ended.flow.taken(), Some(Taken { transport: Transport::Quic, address: first.address }));
    }
    expect_echo(&mut moved, b"goes on where it is");
    first.loses.store(0, Relaxed);
    drop(await_path(&near, first.address));
    expect_echo(&mut moved, b"and stays there");
}

#[test]
fn a_flow_lives_on_when_the_near_side_changes_its_address() {
    let (keys, server) = (Keys::new(), Server::echo());
    // The kernel spreads addresses over workers; only the one that has the connection can go on with it.
    let far = Node::start(&format!("workers = 1\n{}", keys.far_text("127.0.0.1:0", "carrier = 'direct'")));
    let gate = Gate::to(far.entry());
    let near = keys.near_through(&gate, server.address, "transport = 'quic'");
    let mut client = connect(near.entry());
    expect_echo(&mut client, b"from the first address");
    for round in 0..3_u8 {
        gate.moves.store(true, Relaxed);
        awaited("the gate has moved", || (!gate.moves.load(Relaxed)).then_some(()));
        expect_echo(&mut client, &vec![round; 200_000]);
    }
    client.shutdown(Shutdown::Write).unwrap();
    expect_end(&mut client, b"");
    for node in [&near, &far] {
        // One flow and one connection from the beginning to the end.
        node.ends_with(EndReason::Ok);
    }
}

#[test]
fn records_say_what_carried_a_flow() {
    for transport in TRANSPORTS {
        let (keys, server) = (Keys::new(), Server::echo());
        let far = keys.far("carrier = 'direct'");
        let near = keys.near(server.address, &[far.entry()], transport);
        let mut client = connect(near.entry());
        expect_echo(&mut client, b"hello");
        drop(client);
        let ended = near.ends_with(EndReason::Ok);
        let decided = ended.flow.decided();
        let record = FlowRecord::ended(&ended, decided.as_deref());
        assert_eq!(record.carrier.as_deref(), Some("tunnel:t"));
        let word = if transport.contains("quic") { "quic" } else { "tls" };
        assert_eq!(record.path.as_deref(), Some(&*format!("{word} {}", far.entry())));
        // The far side dials as anybody does.
        let ended = far.ends_with(EndReason::Ok);
        assert_eq!(FlowRecord::ended(&ended, None).path, None);
    }
}

#[test]
fn the_far_side_takes_connections_that_stand() {
    for transport in TRANSPORTS {
        let (keys, host) = (Keys::new(), Host::new());
        let rule = "carrier = 'direct'\nwarm = 1\nwarm_idle_ms = 600000";
        let far = Node::start(&format!("workers = 1\n{}", keys.far_text("127.0.0.1:0", rule)));
        let near = keys.near(host.address, &[far.entry()], transport);
        // The first flow teaches the destination.
        let mut client = connect(near.entry());
        client.write_all(b"first").unwrap();
        expect(&mut host.accept(), b"first");
        let mut waiting = host.accept();
        drop(client);
        far.ended(1);
        let mut client = connect(near.entry());
        client.write_all(b"second").unwrap();
        expect(&mut waiting, b"second");
        drop((client, waiting));
        let ended = far.ends_with(EndReason::Ok);
        let warm = Taken { transport: Transport::Warm, address: host.address };
        assert_eq!(ended.flow.taken(), Some(warm));
    }
}

/// A path on which datagrams come to the far side, and none comes back.
fn one_way(far: SocketAddr) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let outside = UdpSocket::bind("127.0.0.1:0").unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 65_536];
        while let Ok(n) = socket.recv(&mut buffer) {
            let _ = outside.send_to(&buffer[..n], far);
        }
    });
    address
}

#[test]
fn quic_handshakes_that_do_not_end_leave_for_others() {
    let (keys, server) = (Keys::new(), Server::echo());
    let limits = "limits = { max_handshakes = 2, handshake_timeout_ms = 3600000 }";
    let text = keys.far_text("127.0.0.1:0", "carrier = 'direct'");
    let far = Node::start(&format!("workers = 1\n{limits}\n{text}"));
    let silent: Vec<_> = (0..3)
        .map(|_| {
            let to = [one_way(far.entry())];
            Node::start(&format!(
                "workers = 1\n{}",
                keys.near_text(server.address, &to, "transport = 'quic'")
            ))
        })
        .collect();
    awaited("the oldest leaves", || (far.shared.closed_for_others().0 > 0).then_some(()));
    let near = keys.near(server.address, &[far.entry()], "transport = 'quic'");
    awaited("a near side that finishes its handshake is let in", || {
        let mut client = connect(near.entry());
        client.write_all(b"hello").ok()?;
        let mut answer = [0; 5];
        client.read_exact(&mut answer).ok()?;
        (answer == *b"hello").then_some(())
    });
    drop(silent);
}
