//! Flows of UDP over the overlay: clients at a, servers at c, relays b1 and b2 between.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

use crate::node::Up;
use crate::scene::{Scene, status};
use rustix::process::Signal;
use sidetrack_core::socks::v5::udp::{Datagram, put_header};
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, eventually};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

const DELIVER: &str = "[[overlay.deliver]]\nfrom = \"a\"\nto = [\"127.0.0.0/8\", \"::1/128\"]\n";

/// A UDP port at a that stands for this server, and what its rule says besides the carrier.
fn scene(server: SocketAddr, keys: &str) -> Scene {
    scene_at(server, keys, DELIVER)
}

fn scene_at(server: SocketAddr, keys: &str, deliver: &str) -> Scene {
    let tables = format!(
        "[[listen]]\nname = \"dns\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[rule]]\nname = \"over\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = \"overlay:c\"\n{keys}"
    );
    Scene::with(&tables, deliver, |_, to| to)
}

/// A client of a UDP port at a.
fn client(scene: &Scene) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(scene.a.addresses("dns")[0]).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

#[track_caller]
fn echo(client: &UdpSocket, payload: &[u8]) -> Vec<u8> {
    client.send(payload).unwrap();
    receive(client)
}

#[track_caller]
fn receive(client: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65_536];
    let length = client.recv(&mut buffer).expect("an answer");
    buffer.truncate(length);
    buffer
}

/// Waits until datagrams of `a` reach c as packets.
fn by_datagram(scene: &Scene) {
    scene.wait("packets reach c", |status| {
        let paths = status["paths"].as_array().unwrap();
        paths.iter().any(|path| path["to"] == "c" && path["by_datagram"] == true)
    });
}

#[test]
fn datagrams_of_all_lengths_pass_both_ways_and_each_node_has_a_record() {
    let server = Echo::start("127.0.0.1");
    let mut scene = scene(server.address, "idle_timeout_ms = 60000\n");
    let [one, other] = [client(&scene), client(&scene)];
    // The first datagram is not lost while the nodes agree about the association.
    assert_eq!(echo(&one, b"first"), b"first");
    let mut bytes = 5;
    // The longest do not fit in a packet of the overlay: the session carries them.
    for length in [0, 1, 1_200, 9_000, 64_000, 65_507] {
        let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        assert!(echo(&one, &payload) == payload, "{length} bytes");
        bytes += length;
    }
    by_datagram(&scene);
    assert_eq!(echo(&one, b"as a packet"), b"as a packet");
    bytes += 11;
    assert_ne!(echo(&one, b"who"), echo(&other, b"who"), "each client has a port of its own");
    assert_eq!(echo(&one, b"who"), echo(&one, b"who"), "and keeps it");
    scene.a.signal(Signal::TERM);
    let records = [scene.a.record(), scene.a.record()];
    let longest = records.iter().max_by_key(|record| record.number("bytes_up")).unwrap();
    assert_eq!(longest.fate(), ("over", "overlay:c", "shutdown"));
    assert_eq!(longest.text("protocol"), "udp");
    assert_eq!(longest.number("bytes_up"), bytes as u64 + 9);
    assert_eq!(longest.number("packets_up"), 11);
    assert_eq!(longest.number("packets_down"), 11);
    let far = [scene.c.record(), scene.c.record()];
    assert!(far.iter().any(|record| record.number("bytes_up") == longest.number("bytes_up")));
    assert!(
        far.iter().all(|record| record.text("protocol") == "udp" && record.text("listener") == "overlay")
    );
}

