//! A flow between two applications, and what they see when a node of its way is killed.

use crate::node::Up;
use rustix::process::Signal;
use sidetrack_testkit::LIMIT;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};

/// What the client sends first, and what the server answers.
const ASKED: &[u8] = b"the client's first bytes";
const ANSWER: &[u8] = b"the server's first bytes";

/// A server that takes one connection after the other, by hand.
pub(crate) struct Server {
    pub address: SocketAddr,
    listener: TcpListener,
}

impl Server {
    pub(crate) fn start(ip: &str) -> Self {
        let listener = TcpListener::bind(crate::node::at(ip, 0)).expect("a port");
        Self { address: listener.local_addr().expect("an address"), listener }
    }
}

/// A flow in the middle of its life: bytes have passed both ways, none is under way, and neither side has ended.
pub(crate) struct Flow {
    client: TcpStream,
    server: TcpStream,
}

impl Flow {
    /// Over a connection that leads to the server; `ask` may send its request and read the proxy's answer.
    pub(crate) fn over(mut client: TcpStream, server: &Server, ask: impl FnOnce(&mut TcpStream)) -> Self {
        client.set_read_timeout(Some(LIMIT)).expect("a time-out");
        ask(&mut client);
        client.write_all(ASKED).expect("written");
        let (mut server, _) = server.listener.accept().expect("a connection");
        server.set_read_timeout(Some(LIMIT)).expect("a time-out");
        expect(&mut server, ASKED);
        server.write_all(ANSWER).expect("written");
        expect(&mut client, ANSWER);
        Self { client, server }
    }

    /// An HTTP request whose answer has no length: only the end of the connection ends it.
    pub(crate) fn of_http(mut client: TcpStream, server: &Server) -> Self {
        client.set_read_timeout(Some(LIMIT)).expect("a time-out");
        write!(client, "GET http://{0}/ HTTP/1.1\r\nHost: {0}\r\n\r\n", server.address).expect("written");
        let (mut server, _) = server.listener.accept().expect("a connection");
        server.set_read_timeout(Some(LIMIT)).expect("a time-out");
        until(&mut server, b"\r\n\r\n");
        server.write_all(b"HTTP/1.0 200 OK\r\nCache-Control: no-store\r\n\r\nhalf of it").expect("written");
        until(&mut client, b"half of it");
        Self { client, server }
    }

    /// The node is killed while both sides are quiet.
    pub(crate) fn killed(self, node: &mut Up) {
        kill(node);
        expect_reset("the client", self.client);
        expect_reset("the server", self.server);
    }

    /// The node is killed after the client has sent its end, in the middle of the server's answer.
    pub(crate) fn killed_half_closed(mut self, node: &mut Up) {
        self.client.shutdown(Shutdown::Write).expect("a FIN");
        assert_eq!(self.server.read(&mut [0; 1]).expect("the client's end"), 0);
        self.server.write_all(ANSWER).expect("written");
        expect(&mut self.client, ANSWER);
        kill(node);
        expect_reset("the client", self.client);
    }

    /// The node is killed in the middle of the client's upload.
    pub(crate) fn killed_in_upload(self, node: &mut Up) {
        let mut sending = self.client.try_clone().expect("a socket");
        // Ends with the connection.
        let upload = std::thread::spawn(move || while sending.write_all(&[7; 65_536]).is_ok() {});
        let mut server = self.server;
        server.read_exact(&mut vec![0; 4_000_000]).expect("an upload");
        kill(node);
        expect_reset("the server", server);
        // The client's error goes to its next write.
        upload.join().expect("no panic");
    }
}

fn kill(node: &mut Up) {
    node.signal(Signal::KILL);
}

fn expect(stream: &mut TcpStream, bytes: &[u8]) {
    let mut got = vec![0; bytes.len()];
    stream.read_exact(&mut got).expect("bytes");
    assert_eq!(got, bytes);
}

/// Reads until the bytes end like this.
pub(crate) fn until(stream: &mut TcpStream, end: &[u8]) {
    let mut got = Vec::new();
    let mut byte = [0];
    while !got.ends_with(end) {
        stream.read_exact(&mut byte).expect("more");
        got.push(byte[0]);
    }
}

fn expect_reset(who: &str, mut stream: TcpStream) {
    let end = loop {
        match stream.read(&mut [0; 65_536]) {
            Ok(0) => break None,
            Ok(_) => {}
            Err(error) => break Some(error.kind()),
        }
    };
    assert_eq!(end, Some(ErrorKind::ConnectionReset), "{who}: a stream that was cut must not end in order");
}

impl Server {
    /// Takes a connection, reads these bytes, and is reset once what carries it is killed.
    pub(crate) fn hears_and_is_reset(&self, bytes: &[u8], kill: impl FnOnce()) {
        let (mut stream, _) = self.listener.accept().expect("a connection");
        stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
        expect(&mut stream, bytes);
        kill();
        expect_reset("the server", stream);
    }
}
