//! Whole packets between two sites: applications' own TCP and UDP, on the nodes themselves and on hosts behind them, and what
//! is not let in.
//!
//! ```text
//!   left host --10.1.0.0/24-- a --10.9.0.0/24-- b --10.2.0.0/24-- right host      a's own way to 10.2 (and b's to 10.1)
//! ```                                                                             leads nowhere: only the overlay does.

use crate::node::peers::{Server, visit};
use crate::node::{Up, at};
use crate::scene::{Keys, status, wait_for};
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_testkit::{LIMIT, Node, eventually, is_root};
use std::fmt::Write as _;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

/// Two sites and the nodes that connect them.
pub(crate) struct Sites {
    pub left: Node,
    pub a: Node,
    pub b: Node,
    pub right: Node,
    keys: Keys,
}

/// Both nodes at work.
pub(crate) struct Running {
    pub a: Up,
    pub b: Up,
    /// The tables of their configurations.
    pub of_a: String,
    pub of_b: String,
}

const DENY: &str = "default = \"deny\"\n";

impl Sites {
    pub(crate) fn new() -> Self {
        let [left, a, b, right] = [(); 4].map(|()| Node::new());
        let sites = Self { left, a, b, right, keys: Keys::new(&["a", "b"]) };
        sites.join(&sites.a, &sites.b, "9", "mid", ["1", "2"]);
        for (router, host, net) in [(&sites.a, &sites.left, "1"), (&sites.b, &sites.right, "2")] {
            sites.join(router, host, net, "in", ["254", "1"]);
            host.ip(&format!("route add default via 10.{net}.0.254"));
            host.ip(&format!("route add default via fd00:{net}::254"));
            router.run(|| {
                sidetrack_sys::sysctl::write("net/ipv4/ip_forward", "1").expect("forwarding");
                sidetrack_sys::sysctl::write("net/ipv6/conf/all/forwarding", "1").expect("forwarding");
            });
        }
        for (node, own, far) in [(&sites.a, "1", "2"), (&sites.b, "2", "1")] {
            // No host has this address: what is not caught arrives nowhere.
            node.ip(&format!("route add 10.{far}.0.0/24 via 10.9.0.77 src 10.{own}.0.254"));
            node.ip(&format!("route add fd00:{far}::/64 via fd00:9::77 src fd00:{own}::254"));
            // A forged source is to come as far as our rules.
            node.run(|| {
                for name in ["all", "in"] {
                    let key = format!("net/ipv4/conf/{name}/rp_filter");
                    sidetrack_sys::sysctl::write(&key, "0").expect("rp_filter");
                }
            });
        }
        sites
    }

    fn join(&self, one: &Node, other: &Node, net: &str, name: &str, parts: [&str; 2]) {
        one.ip(&format!("link add {name} type veth peer name {name} netns {}", other.thread_id()));
        for (node, part) in [(one, parts[0]), (other, parts[1])] {
            node.ip(&format!("addr add 10.{net}.0.{part}/24 dev {name}"));
            node.ip(&format!("addr add fd00:{net}::{part}/64 dev {name} nodad"));
            node.ip(&format!("link set {name} up"));
        }
        one.carries(name);
        other.carries(name);
    }

    /// Both nodes, catching at `place` for links of this kind; b delivers to these ports.
    fn start(&self, place: &str, link: &str, ports: &[u16]) -> Running {
        self.start_with(place, link, ports, ["", ""])
    }

    /// The same; these rules, or listeners, are a's and b's.
    fn start_with(&self, place: &str, link: &str, ports: &[u16], rules: [&str; 2]) -> Running {
        // The default is for flows that a node caught itself.
        let top = rules.map(|rules| if rules.is_empty() { "" } else { DENY });
        self.start_as(top, place, link, ports, rules)
    }