#[test]
fn records_say_which_datagrams_were_recovered_on_the_last_link() {
    let server = Echo::start("127.0.0.1");
    let mut scene = scene(server.address, "link = \"real-time\"\ndeadline_ms = 5000\n");
    let client = client(&scene);
    echo(&client, b"first");
    by_datagram(&scene);
    // Each end loses every fifth datagram of its neighbours.
    for (up, relay) in [(&scene.a, "b1"), (&scene.a, "b2"), (&scene.c, "b1"), (&scene.c, "b2")] {
        crate::tools::run(up, &["link", "set", relay, "--loss", "20"]);
    }
    client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let repeated = |up: &Up| status(up)["spread"]["real_time"]["recovered"].as_u64() >= Some(20);
    eventually("both ends recover datagrams", || {
        // One that is lost for good has no answer.
        client.send(b"again").unwrap();
        let _ = client.recv(&mut [0; 64]);
        repeated(&scene.a) && repeated(&scene.c)
    });
    scene.a.signal(Signal::TERM);
    let near = scene.a.record();
    // The sessions of the near end are over.
    let far = scene.c.record();
    for record in [near, far] {
        let detail = record.text("detail");
        assert!(detail.contains("were recovered on the last link"), "{detail}");
        assert!(!detail.contains("came, 0 were recovered"), "{detail}");
    }
}

#[test]
fn a_relay_is_killed_while_datagrams_are_duplicated_and_none_is_lost() {
    let server = Echo::start("127.0.0.1");
    let mut scene = scene(server.address, "dissemination = \"duplicate\"\ndeadline_ms = 1000\n");
    let client = client(&scene);
    echo(&client, b"first");
    // Both directions take both relays, once their links are known to carry packets.
    eventually("copies are sent", || {
        echo(&client, b"again");
        [&scene.a, &scene.c].iter().all(|up| status(up)["spread"]["copies"].as_u64() > Some(20))
    });
    client.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    let (mut came, mut twice, mut killed) = (BTreeSet::new(), Vec::new(), false);
    let mut take = |came: &mut BTreeSet<u32>| {
        let mut buffer = [0; 64];
        while let Ok(4) = client.recv(&mut buffer) {
            let number = u32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]);
            if !came.insert(number) {
                twice.push(number);
            }
        }
    };
    for number in 0..300_u32 {
        client.send(&number.to_be_bytes()).unwrap();
        take(&mut came);
        std::thread::park_timeout(Duration::from_millis(2));
        if number == 100 {
            scene.kill("b1");
            killed = true;
        }
    }
    let until = Instant::now() + LIMIT;
    while came.len() < 300 && Instant::now() < until {
        take(&mut came);
    }
    assert!(killed && twice.is_empty(), "twice: {twice:?}");
    let lost: Vec<_> = (0..300).filter(|number| !came.contains(number)).collect();
    assert!(lost.is_empty(), "lost: {lost:?}");
}

/// Sends datagrams until one comes back: those on their way while links change may be lost.
#[track_caller]
fn answers(client: &UdpSocket, what: &str) {
    client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let until = Instant::now() + LIMIT;
    let mut buffer = [0; 64];
    for number in 0.. {
        assert!(Instant::now() < until, "{what}: no answer");
        client.send(format!("{what}-{number}").as_bytes()).unwrap();
        // It may be the answer to an earlier one.
        if client.recv(&mut buffer).is_ok_and(|length| buffer[..length].starts_with(what.as_bytes())) {
            break;
        }
    }
    client.set_read_timeout(Some(LIMIT)).unwrap();
}

