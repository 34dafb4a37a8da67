//! UDP ASSOCIATE at a `socks` listener (RFC 1928 Sec. 6 and 7), by a client that writes and reads each byte itself.

use super::node::{Up, admin};
use super::{Echo, LONGEST, dropped};
use rustix::process::Signal;
use sidetrack_core::flow::Destination;
use sidetrack_core::socks::v5::udp::{Datagram, HEADER_MAX, put_header};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

pub(crate) const RULES: &str = "[[rule]]\nname = \"no-dns\"\nmatch = { protocol = \"udp\", port = 53 }\naction = \"deny\"\n\
                     [[rule]]\nname = \"all\"\nmatch = { protocol = \"udp\", listener = \"proxy\" }\ncarrier = \"direct\"\n";

/// A node with a `socks` listener. `keys` are lines of it, `rest` other tables.
pub(crate) fn up(keys: &str, rest: &str) -> Up {
    let tables =
        format!("[[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n{keys}\n{rest}");
    Up::start("default = \"deny\"\n", &tables)
}

/// A client with an association.
pub(crate) struct Associated {
    /// The connection that keeps it.
    pub(crate) control: TcpStream,
    pub(crate) socket: UdpSocket,
    pub(crate) relay: SocketAddr,
}

/// Asks for UDP ASSOCIATE with this announced address. Returns the connection, the code and the bound address.
pub(crate) fn ask(proxy: SocketAddr, announced: &str) -> (TcpStream, u8, Option<SocketAddr>) {
    ask_on(TcpStream::connect(proxy).unwrap(), announced)
}

/// The same on a connection that is there.
pub(crate) fn ask_on(mut control: TcpStream, announced: &str) -> (TcpStream, u8, Option<SocketAddr>) {
    control.set_read_timeout(Some(LIMIT)).unwrap();
    control.write_all(&[5, 1, 0]).unwrap();
    let mut method = [0; 2];
    control.read_exact(&mut method).unwrap();
    assert_eq!(method, [5, 0]);
    let mut request = vec![5, 3];
    let mut header = Vec::new();
    put_header(&mut header, &announced.parse::<SocketAddr>().unwrap().into());
    // A header differs from a request in its first three bytes.
    request.extend_from_slice(&header[2..]);
    control.write_all(&request).unwrap();
    let mut reply = [0; 4];
    control.read_exact(&mut reply).unwrap();
    let mut address = vec![0; if reply[3] == 4 { 18 } else { 6 }];
    control.read_exact(&mut address).unwrap();
    let bytes = [&[0, 0, 0, reply[3]], &address[..]].concat();
    let bound = Datagram::parse(&bytes).unwrap().remote.socket_addr();
    (control, reply[1], bound)
}

