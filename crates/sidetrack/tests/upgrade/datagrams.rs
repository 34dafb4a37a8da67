//! Associations of UDP go on in the new process: outside ports, counts and records.

use crate::node::Up;
use crate::node::admin::flows;
use crate::{Upgrade, ends, stop};
use sidetrack_testkit::{LIMIT, in_namespace};
use std::collections::BTreeSet;
use std::net::{SocketAddr, UdpSocket};

/// Clients of each kind.
const CLIENTS: usize = 5;

/// A server that answers each datagram with the address that it came from.
fn mirror() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let address = socket.local_addr().expect("bound");
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        // It ends with the test.
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(from.to_string().as_bytes(), from);
        }
    });
    address
}

struct Client {
    socket: UdpSocket,
    /// The address by which the server knows it.
    outside: String,
}

impl Client {
    fn start(to: SocketAddr) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
        socket.connect(to).expect("connected");
        socket.set_read_timeout(Some(LIMIT)).expect("set");
        let mut client = Self { socket, outside: String::new() };
        client.outside = client.ask();
        client
    }

    fn ask(&self) -> String {
        self.socket.send(b"where am I?").expect("sent");
        let mut buffer = [0; 100];
        let length = self.socket.recv(&mut buffer).expect("an answer");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }

    fn goes_on(&self) {
        assert_eq!(self.ask(), self.outside, "the server knows it by the same port");
    }
}

/// Clients whose node is replaced, after an upgrade that was taken back and one whose process was killed.
fn go_on(up: Up, to: SocketAddr) {
    let clients: Vec<_> = (0..CLIENTS).map(|_| Client::start(to)).collect();
    let all = || clients.iter().for_each(Client::goes_on);
    all();
    let numbers = || flows(&up).iter().map(|flow| flow.number("flow")).collect::<BTreeSet<_>>();
    let before = numbers();
    assert_eq!(before.len(), CLIENTS);
    let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "60s"]);
    let back = upgrade.started();
    upgrade.until("serves new connections");
    all();
    crate::node::send(back.0, rustix::process::Signal::KILL);
    assert!(!upgrade.ended().0);
    ends(&back);
    all();
    let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "1ms"]);
    let back = upgrade.started();
    assert!(!upgrade.ended().0);
    ends(&back);
    all();
    let mut upgrade = Upgrade::start(&up.folder(), &[]);
    let new = upgrade.started();
    let (success, said) = upgrade.ended();
    assert!(success && said.contains("no flow is left"), "{said}");
    all();
    assert_eq!(numbers(), before);
    let records = stop(up, &new);
    assert_eq!(records.len(), CLIENTS, "one record each: {records:?}");
    for client in &clients {
        let address = client.socket.local_addr().expect("bound");
        let record = records.iter().find(|record| record.address("client") == address).expect("a record");
        assert_eq!((record.text("reason"), record.text("rule")), ("shutdown", "all"), "{record:?}");
        // One answer was counted by the process that was killed.
        assert_eq!((record.number("packets_up"), record.number("packets_down")), (5, 5), "{record:?}");
        assert_eq!(record.number("bytes_up"), 5 * 11);
    }
}

const RULE: &str = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n";

#[test]
fn those_of_a_port_keep_their_sockets() {
    let to = mirror();
    let tables = format!(
        "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"port\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{to}\"\n{RULE}"
    );
    let up = Up::start("workers = 2\ndefault = \"deny\"\n", &tables);
    let entry = up.addresses("port")[0];
    go_on(up, entry);
}

#[test]
fn captured_ones_keep_their_outside_port() {
    in_namespace(|| {
        let to = mirror();
        let tables = format!(
            "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"out\"\nkind = \"redirect\"\nprotocol = \"udp\"\ndst = \"127.0.0.1\"\nports = {}\n{RULE}",
            to.port()
        );
        let up = Up::start("default = \"deny\"\n", &tables);
        go_on(up, to);
    });
}
