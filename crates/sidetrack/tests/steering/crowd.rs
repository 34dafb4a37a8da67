//! Redirected connections to port 80 that are read as HTTP: one client does not keep others out.

use crate::node::Up;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

const SERVER: &str = "10.0.2.1:80";
/// The two addresses of the client's host.
const CLIENTS: [&str; 2] = ["10.0.1.1", "10.0.1.2"];

const TABLES: &str = "[[listen]]\nname = \"router\"\nkind = \"redirect\"\nlocal = false\nforwarded = true\n\
                      interfaces = [\"to-client\"]\nports = 80\ncache = {}\n\
                      [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n";

/// A client, a router with these limits, and a server that answers every request.
fn scene(limits: &str) -> (Line, Up) {
    let line = Line::new();
    line.client.ip("addr add 10.0.1.2/24 dev eth0");
    line.server.run(|| {
        let listener = TcpListener::bind(SERVER).expect("bound");
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|count| count == 1) {
                    head.push(byte[0]);
                }
                let answer = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nserved";
                // The client may be gone.
                let _ = stream.write_all(answer.as_bytes());
            }
        });
    });
    let top = format!("default = \"deny\"\nlimits = {{ handshake_timeout_ms = 3600000, {limits} }}\n");
    let up = line.router.run(move || Up::start(&top, TABLES));
    (line, up)
}

fn connected(line: &Line, from: &'static str) -> TcpStream {
    attempted(line, from).expect("connected")
}

/// Connects. A reset that is here before the connect is seen to be over is its error.
fn attempted(line: &Line, from: &'static str) -> std::io::Result<TcpStream> {
    line.client.run(move || {
        use socket2::{Domain, Socket, Type};
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let (from, to) = (format!("{from}:0"), SERVER);
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        socket.bind(&address(&from).into()).expect("bound");
        socket.connect_timeout(&address(to).into(), LIMIT)?;
        socket.set_read_timeout(Some(LIMIT)).expect("a limit");
        Ok(socket.into())
    })
}

/// Whether a connection was reset; waits for one of the two.
fn is_reset(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::ConnectionReset)
}

/// Whether a new connection is reset, before or after it is seen to stand.
fn is_refused(line: &Line, from: &'static str) -> bool {
    attempted(line, from)
        .map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |mut it| is_reset(&mut it))
}

fn is_served(mut stream: TcpStream) -> bool {
    let asked = stream.write_all(b"GET / HTTP/1.1\r\nHost: web.example\r\nConnection: close\r\n\r\n");
    let mut answer = String::new();
    asked.is_ok() && stream.read_to_string(&mut answer).is_ok() && answer.ends_with("served")
}

#[test]
fn connections_that_ask_nothing_leave_the_oldest_first() {
    if !is_root() {
        return;
    }
    let (line, mut up) = scene("max_handshakes = 2");
    let mut silent: Vec<_> = (0..3).map(|_| connected(&line, CLIENTS[0])).collect();
    assert!(is_reset(&mut silent[0]), "the oldest leaves for the third");
    let record = up.record();
    assert_eq!((record.text("reason"), record.text("listener")), ("limit", "router"), "{record:?}");
    assert!(record.text("detail").contains("max_handshakes"), "{record:?}");
    assert!(is_served(connected(&line, CLIENTS[1])), "one that asks is served");
    assert!(is_reset(&mut silent[1]), "it needed a place, too");
    silent[2].set_nonblocking(true).expect("set");
    let waits = silent[2].read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(waits, Err(ErrorKind::WouldBlock), "the youngest stays");
    assert!(up.stop().0.success());
}

#[test]
fn a_client_with_its_share_keeps_no_other_client_out() {
    if !is_root() {
        return;
    }
    // As written, and half of all flows by default.
    for (limits, told) in [
        ("max_flows_per_client = 2", "max_flows_per_client"),
        ("max_flows = 4, max_handshakes = 4", "one in 2"),
    ] {
        let (line, mut up) = scene(limits);
        let mut held: Vec<_> = (0..2).map(|_| connected(&line, CLIENTS[0])).collect();
        assert!(is_refused(&line, CLIENTS[0]), "{limits}");
        let record = up.record();
        assert_eq!((record.text("reason"), record.text("listener")), ("limit", "router"), "{record:?}");
        assert!(record.text("detail").contains(told), "{record:?}");
        assert!(is_served(connected(&line, CLIENTS[1])), "{limits}: another client is served");
        assert_eq!(up.record().text("reason"), "ok");
        held.clear();
        eventually("it has room again", || attempted(&line, CLIENTS[0]).is_ok_and(is_served));
        assert!(up.stop().0.success());
    }
}
