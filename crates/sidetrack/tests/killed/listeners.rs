//! Each kind of listener, with the direct carrier.

use crate::cut::{Flow, Server, until};
use crate::node::Up;
use sidetrack_testkit::{LIMIT, Line, in_namespace, is_root};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

const DIRECT: &str = "default = \"direct\"\n";

fn connect(to: SocketAddr) -> TcpStream {
    TcpStream::connect_timeout(&to, LIMIT).expect("a connection")
}

/// Every way to be killed, each with a node and a flow of its own.
fn each_way(start: impl Fn() -> Up, flow: impl Fn(&Up) -> Flow) {
    for way in [Flow::killed, Flow::killed_half_closed, Flow::killed_in_upload] {
        let mut up = start();
        let flow = flow(&up);
        way(flow, &mut up);
        up.gone();
    }
}

#[test]
fn reverse() {
    let server = Server::start("127.0.0.1");
    let table = format!(
        "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
        server.address
    );
    each_way(
        || Up::start(DIRECT, &table),
        |up| Flow::over(connect(up.addresses("reverse")[0]), &server, |_| {}),
    );
}

#[test]
fn socks() {
    let server = Server::start("127.0.0.1");
    let ask = |stream: &mut TcpStream| {
        // RFC 1928: no authentication, CONNECT to an IPv4 address.
        stream.write_all(&[5, 1, 0]).expect("written");
        stream.read_exact(&mut [0; 2]).expect("a method");
        let SocketAddr::V4(to) = server.address else { unreachable!("bound to IPv4") };
        let request = [&[5, 1, 0, 1][..], &to.ip().octets(), &to.port().to_be_bytes()].concat();
        stream.write_all(&request).expect("written");
        let mut reply = [0; 10];
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!(reply[1], 0, "succeeded");
    };
    each_way(
        || Up::start(DIRECT, "[[listen]]\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n"),
        |up| Flow::over(connect(up.addresses("socks")[0]), &server, ask),
    );
}

const HTTP: &str = "[[listen]]\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n";

#[test]
fn http_connect() {
    let server = Server::start("127.0.0.1");
    let ask = |stream: &mut TcpStream| {
        write!(stream, "CONNECT {0} HTTP/1.1\r\nHost: {0}\r\n\r\n", server.address).expect("written");
        until(stream, b"\r\n\r\n");
    };
    each_way(|| Up::start(DIRECT, HTTP), |up| Flow::over(connect(up.addresses("http")[0]), &server, ask));
}

#[test]
fn http_answer_that_only_the_end_of_the_connection_ends() {
    let server = Server::start("127.0.0.1");
    let mut up = Up::start(DIRECT, HTTP);
    let flow = Flow::of_http(connect(up.addresses("http")[0]), &server);
    flow.killed(&mut up);
    up.gone();
}

#[test]
fn redirect() {
    in_namespace(|| {
        let server = Server::start("127.0.0.1");
        let table = format!(
            "[[listen]]\nname = \"out\"\nkind = \"redirect\"\ndst = \"127.0.0.1\"\nports = {}\n\
             [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
            server.address.port()
        );
        each_way(|| Up::start(DIRECT, &table), |_| Flow::over(connect(server.address), &server, |_| {}));
    });
}

#[test]
fn tproxy() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let server = line.server.run(|| Server::start("10.0.2.1"));
    let to = server.address;
    let table = "[[listen]]\nkind = \"tproxy\"\ninterfaces = [\"to-client\"]\n\
                 [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\nkeep_client_address = true\n";
    each_way(
        || line.router.run(move || Up::start(DIRECT, table)),
        |_| Flow::over(line.client.run(move || connect(to)), &server, |_| {}),
    );
}

#[test]
fn the_process_of_run() {
    let server = Server::start("127.0.0.1");
    let mut run = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .args(["run", "--", "nc", "127.0.0.1", &server.address.port().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary");
    run.stdin.as_mut().expect("piped").write_all(b"words").expect("written");
    server.hears_and_is_reset(b"words", || run.kill().expect("our child"));
    run.wait().expect("our child");
}
