//! Connections to servers that stand before a flow comes (`warm`).

use crate::node::{Node, reverse_config};
use crate::peers::{Host, closed_address, connect, expect, expect_end, expect_reset, expect_reset_at, reset};
use sidetrack::config::Config;
use sidetrack::live::{Ended, Transport};
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::awaited;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::time::{Duration, Instant};

/// A node of one worker that stands for `server`, and holds connections to it from its start.
fn node(server: SocketAddr, rule: &str) -> Node {
    learning(server, &format!("to = '{server}'\n{rule}"))
}

/// The same, where the destination is known from the first flow on.
fn learning(server: SocketAddr, rule: &str) -> Node {
    Node::start(&format!("workers = 1\n{}", reverse_config(server, &format!("carrier = 'direct'\n{rule}"))))
}

fn is_warm(ended: &Ended) -> bool {
    ended.flow.taken().is_some_and(|taken| taken.transport == Transport::Warm)
}

const LONG: &str = "warm_idle_ms = 600000";

#[test]
fn a_flow_takes_a_connection_that_stood_before_it_came() {
    let host = Host::new();
    let node = node(host.address, &format!("warm = 1\n{LONG}"));
    // No client has connected to us yet.
    let mut server = host.accept();
    for _ in 0..3 {
        let mut client = connect(node.entry());
        client.write_all(b"question").unwrap();
        expect(&mut server, b"question");
        server.write_all(b"answer").unwrap();
        expect(&mut client, b"answer");
        client.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut server, b"");
        drop(server);
        expect_end(&mut client, b"");
        let ended = node.ends_with(EndReason::Ok);
        assert!(is_warm(&ended));
        assert_eq!(ended.flow.bytes(), (8, 6));
        // Another takes its place.
        server = host.accept();
    }
}

#[test]
fn destinations_are_learnt_from_flows() {
    let host = Host::new();
    let node = learning(host.address, &format!("warm = 2\n{LONG}"));
    let mut client = connect(node.entry());
    client.write_all(b"1").unwrap();
    // The flow's own, and two more: which comes first is the kernel's affair.
    let mut servers = vec![host.accept(), host.accept(), host.accept()];
    let first = serve_one(&mut servers, b"1");
    drop((client, servers.remove(first)));
    assert!(!is_warm(&node.ends_with(EndReason::Ok)));
    let mut client = connect(node.entry());
    client.write_all(b"2").unwrap();
    let second = serve_one(&mut servers, b"2");
    drop((client, servers.remove(second)));
    assert!(is_warm(&node.ends_with(EndReason::Ok)));
}

/// Waits until one of these connections has these bytes; its number.
fn serve_one(servers: &mut [std::net::TcpStream], expected: &[u8]) -> usize {
    for server in servers.iter() {
        server.set_nonblocking(true).unwrap();
    }
    let mut buffer = [0; 16];
    awaited("the bytes come", || {
        servers
            .iter_mut()
            .position(|server| server.read(&mut buffer).is_ok_and(|n| n > 0 && &buffer[..n] == expected))
    })
}

#[test]
fn connections_that_their_server_ended_are_replaced() {
    for ends_with_reset in [false, true] {
        let host = Host::new();
        let node = node(host.address, &format!("warm = 1\n{LONG}"));
        let mut server = host.accept();
        if ends_with_reset {
            reset(server);
        } else {
            // What it said before belongs to no flow.
            server.write_all(b"408 too slow\r\n").unwrap();
            drop(server);
        }
        let mut server = host.accept();
        let mut client = connect(node.entry());
        client.write_all(b"hello").unwrap();
        expect(&mut server, b"hello");
        drop(server);
        expect_end(&mut client, b"");
        drop(client);
        assert!(is_warm(&node.ends_with(EndReason::Ok)));
    }
}

#[test]
fn what_a_server_says_first_reaches_the_client() {
    let host = Host::new();
    let node = node(host.address, &format!("warm = 1\n{LONG}"));
    let mut server = host.accept();
    server.write_all(b"220 ready\r\n").unwrap();
    let mut client = connect(node.entry());
    expect(&mut client, b"220 ready\r\n");
    client.write_all(b"EHLO\r\n").unwrap();
    expect(&mut server, b"EHLO\r\n");
    drop((client, server));
    assert!(is_warm(&node.ends_with(EndReason::Ok)));
}

