//! A gateway whose rules are names, for clients that know nothing of it: its resolver (`[dns]`) gives them addresses that represent
//! names, and its listeners take the connections and datagrams to these.

use crate::name_server::{self, NameServer};
use crate::node::Up;
use crate::node::admin;
use crate::node::peers::{Server, visit};
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};

const RESOLVER: &str = "10.0.1.254:53";

/// A query for an address of `name` (RFC 1035 Sec. 4.1).
fn query(name: &str) -> Vec<u8> {
    let mut bytes = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).expect("a short label"));
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 0, 1, 0, 1]);
    bytes
}

/// The code of an answer, and the address at its end if it has one.
fn read(answer: &[u8]) -> (u8, Option<Ipv4Addr>) {
    assert_eq!(&answer[..2], [0x12, 0x34]);
    let address = (answer[7] == 1).then(|| answer.last_chunk::<4>().copied().expect("an address"));
    (answer[3] & 15, address.map(Ipv4Addr::from))
}

fn ask_by_udp(name: &str) -> (u8, Option<Ipv4Addr>) {
    let socket = UdpSocket::bind("10.0.1.1:0").expect("a socket");
    socket.set_read_timeout(Some(LIMIT)).expect("a time-out");
    socket.connect(RESOLVER).expect("a route");
    socket.send(&query(name)).expect("sent");
    let mut buffer = [0; 512];
    let length = socket.recv(&mut buffer).expect("an answer from the address that was asked");
    read(&buffer[..length])
}

fn ask_by_tcp(name: &str) -> (u8, Option<Ipv4Addr>) {
    let mut stream = TcpStream::connect(RESOLVER).expect("a connection");
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let query = query(name);
    stream.write_all(&[&[0, u8::try_from(query.len()).expect("short")], &query[..]].concat()).expect("sent");
    let mut length = [0; 2];
    stream.read_exact(&mut length).expect("a length");
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer).expect("an answer");
    read(&answer)
}

/// Connects to `to` by a SOCKS5 proxy (RFC 1928) and says whether it says yes.
fn by_socks(proxy: SocketAddr, to: Ipv4Addr, port: u16) -> bool {
    let mut stream = TcpStream::connect(proxy).expect("a connection");
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    stream.write_all(&[5, 1, 0]).expect("sent");
    stream.read_exact(&mut [0; 2]).expect("a method");
    stream.write_all(&[&[5, 1, 0, 1], &to.octets()[..], &port.to_be_bytes()].concat()).expect("sent");
    let mut reply = [0; 10];
    stream.read_exact(&mut reply).expect("a reply");
    reply[1] == 0
}

/// Sends a datagram, and waits for the answer from the address that was asked.
fn is_echoed(echo: Ipv4Addr, port: u16) -> bool {
    let socket = UdpSocket::bind("10.0.1.1:0").expect("a socket");
    socket.set_read_timeout(Some(LIMIT)).expect("a time-out");
    socket.connect((echo, port)).expect("a route");
    socket.send(b"word").expect("sent");
    socket.recv(&mut [0; 64]).expect("an answer") > 0
}

struct Scene {
    line: Line,
    web: Server,
    echo: Echo,
}

impl Scene {
    fn new() -> Self {
        let line = Line::new();
        let web = line.server.run(|| Server::start("10.0.2.1"));
        let echo = line.server.run(|| Echo::start("10.0.2.1"));
        Self { line, web, echo }
    }

    /// The configuration of the gateway. `hosts`: the names whose connections pass.
    fn tables(&self, hosts: &str) -> String {
        self.tables_of("kind = \"redirect\"\nlocal = false\nforwarded = true", hosts)
    }

    fn tables_of(&self, kind: &str, hosts: &str) -> String {
        let (web, echo) = (self.web.address, self.echo.address);
        format!(
            r#"
[dns]
address = "{RESOLVER}"
from = ["10.0.1.0/24"]
# Nobody answers there, and nobody has to: the rule sends these names to fixed addresses.
servers = ["127.0.0.1:9"]
[[listen]]
name = "tcp"
{kind}
interfaces = ["to-client"]
[[listen]]
name = "udp"
protocol = "udp"
{kind}
interfaces = ["to-client"]
[[listen]]
name = "socks"
kind = "socks"
address = "10.0.1.254:1080"
[[rule]]
name = "web"
match = {{ host = {hosts}, protocol = "tcp" }}
to = "{web}"
carrier = "direct"
[[rule]]
name = "echo"
match = {{ host = "echo.example", protocol = "udp" }}
to = "{echo}"
carrier = "direct"
"#
        )
    }

