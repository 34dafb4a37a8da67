//! Datagrams of this host's own programs, caught by a `redirect` listener of UDP.

use crate::datagrams::{ALL, client, echo, errors, listen, seen};
use crate::node::Up;
use crate::node::traces::Traces;
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

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

    fn ports(&self) -> String {
        let [v4, v6] = self.servers.each_ref().map(|server| server.address.port());
        format!("ports = [{v4}, {v6}]\n")
    }

    /// Starts on the client's host.
    fn up(&self, keys: &str, rules: &str) -> Up {
        let tables = format!(
            "[limits]\ndrain_ms = 0\n[[listen]]\nname = \"out\"\nkind = \"redirect\"\nprotocol = \"udp\"\n{keys}{rules}"
        );
        self.line.client.run(move || Up::start("default = \"deny\"\n", &tables))
    }

    fn client(&self, to: SocketAddr) -> UdpSocket {
        self.line.client.run(move || client(to))
    }
}

/// Whether this client's datagrams are caught: the server sees another port than the client's.
fn is_caught(client: &UdpSocket) -> bool {
    seen(client) != client.local_addr().expect("an address")
}

#[test]
fn programs_are_caught_and_answered_from_the_asked_address_at_every_length() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let before = scene.line.client.run(Traces::now);
    let up = scene.up(&scene.ports(), ALL);
    let mut clients = Vec::new();
    for server in &scene.servers {
        let client = scene.client(server.address);
        let own = client.local_addr().expect("an address");
        let seen = seen(&client);
        assert_eq!(seen.ip(), own.ip(), "our socket is on the same host");
        assert_ne!(seen.port(), own.port(), "and is another one");
        // Of IPv6, `lo` takes 65,536 bytes with the header, and none in fragments.
        let longest = if server.address.is_ipv4() { 65_507 } else { 65_488 };
        for length in [0, 1, 1452, 1473, 9000, longest] {
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
        assert_eq!((record.text("intercept"), record.text("protocol")), ("redirect", "udp"));
        assert_eq!((record.text("listener"), record.address("orig_dst")), ("out", server.address));
        assert_eq!((record.number("packets_up"), record.number("packets_down")), (7, 7));
    }
    scene.line.client.run(move || before.expect_back("after the end"));
}

#[test]
fn a_program_keeps_its_outside_port_and_other_ports_are_left_alone() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let [second, spared] = [(); 2].map(|()| scene.line.server.run(|| Echo::start("10.0.2.1")));
    let first = &scene.servers[0];
    let ports = format!("ports = [{}, {}]\n", first.address.port(), second.address.port());
    let up = scene.up(&ports, ALL);
    let socket = scene.line.client.run(|| UdpSocket::bind("0.0.0.0:0").expect("a socket"));
    socket.set_read_timeout(Some(LIMIT)).expect("a limit");
    let mut outside = Vec::new();
    for server in [first, &second, &spared] {
        socket.send_to(b"who", server.address).expect("sent");
        let mut buffer = [0; 100];
        let (length, from) = socket.recv_from(&mut buffer).expect("an answer");
        assert_eq!(from, server.address, "the answer's sender");
        outside.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    assert_eq!(outside[0], outside[1], "RFC 4787 REQ-1");
    let own = socket.local_addr().expect("an address").port().to_string();
    assert!(!outside[0].ends_with(&own) && outside[2].ends_with(&own), "{outside:?} {own}");
    assert_eq!(up.stop().1.len(), 2);
}

#[test]
fn only_the_users_named_are_caught() {
    const NOBODY: u32 = 65_534;
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let up = scene.up(&format!("users = [{NOBODY}]\n"), ALL);
    for server in &scene.servers {
        let to = server.address;
        assert!(!is_caught(&scene.client(to)), "root is not meant");
        let as_nobody = scene.line.client.run(move || {
            // A thread has its own user id: what it gives up is lost to it only.
            let thread = std::thread::spawn(move || {
                let nobody = rustix::process::Uid::from_raw(NOBODY);
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root");
                is_caught(&client(to))
            });
            thread.join().expect("asked")
        });
        assert!(as_nobody);
    }
    assert!(up.stop().0.success());
}

