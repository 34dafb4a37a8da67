//! A far side whose ports answer in every way, and a client that says how its `connect()` ended.

use sidetrack_testkit::{LIMIT, Line, nft};
use socket2::{Domain, Socket, Type};
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The ports of the far side: what each does, and the result of `connect()` to it over IPv4 and over IPv6.
pub(crate) const WAYS: [(u16, &str, [&str; 2]); 8] = [
    (7001, "accept", ["connected", "connected"]),
    (7002, "tcp reset", ["refused", "refused"]),
    (7003, "icmpx type host-unreachable", ["host", "host"]),
    (7004, "icmpx type no-route", ["net", "net"]),
    (7005, "icmpx type port-unreachable", ["refused", "refused"]),
    (7006, "icmpx type admin-prohibited", ["host", "denied"]),
    (7007, "drop", ["late", "late"]),
    (7008, "reset at once", ["reset", "reset"]),
];

/// The far side's addresses on a [`Line`].
pub(crate) const SERVERS: [&str; 2] = ["10.0.2.1", "fd00:2::1"];

/// Makes the server of a line answer in all these ways, as often as it is asked. `false` without the nft tool.
pub(crate) fn far_side(line: &Line) -> bool {
    let is_there = line.server.run(|| {
        for (name, value) in [
            ("net/ipv4/icmp_ratelimit", "0"),
            ("net/ipv4/icmp_msgs_per_sec", "1000000"),
            ("net/ipv4/icmp_msgs_burst", "1000000"),
            ("net/ipv6/icmp/ratelimit", "0"),
        ] {
            // A setting of the whole host on older kernels; the default is enough for most runs.
            let _ = sidetrack_sys::sysctl::write(name, value);
        }
        nft("add table inet far").is_some()
            && nft("add chain inet far in { type filter hook input priority 0 ; }").is_some()
            && WAYS.iter().all(|(port, way, _)| match *way {
                "accept" | "reset at once" => true,
                "drop" => nft(&format!("add rule inet far in tcp dport {port} drop")).is_some(),
                way => nft(&format!("add rule inet far in tcp dport {port} reject with {way}")).is_some(),
            })
    });
    line.server.run(|| {
        for server in SERVERS {
            serve(&at(server, 7001), |client| drop(std::thread::spawn(move || hold(client))));
            serve(&at(server, 7008), |client| {
                let _ = client.set_linger(Some(Duration::ZERO));
            });
        }
    });
    is_there
}

fn at(server: &str, port: u16) -> SocketAddr {
    SocketAddr::new(server.parse().expect("an address"), port)
}

/// Accepts in a thread, for as long as the test runs.
fn serve(address: &SocketAddr, handle: impl Fn(Socket) + Send + 'static) {
    let listener = TcpListener::bind(address).expect("listen");
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            handle(client.into());
        }
    });
}

/// Keeps a connection until its client closes it.
fn hold(mut client: Socket) {
    let _ = client.read(&mut [0]);
}

/// How a `connect()` to this address ends, and what the first read says if it had connected.
pub(crate) fn outcome(to: SocketAddr) -> String {
    match dial(to) {
        Ok(mut socket) if to.port() == 7008 => {
            socket.set_read_timeout(Some(LIMIT)).expect("limit");
            socket.read(&mut [0]).map_or_else(|error| word(&error), |_| "closed".into())
        }
        Ok(_) => "connected".into(),
        Err(error) => word(&error),
    }
}

fn dial(to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    if to.port() == 7007 {
        // This one is asked for its patience; all others have that of the kernel.
        socket.set_tcp_user_timeout(Some(Duration::from_millis(200)))?;
    }
    socket.connect(&to.into())?;
    Ok(socket)
}

fn word(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => "refused".into(),
        Some(libc::EHOSTUNREACH) => "host".into(),
        Some(libc::ENETUNREACH) => "net".into(),
        Some(libc::EACCES) => "denied".into(),
        Some(libc::ETIMEDOUT) => "late".into(),
        Some(libc::ECONNRESET) => "reset".into(),
        _ => error.to_string(),
    }
}

/// Asks each way of both servers this number of times, all at once, in this thread's network. Returns what differs from what is
/// expected. An ICMP error that arrives within `connect()` is lost, so some take a retransmission of the SYN (1 s).
pub(crate) fn differences(rounds: usize) -> Vec<String> {
    let mut asked = Vec::new();
    for (place, server) in SERVERS.iter().enumerate() {
        for (port, way, expected) in WAYS {
            for round in 0..rounds {
                let asking = std::thread::spawn(move || outcome(at(server, port)));
                asked.push((format!("round {round}, {server}, {way}"), expected[place], asking));
            }
        }
    }
    let mut different = Vec::new();
    for (what, expected, asking) in asked {
        let got = asking.join().expect("a thread");
        if got != expected {
            different.push(format!("{what}: {got}"));
        }
    }
    different
}

/// The variable that makes [`probe_inside`] work: the number of rounds.
const ROUNDS: &str = "SIDETRACK_TEST_PROBE_ROUNDS";

/// Asks as [`differences`] does, in a command of `sidetrack run` with these arguments.
pub(crate) fn differences_under_run(arguments: &[&str], rounds: usize) -> Vec<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .arg("run")
        .args(arguments)
        .arg("--")
        .arg(std::env::current_exe().expect("this test"))
        .args(["--exact", "probe::probe_inside", "--ignored", "--nocapture"])
        .env(ROUNDS, rounds.to_string())
        .stdin(Stdio::null())
        .output()
        .expect("the binary");
    let text = String::from_utf8_lossy(&output.stdout);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("probe: done"), "{text}\n{told}");
    text.lines()
        .filter_map(|line| line.split_once("probe differs: "))
        .map(|(_, what)| what.to_owned())
        .collect()
}

#[test]
#[ignore = "runs inside of `sidetrack run`, started by other tests"]
fn probe_inside() {
    let Ok(rounds) = std::env::var(ROUNDS) else { return };
    for difference in differences(rounds.parse().expect("a number")) {
        println!("probe differs: {difference}");
    }
    println!("probe: done");
}