    /// The same; both files begin with these keys.
    pub(crate) fn start_as(
        &self,
        [top_a, top_b]: [&'static str; 2],
        place: &str,
        link: &str,
        ports: &[u16],
        rules: [&str; 2],
    ) -> Running {
        let packets = |node: &str, net: &str| {
            format!(
                "[[overlay.packets]]\nnode = \"{node}\"\nto = [\"10.{net}.0.0/24\", \"fd00:{net}::/64\"]\nat = \"{place}\"\n\
                 link = \"{link}\"\n"
            )
        };
        let listen = "listen = \"10.9.0.2:8100\"\n";
        let mut b = self.keys.section("b", &[], true).replace("listen = \"127.0.0.1:0\"\n", listen);
        b.insert_str(0, rules[1]);
        let _ = write!(
            b,
            "{}[[overlay.deliver]]\nfrom = \"a\"\nto = [\"10.2.0.0/24\", \"fd00:2::/64\"]\nport = {ports:?}\n",
            packets("a", "1")
        );
        let a = self.keys.section("a", &[("b", at("10.9.0.2", 8100))], false) + &packets("b", "2");
        let (of_a, of_b) = (rules[0].to_owned() + &a, b);
        let (text_a, text_b) = (of_a.clone(), of_b.clone());
        let b = self.b.run(move || Up::start(top_b, &text_b));
        let mut a = self.a.run(move || Up::start(top_a, &text_a));
        a.log_line("a way for packets", |line| line.contains("packets pass over the overlay"));
        let mut b = b;
        b.log_line("a way back", |line| line.contains("packets pass over the overlay"));
        if link == "best-effort" {
            for node in [&a, &b] {
                wait_for(node, "datagrams arrive", |status| status["paths"][0]["by_datagram"] == true);
            }
        }
        Running { a, b, of_a, of_b }
    }
}

pub(crate) fn caught(up: &Up, what: &str) -> u64 {
    status(up)["caught"][what].as_u64().expect("a count")
}

/// A word there and back by UDP.
fn echo(client: &UdpSocket, server: &UdpSocket) {
    let mut buffer = [0; 9000];
    for socket in [client, server] {
        socket.set_read_timeout(Some(LIMIT)).expect("a time-out");
    }
    for length in [1, 1400, 8000] {
        let word = vec![0x5a; length];
        client.send_to(&word, server.local_addr().expect("an address")).expect("sent");
        let (n, from) = server.recv_from(&mut buffer).expect("the word");
        assert_eq!((n, from), (length, client.local_addr().expect("an address")), "as it was sent");
        server.send_to(&buffer[..n], from).expect("sent");
        assert_eq!(client.recv_from(&mut buffer).expect("its echo").0, length);
    }
}

fn udp(node: &Node, ip: &'static str) -> UdpSocket {
    udp_at(node, at(ip, 0))
}

fn udp_at(node: &Node, address: SocketAddr) -> UdpSocket {
    node.run(move || UdpSocket::bind(address).expect("a socket"))
}

/// TCP and UDP from one host to the other, both versions; TCP stays between them.
fn both_ways(
    sites: &Sites,
    (place, link): (&str, &str),
    client: &Node,
    clients: [&'static str; 2],
    server: &Node,
    servers: [&'static str; 2],
) {
    let tcp = server.run(move || servers.map(Server::start));
    let far = servers.map(|ip| udp(server, ip));
    let mut ports: Vec<u16> = tcp.iter().map(|server| server.address.port()).collect();
    ports.extend(far.iter().map(|socket| socket.local_addr().expect("an address").port()));
    let up = sites.start(place, link, &ports);
    for (number, server) in tcp.iter().enumerate() {
        let to = server.address;
        // Between busy nodes a link may be taken for dead for a moment; what is sent meanwhile is told so.
        eventually("there is a way", || client.run(move || TcpStream::connect_timeout(&to, LIMIT).is_ok()));
        let (own, seen, _) = client.run(move || visit(to, &[7; 1_000_000]));
        assert_eq!((own.ip(), own), (at(clients[number], 0).ip(), seen), "the server sees the client itself");
    }
    for (ip, far) in clients.into_iter().zip(&far) {
        let near = udp(client, ip);
        // Where hosts are behind the routers, what is larger than their links is cut by the sender, and fragments are not
        // caught; here applications are on the nodes.
        if place == "local" {
            echo(&near, far);
        }
    }
    assert!(caught(&up.a, "sent") > 100 && caught(&up.b, "delivered") > 100, "{:#}", status(&up.a));
    assert!(caught(&up.b, "sent") > 10 && caught(&up.a, "delivered") > 10);
    assert_eq!((caught(&up.a, "refused"), caught(&up.b, "refused")), (0, 0));
    for node in [&up.a, &up.b] {
        let expected = if link == "best-effort" { caught(node, "sent") } else { 0 };
        assert_eq!(caught(node, "by_datagram"), expected, "{:#}", status(node));
    }
    let (status, _) = up.a.stop();
    assert!(status.success());
    assert_eq!(tables_of(&sites.a), [""; 0], "left behind");
}

/// Our tables of a host.
pub(crate) fn tables_of(node: &Node) -> Vec<String> {
    let tables = node.run(|| {
        let mut socket = Socket::open(Protocol::Netfilter).expect("a socket");
        sidetrack_sys::nft::list_tables(&mut socket).expect("a list")
    });
    let names = tables.into_iter().map(|table| table.name);
    names.filter(|name| name.starts_with("sidetrack")).collect()
}

#[test]
fn applications_on_the_nodes_speak_through_the_overlay_as_if_it_were_not_there() {
    if !is_root() {
        return;
    }
    let sites = Sites::new();
    both_ways(
        &sites,
        ("local", "reliable"),
        &sites.a,
        ["10.1.0.254", "fd00:1::254"],
        &sites.b,
        ["10.2.0.254", "fd00:2::254"],
    );
}

#[test]
fn hosts_behind_routers_need_no_software() {
    if !is_root() {
        return;
    }
    let sites = Sites::new();
    both_ways(
        &sites,
        ("router", "reliable"),
        &sites.left,
        ["10.1.0.1", "fd00:1::1"],
        &sites.right,
        ["10.2.0.1", "fd00:2::1"],
    );
}

#[test]
fn nobody_gets_behind_a_firewall_with_packets() {
    if !is_root() {
        return;
    }
    let sites = Sites::new();
    let open = udp(&sites.right, "10.2.0.1");
    let closed = udp(&sites.right, "10.2.0.1");
    let port = |socket: &UdpSocket| socket.local_addr().expect("an address").port();
    let up = sites.start("router", "best-effort", &[port(&open)]);
    let refused = |times: u64| {
        eventually("it is refused", || caught(&up.b, "refused") == times);
    };
    let send = |from: &UdpSocket, to: &UdpSocket| {
        from.send_to(b"knock", to.local_addr().expect("an address")).expect("sent");
    };
    let near = udp(&sites.left, "10.1.0.1");
    // To a port that no entry of b allows.
    send(&near, &closed);
    refused(1);
    // From an address that is not behind a, as a host of the left might forge it.
    sites.left.ip("addr add 10.66.0.1/32 dev lo");
    let forger = udp(&sites.left, "10.66.0.1");
    send(&forger, &open);
    refused(2);
    // The right host may answer without a rule, but may not begin: the left allows nothing.
    let nosy = udp(&sites.right, "10.2.0.1");
    send(&nosy, &near);
    eventually("a refuses it", || caught(&up.a, "refused") == 1);
    // After all that, what is allowed passes, and is the first thing that arrives anywhere.
    send(&near, &open);
    let mut buffer = [0; 64];
    open.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let near_address: SocketAddr = near.local_addr().expect("an address");
    assert_eq!(open.recv_from(&mut buffer).expect("allowed"), (5, near_address));
    for socket in [&closed, &near] {
        socket.set_nonblocking(true).expect("nonblocking");
        assert!(socket.recv_from(&mut buffer).is_err(), "nothing came");
    }
    // An answer passes to whom it answers.
    near.set_nonblocking(false).expect("blocking");
    near.set_read_timeout(Some(LIMIT)).expect("a time-out");
    send(&open, &near);
    assert_eq!(near.recv_from(&mut buffer).expect("the answer").0, 5);
    wait_for(&up.a, "a count", |status| status["caught"]["delivered"] == 1);
}

/// How long a datagram may be on its way before another is sent: between busy nodes a link may be down for a moment.
const AGAIN: Duration = Duration::from_secs(2);

/// Sends a word, and again should it be lost, until `holds`.
fn knock(from: &UdpSocket, to: &UdpSocket, word: &str, mut holds: impl FnMut() -> bool) {
    let (to, until) = (to.local_addr().expect("an address"), Instant::now() + LIMIT);
    let mut next = Instant::now();
    while !holds() {
        assert!(Instant::now() < until, "nothing became of '{word}'");
        if Instant::now() >= next {
            from.send_to(word.as_bytes(), to).expect("sent");
            next = Instant::now() + AGAIN;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// The words that have arrived, each with its sender.
fn arrived(at: &UdpSocket) -> Vec<(String, SocketAddr)> {
    at.set_nonblocking(true).expect("nonblocking");
    let mut buffer = [0; 64];
    let words =
        std::iter::from_fn(|| at.recv_from(&mut buffer).ok().map(|(n, from)| (buffer[..n].to_vec(), from)));
    words.map(|(word, from)| (String::from_utf8(word).expect("a word"), from)).collect()
}

/// Sends a word until it arrives; gives the sender that is seen.
fn reaches(from: &UdpSocket, to: &UdpSocket, word: &str) -> SocketAddr {
    let mut seen = None;
    knock(from, to, word, || {
        seen = seen.or(arrived(to).into_iter().find(|(came, _)| came == word).map(|(_, from)| from));
        seen.is_some()
    });
    seen.expect("a sender")
}

#[test]
fn rules_of_the_delivering_node_hold_for_packets_and_a_reload_changes_them() {
    if !is_root() {
        return;
    }
    let sites = Sites::new();
    for ip in ["10.2.0.7/24", "10.2.0.8/24"] {
        sites.right.ip(&format!("addr add {ip} dev in"));
    }
    let [open, closed, shut] = ["10.2.0.1", "10.2.0.7", "10.2.0.8"].map(|ip| udp(&sites.right, ip));
    let port = |socket: &UdpSocket| socket.local_addr().expect("an address").port();
    // No rule allows what `open` gets: an entry of [[overlay.deliver]] does, and the default is not for deliveries.
    let rule = |name: &str, condition: &str| {
        format!("[[rule]]\nname = \"{name}\"\nmatch = {{ {condition} }}\naction = \"deny\"\n")
    };
    let of_network = rule("no-seven", "to = \"10.2.0.7\"");
    let of_port =
        rule("no-port", &format!("intercept = \"tunnel\", socks_user = \"a\", port = {}", port(&shut)));
    let ports = [port(&open), port(&closed), port(&shut)];
    let mut up = sites.start_with(
        "router",
        "reliable",
        &ports,
        [
            "[[rule]]\nname = \"no-answers\"\nmatch = { to = \"10.1.0.0/24\" }\naction = \"deny\"\n",
            &(of_network.clone() + &of_port),
        ],
    );
    let near = udp(&sites.left, "10.1.0.1");
    for (to, rule) in [(&closed, "'no-seven'"), (&shut, "'no-port'")] {
        knock(&near, to, "denied", || {
            let log = up.b.log_so_far();
            log.lines().any(|line| line.contains("delivery of packets denied") && line.contains(rule))
        });
    }
    assert!(caught(&up.b, "denied") >= 2, "{:#}", status(&up.b));
    let client = near.local_addr().expect("an address");
    assert_eq!(reaches(&near, &open, "allowed"), client);
    for silent in [&closed, &shut] {
        assert_eq!(arrived(silent), []);
    }
    // An answer, about which the rules of its receiver are not asked.
    reaches(&open, &near, "answer");
    // A reload: no verdict of the old configuration is left.
    let open_denied = rule("no-open", &format!("to = \"10.2.0.1\", port = {}", port(&open)));
    up.b.reload(DENY, &up.of_b.replace(&of_network, &open_denied));
    assert_eq!(reaches(&near, &closed, "allowed now"), client);
    let denied_again = || {
        let before = caught(&up.b, "denied");
        knock(&near, &open, "denied now", || caught(&up.b, "denied") > before);
    };
    denied_again();
    // A server that has more to say does not make what it answered a conversation of its own.
    reaches(&open, &near, "more");
    denied_again();
    assert!(arrived(&open).iter().all(|(word, _)| word == "allowed"), "nothing that is denied now");
    assert_eq!((caught(&up.b, "refused"), caught(&up.b, "failed")), (0, 0), "{:#}", status(&up.b));
    let metrics = crate::node::admin::show(&up.b, "/metrics");
    let line = format!("sidetrack_overlay_packets_total{{fate=\"denied\"}} {}", caught(&up.b, "denied"));
    assert!(metrics.lines().any(|found| found == line), "{line} in\n{metrics}");
}

#[test]
fn packets_to_a_listener_of_the_delivering_node_are_denied() {
    if !is_root() {
        return;
    }
    let sites = Sites::new();
    let listener = "[[listen]]\nkind = \"socks\"\naddress = \"10.2.0.254:1080\"\n";
    let up = sites.start_with("local", "reliable", &[1080], ["", listener]);
    let client = sites.a.run(|| {
        let client =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        client.set_nonblocking(true).expect("nonblocking");
        // The SYN leaves; no answer comes, so its connection never stands.
        let _ = client.connect(&at("10.2.0.254", 1080).into());
        client
    });
    // A SYN that is lost is sent again.
    eventually("it is denied", || caught(&up.b, "denied") > 0);
    assert_eq!(caught(&up.b, "delivered"), 0);
    assert!(client.peer_addr().is_err(), "no connection");
    // A datagram to the same port is for a server that may be there.
    let server = udp_at(&sites.b, at("10.2.0.254", 1080));
    reaches(&udp(&sites.a, "10.1.0.254"), &server, "to a server");
}

#[test]
fn datagrams_carry_packets_of_the_nodes_as_well() {
    if !is_root() {
        return;
    }
    let sites = Sites::new();
    let (near, far) = (["10.1.0.254", "fd00:1::254"], ["10.2.0.254", "fd00:2::254"]);
    both_ways(&sites, ("local", "best-effort"), &sites.a, near, &sites.b, far);
}

#[test]
fn datagrams_carry_packets_of_hosts_behind_routers_and_the_session_does_where_they_are_blocked() {
    if !is_root() {
        return;
    }
    let sites = Sites::new();
    let (near, far) = (["10.1.0.1", "fd00:1::1"], ["10.2.0.1", "fd00:2::1"]);
    both_ways(&sites, ("router", "best-effort"), &sites.left, near, &sites.right, far);
    // Nothing in a datagram arrives at b: the session takes over, and the link stays.
    let server = sites.right.run(move || Server::start("10.2.0.1"));
    let to = server.address;
    let mut up = sites.start("router", "best-effort", &[to.port()]);
    crate::tools::run(&up.b, &["link", "set", "a", "--loss", "100"]);
    wait_for(&up.a, "datagrams are blocked", |status| status["paths"][0]["by_datagram"] == false);
    let before = caught(&up.a, "by_datagram");
    sites.left.run(move || visit(to, &[7; 300_000]));
    assert_eq!(caught(&up.a, "by_datagram"), before);
    assert!(caught(&up.b, "delivered") > 30, "{:#}", status(&up.b));
    assert!(!up.a.log_so_far().contains("overlay link down"), "{}", up.a.log_so_far());
}
