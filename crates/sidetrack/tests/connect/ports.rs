//! Connections from one port of a client to several servers. All lead to one listener of ours, so the kernel gives some of them another
//! port on their way.

use crate::node::Up;
use crate::node::peers::{Client, Server};
use sidetrack_testkit::{Line, is_root};
use socket2::{Domain, Socket, Type};
use std::net::SocketAddr;

#[test]
fn each_connection_finds_its_session() {
    const PORT: u16 = 23_456;
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| [(); 4].map(|()| Server::start("10.0.2.1")));
    let tables = "[[listen]]\nname = \"r\"\nkind = \"redirect\"\ndst = [\"10.0.2.0/24\"]\n[[rule]]\nname = \"all\"\n\
                  carrier = \"direct\"\nkernel = \"never\"\nconnect = \"faithful\"\n";
    let mut up = line.client.run(|| Up::start("default = \"deny\"\n", tables));
    for server in &servers {
        let to = server.address;
        line.client.run(move || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            socket.set_reuse_address(true).expect("set");
            socket.bind(&SocketAddr::from(([10, 0, 1, 1], PORT)).into()).expect("bound");
            socket.connect(&to.into()).expect("connected");
            Client::over(socket.into()).expect("greeted").echo(b"word").expect("an echo");
        });
        // One connection, one flow, with the client's own port.
        let record = up.record();
        assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
        assert_eq!(record.address("client").port(), PORT);
    }
    let (status, rest) = up.stop();
    assert!(status.success() && rest.is_empty(), "{rest:?}");
}