#[test]
fn nothing_is_said_twice_when_a_connection_breaks() {
    let host = Host::new();
    let node = node(host.address, &format!("warm = 2\n{LONG}"));
    let mut servers = [host.accept(), host.accept()];
    let mut client = connect(node.entry());
    client.write_all(b"pay 10").unwrap();
    let paid = serve_one(&mut servers, b"pay 10");
    let third = host.accept();
    let [first, second] = servers;
    let (broken, other) = if paid == 0 { (first, second) } else { (second, first) };
    reset(broken);
    expect_reset(&mut client);
    assert!(is_warm(&node.ends_with(EndReason::ServerReset)));
    // The node has done all it ever does for this flow.
    node.stop();
    for mut server in [other, third] {
        server.set_nonblocking(false).unwrap();
        expect_end(&mut server, b"");
    }
}

#[test]
fn connections_that_waited_too_long_are_closed_and_made_anew() {
    let host = Host::new();
    let _node = node(host.address, "warm = 1\nwarm_idle_ms = 200");
    for _ in 0..3 {
        expect_end(&mut host.accept(), b"");
    }
}

#[test]
fn a_server_that_refuses_is_left_alone_for_longer_each_time() {
    let host = Host::new();
    let node = node(host.address, &format!("warm = 4\n{LONG}"));
    let began = Instant::now();
    let mut seen = 0;
    // It closes what it accepts.
    while began.elapsed() < Duration::from_millis(1500) {
        drop(host.accept());
        seen += 1;
    }
    // Four at a time, after 250, 500, 1000 ms and so on; the last may have come when the time was over.
    assert!(seen <= 16, "{seen} connections in {:?}", began.elapsed());
    drop(node);
    // Flows find out for themselves that no server is there.
    let node = self::node(closed_address(), &format!("warm = 4\n{LONG}"));
    expect_reset_at(node.entry());
    node.ends_with(EndReason::Refused);
}

#[test]
fn no_more_stand_than_there_is_room_for() {
    let host = Host::new();
    let node = node(host.address, &format!("warm = 64\n{LONG}"));
    let room = sidetrack::worker::WARM_MIN;
    let mut servers: Vec<_> = (0..room).map(|_| host.accept()).collect();
    let mut client = connect(node.entry());
    client.write_all(b"x").unwrap();
    serve_one(&mut servers, b"x");
    // The one that was taken makes room for one more, and for no others.
    servers.push(host.accept());
    host.listener.set_nonblocking(true).unwrap();
    assert_eq!(host.listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn all_are_closed_when_the_node_stops() {
    let host = Host::new();
    let node = node(host.address, &format!("warm = 3\n{LONG}"));
    let servers = [host.accept(), host.accept(), host.accept()];
    node.stop();
    for mut server in servers {
        expect_end(&mut server, b"");
    }
}

#[test]
fn a_reload_leaves_alone_what_it_does_not_change() {
    let [first, second] = [Host::new(), Host::new()];
    let node = node(first.address, &format!("warm = 1\n{LONG}"));
    let mut waiting = first.accept();
    let load = |server: &Host, more: &str| {
        let rule = format!("carrier = 'direct'\nto = '{}'\nwarm = 1\n{LONG}\n{more}", server.address);
        let text = format!("version = 1\nworkers = 1\n{}", reverse_config(server.address, &rule));
        node.shared.config.store(std::sync::Arc::new(Config::from_text("test.toml", &text).expect("good")));
    };
    // Another rule comes, which has connections of its own: when they stand, the reload is done.
    load(&first, &format!("[[rule]]\nname = 'b'\ncarrier = 'direct'\nto = '{}'\nwarm = 1", second.address));
    let mut other = second.accept();
    let mut client = connect(node.entry());
    client.write_all(b"same").unwrap();
    expect(&mut waiting, b"same");
    drop((client, waiting));
    assert!(is_warm(&node.ends_with(EndReason::Ok)));
    let mut waiting = first.accept();
    // Both rules go.
    load(&Host::new(), "");
    expect_end(&mut waiting, b"");
    expect_end(&mut other, b"");
}
