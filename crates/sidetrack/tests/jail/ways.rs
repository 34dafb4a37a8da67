//! The matrix of ways out: each is tried by one program in one jail, and a neighbour counts the packets that come out.
//!
//! `docs/jail.md` has the table. The test compares it with what was tried, row by row.

use super::{command, text};
use sidetrack_testkit::{Node, is_root, nft};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const PROGRAM: &str = include_str!("ways.py");

/// Rows that reach the neighbour without a jail. The others would change this host.
const HARMLESS: &str =
    "TCP over IPv4,TCP over IPv6,UDP over IPv4,UDP over IPv6,QUIC (UDP 443),multicast over IPv4 (mDNS)";

/// This host and its neighbour, each in a network namespace.
struct Network {
    host: Node,
    neighbour: Node,
    allowed_port: u16,
    host_port: u16,
    /// Connections that servers of this host got.
    reached: Arc<AtomicUsize>,
    folder: tempfile::TempDir,
    _listening: (UnixListener, UnixListener),
}

/// Greets every client. Its thread ends with the test.
fn greeting(listener: TcpListener, count: Arc<AtomicUsize>) -> u16 {
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            count.fetch_add(1, Ordering::Relaxed);
            let _ = client.and_then(|mut client| std::io::Write::write_all(&mut client, b"hello"));
        }
    });
    port
}

impl Network {
    fn new() -> Self {
        let (host, neighbour) = (Node::new(), Node::new());
        host.ip(&format!("link add jail0 type veth peer name jail1 netns {}", neighbour.thread_id()));
        for (node, name, last) in [(&host, "jail0", 1), (&neighbour, "jail1", 2)] {
            node.ip(&format!("addr add 10.77.0.{last}/24 dev {name}"));
            node.ip(&format!("addr add fd00:77::{last}/64 dev {name} nodad"));
            node.ip(&format!("link set {name} up"));
        }
        host.ip("route add default via 10.77.0.2");
        host.carries("jail0");
        let allowed_port =
            neighbour.run(|| greeting(TcpListener::bind("10.77.0.2:0").unwrap(), Arc::default()));
        let table = format!(
            "table inet seen {{ counter others {{ }}; chain seen {{ type filter hook prerouting priority -300; iif lo accept; \
             tcp dport {allowed_port} accept; icmpv6 type {{ 130, 131, 132, 133, 134, 135, 136, 143 }} accept; \
             counter name others; }}; }}"
        );
        neighbour.run(move || nft(&format!("add {table}")).expect("nft"));
        let reached = Arc::new(AtomicUsize::new(0));
        let count = reached.clone();
        let host_port = host.run(move || greeting(TcpListener::bind("[::]:0").unwrap(), count));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("daemon");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(b"sidetrack-jail-test").unwrap();
        let listening =
            host.run(move || (UnixListener::bind(path).unwrap(), UnixListener::bind_addr(&name).unwrap()));
        Self { host, neighbour, allowed_port, host_port, reached, folder, _listening: listening }
    }

    /// Runs the program, in a jail or without, and returns its end with the packets that the neighbour got meanwhile.
    fn tried(&self, jailed: bool) -> (Output, u64) {
        let before = self.packets();
        let allow = format!("10.77.0.2:{},*.wild.invalid,allowed.invalid", self.allowed_port);
        let mut command = match jailed {
            true => command(&["--allow", &allow], &["python3", "-c", PROGRAM]),
            false => {
                let mut python = std::process::Command::new("python3");
                python.args(["-c", PROGRAM]).env("ONLY", HARMLESS);
                python
            }
        };
        command.env("ALLOWED_PORT", self.allowed_port.to_string());
        command.env("HOST_PORT", self.host_port.to_string()).env("ABSTRACT", "sidetrack-jail-test");
        command.env("SOCKET_PATH", self.folder.path().join("daemon"));
        let output = self.host.run(move || {
            let socket = inherited();
            command.env("INHERITED", socket.as_raw_fd().to_string()).output().unwrap()
        });
        (output, self.packets() - before)
    }

    /// All packets that the neighbour got, but for those of the allowed connection and of neighbour discovery.
    fn packets(&self) -> u64 {
        let listed = self.neighbour.run(|| nft("list counter inet seen others").expect("nft"));
        let mut words = listed.split_whitespace().skip_while(|word| *word != "packets");
        words.nth(1).unwrap().parse().unwrap()
    }
}

/// A connected socket that children inherit.
fn inherited() -> OwnedFd {
    use rustix::net::{AddressFamily, SocketType, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    connect(&socket, &"10.77.0.2:10050".parse::<SocketAddr>().unwrap()).unwrap();
    socket
}

/// Rows with their results, from what the program printed.
fn rows(printed: &str) -> BTreeMap<String, String> {
    let row = |line: &str| {
        let mut fields = line.split('\t');
        (fields.next().unwrap_or_default().to_owned(), fields.next().unwrap_or_default().to_owned())
    };
    printed.lines().map(row).collect()
}

/// The rows of the table in the document that are not delegated, with the first word of the second column.
fn documented() -> BTreeMap<String, String> {
    let document = include_str!("../../../../docs/jail.md");
    let table = document.split("| way | result | why |").nth(1).unwrap().split("\n\n").next().unwrap();
    let row = |line: &str| {
        let fields: Vec<_> = line.split('|').map(str::trim).collect();
        let result = match *fields.get(2)? {
            "blocked" => "blocked",
            "allowed" => "design",
            _ => return None,
        };
        Some((fields.get(1)?.to_string(), result.to_owned()))
    };
    table.lines().filter_map(row).collect()
}

#[test]
fn no_way_leads_out_and_the_table_says_so() {
    if !is_root() {
        return;
    }
    let network = Network::new();
    let (output, packets) = network.tried(true);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed}{}", text(&output.stderr));
    let found = rows(&printed);
    let reached: Vec<_> = printed.lines().filter(|line| line.contains("\tREACHED\t")).collect();
    assert!(reached.is_empty(), "{reached:#?}");
    assert_eq!(packets, 0, "packets at the neighbour: {printed}");
    assert_eq!(network.reached.load(Ordering::Relaxed), 0, "connections to servers of this host: {printed}");
    assert_eq!(found, documented(), "{printed}");
    assert!(found.len() >= 60, "{}", found.len());
    // The neighbour does count: without a jail, packets come.
    let (output, packets) = network.tried(false);
    assert!(packets >= 6, "{packets} packets: {}{}", text(&output.stdout), text(&output.stderr));
}
