//! Refusals, resets and lost far ends reach the application.

use crate::scene::{Scene, Server};
use sidetrack_testkit::LIMIT;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

const DELIVER: &str = "[[overlay.deliver]]\nto = \"127.0.0.0/8\"\n";

/// How a connection ends for an application that only reads.
fn read_end(stream: &mut TcpStream) -> Result<Vec<u8>, ErrorKind> {
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let mut got = Vec::new();
    match stream.read_to_end(&mut got) {
        Ok(_) => Ok(got),
        Err(error) => Err(error.kind()),
    }
}

/// The same for a new connection, which may end before connect(2) returns.
fn end_at(address: SocketAddr) -> Result<Vec<u8>, ErrorKind> {
    read_end(&mut TcpStream::connect(address).map_err(|error| error.kind())?)
}

#[test]
fn what_no_entry_allows_is_not_delivered_and_a_refusal_is_one() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let other = if address.port() == 1 { 2 } else { address.port() - 1 };
    let allowed = format!("[[overlay.deliver]]\nto = \"127.0.0.0/8\"\nport = [{other}]\n");
    let mut scene = Scene::new(address, &allowed);
    assert_eq!(end_at(scene.entry()), Err(ErrorKind::ConnectionReset));
    let record = scene.a.record();
    assert_eq!(record.fate(), ("over", "overlay:c", "policy_denied"));
    assert!(record.text("detail").contains("[[overlay.deliver]] lets a reach nothing"), "{record:?}");
    listener.set_nonblocking(true).expect("nonblocking");
    assert!(listener.accept().is_err(), "nobody came");
    drop((scene, listener));

    // Bound, and not listening: a listener that is dropped may live on for a moment in a child of another test.
    let bound = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    bound.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a port");
    let closed = bound.local_addr().expect("an address").as_socket().expect("IPv4");
    let mut scene = Scene::new(closed, DELIVER);
    assert_eq!(end_at(scene.entry()), Err(ErrorKind::ConnectionReset));
    assert_eq!(scene.a.record().fate(), ("over", "overlay:c", "refused"));
}

#[test]
fn resets_pass_as_resets_both_ways() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut scene = Scene::new(listener.local_addr().expect("an address"), DELIVER);
    let mut client = TcpStream::connect(scene.entry()).expect("a's listener");
    let (mut server, _) = listener.accept().expect("the flow");
    server.write_all(b"last words").expect("sent");
    let mut words = [0; 10];
    client.read_exact(&mut words).expect("the words");
    socket2::SockRef::from(&server).set_linger(Some(std::time::Duration::ZERO)).expect("linger");
    drop(server);
    assert_eq!(read_end(&mut client), Err(ErrorKind::ConnectionReset));
    assert_eq!(scene.a.record().fate(), ("over", "overlay:c", "server_reset"));

    let mut client = TcpStream::connect(scene.entry()).expect("a's listener");
    let (mut server, _) = listener.accept().expect("the flow");
    server.write_all(b"last words").expect("sent");
    client.read_exact(&mut words).expect("the words");
    socket2::SockRef::from(&client).set_linger(Some(std::time::Duration::ZERO)).expect("linger");
    drop(client);
    assert_eq!(read_end(&mut server), Err(ErrorKind::ConnectionReset));
    assert_eq!(scene.a.record().fate(), ("over", "overlay:c", "client_reset"));
}

#[test]
fn a_node_that_dies_resets_the_application_that_it_served() {
    let server = Server::start(Vec::new());
    let mut scene = Scene::new(server.address, DELIVER);
    let mut client = TcpStream::connect(scene.entry()).expect("a's listener");
    client.write_all(b"some bytes").expect("sent");
    sidetrack_testkit::eventually("the bytes arrive", || {
        server.taken.load(std::sync::atomic::Ordering::Relaxed) >= 10
    });
    scene.c.signal(rustix::process::Signal::KILL);
    assert_eq!(server.finish().expect_err("no orderly end").kind(), ErrorKind::ConnectionReset);
    // The other end waits for a path as long as a session may be without, then it is told, too.
    assert_eq!(read_end(&mut client), Err(ErrorKind::ConnectionReset));
    assert_eq!(scene.a.record().fate(), ("over", "overlay:c", "server_reset"));
}
