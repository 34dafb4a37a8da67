//! Flows of listeners that the kernel takes over while bytes go both ways (`shunt = { fast_path = "wire" }`).

#[path = "../node/mod.rs"]
mod node;

mod back;
mod crash;
mod ends;
mod faults;
mod holes;
mod limits;
mod listeners;
mod loss;
mod memory;
mod stays;
mod ten;
mod upgrade;

use node::admin::{flows, show};
use node::{Record, Up};
use sidetrack_testkit::{Line, awaited};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

/// Goes to the wire after 100 kB.
const RULE: &str = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n\
                    shunt = { fast_path = \"wire\", after_bytes = 100000 }\n";

/// Flows end with their process: nothing is left when a test kills it.
const NO_PINS: &str = "[wire]\npins = \"none\"\n";

/// A node on the router with a port for a server, and a connection through it: the client's end and the server's.
struct Flow {
    line: Line,
    up: Up,
    client: TcpStream,
    server: TcpStream,
}

/// `rest`: tables beside the listener `port`.
fn flow(v6: bool, top: &str, rest: &str) -> Flow {
    let line = Line::new();
    flow_on(line, v6, top, rest)
}

fn flow_on(line: Line, v6: bool, top: &str, rest: &str) -> Flow {
    let (server_at, door) =
        if v6 { ("[fd00:2::1]:0", "[fd00:1::fe]:80") } else { ("10.0.2.1:0", "10.0.1.254:80") };
    flow_to(line, server_at, door, top, rest)
}

/// A flow from this door of the router to this address of the server's host.
fn flow_to(line: Line, server_at: &'static str, door: &'static str, top: &str, rest: &str) -> Flow {
    let listener = line.server.run(move || TcpListener::bind(server_at).expect("bound"));
    let to = listener.local_addr().expect("an address");
    let listen =
        format!("[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"{door}\"\nto = \"{to}\"\n");
    let no_pins = if rest.contains("[wire]") { "" } else { NO_PINS };
    let (top, tables) = (format!("default = \"deny\"\n{top}"), format!("{no_pins}{listen}{rest}"));
    let up = line.router.run(move || Up::start(&top, &tables));
    let client = line.client.run(move || TcpStream::connect(door).expect("connected"));
    let server = line.server.run(move || listener.accept().expect("accepted").0);
    Flow { line, up, client, server }
}

impl Flow {
    /// The client sends these bytes, and the server has them.
    fn exchange(&mut self, bytes: usize) {
        pass(&mut self.client, &mut self.server, bytes);
    }

    /// As [`flow`] with bytes so that it goes to the wire; returns when it is there.
    fn wired(mut self) -> Self {
        self.exchange(150_000);
        self.server.write_all(b"and back").expect("sent");
        self.client.read_exact(&mut [0; 8]).expect("received");
        on_the_wire(&self.up);
        self
    }
}

/// One end sends this number of bytes, and the other end has them.
fn pass(from: &mut TcpStream, to: &mut TcpStream, bytes: usize) {
    let sent = vec![7; bytes];
    std::thread::scope(|scope| {
        scope.spawn(|| from.write_all(&sent).expect("sent"));
        let mut received = vec![0; bytes];
        to.read_exact(&mut received).expect("received");
        assert!(received == sent);
    });
}

/// Waits until the only flow has no sockets any more.
fn on_the_wire(up: &Up) -> Record {
    awaited("the flow is on the wire", || flows(up).into_iter().find(|flow| flow.0["shunted"] == true))
}

/// A value of the metrics.
fn metric(up: &Up, line: &str) -> u64 {
    let text = show(up, "/metrics");
    let found = text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok());
    found.unwrap_or_else(|| panic!("no {line} in\n{text}"))
}

/// An address that a test listens on.
fn address(of: &TcpListener) -> SocketAddr {
    of.local_addr().expect("an address")
}
