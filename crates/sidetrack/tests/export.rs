//! Reports of flows for collectors: IPFIX with nfcapd, and with a small reader of our own over TCP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod node;
#[path = "export/otlp.rs"]
mod otlp;
#[path = "export/reader.rs"]
mod reader;

use node::{Up, admin};
use reader::{Record, Session};
use serde_json::Value;
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A server that answers each connection with as many bytes as it got, and ends it; and one of datagrams on the same port.
fn server(address: &str) -> SocketAddr {
    let listener = TcpListener::bind(address).expect("a listener");
    let address = listener.local_addr().expect("an address");
    let datagrams = UdpSocket::bind(address).expect("a socket");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = stream.read(&mut buffer) {
                    let _ = stream.write_all(&buffer[..read]);
                }
            });
        }
    });
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = datagrams.recv_from(&mut buffer) {
            let _ = datagrams.send_to(&buffer[..length], from);
        }
    });
    address
}

/// A node with a port towards the server, one towards a port where no program listens, and one that rules deny.
fn start(server: SocketAddr, export: &str) -> Up {
    start_with(server, export, |_| {})
}

/// The same with more files in its folder.
fn start_with(server: SocketAddr, export: &str, files: impl FnOnce(&std::path::Path)) -> Up {
    let listen = |name: &str, more: &str| {
        format!("[[listen]]\nname = \"{name}\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\n{more}\n")
    };
    let tables = [
        export.to_owned(),
        listen("port", &format!("to = \"{server}\"")),
        listen("datagrams", &format!("protocol = \"udp\"\nto = \"{server}\"")),
        listen("denied", &format!("to = \"{server}\"")),
        "[[rule]]\nname = \"all\"\nmatch = { listener = [\"port\", \"datagrams\"] }\ncarrier = \"direct\"\nkernel = \"never\"\n".into(),
    ];
    let top = "user = \"root\"\ndefault = \"deny\"\n[limits]\nudp_idle_timeout_ms = 500\n";
    Up::start_with(top, &tables.concat(), files)
}

fn address(node: &Up, listener: &str) -> SocketAddr {
    node.addresses(listener)[0]
}

/// One flow that moves `bytes` both ways. Returns the client's port.
fn visit(node: &Up, bytes: usize) -> u16 {
    let mut stream = TcpStream::connect(address(node, "port")).expect("connects");
    stream.write_all(&vec![7; bytes]).expect("written");
    stream.shutdown(Shutdown::Write).expect("a FIN");
    let mut back = Vec::new();
    stream.read_to_end(&mut back).expect("an answer");
    assert_eq!(back.len(), bytes);
    stream.local_addr().expect("an address").port()
}

/// One datagram and its answer. Returns the client's port.
fn ask(node: &Up, bytes: usize) -> u16 {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.connect(address(node, "datagrams")).expect("connects");
    socket.set_read_timeout(Some(LIMIT)).expect("a limit");
    socket.send(&vec![7; bytes]).expect("sent");
    assert_eq!(socket.recv(&mut [0; 2048]).expect("an answer"), bytes);
    socket.local_addr().expect("an address").port()
}

/// One connection that a rule denies.
fn denied(node: &Up) {
    let mut stream = TcpStream::connect(address(node, "denied")).expect("connects");
    let _ = stream.read(&mut [0; 1]);
}

fn metric(node: &Up, name: &str) -> u64 {
    let text = admin::show(node, "/metrics");
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in\n{text}"))
}

const REPORTS: &str = "sidetrack_export_reports_total{to=\"ipfix\"}";

/// nfcapd on port 4739 of this namespace.
struct Nfcapd {
    child: Child,
    folder: tempfile::TempDir,
}

