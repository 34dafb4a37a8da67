//! SIGTERM: the listeners close, flows go on for a while, and a second signal ends them at once.

use crate::node::Up;
use crate::node::peers::{Client, Server};
use rustix::process::Signal;
use sidetrack_testkit::eventually;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};

/// A node with one flow through its listener, which is told to stop.
fn stopping(drain_ms: u64) -> (Server, SocketAddr, Up, Client) {
    let server = Server::start("127.0.0.1");
    let tables = format!(
        "[limits]\ndrain_ms = {drain_ms}\n[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n",
        server.address
    );
    let mut up = Up::start("default = \"deny\"\n", &tables);
    let entry = up.addresses("reverse")[0];
    let mut client = Client::connect(entry).expect("a connection");
    client.echo(b"before").expect("an echo");
    up.signal(Signal::TERM);
    up.log_line("that it drains", |line| line.contains("draining"));
    (server, entry, up, client)
}

#[test]
fn flows_go_on_and_the_node_ends_with_the_last_of_them() {
    let (_server, entry, mut up, mut client) = stopping(3_600_000);
    eventually("new connections are refused", || {
        TcpStream::connect(entry).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    });
    client.echo(&[7; 100_000]).expect("the flow goes on");
    let address = client.address;
    client.close().expect("an orderly end");
    let (status, rest) = up.gone();
    // A connection that was tried before the listener had closed has a record, too.
    let ours: Vec<_> = rest.iter().filter(|record| record.address("client") == address).collect();
    assert!(status.success() && ours.len() == 1 && ours[0].text("reason") == "ok", "{status} {rest:?}");
}

#[test]
fn flows_that_take_too_long_are_ended() {
    let (_server, _, mut up, client) = stopping(100);
    assert_eq!(up.record().text("reason"), "shutdown");
    assert!(up.gone().0.success());
    let end = client.into_stream().read(&mut [0; 1]);
    assert_eq!(end.expect_err("cut").kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_second_signal_ends_them_at_once() {
    for signal in [Signal::TERM, Signal::INT] {
        let (_server, _, mut up, _client) = stopping(3_600_000);
        up.signal(signal);
        assert_eq!(up.record().text("reason"), "shutdown");
        assert!(up.gone().0.success());
    }
}
