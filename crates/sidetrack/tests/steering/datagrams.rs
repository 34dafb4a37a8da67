//! Datagrams of other hosts, caught on a router by tproxy.

use crate::node::Up;
use crate::node::traces::Traces;
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, Line, Node, eventually, is_root};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Command, Stdio};

const LISTEN: &str =
    "[[listen]]\nname = \"router\"\nkind = \"tproxy\"\nprotocol = \"udp\"\ninterfaces = [\"to-client\"]\n";
pub(crate) const ALL: &str =
    "[[rule]]\nname = \"all\"\nmatch = { protocol = \"udp\" }\ncarrier = \"direct\"\nkernel = \"never\"\n";

/// A client that takes answers only from the address it asks.
pub(crate) fn client(to: SocketAddr) -> UdpSocket {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).expect("a socket");
    socket.connect(to).expect("a route");
    socket.set_read_timeout(Some(LIMIT)).expect("a limit");
    socket
}

pub(crate) fn echo(client: &UdpSocket, payload: &[u8]) -> Vec<u8> {
    client.send(payload).expect("sent");
    let mut buffer = vec![0; 65_536];
    let length = loop {
        match client.recv(&mut buffer) {
            // A socket with a time-out is interrupted when this process is stopped and goes on (signal(7)).
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            done => break done.expect("an answer from the asked address"),
        }
    };
    buffer.truncate(length);
    buffer
}

/// Returns the address that a server sees.
pub(crate) fn seen(client: &UdpSocket) -> SocketAddr {
    String::from_utf8(echo(client, b"who")).expect("text").parse().expect("an address")
}

/// A listener of UDP of this kind, with these keys.
pub(crate) fn listen(kind: &str, keys: &str) -> String {
    format!("[[listen]]\nname = \"out\"\nkind = \"{kind}\"\nprotocol = \"udp\"\n{keys}")
}

/// Sends a datagram of this length and waits for the ICMP error about it. Prints its errno, origin (2 or 3: ICMP of either version),
/// type, code and MTU.
const ASK_ERRORS: &str = "
import select, socket, struct, sys
family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET
s = socket.socket(family, socket.SOCK_DGRAM)
s.setsockopt(*((41, 25, 1) if family == socket.AF_INET6 else (0, 11, 1)))
s.connect((sys.argv[1], int(sys.argv[2])))
s.send(bytes(int(sys.argv[3])))
waits = select.poll()
waits.register(s, select.POLLERR)
assert waits.poll(60000)
control = s.recvmsg(100, 200, socket.MSG_ERRQUEUE)[1]
error, origin, kind, code, _, info, _ = struct.unpack('IBBBBII', control[0][2][:16])
print(error, origin, kind, code, info)
";

/// Returns what [`ASK_ERRORS`] prints on this host.
pub(crate) fn errors(host: &Node, to: SocketAddr, length: usize) -> String {
    let done = host.run(move || {
        let mut python = Command::new("python3");
        python.args(["-c", ASK_ERRORS, &to.ip().to_string(), &to.port().to_string(), &length.to_string()]);
        python.output().expect("python3")
    });
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).trim().to_owned()
}

struct Scene {
    line: Line,
    servers: [Echo; 2],
}

impl Scene {
    fn new() -> Self {
        let line = Line::new();
        let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1"].map(Echo::start));
        Self { line, servers }
    }

    fn up(&self, listen: &str, rules: &str) -> Up {
        let tables = format!("[limits]\ndrain_ms = 0\n{LISTEN}{listen}{rules}");
        self.line.router.run(move || Up::start("default = \"deny\"\n", &tables))
    }

    fn client(&self, to: SocketAddr) -> UdpSocket {
        self.line.client.run(move || client(to))
    }
}

#[test]
fn answers_come_from_the_asked_address_at_every_length() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let before = scene.line.router.run(Traces::now);
    let up = scene.up("", ALL);
    let mut clients = Vec::new();
    for (server, router) in scene.servers.iter().zip(["10.0.2.254", "fd00:2::fe"]) {
        let client = scene.client(server.address);
        assert_eq!(seen(&client).ip(), router.parse::<std::net::IpAddr>().expect("an address"));
        for length in [0, 1, 1452, 1472, 1473, 9000, 65_507] {
            let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            assert!(echo(&client, &payload) == payload, "{length} bytes of {}", server.address);
        }
        clients.push(client);
    }
    let (status, records) = up.stop();
    assert!(status.success());
    assert_eq!(records.len(), 2, "{records:?}");
    for (client, server) in clients.iter().zip(&scene.servers) {
        let own = client.local_addr().expect("an address");
        let record = records.iter().find(|record| record.address("client") == own).expect("a record");
        assert_eq!(record.fate(), ("all", "direct", "shutdown"));
        assert_eq!((record.text("intercept"), record.text("protocol")), ("tproxy", "udp"));
        assert_eq!(record.address("orig_dst"), server.address);
        assert_eq!((record.number("packets_up"), record.number("packets_down")), (8, 8));
    }
    scene.line.router.run(move || before.expect_back("after the end"));
}