    fn up(&self) -> Up {
        let tables = self.tables("\"web.example\"");
        self.line.router.run(move || Up::start("default = \"deny\"\n", &tables))
    }

    fn ask(&self, by: fn(&str) -> (u8, Option<Ipv4Addr>), name: &'static str) -> (u8, Option<Ipv4Addr>) {
        self.line.client.run(move || by(name))
    }
}

/// The value of a metric.
fn metric(up: &Up, line: &str) -> u64 {
    let (_, text) = admin::ask(up, "GET", "/metrics");
    let found = text.lines().find_map(|one| one.strip_prefix(line)?.trim().parse().ok());
    found.unwrap_or_default()
}

/// The gateway's own programs ask its resolver, too: the address that they dial stands for a name.
#[test]
fn rules_name_users_of_programs_that_dial_names() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let tables = scene.tables_of("kind = \"redirect\"\nlocal = true", "\"web.example\"");
    let tables = tables.replace("interfaces = [\"to-client\"]\n", "dst = [\"198.18.0.0/15\"]\n");
    let tables = tables.replace("[\"10.0.1.0/24\"]", "[\"10.0.1.0/24\", \"127.0.0.0/8\"]");
    let tables = tables.replace("host = \"web.example\"", "host = \"web.example\", user = 0");
    let mut up = scene.line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let port = scene.web.address.port();
    scene.line.router.ip("route add 198.18.0.0/15 via 10.0.2.1");
    scene.line.router.run(move || {
        let socket = UdpSocket::bind("10.0.1.254:0").expect("a socket");
        socket.set_read_timeout(Some(LIMIT)).expect("a time-out");
        socket.connect(RESOLVER).expect("a route");
        socket.send(&query("web.example")).expect("sent");
        let mut buffer = [0; 512];
        let length = socket.recv(&mut buffer).expect("an answer");
        let address = read(&buffer[..length]).1.expect("an address");
        visit((address, port).into(), b"word");
    });
    let record = up.record();
    assert_eq!(record.fate(), ("web", "direct", "ok"), "{record:?}");
    assert_eq!((record.text("orig_dst"), record.text("user")), (&*format!("web.example:{port}"), "uid:0"));
    assert!(up.stop().0.success());
}