impl Nfcapd {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("nfcapd");
        command.args(["-b", "127.0.0.1", "-p", "4739", "-t", "3600", "-w"]).arg(folder.path());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("nfcapd");
        eventually("nfcapd listens", || {
            std::fs::read_to_string("/proc/thread-self/net/udp").unwrap().contains(":1283 ")
        });
        Self { child, folder }
    }

    /// Ends it and returns the flows that it has written.
    fn flows(mut self) -> Vec<Value> {
        node::send(self.child.id(), rustix::process::Signal::TERM);
        self.child.wait().expect("a child");
        let read = Command::new("nfdump").args(["-q", "-o", "json", "-R"]).arg(self.folder.path()).output();
        let read = read.expect("nfdump");
        let text = String::from_utf8_lossy(&read.stdout).into_owned();
        serde_json::from_str(&format!("[{text}]")).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

#[test]
fn a_real_collector_reads_flows_of_tcp_and_udp() {
    in_namespace(|| {
        let (server, collector) = (server("127.0.0.1:0"), Nfcapd::start());
        let node = start(server, "[export.ipfix]\ncollector = \"localhost:4739\"\nobservation_domain = 77\n");
        let (web, asked) = (visit(&node, 3000), ask(&node, 700));
        denied(&node);
        eventually("three reports", || metric(&node, REPORTS) == 3);
        let flows = collector.flows();
        let of = |port: u16| {
            let found = flows.iter().find(|flow| flow["src_port"] == port);
            found.unwrap_or_else(|| panic!("no flow of port {port} in {flows:#?}"))
        };
        assert_eq!(flows.len(), 3, "{flows:#?}");
        let (web, asked) = (of(web), of(asked));
        assert_eq!(
            (&web["proto"], &web["src4_addr"], &web["dst4_addr"]),
            (&6.into(), &"127.0.0.1".into(), &"127.0.0.1".into())
        );
        assert_eq!((&web["in_bytes"], &web["out_bytes"]), (&3000.into(), &3000.into()), "{web:#}");
        assert_eq!(web["dst_port"], server.port());
        assert_eq!(
            (&asked["proto"], &asked["in_bytes"], &asked["out_bytes"]),
            (&17.into(), &700.into(), &700.into()),
            "{asked:#}"
        );
        assert_eq!((&asked["in_packets"], &asked["out_packets"]), (&1.into(), &1.into()), "{asked:#}");
    });
}

/// Reads messages of a connection until its end, or until `enough` records came.
fn read(stream: &mut TcpStream, session: &mut Session, enough: usize) -> Vec<Record> {
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    let mut records = Vec::new();
    while records.len() < enough {
        let mut message = vec![0; 16];
        match stream.read_exact(&mut message) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
            read => read.expect("a message"),
        }
        message.resize(usize::from(u16::from_be_bytes([message[2], message[3]])), 0);
        stream.read_exact(&mut message[16..]).expect("the rest");
        records.extend(session.read(&message));
    }
    records
}

fn over_tcp(collector: SocketAddr, more: &str) -> String {
    format!("[export.ipfix]\ncollector = \"{collector}\"\ntransport = \"tcp\"\nenterprise = 32473\n{more}\n")
}

#[test]
fn a_collector_that_goes_and_comes_back_loses_no_later_flow() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let node =
            start(server("[::1]:0"), &over_tcp(listener.local_addr().unwrap(), "observation_domain = 5"));
        let port = visit(&node, 10);
        denied(&node);
        let (mut stream, _) = listener.accept().unwrap();
        let mut session = Session::default();
        let records = read(&mut stream, &mut session, 2);
        let one = records.iter().find(|one| one.of(7) == u64::from(port)).expect("the flow");
        assert_eq!((one.bytes(), one.packets(), session.domain), ((10, 10), None, 5));
        assert_eq!(
            (one.address([8, 27]), one.address([12, 28])),
            (Some("127.0.0.1".parse().unwrap()), Some("::1".parse().unwrap()))
        );
        assert!(one.of(152) <= one.of(153) && one.of(152) > 1_700_000_000_000, "{one:?}");
        assert_eq!([1, 2, 3, 4].map(|own| one.text(own, 32_473)), ["all", "direct", "port", "ok"]);
        assert_eq!((one.of(136), one.of(233), one.of(4)), (3, 2, 6));
        let other = records.iter().find(|one| one.of(7) != u64::from(port)).expect("the denied one");
        assert_eq!((other.of(136), other.of(233), other.text(4, 32_473)), (4, 3, "policy_denied".into()));
        // The collector goes: a new session has its own templates and numbers.
        drop(stream);
        drop(listener.accept().unwrap());
        let (mut stream, _) = listener.accept().unwrap();
        visit(&node, 20);
        visit(&node, 30);
        let mut all = Vec::new();
        let mut session = Session::default();
        all.extend(read(&mut stream, &mut session, 2));
        assert_eq!(all.iter().map(|one| one.bytes().0).collect::<Vec<_>>(), [20, 30]);
        // What ends with the program is sent, too.
        let mut open = TcpStream::connect(address(&node, "port")).expect("connects");
        open.write_all(&[7; 40]).expect("written");
        open.read_exact(&mut [0; 40]).expect("an answer");
        let (status, _) = node.stop();
        assert!(status.success(), "{status}");
        let last = read(&mut stream, &mut session, usize::MAX);
        assert_eq!(
            last.iter().map(|one| (one.bytes().0, one.text(4, 32_473))).collect::<Vec<_>>(),
            [(40, "shutdown".into())]
        );
    });
}