#[test]
fn what_is_denied_is_refused_and_rules_see_the_program() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let closed = scene.line.server.run(|| {
        let socket = UdpSocket::bind("10.0.2.1:0").expect("a socket");
        socket.local_addr().expect("an address")
    });
    let own = std::env::current_exe().expect("a program");
    let own = own.file_name().expect("a name").to_string_lossy().into_owned();
    let rules =
        format!("[[rule]]\nname = \"this\"\nmatch = {{ process = \"{own}\" }}\ncarrier = \"direct\"\n");
    let mut up = scene.up("dst = [\"10.0.2.0/24\", \"fd00:2::/64\"]\n", &rules);
    for server in &scene.servers {
        assert!(is_caught(&scene.client(server.address)));
        // Errno, origin, type and code of the message, and its MTU.
        let refused = if server.address.is_ipv4() { "111 2 3 3 0" } else { "111 3 1 4 0" };
        assert_eq!(errors(&scene.line.client, server.address, 3), refused);
        let record = up.record();
        assert_eq!(record.fate(), ("", "", "policy_denied"), "{record:?}");
        assert!(record.text("process").starts_with("python3"), "{record:?}");
    }
    let client = scene.client(closed);
    client.send(b"anybody").expect("sent");
    let error = client.recv(&mut [0; 10]).expect_err("the port is closed");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_server_of_this_host_answers_its_clients_itself() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let server = scene.line.client.run(|| Echo::start("10.0.1.1"));
    let caught = scene.line.client.run(|| Echo::start("10.0.1.1"));
    // Our own port for a server, which answers the same clients.
    let reverse = format!(
        "[[listen]]\nname = \"in\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"10.0.1.1:0\"\nto = \"{}\"\n",
        server.address
    );
    let everywhere = "dst = [\"0.0.0.0/0\"]\n";
    let up = scene.up(everywhere, &format!("{reverse}{ALL}"));
    let entry = up.addresses("in")[0];
    let remote = scene.line.server.run(move || client(server.address));
    assert_eq!(seen(&remote), remote.local_addr().expect("an address"), "the server's answers are not ours");
    let through = scene.line.server.run(move || client(entry));
    assert_eq!(seen(&through).ip(), entry.ip());
    // A program of this host reaches our own port, and is caught on its way to another one of this host.
    let here = scene.client(entry);
    assert_eq!(seen(&here).ip(), entry.ip());
    assert!(is_caught(&scene.client(caught.address)));
    let (_, records) = up.stop();
    let mut listeners: Vec<_> = records.iter().map(|record| record.text("listener")).collect();
    listeners.sort_unstable();
    assert_eq!(listeners, ["in", "in", "out"], "{records:?}");
}

#[test]
fn a_kill_leaves_no_rule_and_datagrams_pass_again() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let before = scene.line.client.run(Traces::now);
    let mut up = scene.up(&scene.ports(), ALL);
    let clients = scene.servers.each_ref().map(|server| scene.client(server.address));
    for client in &clients {
        assert!(is_caught(client));
    }
    up.signal(Signal::KILL);
    let _ = up.gone();
    scene.line.client.run(move || before.expect_back("after the kill"));
    for client in &clients {
        let own = client.local_addr().expect("an address").to_string();
        client.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
        eventually("datagrams pass without us", || {
            let mut buffer = [0; 100];
            client.send(b"who").is_ok()
                && client.recv(&mut buffer).is_ok_and(|length| buffer[..length] == *own.as_bytes())
        });
    }
}

#[test]
fn a_path_that_becomes_narrower_is_told_to_the_program() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let up = scene.up(&scene.ports(), ALL);
    let clients = scene.servers.each_ref().map(|server| scene.client(server.address));
    let payload = [7; 1400];
    for client in &clients {
        assert!(echo(client, &payload) == payload);
    }
    scene.line.server.ip("link set eth0 mtu 1300");
    scene.line.router.ip("link set to-server mtu 1300");
    for (client, server) in clients.iter().zip(&scene.servers) {
        let too_big = if server.address.is_ipv4() { "90 2 3 4 1300" } else { "90 3 2 0 1300" };
        assert_eq!(errors(&scene.line.client, server.address, 1400), too_big);
        // From now on the kernel knows the path, and sends fragments.
        assert!(echo(client, &payload) == payload);
    }
    assert!(up.stop().0.success());
}

