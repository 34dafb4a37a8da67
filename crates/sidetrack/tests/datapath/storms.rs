//! Random and mutated bytes at live listeners: everything survives, and every flow is recorded.

use crate::node::Node;
use crate::peers::{Server, expect_echo, patient, reset};
use crate::random::{Random, seed};
use crate::socks::{v5_connect, v5_request};
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::LIMIT;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

const CONNECTIONS: usize = 2000;
/// Most of a connection is waiting for a time-out.
const THREADS: usize = 50;

/// A node on whose listeners anything may be said: only loopback addresses are ever dialled, whatever a mutated
/// request asks for.
fn node(server: SocketAddr) -> Node {
    Node::start(&format!(
        "default = 'deny'\nlimits = {{ handshake_timeout_ms = 100, connect_timeout_ms = 100 }}\n\
         [[listen]]\nname = 'socks'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
         [[listen]]\nname = 'login'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
         users = [{{ user = 'u', password = 'p' }}]\n\
         [[listen]]\nname = 'proxied'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{server}'\n\
         accept_proxy_protocol = '127.0.0.0/8'\n\
         [[listen]]\nname = 'named'\nkind = 'reverse'\naddress = '127.0.0.1:0'\n\
         names = {{ 'www.example.com' = '{server}' }}\n\
         [[rule]]\nname = 'here'\nmatch = {{ to = '127.0.0.0/8' }}\ncarrier = 'direct'\n"
    ))
}

/// Whole handshakes to begin with.
fn openings(server: SocketAddr) -> Vec<(&'static str, Vec<u8>)> {
    let request = v5_request(1, &server.to_string());
    let mut v6 = vec![6, 1, 0, 8];
    v6.extend(server.port().to_be_bytes());
    v6.extend([0, 1, 127, 0, 0, 1, 0, 2, 0, 8, 0, 5, 0, 0]);
    vec![
        ("socks", [&[5, 1, 0][..], &request].concat()),
        ("socks", v6),
        ("login", [&[5, 1, 2, 1, 1, b'u', 1, b'p'][..], &request].concat()),
        ("proxied", b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n".to_vec()),
        ("proxied", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c\xc0\0\x02\x01\xc0\0\x02\x02\0\x01\0\x02".to_vec()),
        ("named", b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n".to_vec()),
        ("named", crate::transfers::client_hello().to_vec()),
    ]
}

/// Changes, cuts, repeats or replaces bytes.
fn mutated(mut bytes: Vec<u8>, random: &mut Random) -> Vec<u8> {
    for _ in 0..random.below(4) {
        let at = random.below(bytes.len().max(1));
        match random.below(5) {
            0 => bytes.truncate(at),
            1 if at < bytes.len() => bytes[at] = random.next().to_le_bytes()[0],
            2 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            3 => {
                let len = random.below(64);
                let noise = random.bytes(len);
                bytes.splice(at..at, noise);
            }
            _ => bytes.extend_from_within(at.min(bytes.len())..),
        }
    }
    if random.below(10) == 0 {
        let len = random.below(40_000);
        bytes = random.bytes(len);
    }
    bytes
}

/// One connection: says something, and goes in one of the ways there are. Whether it is sure to be accepted: one that
/// is reset in the listener's queue may never be.
fn connection(node: &Node, openings: &[(&str, Vec<u8>)], random: &mut Random) -> bool {
    let (listener, opening) = &openings[random.below(openings.len())];
    let mut client = match TcpStream::connect_timeout(&node.address(listener), LIMIT) {
        Ok(client) => patient(client),
        // Its time was over before connect(2) has returned.
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            return true;
        }
    };
    // Some get through to the server, which has nothing to say either.
    client.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let bytes = mutated(opening.clone(), random);
    let cut = random.below(bytes.len() + 1);
    for piece in [&bytes[..cut], &bytes[cut..]] {
        // It may be refused in the middle of what it says.
        if client.write_all(piece).is_err() {
            return true;
        }
    }
    let way = random.below(4);
    match way {
        0 => reset(client),
        1 => drop(client),
        2 => {
            let _ = client.shutdown(Shutdown::Write);
            let _ = client.read_to_end(&mut Vec::new());
        }
        _ => {
            let _ = client.read(&mut [0; 64]);
        }
    }
    way != 0
}

#[test]
fn random_bytes_at_every_listener() {
    let server = Server::echo();
    let node = node(server.address);
    let openings = openings(server.address);
    let seed = seed();
    let accepted: usize = std::thread::scope(|scope| {
        let start = |thread: u64| {
            let (node, openings) = (&node, &openings);
            scope.spawn(move || {
                let mut random = Random::new(seed ^ thread);
                (0..CONNECTIONS / THREADS).filter(|_| connection(node, openings, &mut random)).count()
            })
        };
        let threads: Vec<_> = (0..THREADS as u64).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    // Each that was accepted has its one record.
    let ended = node.all_ended(accepted);
    assert!((accepted..=CONNECTIONS).contains(&ended.len()), "{} of {accepted}", ended.len());
    for ended in &ended {
        let fault = matches!(ended.reason, EndReason::Internal | EndReason::Shutdown | EndReason::Killed);
        assert!(!fault, "{ended:?}");
    }
    let reasons: std::collections::BTreeSet<_> = ended.iter().map(|ended| ended.reason).collect();
    assert!(reasons.len() >= 6, "the storm was a breeze: {reasons:?}");
    expect_echo(&mut v5_connect(node.address("socks"), &server.address.to_string()), b"all is well");
}