impl Associated {
    pub(crate) fn new(proxy: SocketAddr) -> Self {
        let (control, code, relay) = ask(proxy, "0.0.0.0:0");
        assert_eq!(code, 0);
        let relay = relay.unwrap();
        let socket = UdpSocket::bind((relay.ip(), 0)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self { control, socket, relay }
    }

    pub(crate) fn send(&self, to: &str, payload: &[u8]) {
        let mut datagram = Vec::new();
        put_header(&mut datagram, &to.parse().unwrap());
        datagram.extend_from_slice(payload);
        self.socket.send_to(&datagram, self.relay).unwrap();
    }

    pub(crate) fn receive(&self) -> (Destination, Vec<u8>) {
        let mut buffer = vec![0; 65_536];
        let (length, from) = self.socket.recv_from(&mut buffer).expect("an answer");
        assert_eq!(from, self.relay);
        let Datagram { remote, payload } = Datagram::parse(&buffer[..length]).unwrap();
        (remote, payload.to_vec())
    }

    #[track_caller]
    pub(crate) fn echo(&self, server: SocketAddr, payload: &[u8]) {
        self.send(&server.to_string(), payload);
        assert!(self.receive() == (server.into(), payload.to_vec()));
    }
}

#[test]
fn one_association_reaches_servers_of_both_families_and_names_from_one_port() {
    let servers = [Echo::start("127.0.0.1"), Echo::start("::1"), Echo::start("127.0.0.1")];
    let mut up = up("", RULES);
    let client = Associated::new(up.addresses("proxy")[0]);
    for server in &servers {
        for payload in [&b"hello"[..], b"", &[7; 1200]] {
            client.echo(server.address, payload);
        }
    }
    // Endpoint-independent mapping: both servers see one sender.
    client.send(&servers[0].address.to_string(), b"who");
    client.send(&servers[2].address.to_string(), b"who");
    assert_eq!(client.receive().1, client.receive().1);
    client.send(&format!("localhost:{}", servers[0].address.port()), b"by name");
    let (from, payload) = client.receive();
    assert_eq!((from.to_string(), &payload[..]), (servers[0].address.to_string(), &b"by name"[..]));
    let flows = admin::flows(&up);
    assert_eq!(flows.len(), 5, "the connection and four flows: {flows:?}");
    let port = client.socket.local_addr().unwrap();
    let of_udp: Vec<_> = flows.iter().filter(|flow| flow.text("protocol") == "udp").collect();
    assert!(of_udp.iter().all(|flow| flow.address("client") == port), "{of_udp:?}");
    drop(client.control);
    eventually("all flows end with the connection", || admin::flows(&up).is_empty());
    up.signal(Signal::TERM);
    let (status, records) = up.gone();
    assert!(status.success(), "{status}");
    let (udp, tcp): (Vec<_>, Vec<_>) = records.iter().partition(|record| record.text("protocol") == "udp");
    assert_eq!((udp.len(), tcp.len()), (4, 1), "{records:?}");
    for record in &udp {
        assert_eq!(record.fate(), ("all", "direct", "ok"));
        assert_eq!(record.text("intercept"), "socks");
    }
    assert_eq!(tcp[0].text("reason"), "ok");
    assert!(tcp[0].text("detail").contains("UDP ASSOCIATE"), "{:?}", tcp[0]);
}

#[test]
fn each_destination_has_its_own_verdict_and_a_denied_one_one_record() {
    let server = Echo::start("127.0.0.1");
    let mut up = up("", RULES);
    let client = Associated::new(up.addresses("proxy")[0]);
    for _ in 0..5 {
        client.send("127.0.0.1:53", b"a question");
    }
    client.echo(server.address, b"still there");
    let record = up.record();
    assert_eq!(record.fate(), ("no-dns", "", "policy_denied"));
    eventually("the others are counted", || dropped(&up, "refused") == 4);
}

#[test]
fn only_the_client_is_served_and_strangers_get_no_byte() {
    let server = Echo::start("127.0.0.1");
    let up = up("", RULES);
    let client = Associated::new(up.addresses("proxy")[0]);
    // Before the first datagram, an address other than that of the connection.
    let stranger = UdpSocket::bind("127.0.0.2:0").unwrap();
    let mut forged = Vec::new();
    put_header(&mut forged, &server.address.into());
    stranger.send_to(&forged, client.relay).unwrap();
    eventually("it is counted", || dropped(&up, "stranger") == 1);
    client.echo(server.address, b"mine");
    // After it, another port of the client's address.
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    other.send_to(&forged, client.relay).unwrap();
    eventually("it is counted", || dropped(&up, "stranger") == 2);
    assert_eq!(admin::flows(&up).len(), 2, "the connection and one flow");
    for socket in [stranger, other] {
        socket.set_nonblocking(true).unwrap();
        assert!(socket.recv(&mut [0; 16]).is_err(), "no answer to a stranger");
    }
}

#[test]
fn an_announced_port_is_the_only_one() {
    let server = Echo::start("127.0.0.1");
    let up = up("", RULES);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let announced = socket.local_addr().unwrap();
    let (control, code, relay) = ask(up.addresses("proxy")[0], &announced.to_string());
    assert_eq!(code, 0);
    let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    let relay = relay.unwrap();
    let mut datagram = Vec::new();
    put_header(&mut datagram, &server.address.into());
    other.send_to(&datagram, relay).unwrap();
    eventually("it is counted", || dropped(&up, "stranger") == 1);
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    Associated { control, socket, relay }.echo(server.address, b"from the announced port");
}

#[test]
fn fragments_and_datagrams_without_a_header_are_dropped_and_counted() {
    let server = Echo::start("127.0.0.1");
    let up = up("", RULES);
    let client = Associated::new(up.addresses("proxy")[0]);
    let mut fragment = Vec::new();
    put_header(&mut fragment, &server.address.into());
    fragment[2] = 1;
    for bytes in [&fragment[..], &[], &[0, 0, 0, 1, 127], &[0, 0, 0, 9, 0, 0, 0, 0, 0, 0]] {
        client.socket.send_to(bytes, client.relay).unwrap();
    }
    eventually("all are counted", || dropped(&up, "fragment") == 1 && dropped(&up, "malformed") == 3);
    client.echo(server.address, b"whole");
}

#[test]
fn the_longest_datagrams_pass_and_what_does_not_fit_is_counted_and_never_cut() {
    let server = Echo::start("127.0.0.1");
    let up = up("", RULES);
    let client = Associated::new(up.addresses("proxy")[0]);
    // The header of an IPv4 address has 10 bytes.
    client.echo(server.address, &vec![3; LONGEST - 10]);
    // A server's longest datagram has no room for the header.
    let far = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = far.local_addr().unwrap();
    client.send(&to.to_string(), b"ask");
    let (_, outside) = far.recv_from(&mut [0; 16]).unwrap();
    far.send_to(&vec![1; LONGEST], outside).unwrap();
    eventually("it is counted", || dropped(&up, "too_long") == 1);
    far.send_to(&[2; 9], outside).unwrap();
    assert_eq!(client.receive(), (to.into(), vec![2; 9]));
}

#[test]
fn filtering_decides_which_servers_may_send() {
    for (word, another_port, another_host) in [
        ("address-and-port-dependent", false, false),
        ("address-dependent", true, false),
        ("endpoint-independent", true, true),
    ] {
        let up = up(&format!("udp_filtering = \"{word}\""), RULES);
        let client = Associated::new(up.addresses("proxy")[0]);
        let asked = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send(&asked.local_addr().unwrap().to_string(), b"ask");
        let (_, outside) = asked.recv_from(&mut [0; 16]).unwrap();
        let mut filtered = 0;
        for (ip, passes) in [("127.0.0.1", another_port), ("127.0.0.3", another_host)] {
            let other = UdpSocket::bind((ip, 0)).unwrap();
            other.send_to(b"unasked", outside).unwrap();
            if passes {
                assert_eq!(
                    client.receive(),
                    (other.local_addr().unwrap().into(), b"unasked".to_vec()),
                    "{word}"
                );
            } else {
                filtered += 1;
                eventually("it is counted", || dropped(&up, "filtered") == filtered);
            }
        }
        asked.send_to(b"asked", outside).unwrap();
        assert_eq!(client.receive().1, b"asked", "{word}");
    }
}

#[test]
fn a_server_that_is_not_there_is_the_reason_of_its_flow_alone() {
    let server = Echo::start("127.0.0.1");
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    let gone = closed.local_addr().unwrap();
    drop(closed);
    let mut up = up("", &format!("[limits]\nudp_idle_timeout_ms = 1000\n{RULES}"));
    let client = Associated::new(up.addresses("proxy")[0]);
    client.echo(server.address, b"x");
    client.send(&gone.to_string(), b"anybody");
    let first = up.record();
    let second = up.record();
    let mut reasons = [&first, &second].map(|record| (record.address("orig_dst"), record.text("reason")));
    reasons.sort_by_key(|(_, reason)| *reason);
    assert_eq!(reasons, [(server.address, "idle"), (gone, "refused")]);
}

#[test]
fn the_advertised_address_is_told_and_the_command_may_be_switched_off() {
    let up = up("udp_advertise = \"203.0.113.9\"", RULES);
    let (_control, code, bound) = ask(up.addresses("proxy")[0], "0.0.0.0:0");
    assert_eq!((code, bound.unwrap().ip()), (0, "203.0.113.9".parse().unwrap()));
    let mut up = self::up("udp_ports = \"off\"", RULES);
    let (_control, code, _) = ask(up.addresses("proxy")[0], "0.0.0.0:0");
    assert_eq!(code, 7);
    assert_eq!(up.record().text("reason"), "unsupported");
}

#[test]
fn flows_and_their_connection_can_be_killed() {
    let server = Echo::start("127.0.0.1");
    let mut up = up("", RULES);
    let mut client = Associated::new(up.addresses("proxy")[0]);
    client.echo(server.address, b"x");
    let id = |up: &Up, protocol: &str| {
        let flows = admin::flows(up);
        flows.iter().find(|flow| flow.text("protocol") == protocol).map(|flow| flow.number("flow"))
    };
    let flow = id(&up, "udp").expect("a flow");
    assert_eq!(admin::ask(&up, "DELETE", &format!("/v1/flows/{flow}")).0, 200);
    assert_eq!(up.record().fate(), ("all", "direct", "killed"));
    client.echo(server.address, b"the next datagram begins another one");
    let connection = id(&up, "tcp").expect("the connection");
    assert_eq!(admin::ask(&up, "DELETE", &format!("/v1/flows/{connection}")).0, 200);
    let mut reasons = [up.record(), up.record()].map(|record| record.text("reason").to_owned());
    reasons.sort();
    assert_eq!(reasons, ["killed", "killed"]);
    assert_eq!(client.control.read(&mut [0; 1]).unwrap_or(0), 0, "it is closed");
}

#[test]
fn a_table_that_is_full_ends_what_was_idle_for_longest() {
    let servers: Vec<_> = (0..3).map(|_| Echo::start("127.0.0.1")).collect();
    // One connection may have a quarter of the associations.
    let mut up = up("", &format!("[limits]\nmax_associations = 8\n{RULES}"));
    let client = Associated::new(up.addresses("proxy")[0]);
    for server in &servers {
        client.echo(server.address, b"x");
    }
    let record = up.record();
    assert_eq!((record.text("reason"), record.address("orig_dst")), ("limit", servers[0].address));
}

#[test]
fn hundreds_of_associations_at_once_leave_one_record_each_and_no_socket() {
    const CLIENTS: usize = 200;
    let server = Echo::start("127.0.0.1");
    let mut up = up("", RULES);
    let proxy = up.addresses("proxy")[0];
    // Other descriptors are opened at the end of the start.
    let sockets = || {
        let all = std::fs::read_dir(format!("/proc/{}/fd", up.pid())).unwrap();
        let kinds = all.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        kinds.filter(|kind| kind.to_string_lossy().starts_with("socket:")).count()
    };
    let before = sockets();
    let clients: Vec<_> = (0..CLIENTS).map(|_| Associated::new(proxy)).collect();
    for client in &clients {
        client.send(&server.address.to_string(), b"x");
    }
    for client in &clients {
        assert_eq!(client.receive().1, b"x");
    }
    assert!(sockets() >= before + 3 * CLIENTS, "a connection and two sockets each");
    drop(clients);
    eventually("no flow is left", || admin::flows(&up).is_empty());
    eventually("no socket is left", || sockets() <= before + 2);
    up.signal(Signal::TERM);
    let (_, records) = up.gone();
    assert_eq!(records.len(), 2 * CLIENTS);
}

#[test]
fn twenty_thousand_associations_at_once_share_one_socket_and_those_without_room_are_counted() {
    const ROOM: usize = 20_000;
    const MORE: usize = 500;
    const BURST: usize = 100;
    let server = Echo::start("127.0.0.1");
    // It hears all addresses of loopback, and answers none.
    let silent = UdpSocket::bind("0.0.0.0:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    // One connection may have a quarter of all associations. The connection and the echo are flows, too.
    let limits = format!("[limits]\nmax_associations = 100000\nmax_flows = {}\n", ROOM + 2);
    let up = up("udp_ports = \"shared\"", &format!("{limits}{RULES}"));
    let proxy = up.addresses("proxy")[0];
    // Told apart by its port from the first datagram on.
    let client = Associated::new(proxy);
    client.echo(server.address, b"first");
    let sockets = || std::fs::read_dir(format!("/proc/{}/fd", up.pid())).unwrap().count();
    let before = sockets();
    for number in 0..ROOM + MORE {
        let (high, low) = (number / 250, number % 250 + 1);
        client.send(&format!("127.{}.{}.{low}:{port}", 100 + high / 250, high % 250), b"x");
        if number % BURST == BURST - 1 {
            // No more than a socket buffer holds. The echo keeps its own association in use.
            client.echo(server.address, b"all have come");
        }
    }
    let sums = || {
        let text = admin::show(&up, "/metrics");
        let sum = |name: &str, label: &str| -> usize {
            let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
            lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<usize>().ok()).sum()
        };
        (sum("sidetrack_flows_active", ""), sum("sidetrack_flows_total", "reason=\"limit\""))
    };
    // Ended flows are counted a moment later.
    eventually("each is open or counted", || sums() == (ROOM + 2, MORE));
    assert!(sockets() <= before + 10, "associations of one client need no descriptors of their own");
    client.echo(server.address, b"it still works");
}

#[test]
fn an_idle_association_keeps_no_buffer() {
    const CLIENTS: u64 = 200;
    const LONG: usize = 30_000;
    let server = Echo::start("127.0.0.1");
    let tables = format!(
        "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n{RULES}"
    );
    let up = Up::start_measured("default = \"deny\"\n", &tables);
    let proxy = up.addresses("proxy")[0];
    let resident = || {
        let text = std::fs::read_to_string(format!("/proc/{}/status", up.pid())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let open = || {
        let client = Associated::new(proxy);
        client.echo(server.address, &[7; LONG]);
        client
    };
    // What is allocated once is there.
    let mut clients: Vec<_> = (0..50).map(|_| open()).collect();
    let before = resident();
    clients.extend((0..CLIENTS).map(|_| open()));
    let each = resident().saturating_sub(before) * 1024 / CLIENTS;
    // Far less than the datagram that each has sent and received; `sidetrack-lab udp` has the bar.
    assert!(each < LONG as u64 / 2, "{each} bytes each");
}

#[test]
fn a_client_port_that_is_used_again_at_once_is_another_client() {
    let server = Echo::start("127.0.0.1");
    let up = up("", RULES);
    let proxy = up.addresses("proxy")[0];
    let first = Associated::new(proxy);
    first.echo(server.address, b"first");
    let port = first.socket.local_addr().unwrap();
    let Associated { control, socket, relay: old } = first;
    drop((control, socket));
    let mut second = Associated::new(proxy);
    second.socket = UdpSocket::bind(port).unwrap();
    second.socket.set_read_timeout(Some(LIMIT)).unwrap();
    second.echo(server.address, b"second");
    eventually("the old port is closed", || UdpSocket::bind(old).is_ok());
    assert_eq!(admin::flows(&up).iter().filter(|flow| flow.text("protocol") == "udp").count(), 1);
}

#[test]
fn users_are_known_to_rules_of_datagrams() {
    let server = Echo::start("127.0.0.1");
    let rules = "[[rule]]\nname = \"all\"\nmatch = { protocol = \"udp\" }\ncarrier = \"direct\"\n";
    let mut up = up("users = [{ user = \"ann\", password = \"secret\" }]", rules);
    let proxy = up.addresses("proxy")[0];
    let mut control = TcpStream::connect(proxy).unwrap();
    control.set_read_timeout(Some(LIMIT)).unwrap();
    control.write_all(&[5, 1, 2]).unwrap();
    control.write_all(b"\x01\x03ann\x06secret").unwrap();
    control.write_all(&[5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut reply = [0; 14];
    control.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..8], [5, 2, 1, 0, 5, 0, 0, 1]);
    let relay =
        Datagram::parse(&[&[0, 0, 0, 1], &reply[8..]].concat()).unwrap().remote.socket_addr().unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let client = Associated { control, socket, relay };
    client.echo(server.address, b"x");
    drop(client);
    let records = [up.record(), up.record()];
    assert!(records.iter().all(|record| record.text("user") == "ann"), "{records:?}");
    // A client without a password is refused.
    let mut control = TcpStream::connect(proxy).unwrap();
    control.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    control.write_all(&[5, 1, 0]).unwrap();
    let mut method = [0; 2];
    control.read_exact(&mut method).unwrap();
    assert_eq!(method, [5, 0xff]);
}

#[test]
fn headers_of_names_are_the_longest() {
    let name = format!("{}:1", vec!["a".repeat(61); 4].join("."));
    let mut header = Vec::new();
    put_header(&mut header, &name.parse().unwrap());
    assert!(header.len() <= HEADER_MAX);
}