#[test]
fn a_flow_that_goes_on_is_reported_and_each_byte_once() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let node = start(
            server("127.0.0.1:0"),
            &over_tcp(listener.local_addr().unwrap(), "active_timeout_ms = 1000"),
        );
        let mut open = TcpStream::connect(address(&node, "port")).expect("connects");
        let mut pass = |bytes: usize| {
            open.write_all(&vec![7; bytes]).expect("written");
            open.read_exact(&mut vec![0; bytes]).expect("an answer");
        };
        let (mut stream, _) = listener.accept().unwrap();
        let mut session = Session::default();
        let mut records = Vec::new();
        for bytes in [10, 20] {
            pass(bytes);
            records.extend(read(&mut stream, &mut session, 1));
        }
        pass(30);
        drop(open);
        while records.last().is_none_or(|last| last.of(136) == 2) {
            records.extend(read(&mut stream, &mut session, 1));
        }
        assert!(records.len() >= 3 && records[..2].iter().all(|one| one.of(136) == 2), "{records:?}");
        assert_eq!(records.iter().map(|one| one.bytes().0).sum::<u64>(), 60);
        assert!(records.iter().all(|one| one.of(148) == 1 && one.of(152) == records[0].of(152)));
        drop(node);
    });
}

#[test]
fn a_collector_that_reads_nothing_slows_no_flow() {
    in_namespace(|| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut node = start(server("127.0.0.1:0"), &over_tcp(listener.local_addr().unwrap(), ""));
        let (stream, _) = listener.accept().unwrap();
        // No program listens there any more, and what is connected is never read.
        drop(listener);
        for _ in 0..20 {
            visit(&node, 100);
            assert_eq!(node.record().text("reason"), "ok");
        }
        drop(stream);
        eventually("attempts fail", || metric(&node, "sidetrack_export_failures_total{to=\"ipfix\"}") > 1);
        visit(&node, 100);
        assert_eq!(node.record().text("reason"), "ok");
        eventually("the flow waits", || metric(&node, "sidetrack_export_waiting_flows{to=\"ipfix\"}") > 0);
        node.log_line("why", |line| line.contains("cannot send reports of flows"));
        let (status, _) = node.stop();
        assert!(status.success(), "{status}");
    });
}

#[test]
fn a_collector_of_datagrams_that_is_not_there_is_found_when_it_comes() {
    in_namespace(|| {
        let place = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let node = start(server("127.0.0.1:0"), &format!("[export.ipfix]\ncollector = \"{place}\"\n"));
        visit(&node, 10);
        eventually("the host says that no program receives", || {
            metric(&node, "sidetrack_export_failures_total{to=\"ipfix\"}") > 0
        });
        let collector = UdpSocket::bind(place).unwrap();
        collector.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let (mut session, mut records) = (Session::lossy(), Vec::new());
        eventually("a report of a new flow", || {
            visit(&node, 20);
            let mut message = [0; 65_535];
            while let Ok(length) = collector.recv(&mut message) {
                records.extend(session.read(&message[..length]));
            }
            records.iter().any(|one| one.bytes() == (20, 20))
        });
    });
}
