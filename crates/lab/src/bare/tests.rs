//! The smallest relay on loopback: the output equals the input.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use super::*;

/// A relay in a thread that ends with the tests.
fn started(role: Role, to: Option<SocketAddr>) -> SocketAddr {
    let options = Options { role, listen: ([127, 0, 0, 1], 0).into(), to, buffer_bytes: super::BUFFER_BYTES };
    let listener = listen(&options).expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || serve(&listener, options));
    address
}

/// A server that reads to the end and sends everything back twice.
fn doubling() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut bytes = Vec::new();
            if stream.read_to_end(&mut bytes).is_ok() {
                let _ = stream.write_all(&bytes.repeat(2));
            }
        }
    });
    address
}

fn dialled(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("not zero");
    stream.set_nodelay(true).expect("a socket");
    stream
}

fn rest_of(mut stream: TcpStream) -> Vec<u8> {
    stream.shutdown(Shutdown::Write).expect("open");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("the server closes in order");
    bytes
}

/// Many times the size of the sockets' and the thread's buffers.
fn much() -> Vec<u8> {
    (0..12_000_000_u32).map(|number| (number / 251 + number) as u8).collect()
}

fn request(version: u8, to: SocketAddr) -> Vec<u8> {
    let SocketAddr::V4(to) = to else { panic!("IPv4 only") };
    let ([a, b, c, d], [p, q]) = (to.ip().octets(), to.port().to_be_bytes());
    if version == 5 {
        vec![5, 1, 0, 1, a, b, c, d, p, q]
    } else {
        vec![6, 1, 0, 8, p, q, 0, 1, a, b, c, d, 0, 2, 0, 8, 0, 5, 0, 0]
    }
}

#[test]
fn a_relay_keeps_every_byte_in_order() {
    let relay = dialled(started(Role::Reverse, Some(doubling())));
    let bytes = much();
    let writer = { (relay.try_clone().expect("a descriptor"), bytes.clone()) };
    let writing = std::thread::spawn(move || (&writer.0).write_all(&writer.1));
    writing.join().expect("no panic").expect("the relay reads");
    assert!(rest_of(relay) == bytes.repeat(2), "bytes were lost or mixed up");
}

#[test]
fn socks5_byte_by_byte() {
    let mut client = dialled(started(Role::Socks, None));
    let wanted = request(5, doubling());
    for byte in [&[5, 2, 0, 2][..], &wanted].concat() {
        client.write_all(&[byte]).expect("the relay reads");
    }
    let mut replies = [1; 12];
    client.read_exact(&mut replies).expect("method and reply");
    assert_eq!(replies, [5, 0, 5, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    client.write_all(b"hello").expect("the relay reads");
    assert_eq!(rest_of(client), b"hellohello");
}

#[test]
fn socks6_in_one_write_and_byte_by_byte() {
    let (relay, all) = (started(Role::Socks, None), [&request(6, doubling())[..], b"hello"].concat());
    for piece in [all.len(), 1] {
        let mut client = dialled(relay);
        for bytes in all.chunks(piece) {
            client.write_all(bytes).expect("the relay reads");
        }
        let mut replies = [1; 16];
        client.read_exact(&mut replies).expect("two replies");
        assert_eq!(replies, [6, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(rest_of(client), b"hellohello", "in pieces of {piece}");
    }
}

#[test]
fn a_refused_dial_closes() {
    let closed =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port");
    let mut client = dialled(started(Role::Reverse, Some(closed)));
    client.write_all(b"hello").expect("the relay reads");
    let mut bytes = Vec::new();
    assert!(matches!(client.read_to_end(&mut bytes), Ok(0) | Err(_)), "an answer out of nothing");
}

/// A server that sends its bytes, ends its direction, and returns what it still reads.
fn ending_first() -> (SocketAddr, std::sync::mpsc::Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    let (heard, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the relay dials");
        stream.write_all(b"last word").expect("open");
        stream.shutdown(Shutdown::Write).expect("open");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("the client closes in order");
        heard.send(bytes)
    });
    (address, hears)
}

#[test]
fn a_server_that_has_ended_still_hears_the_client() {
    let (server, hears) = ending_first();
    let mut client = dialled(started(Role::Reverse, Some(server)));
    client.write_all(b"hello").expect("the relay reads");
    let mut bytes = Vec::new();
    client.read_to_end(&mut bytes).expect("the server's end is passed on");
    assert_eq!(bytes, b"last word");
    client.write_all(&much()).expect("the relay still reads");
    drop(client);
    let all = hears.recv_timeout(Duration::from_secs(30)).expect("the client's end is passed on");
    assert!(all == [b"hello", &much()[..]].concat(), "bytes were lost or mixed up");
}
