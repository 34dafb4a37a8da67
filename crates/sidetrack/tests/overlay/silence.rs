//! Peers that connect and say nothing, or too little.

use crate::node::Up;
use crate::scene::{Keys, overlay_address, status, wait_for};
use sidetrack_testkit::LIMIT;
use socket2::{Domain, Socket, Type};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The head of a TLS record that announces a hello of 512 bytes, and the first bytes of it.
const HALF_A_HELLO: [u8; 11] = [22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];

/// Connects from this address.
fn connect_from(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.bind(&SocketAddr::from((from, 0)).into()).expect("an address of loopback");
    socket.connect(&to.into()).expect("the node listens");
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    stream
}

/// Waits until the node has closed the connection; panics if it does not within the test's limit.
fn is_closed(mut stream: &TcpStream) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("it was not closed: {error}"),
    }
}

#[test]
fn a_peer_that_stays_silent_or_sends_half_a_hello_is_closed() {
    let keys = Keys::new(&["a", "c"]);
    let mut c = Up::start("", &keys.section("c", &[], true));
    let to = overlay_address(&c);
    let reason = |c: &mut Up, peer: &TcpStream, reason: &str| {
        let peer = peer.local_addr().expect("an address").to_string();
        // The log has it a moment later than the peer sees the end.
        sidetrack_testkit::eventually("the reason in the log", || {
            let log = c.log_so_far();
            log.lines().any(|line| line.contains(&peer) && line.contains(reason))
        });
    };
    let silent = connect_from(Ipv4Addr::LOCALHOST, to);
    is_closed(&silent);
    // The limit for the first byte ended it, not that of the whole handshake.
    reason(&mut c, &silent, "it says nothing");
    for length in [1, 5, HALF_A_HELLO.len()] {
        let mut half = connect_from(Ipv4Addr::LOCALHOST, to);
        half.write_all(&HALF_A_HELLO[..length]).expect("sent");
        is_closed(&half);
        reason(&mut c, &half, "no handshake in time");
    }
    assert_eq!(status(&c)["strangers"], 4);
    let a = Up::start("", &keys.section("a", &[("c", to)], false));
    wait_for(&a, "a link", |status| status["links"][0]["up"] == true);
}

/// Connects again and again from one address, so that it always holds as many places as it can.
fn hold_places(from: Ipv4Addr, to: SocketAddr, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    /// More than one source, or all strangers together, may hold.
    const HELD: usize = 400;
    std::thread::spawn(move || {
        let mut held = Vec::new();
        while !stop.load(Relaxed) {
            // What the node has closed is replaced.
            held.retain(|stream: &TcpStream| {
                stream.set_nonblocking(true).expect("non-blocking");
                stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
            });
            while held.len() < HELD {
                let mut stream = connect_from(from, to);
                // The node may have closed it already.
                let _ = stream.write_all(&HALF_A_HELLO);
                held.push(stream);
            }
            std::thread::park_timeout(std::time::Duration::from_millis(20));
        }
    })
}

#[test]
fn a_configured_neighbour_gets_in_while_strangers_hold_all_the_places() {
    let keys = Keys::new(&["a", "c"]);
    // `c` knows where `a` is, but nothing listens there: the link is the one that `a` dials.
    let bound = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    bound.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
    let of_a = bound.local_addr().expect("an address").as_socket().expect("IPv4");
    let c = Up::start("", &keys.section("c", &[("a", of_a)], true));
    let to = overlay_address(&c);
    let stop = Arc::new(AtomicBool::new(false));
    let strangers = [2, 3].map(|last| hold_places(Ipv4Addr::new(127, 0, 0, last), to, stop.clone()));
    // A third address gets no place: its connections are closed although they say nothing wrong yet.
    wait_for(&c, "strangers that find no place", |status| status["strangers"].as_u64() > Some(400));
    let a = Up::start("", &keys.section("a", &[("c", to)], false));
    wait_for(&a, "a link", |status| status["links"][0]["up"] == true);
    let before = status(&c)["strangers"].as_u64();
    wait_for(&c, "strangers that still find no place", |status| status["strangers"].as_u64() > before);
    stop.store(true, Relaxed);
    strangers.into_iter().for_each(|thread| thread.join().expect("no panic"));
}