#[test]
fn a_client_keeps_its_outside_port_and_each_destination_is_a_flow() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let other = scene.line.server.run(|| Echo::start("10.0.2.1"));
    let mut up = scene.up("", ALL);
    let socket = scene.line.client.run(|| UdpSocket::bind("0.0.0.0:0").expect("a socket"));
    socket.set_read_timeout(Some(LIMIT)).expect("a limit");
    let mut outside = Vec::new();
    for server in [&scene.servers[0], &other] {
        socket.send_to(b"who", server.address).expect("sent");
        let mut buffer = [0; 100];
        let (length, from) = socket.recv_from(&mut buffer).expect("an answer");
        assert_eq!(from, server.address, "the answer's sender");
        outside.push(buffer[..length].to_vec());
    }
    assert_eq!(outside[0], outside[1], "RFC 4787 REQ-1");
    up.signal(Signal::TERM);
    let (_, records) = up.gone();
    let mut asked: Vec<_> = records.iter().map(|record| record.address("orig_dst")).collect();
    asked.sort_unstable();
    let mut servers = [scene.servers[0].address, other.address];
    servers.sort_unstable();
    assert_eq!(asked, servers);
}

#[test]
fn what_is_denied_or_not_meant_says_so() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let denied = scene.line.server.run(|| Echo::start("10.0.2.1"));
    let [v4, v6] = scene.servers.each_ref().map(|server| server.address);
    let rules = format!(
        "[[rule]]\nname = \"no\"\nmatch = {{ port = {} }}\naction = \"deny\"\n{ALL}",
        denied.address.port()
    );
    let mut up = scene.up(&format!("ports = [{}, {}]\n", denied.address.port(), v6.port()), &rules);
    // Its port is not in the list.
    let free = scene.client(v4);
    assert_eq!(seen(&free), free.local_addr().expect("an address"), "it passed without us");
    let caught = scene.client(v6);
    assert_ne!(seen(&caught), caught.local_addr().expect("an address"));
    let refused = scene.client(denied.address);
    for _ in 0..5 {
        // It may report the error about the one before.
        let _ = refused.send(b"who");
    }
    let record = up.record();
    assert_eq!(record.fate(), ("no", "", "policy_denied"));
    assert_eq!(record.address("client"), refused.local_addr().expect("an address"));
    refused.set_nonblocking(true).expect("a flag");
    assert!(refused.recv(&mut [0; 10]).is_err(), "the server has not seen it");
}

#[test]
fn what_cannot_arrive_is_answered_by_icmp() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let closed = scene.line.server.run(|| {
        ["10.0.2.1", "fd00:2::1"].map(|ip| {
            let socket = UdpSocket::bind((ip, 0)).expect("a socket");
            socket.local_addr().expect("an address")
        })
    });
    let hop = scene.line.server.run(|| {
        let listener = "[[listen]]\nname = \"hop\"\nkind = \"socks\"\naddress = \"10.0.2.1:0\"\n";
        Up::start("default = \"deny\"\n", &format!("{listener}{ALL}"))
    });
    let servers = scene.servers.each_ref().map(|server| server.address);
    let rules = format!(
        "[[rule]]\nname = \"hop\"\nmatch = {{ port = [{}, {}] }}\ncarrier = \"socks5://{}\"\n\
         [[rule]]\nname = \"closed\"\nmatch = {{ port = [{}, {}] }}\ncarrier = \"direct\"\n",
        servers[0].port(),
        servers[1].port(),
        hop.addresses("hop")[0],
        closed[0].port(),
        closed[1].port()
    );
    let up = scene.up("", &rules);
    // Denied by the default: "administratively prohibited" (RFC 1812 Sec. 5.2.7.1, RFC 4443 Sec. 3.1).
    for (ip, prohibited) in [("10.0.2.1", "113 2 3 13 0"), ("fd00:2::1", "13 3 1 1 0")] {
        let to = SocketAddr::new(ip.parse().expect("an address"), 9);
        assert_eq!(errors(&scene.line.client, to, 0), prohibited);
        assert_eq!(errors(&scene.line.client, to, 100), prohibited);
    }
    for (to, refused) in closed.into_iter().zip(["111 2 3 3 0", "111 3 1 4 0"]) {
        assert_eq!(errors(&scene.line.client, to, 5), refused, "as the server says");
    }
    // With the hop's header (10 and 22 bytes) a datagram may have 65,507 bytes.
    for (to, too_big) in servers.into_iter().zip(["90 2 3 4 65525", "90 3 2 0 65533"]) {
        assert_eq!(errors(&scene.line.client, to, 65_500), too_big);
        let client = scene.client(to);
        let fits = [5; 65_485];
        assert!(echo(&client, &fits) == fits);
        client.send(&[0; 65_500]).expect("sent");
        let error = client.recv(&mut [0; 10]).expect_err("it is told");
        assert_eq!(error.raw_os_error(), Some(90), "EMSGSIZE");
    }
    assert!(up.stop().0.success());
}

