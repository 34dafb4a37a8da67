//! Clients that leave, or never finish, at every step of every handshake.

use crate::node::Node;
use crate::peers::{Host, connect, expect, expect_echo, expect_reset_at, reset};
use crate::socks::{v5_address, v5_request};
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::awaited;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

/// The listeners whose clients have something to say first.
fn listeners(handshake_timeout_ms: u64) -> Node {
    Node::start(&format!(
        "limits = {{ handshake_timeout_ms = {handshake_timeout_ms} }}\n\
         [[listen]]\nname = 'socks'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
         [[listen]]\nname = 'login'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
         users = [{{ user = 'u', password = 'p' }}]\n\
         [[listen]]\nname = 'proxied'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '127.0.0.1:1'\n\
         accept_proxy_protocol = '127.0.0.0/8'\n\
         [[listen]]\nname = 'named'\nkind = 'reverse'\naddress = '127.0.0.1:0'\n\
         names = {{ 'a.example' = '127.0.0.1:1' }}\n"
    ))
}

/// A listener and the whole of what its client says before a path is made.
fn handshakes() -> Vec<(&'static str, Vec<u8>)> {
    let v5 = [&[5, 1, 0][..], &v5_request(1, "db.example.nl:5432")].concat();
    let login = [&[5, 1, 2, 1, 1, b'u', 1, b'p'][..], &v5_request(1, "192.0.2.1:80")].concat();
    let mut v6 = vec![6, 1, 0, 8, 1, 187, 0, 1, 192, 0, 2, 1];
    v6.extend([0, 2, 0, 8, 0, 5, 0, 0]);
    let socksx = [&[6, 1][..], &v5_address("192.0.2.1:443"), &[0, 0, 8, 0, 2, 0, 8, 0, 5, 0, 0]].concat();
    vec![
        ("socks", v5),
        ("login", login),
        ("socks", v6),
        ("socks", socksx),
        ("proxied", b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n".to_vec()),
        ("proxied", sidetrack_v2()),
        ("named", b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n".to_vec()),
    ]
}

/// A header of PROXY protocol version 2.
fn sidetrack_v2() -> Vec<u8> {
    use sidetrack_core::proxy_protocol::{Addresses, encode_v2};
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    encode_v2(&Addresses::tcp(address("192.0.2.1:1"), address("192.0.2.2:2")), &[], true).unwrap()
}

#[test]
fn a_client_that_resets_is_gone_at_every_byte() {
    let node = listeners(20_000);
    for (listener, bytes) in handshakes() {
        for cut in 0..bytes.len() {
            let mut client = connect(node.address(listener));
            client.write_all(&bytes[..cut]).unwrap();
            // Caught first: a connection that is reset in the listener's queue does not become a flow.
            node.await_live("the flow", |_| true);
            reset(client);
            let reason = node.only_end().reason;
            assert_eq!(reason, EndReason::ClientGone, "{listener} after {cut} bytes of {bytes:?}");
        }
    }
}

#[test]
fn a_client_that_closes_is_gone_at_every_byte() {
    let node = listeners(20_000);
    for (listener, bytes) in handshakes() {
        for cut in 0..bytes.len() {
            let mut client = connect(node.address(listener));
            client.write_all(&bytes[..cut]).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            // The end of what we are told, whatever it is.
            let _ = client.read_to_end(&mut Vec::new());
            let reason = node.only_end().reason;
            assert_eq!(reason, EndReason::ClientGone, "{listener} after {cut} bytes of {bytes:?}");
        }
    }
}

#[test]
fn one_byte_at_a_time_does_not_hold_a_listener_longer() {
    let node = listeners(2000);
    // All at once: the whole costs the time of one.
    let mut clients: Vec<(TcpStream, Vec<u8>)> = handshakes()
        .into_iter()
        .chain([
            ("socks", vec![5]),
            ("proxied", b"PROXY".to_vec()),
            ("named", b"GET / HTTP/1.1\r\n".to_vec()),
        ])
        .map(|(listener, bytes)| {
            let mut slow = bytes.into_iter().rev().collect::<Vec<_>>();
            let mut client = connect(node.address(listener));
            // On a busy machine the time may be over already.
            let _ = client.write_all(&[slow.pop().unwrap()]);
            (client, slow)
        })
        .collect();
    let count = clients.len();
    // The last byte never comes.
    awaited("all clients are reset", || {
        clients.retain_mut(|(client, slow)| {
            let byte = if slow.len() > 1 { slow.pop() } else { None };
            let written = byte.map_or(Ok(()), |byte| client.write_all(&[byte]));
            client.set_nonblocking(true).unwrap();
            let is_open = match client.read(&mut [0; 64]) {
                Ok(n) => n > 0,
                Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
            };
            client.set_nonblocking(false).unwrap();
            written.is_ok() && is_open
        });
        std::thread::park_timeout(std::time::Duration::from_millis(10));
        clients.is_empty().then_some(())
    });
    for ended in node.ended(count) {
        assert_eq!(ended.reason, EndReason::HandshakeTimeout, "{ended:?}");
        assert!(ended.duration >= std::time::Duration::from_millis(2000));
    }
}

#[test]
fn a_client_that_says_nothing_times_out() {
    let node = listeners(200);
    for listener in ["socks", "login", "proxied", "named"] {
        expect_reset_at(node.address(listener));
        node.ends_with(EndReason::HandshakeTimeout);
    }
}

#[test]
fn a_client_that_resets_while_we_dial_ends_the_dialling() {
    // A hop that accepts and says nothing keeps the path in the making.
    let hop = Host::new();
    for (carrier, listener) in [("socks5", "socks"), ("socks6", "reverse"), ("http", "reverse")] {
        let kind = match listener {
            "socks" => "kind = 'socks'".to_owned(),
            _ => "kind = 'reverse'\nto = '192.0.2.1:80'".to_owned(),
        };
        let node = Node::start(&format!(
            "default = 'deny'\n[[listen]]\nname = 'in'\naddress = '127.0.0.1:0'\n{kind}\n\
             [[rule]]\nname = 'all'\ncarrier = ['{carrier}://{}']\n",
            hop.address
        ));
        let mut client = connect(node.entry());
        if listener == "socks" {
            client.write_all(&[5, 1, 0]).unwrap();
            expect(&mut client, &[5, 0]);
            client.write_all(&v5_request(1, "192.0.2.1:80")).unwrap();
        }
        let mut dialled = hop.accept();
        reset(client);
        node.ends_with(EndReason::ClientGone);
        // The half-made path is given up, too.
        let _ = dialled.read_to_end(&mut Vec::new());
    }
}

#[test]
fn a_client_that_half_closes_while_we_dial_is_still_served() {
    let hop = Host::new();
    let node = Node::start(&format!(
        "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '192.0.2.1:80'\n\
         [[rule]]\nname = 'all'\ncarrier = ['http://{}']\n",
        hop.address
    ));
    let mut client = connect(node.entry());
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut dialled = hop.accept();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        dialled.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    dialled.write_all(b"HTTP/1.1 200 OK\r\n\r\nearly ").unwrap();
    crate::peers::expect_end(&mut dialled, b"question");
    dialled.write_all(b"answer").unwrap();
    drop(dialled);
    crate::peers::expect_end(&mut client, b"early answer");
    let ended = node.ends_with(EndReason::Ok);
    assert_eq!(ended.flow.bytes(), (8, 12));
}

/// A port for a server, and a rule that asks for first bytes for as long as can be set.
fn by_name(server: std::net::SocketAddr) -> Node {
    Node::start(&format!(
        "default = 'direct'\nlimits = {{ first_bytes_ms = 100 }}\n\
         [[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{server}'\n\
         [[rule]]\nname = 'by-name'\nmatch = {{ host = 'a.example' }}\naction = 'deny'\n"
    ))
}

#[test]
fn a_server_that_speaks_first_is_not_held_by_a_rule_on_names() {
    let server = Host::new();
    // The wait must end by itself: the client says nothing.
    let node = by_name(server.address);
    let mut client = connect(node.entry());
    let mut accepted = server.accept();
    accepted.write_all(b"220 banner\r\n").unwrap();
    expect(&mut client, b"220 banner\r\n");
    client.write_all(b"EHLO\r\n").unwrap();
    expect(&mut accepted, b"EHLO\r\n");
    drop((client, accepted));
    let ended = node.ends_with(EndReason::Ok);
    assert_eq!(ended.flow.decided().unwrap().rule(), None);
}

#[test]
fn a_client_whose_first_byte_is_no_name_is_let_go_at_once() {
    let server = crate::peers::Server::echo();
    let node = Node::start(&format!(
        "default = 'direct'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\n\
         names = {{ 'a.example' = '127.0.0.1:1' }}\ndefault = '{}'\n",
        server.address
    ));
    let mut client = connect(node.entry());
    expect_echo(&mut client, b"\x00\x01 no protocol with names");
    drop(client);
    node.ends_with(EndReason::Ok);
}

#[test]
fn a_client_that_resets_while_its_first_bytes_are_awaited_is_gone() {
    // It answers no dial: where the wait is over before the client goes, the path does not stand either.
    let (_socket, address, _queue) = crate::endings::deaf();
    let node = by_name(address);
    for _ in 0..10 {
        let client = connect(node.entry());
        node.await_live("the flow", |_| true);
        reset(client);
        node.ends_with(EndReason::ClientGone);
    }
}