#[test]
fn flows_with_proofs_need_no_session_that_a_relay_could_refuse() {
    let server = Echo::start("127.0.0.1");
    let keys = "link = \"best-effort\"\ndissemination = \"duplicate\"\ntrust = \"intrusion-tolerant\"\n";
    let mut scene = scene(server.address, keys);
    let client = client(&scene);
    answers(&client, "first");
    for length in [0, 1, 1_200, 9_000, 60_000] {
        let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        client.send(&payload).unwrap();
        eventually("an answer of this length", || receive(&client) == payload);
    }
    let at_a = status(&scene.a);
    assert_eq!(at_a["sessions_opened"], 0, "{at_a:#}");
    assert!(at_a["spread"]["tolerant"]["delivered"]["duplicate"].as_u64() > Some(0), "{at_a:#}");
    let killed = scene.relay();
    scene.kill(&killed);
    answers(&client, "a relay is gone");
    // What has no room in one packet is dropped, and harms nothing.
    client.send(&[7; 65_507]).unwrap();
    answers(&client, "after a long one");
    scene.a.signal(Signal::TERM);
    let record = scene.a.record();
    assert_eq!(record.text("protocol"), "udp");
    assert_eq!(
        record.fate(),
        ("over", "overlay:c (best-effort, duplicate over 2 paths, intrusion-tolerant)", "shutdown")
    );
    assert!(record.text("detail").ends_with(" copies of its datagrams were sent"), "{record:?}");
    assert_eq!(scene.c.record().text("listener"), "overlay");
}

#[test]
fn a_reliable_flow_with_proofs_loses_no_datagram_with_its_relay() {
    let server = Echo::start("127.0.0.1");
    let keys = "link = \"reliable\"\ndissemination = \"flood\"\ntrust = \"intrusion-tolerant\"\n";
    let mut scene = scene(server.address, keys);
    let client = client(&scene);
    assert_eq!(echo(&client, b"first"), b"first");
    // No more than the client's socket has room for.
    for number in 0..200_u32 {
        client.send(&number.to_be_bytes()).unwrap();
        std::thread::park_timeout(Duration::from_millis(2));
        if number == 100 {
            let killed = scene.relay();
            scene.kill(&killed);
        }
    }
    for number in 0..200_u32 {
        assert_eq!(receive(&client), number.to_be_bytes(), "in order, each once");
    }
    // A refusal passes the same way.
    let none = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.9\"\n";
    let mut scene = scene_at(server.address, keys, none);
    self::client(&scene).send(b"refused").unwrap();
    assert_eq!(scene.a.record().text("reason"), "policy_denied");
}

#[test]
fn the_far_node_refuses_what_its_rules_and_entries_do_not_allow_and_errors_come_back() {
    let server = Echo::start("127.0.0.1");
    // No entry allows it.
    let none = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.9\"\n";
    let mut scene = scene_at(server.address, "", none);
    client(&scene).send(b"refused").unwrap();
    let record = scene.a.record();
    assert_eq!(record.text("reason"), "policy_denied");
    assert!(
        record.text("detail").contains("overlay:c: [[overlay.deliver]] lets a reach nothing"),
        "{record:?}"
    );
    assert_eq!(scene.c.record().text("reason"), "policy_denied");
    drop(scene);
    // A rule denies UDP, and only UDP.
    let denies = format!(
        "{DELIVER}[[rule]]\nname = \"no-udp\"\nmatch = {{ protocol = \"udp\" }}\naction = \"deny\"\n"
    );
    let mut scene = scene_at(server.address, "", &denies);
    client(&scene).send(b"refused").unwrap();
    assert_eq!(scene.a.record().text("reason"), "policy_denied");
    assert!(scene.c.record().text("detail").contains("no-udp"));
    drop(scene);
    // A closed port: the ICMP error ends nothing, and the record says so in the end.
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut scene = scene_at(closed, "idle_timeout_ms = 300\n", DELIVER);
    client(&scene).send(b"closed").unwrap();
    assert_eq!(scene.a.record().text("reason"), "refused");
}

#[test]
fn the_far_node_dies_and_the_next_datagram_begins_anew() {
    let server = Echo::start("127.0.0.1");
    let mut scene = scene(server.address, "");
    let client = client(&scene);
    echo(&client, b"first");
    scene.c.signal(Signal::KILL);
    scene.c.gone();
    let record = scene.a.record();
    assert!(["hop_failed", "unreachable"].contains(&record.text("reason")), "{record:?}");
    assert!(record.text("detail").contains("overlay:c"), "{record:?}");
}

/// A client of a `socks` listener.
struct Associated {
    _control: TcpStream,
    socket: UdpSocket,
    relay: SocketAddr,
}