#[test]
fn a_kill_leaves_no_rule_and_datagrams_pass_again() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let before = scene.line.router.run(Traces::now);
    let mut up = scene.up("", ALL);
    let client = scene.client(scene.servers[0].address);
    let own = client.local_addr().expect("an address");
    assert_ne!(seen(&client), own);
    up.signal(Signal::KILL);
    let _ = up.gone();
    scene.line.router.run(move || before.expect_back("after the kill"));
    client.set_read_timeout(Some(std::time::Duration::from_millis(100))).expect("a limit");
    eventually("datagrams pass without us", || {
        let mut buffer = [0; 100];
        client.send(b"who").is_ok()
            && client.recv(&mut buffer).is_ok_and(|length| buffer[..length] == *own.to_string().as_bytes())
    });
}

#[test]
fn datagrams_without_a_checksum_pass() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let up = scene.up("", ALL);
    let to = scene.servers[0].address;
    // SO_NO_CHECK: the checksum is 0, which says that there is none (RFC 768).
    let script = format!(
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.settimeout(60)\n\
         s.setsockopt(socket.SOL_SOCKET, 11, 1)\ns.connect(('{}', {}))\n\
         for payload in (b'', b'x', bytes(9000)):\n    s.send(payload)\n    assert s.recv(10000) == payload\n",
        to.ip(),
        to.port()
    );
    let done = scene.line.client.run(move || Command::new("python3").args(["-c", &script]).output());
    let done = done.expect("python3");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let (_, records) = up.stop();
    assert_eq!((records.len(), records[0].number("packets_down")), (1, 3), "{records:?}");
}

#[test]
fn programs_reach_their_servers() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let up = scene.up("", ALL);
    for server in &scene.servers {
        let to = server.address;
        let family = if to.is_ipv4() { "UDP4" } else { "UDP6" };
        let socat = scene.line.client.run(move || {
            let mut command = Command::new("socat");
            command.args(["STDIO", &format!("{family}:{to}")]).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn()
        });
        let Ok(mut socat) = socat else { return eprintln!("skipped: needs socat") };
        // It ends with its input, whether or not it has had an answer.
        let mut input = socat.stdin.take().expect("its input");
        input.write_all(b"who").expect("written");
        let mut said = [0; 9];
        socat.stdout.take().expect("its output").read_exact(&mut said).expect("an answer");
        drop(input);
        socat.wait().expect("it ends");
        let text = String::from_utf8_lossy(&said).into_owned();
        let router = if to.is_ipv4() { "10.0.2.25" } else { "[fd00:2:" };
        assert!(text.starts_with(router), "{text}");
        let script = format!(
            "import socket\ns = socket.socket(socket.AF_INET{}, socket.SOCK_DGRAM)\ns.settimeout(60)\n\
             s.sendto(b'from python', ('{}', {}))\ndata, peer = s.recvfrom(100)\n\
             assert data == b'from python' and peer[1] == {}, (data, peer)\n",
            if to.is_ipv4() { "" } else { "6" },
            to.ip(),
            to.port(),
            to.port()
        );
        let done = scene.line.client.run(move || Command::new("python3").args(["-c", &script]).output());
        let done = done.expect("python3");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
    assert!(up.stop().0.success());
}