#[test]
fn names_decide_about_connections_and_datagrams_of_hosts_behind_the_gateway() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let mut up = scene.up();
    let (code, address) = scene.ask(ask_by_udp, "web.example");
    let address = address.expect("an address");
    assert_eq!((code, scene.ask(ask_by_tcp, "web.example").1), (0, Some(address)), "the same over TCP");
    assert!(address.octets().starts_with(&[198, 18]));
    let (denied, also) = (scene.ask(ask_by_udp, "ads.example"), scene.ask(ask_by_tcp, "ads.example"));
    assert_eq!((denied, also), ((3, None), (3, None)), "no such name");
    up.log_line("the denied name", |line| line.contains("a name is denied") && line.contains("ads.example"));

    let port = scene.web.address.port();
    let (_, _, down) = scene.line.client.run(move || visit((address, port).into(), &[7; 100_000]));
    let record = up.record();
    assert_eq!(record.fate(), ("web", "direct", "ok"), "{record:?}");
    assert_eq!(record.text("orig_dst"), format!("web.example:{port}"));
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (100_000, down));

    // Programs of UDP, and clients of the SOCKS listener that resolve names themselves.
    let echo = scene.ask(ask_by_udp, "echo.example").1.expect("an address");
    let port = scene.echo.address.port();
    assert!(scene.line.client.run(move || is_echoed(echo, port)));
    let proxy = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 1, 254)), 1080);
    let port = scene.web.address.port();
    assert!(scene.line.client.run(move || by_socks(proxy, address, port)));
    assert_eq!(up.record().text("orig_dst"), format!("web.example:{port}"));
    // An address that represents nothing leads nowhere.
    let nowhere = Ipv4Addr::new(198, 19, 0, 9);
    assert!(!scene.line.client.run(move || by_socks(proxy, nowhere, port)));
    assert_eq!(up.record().text("reason"), "dns");

    // A stranger hears nothing. The server's host is one.
    scene.line.server.run(|| {
        let socket = UdpSocket::bind("10.0.2.1:0").expect("a socket");
        socket.send_to(&query("web.example"), RESOLVER).expect("sent");
    });
    eventually("the stranger is counted", || {
        metric(&up, "sidetrack_dns_unanswered_total{reason=\"stranger\"}") == 1
    });
    assert_eq!(metric(&up, "sidetrack_dns_names"), 2);
    assert!(metric(&up, "sidetrack_dns_answers_total{source=\"denied\"}") >= 2);

    // Other rules are in force at once, and clients keep what they were given.
    let tables = scene.tables("[\"web.example\", \"ads.example\"]");
    up.reload("default = \"deny\"\n", &tables);
    assert_eq!(scene.ask(ask_by_udp, "ads.example").0, 0);
    assert_eq!(scene.ask(ask_by_udp, "web.example").1, Some(address));

    // Killed, it leaves nothing: the next one gets the port at once.
    up.signal(Signal::KILL);
    drop(up);
    let up = scene.up();
    assert_eq!(scene.ask(ask_by_tcp, "web.example").0, 0);
    assert!(up.stop().0.success());
}

#[test]
fn a_taken_port_is_told_with_what_to_do() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let _taken = line.router.run(|| UdpSocket::bind("10.0.1.254:53").expect("the port"));
    let mut up = line.router.run(|| Up::spawn("", &format!("[dns]\naddress = \"{RESOLVER}\"\n")));
    let told = up.log_line("the reason", |line| line.contains("[dns] cannot answer on 10.0.1.254:53"));
    assert!(told.contains("docs/dns.md"), "{told}");
    assert!(!up.stop().0.success());
}

#[test]
fn tproxy_listeners_take_connections_and_datagrams_to_names() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let tables = scene.tables_of("kind = \"tproxy\"", "\"web.example\"");
    let mut up = scene.line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let (web, port) = (scene.ask(ask_by_udp, "web.example").1.expect("an address"), scene.web.address.port());
    scene.line.client.run(move || visit((web, port).into(), b"word"));
    let record = up.record();
    assert_eq!(
        (record.fate(), record.text("orig_dst")),
        (("web", "direct", "ok"), &*format!("web.example:{port}"))
    );
    let (echo, port) =
        (scene.ask(ask_by_tcp, "echo.example").1.expect("an address"), scene.echo.address.port());
    assert!(scene.line.client.run(move || is_echoed(echo, port)));
    assert!(up.stop().0.success());
}

#[test]
fn a_gateway_that_is_its_own_name_server_finds_real_addresses() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let web = line.server.run(|| Server::start("10.0.2.1"));
    let port = web.address.port();
    let mut up = line.router.run(move || {
        // Its resolv.conf names 127.0.0.1, where its own resolver answers.
        name_server::use_only_our_resolver();
        let answers = [("web.example", vec![vec![Ipv4Addr::new(10, 0, 2, 1)]])].into_iter().collect();
        NameServer::at("127.0.0.2:53", answers);
        Up::start(
            "default = \"deny\"\n",
            "[dns]\naddress = \"127.0.0.1:53\"\nservers = \"127.0.0.2\"\n\
             [[listen]]\nname = \"in\"\nkind = \"reverse\"\naddress = \"10.0.1.254:80\"\nto = \"web.example:PORT\"\n\
             [[rule]]\nname = \"all\"\ncarrier = \"direct\"\n"
                .replace("PORT", &port.to_string())
                .as_str(),
        )
    });
    line.client.run(|| visit("10.0.1.254:80".parse().expect("an address"), b"word"));
    assert_eq!(up.record().fate(), ("all", "direct", "ok"));
    assert!(up.stop().0.success());
}