impl Associated {
    fn new(up: &Up) -> Self {
        let mut control = TcpStream::connect(up.addresses("proxy")[0]).unwrap();
        control.set_read_timeout(Some(LIMIT)).unwrap();
        control.write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
        let mut reply = [0; 12];
        control.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..6], [5, 0, 5, 0, 0, 1]);
        let relay = SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([reply[10], reply[11]])));
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self { _control: control, socket, relay }
    }

    fn send(&self, to: &str, payload: &[u8]) {
        let mut datagram = Vec::new();
        put_header(&mut datagram, &to.parse().unwrap());
        datagram.extend_from_slice(payload);
        self.socket.send_to(&datagram, self.relay).unwrap();
    }

    #[track_caller]
    fn ask(&self, to: &str, payload: &[u8]) -> (String, Vec<u8>) {
        self.send(to, payload);
        let mut buffer = vec![0; 65_536];
        let (length, _) = self.socket.recv_from(&mut buffer).expect("an answer");
        let Datagram { remote, payload } = Datagram::parse(&buffer[..length]).unwrap();
        (remote.to_string(), payload.to_vec())
    }
}

#[test]
fn a_socks_client_reaches_servers_of_both_families_and_names_from_one_port() {
    let servers = [Echo::start("127.0.0.1"), Echo::start("127.0.0.1"), Echo::start("::1")];
    let tables = "[[listen]]\nname = \"proxy\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
                  [[rule]]\nname = \"over\"\nmatch = { protocol = \"udp\" }\ncarrier = \"overlay:c\"\n";
    let scene = Scene::with(tables, DELIVER, |_, to| to);
    let client = Associated::new(&scene.a);
    let ports = servers.each_ref().map(|server| {
        let (from, port) = client.ask(&server.address.to_string(), b"who");
        assert_eq!(from, server.address.to_string());
        String::from_utf8(port).unwrap()
    });
    assert_eq!(ports[0], ports[1], "the mapping does not depend on the server (RFC 4787 REQ-1)");
    assert!(ports[2].starts_with("[::1]:"), "{ports:?}");
    // A denied destination does not harm the others.
    client.send("192.0.2.1:9", b"denied");
    let port = servers[0].address.port();
    let (from, payload) = client.ask(&format!("localhost:{port}"), b"by name");
    assert_eq!((from, payload), (servers[0].address.to_string(), b"by name".to_vec()));
    let another = Associated::new(&scene.a);
    let (_, other) = another.ask(&servers[0].address.to_string(), b"who");
    assert_ne!(other, ports[0].as_bytes(), "another client has another port");
}

#[test]
fn hundreds_of_clients_at_a_time_and_no_more_than_the_far_node_allows() {
    let server = Echo::start("127.0.0.1");
    let limits = format!("[limits]\nmax_associations = 600\n{DELIVER}");
    let mut scene = scene_at(server.address, "idle_timeout_ms = 60000\n", &limits);
    let clients: Vec<_> = (0..700).map(|_| client(&scene)).collect();
    let mut answered = 0;
    for client in &clients {
        client.send(b"hello").unwrap();
    }
    let until = Instant::now() + LIMIT;
    for client in &clients {
        client.set_nonblocking(true).unwrap();
    }
    let mut waiting: Vec<_> = clients.iter().collect();
    while answered < 600 {
        assert!(Instant::now() < until, "{answered} answers");
        waiting.retain(|client| client.recv(&mut [0; 8]).is_err());
        answered = clients.len() - waiting.len();
        std::thread::park_timeout(Duration::from_millis(5));
    }
    let refused: Vec<_> = (0..100).map(|_| scene.a.record()).collect();
    assert!(refused.iter().all(|record| record.text("reason") == "limit"), "{:?}", refused[0]);
    assert!(refused[0].text("detail").contains("max_associations"), "{:?}", refused[0]);
}