/// Answers each question for an IPv4 address with 10.0.2.1, and others with no address (RFC 1035 Sec. 4), until told to stop.
fn answer_names(socket: &UdpSocket, stop: &AtomicBool) {
    socket.set_read_timeout(Some(Duration::from_millis(5))).expect("a limit");
    let mut buffer = [0; 512];
    while !stop.load(Relaxed) {
        let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
        let query = &buffer[..length];
        let name = query[12..].iter().position(|byte| *byte == 0).expect("the end of the name");
        let end = 12 + name + 5;
        let is_v4 = query[end - 4..end - 2] == [0, 1];
        let mut out =
            [&query[..2], &[0x81, 0x80, 0, 1, 0, u8::from(is_v4), 0, 0, 0, 0], &query[12..end]].concat();
        if is_v4 {
            out.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 10, 0, 2, 1]);
        }
        socket.send_to(&out, from).expect("sent");
    }
}

/// Gives this thread, and what it starts, a name server of its own.
fn use_only_this_name_server(ip: &str) {
    #[expect(deprecated, reason = "the new form is unsafe because of CLONE_FILES, which is not used here")]
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS).expect("a mount namespace");
    let mount = |arguments: &[&str]| {
        let output = Command::new("mount").args(arguments).output().expect("the mount tool");
        assert!(output.status.success(), "{output:?}");
    };
    mount(&["--make-rprivate", "/"]);
    let folder = tempfile::tempdir().expect("a folder");
    for (file, text) in [
        ("resolv.conf", format!("nameserver {ip}\noptions timeout:20 attempts:2\n")),
        ("nsswitch.conf", "hosts: files dns\n".to_owned()),
    ] {
        let own = folder.path().join(file);
        std::fs::write(&own, text).expect("written");
        mount(&["--bind", own.to_str().expect("a path in text"), &format!("/etc/{file}")]);
    }
}

#[test]
fn our_own_questions_for_names_pass_whatever_the_rules_say() {
    if !is_root() {
        return;
    }
    let scene = Scene::new();
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = stop.clone();
    let names = scene.line.server.run(move || {
        let socket = UdpSocket::bind("10.0.2.1:53").expect("a socket");
        std::thread::spawn(move || answer_names(&socket, &stopping))
    });
    let hop = scene.line.server.run(|| {
        let listener = "[[listen]]\nname = \"hop\"\nkind = \"socks\"\naddress = \"10.0.2.1:0\"\n";
        Up::start("default = \"deny\"\n", &format!("{listener}{ALL}"))
    });
    let rule = format!(
        "[[rule]]\nname = \"all\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = \"socks5://hop.example:{}\"\n",
        hop.addresses("hop")[0].port()
    );
    scene.line.client.run(|| use_only_this_name_server("10.0.2.1"));
    let server = scene.servers[0].address;
    let up = scene.up(&format!("ports = [53, {}]\n", server.port()), &rule);
    let client = scene.client(server);
    assert_eq!(seen(&client).ip(), "10.0.2.1".parse::<IpAddr>().expect("an address"), "by the hop");
    let (_, records) = up.stop();
    let own = records.iter().filter(|record| record.address("orig_dst").port() == 53);
    assert!(own.clone().count() > 0, "{records:?}");
    for record in own {
        assert_eq!((record.text("rule"), record.text("carrier")), ("", "direct"), "{record:?}");
    }
    stop.store(true, Relaxed);
    names.join().expect("it only answers");
}

#[test]
fn the_plan_shows_the_rules_and_the_routing() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("s.toml");
    let text = format!("version = 1\ndefault = \"deny\"\n{}{ALL}", listen("redirect", "ports = 53\n"));
    std::fs::write(&file, text).expect("written");
    let plan = Command::new(env!("CARGO_BIN_EXE_sidetrack")).args(["plan", "--config"]).arg(&file).output();
    let plan = String::from_utf8(plan.expect("it runs").stdout).expect("text");
    for part in [
        "for 'out' with IP_TRANSPARENT, UDP",
        "type route hook output priority mangle",
        "ct direction reply accept",
        "udp dport 53",
        "meta mark set 0x5e000001",
        "iifname \"lo\" meta mark 0x5e000002 tproxy ip6 to :",
    ] {
        assert!(plan.contains(part), "{part}\n{plan}");
    }
}
