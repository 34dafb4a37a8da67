//! Datagrams of a flow that is open pass without memory from the allocator. The node, its clients and the server are one process, which
//! counts each allocation. Without a test harness: `up` begins with one thread, and other tests would be counted.

use sidetrack::app::{self, UpOptions};
use sidetrack::log;
use sidetrack_testkit::LIMIT;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::{Mutex, OnceLock};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Datagrams that the server has returned before counting begins.
const WARM_UP: usize = 2_000;

/// Datagrams that the server returns while they are counted.
const COUNTED: usize = 20_000;

/// Most allocations for one datagram and its answer. Other threads of the node have some, whatever passes.
const MOST: f64 = 0.05;

/// Datagrams under way: fewer than what any socket buffer holds.
const WINDOW: usize = 8;

/// The server, bound before `up` begins.
static SERVER: OnceLock<UdpSocket> = OnceLock::new();

/// Where the listeners are, by name.
static LISTENERS: Mutex<Vec<(String, SocketAddr)>> = Mutex::new(Vec::new());

/// Takes the lines of the log: the node says where it listens, and when it is ready.
fn take(line: &str) {
    eprint!("{line}");
    let word = |key: &str| {
        let rest = line.split_once(key)?.1;
        Some(rest.split_whitespace().next()?.trim_matches('"').to_owned())
    };
    if let (Some(name), Some(address)) = (word("listener="), word("address=").and_then(|a| a.parse().ok())) {
        LISTENERS.lock().expect("no panic holds it").push((name, address));
    }
    if line.trim_end().ends_with(": ready") {
        // The node may send itself no signal: it has given up the right.
        std::thread::spawn(|| {
            let found = std::panic::catch_unwind(measure).unwrap_or_default();
            std::process::exit(i32::from(!is_right(&found)));
        });
    }
}

fn listener(name: &str) -> SocketAddr {
    let listeners = LISTENERS.lock().expect("no panic holds it");
    listeners.iter().find(|(known, _)| known == name).expect("it listens").1
}

/// Returns the allocations for one datagram and its answer, by the listener's name.
fn measure() -> Vec<(&'static str, f64)> {
    std::thread::spawn(|| {
        let (server, mut buffer) = (SERVER.get().expect("bound"), [0; 2048]);
        while let Ok((length, from)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..length], from);
        }
    });
    let at_port = passes(listener("port"), &[7; 200]);
    let (_connection, relay) = associate(listener("socks"));
    let server = SERVER.get().expect("bound").local_addr().expect("an address");
    // RFC 1928 Sec. 7: no fragment, IPv4.
    let [high, low] = server.port().to_be_bytes();
    let datagram = [&[0, 0, 0, 1, 127, 0, 0, 1, high, low][..], &[7; 200]].concat();
    vec![("port", at_port), ("socks", passes(relay, &datagram))]
}

/// Says what was found, and whether it is right.
fn is_right(found: &[(&str, f64)]) -> bool {
    for (name, allocations) in found {
        println!("{name}: {allocations:.4} allocations for a datagram and its answer");
    }
    let passed = found.iter().filter(|(_, allocations)| *allocations < MOST).count();
    println!("\ndatagram allocations: {passed} passed, {} failed", 2 - passed);
    passed == 2
}

/// Asks a SOCKS5 listener for UDP ASSOCIATE (RFC 1928 Sec. 3 and 4). Returns the connection and the address of the relay.
fn associate(listener: SocketAddr) -> (TcpStream, SocketAddr) {
    let mut connection = TcpStream::connect(listener).expect("a connection");
    connection.set_read_timeout(Some(LIMIT)).expect("a limit");
    connection.write_all(&[5, 1, 0]).expect("sent");
    connection.read_exact(&mut [0; 2]).expect("a method");
    connection.write_all(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).expect("sent");
    let mut reply = [0; 10];
    connection.read_exact(&mut reply).expect("a reply");
    assert_eq!(reply[..8], [5, 0, 0, 1, 127, 0, 0, 1]);
    (connection, ([127, 0, 0, 1], u16::from_be_bytes([reply[8], reply[9]])).into())
}

/// Sends datagrams to a relay and takes the answers. Returns the allocations for each.
fn passes(relay: SocketAddr, datagram: &[u8]) -> f64 {
    let client = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    client.connect(relay).expect("a route");
    client.set_read_timeout(Some(LIMIT)).expect("a limit");
    let mut buffer = [0; 2048];
    let mut pass = |count: usize| {
        for _ in 0..count / WINDOW {
            for _ in 0..WINDOW {
                client.send(datagram).expect("sent");
            }
            for _ in 0..WINDOW {
                assert_eq!(client.recv(&mut buffer).expect("an answer"), datagram.len());
            }
        }
    };
    pass(WARM_UP);
    let taken = || {
        let stats = ALLOCATOR.stats();
        stats.allocations + stats.reallocations
    };
    let before = taken();
    pass(COUNTED);
    (taken() - before) as f64 / COUNTED as f64
}

/// Runs the node. It does not return if it gets ready.
fn node(folder: &Path) -> anyhow::Result<()> {
    let server = UdpSocket::bind("127.0.0.1:0")?;
    let (at, config) = (folder.display(), folder.join("sidetrack.toml"));
    std::fs::write(
        &config,
        format!(
            "version = 1\nworkers = 1\ndefault = \"deny\"\n[admin]\nsocket = \"{at}/admin.sock\"\n\
             [record]\nto = \"stdout\"\n\
             [[listen]]\nname = \"port\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
             [[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
             [[rule]]\nname = \"all\"\nmatch = {{ to = \"127.0.0.1/32\" }}\ncarrier = \"direct\"\nkernel = \"never\"\n",
            server.local_addr()?
        ),
    )?;
    SERVER.set(server).expect("set once");
    log::divert(take);
    log::start(false);
    app::up(&UpOptions { config, confirm: None })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let is_done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // `up` may start this program again for the processes that keep its rights.
        [_, "keeper", ..] => app::keep().is_ok(),
        [_, "starter", ..] => app::starter().is_ok(),
        [_, "node", folder] => node(Path::new(folder)).inspect_err(|error| eprintln!("{error:#}")).is_ok(),
        [_, "--list", ..] => true,
        _ => {
            let folder = tempfile::tempdir().expect("a folder");
            let mut node = Command::new("/proc/self/exe");
            node.arg("node").arg(folder.path()).status().expect("it starts").success()
        }
    };
    if is_done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
