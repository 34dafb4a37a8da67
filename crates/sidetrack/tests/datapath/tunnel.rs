//! Flows through tunnels: over QUIC and over TLS, byte-exact, with half-closes, resets, many at a time, refusals, lost
//! paths and strangers.

use crate::gate::Gate;
use crate::node::Node;
use crate::peers::{
    Host, Server, closed_address, connect, expect, expect_echo, expect_end, expect_reset, expect_reset_at,
    read_all, reset,
};
use crate::transfers::{server, transfers};
use sidetrack::tls::{Made, Pin, self_signed};
use sidetrack_core::flow::EndReason;
use sidetrack_testkit::awaited;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering::Relaxed;
use tempfile::TempDir;

/// The keys of both ends.
pub(crate) struct Keys {
    folder: TempDir,
    near: Made,
    far: Made,
}

impl Keys {
    /// New ones.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let [near, far] = ["near.test", "far.test"].map(|name| self_signed(name, 1).expect("a key"));
        for (name, made) in [("near", &near), ("far", &far)] {
            std::fs::write(folder.path().join(name), made.identity_pem()).expect("a file");
        }
        Self { folder, near, far }
    }

    /// The keys of a configuration for this end, which trusts the other.
    fn of(&self, own: &str) -> String {
        let other = if own == "near" { &self.far } else { &self.near };
        let pin = Pin::of_pem(&other.certificate_pem).expect("a pin");
        format!("identity = '{}'\npins = ['{pin}']\n", self.folder.path().join(own).display())
    }

    /// A far side whose rule has these keys.
    pub(crate) fn far(&self, rule: &str) -> Node {
        self.far_on("127.0.0.1:0", rule)
    }

    fn far_on(&self, address: &str, rule: &str) -> Node {
        Node::start(&self.far_text(address, rule))
    }

    /// The configuration of a far side.
    pub(crate) fn far_text(&self, address: &str, rule: &str) -> String {
        let keys = self.of("far");
        format!(
            "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'tunnel'\naddress = '{address}'\n{keys}\
             [[rule]]\nname = 'all'\n{rule}\n"
        )
    }

    /// A near side that stands for `server` and carries by a tunnel to these far sides, with these keys.
    pub(crate) fn near(&self, server: SocketAddr, far: &[SocketAddr], tunnel: &str) -> Node {
        Node::start(&self.near_text(server, far, tunnel))
    }

    /// The same with one worker, so with one connection: a [`Gate`] knows one near side.
    pub(crate) fn near_through(&self, gate: &Gate, server: SocketAddr, tunnel: &str) -> Node {
        Node::start(&format!("workers = 1\n{}", self.near_text(server, &[gate.address], tunnel)))
    }

    /// The configuration of [`Keys::near`].
    pub(crate) fn near_text(&self, server: SocketAddr, far: &[SocketAddr], tunnel: &str) -> String {
        let addresses: Vec<_> = far.iter().map(|address| format!("'{address}'")).collect();
        let (keys, addresses) = (self.of("near"), addresses.join(", "));
        format!(
            "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{server}'\n\
             [[tunnel]]\nname = 't'\naddress = [{addresses}]\n{keys}{tunnel}\n\
             [[rule]]\nname = 'all'\ncarrier = 'tunnel:t'\n"
        )
    }

    /// Both, the near one first.
    fn path(&self, server: SocketAddr, tunnel: &str) -> [Node; 2] {
        let far = self.far("carrier = 'direct'");
        [self.near(server, &[far.entry()], tunnel), far]
    }
}

/// Waits until these nodes know that the path of their one flow stands: bytes may be there before the answer is here.
fn await_made<'n>(nodes: impl IntoIterator<Item = &'n Node>) {
    for node in nodes {
        node.await_live("the path stands", |flow| flow.connect_time().is_some());
    }
}

/// Every test runs over both.
pub(crate) const TRANSPORTS: [&str; 2] = ["transport = 'quic'", "transport = 'tls'"];

#[test]
fn transfers_are_byte_exact() {
    for transport in TRANSPORTS {
        let server = server(b"");
        let nodes = Keys::new().path(server.address, transport);
        let entry = nodes[0].entry();
        transfers(&nodes, b"", || connect(entry));
    }
}

#[test]
fn policy_at_the_far_side_sees_the_flow() {
    let keys = Keys::new();
    let server = Server::echo();
    let far = keys.far(
        "match = { socks_user = 'near.test', intercept = 'tunnel', from = '127.0.0.1' }\ncarrier = 'direct'",
    );
    let near = keys.near(server.address, &[far.entry()], "transport = 'quic'");
    let mut client = connect(near.entry());
    let from = client.local_addr().unwrap();
    expect_echo(&mut client, b"hello");
    client.shutdown(Shutdown::Write).unwrap();
    expect_end(&mut client, b"");
    near.ends_with(EndReason::Ok);
    let ended = far.ends_with(EndReason::Ok);
    let flow = ended.flow.decided().unwrap().flow.clone();
    assert_eq!((flow.client, flow.orig_dst), (from, server.address.into()));
    assert_eq!(flow.user.as_deref(), Some("near.test"));
    assert_eq!(ended.flow.bytes(), (5, 5));
}

#[test]
fn refusals_reach_the_near_side_with_their_reason() {
    for transport in TRANSPORTS {
        let keys = Keys::new();
        let refusing = keys.path(closed_address(), transport);
        expect_reset_at(refusing[0].entry());
        let ended = refusing[0].ends_with(EndReason::Refused);
        let detail = ended.detail.unwrap();
        assert!(detail.contains("tunnel 't'") && detail.contains("the far side says refused"), "{detail}");
        refusing[1].ends_with(EndReason::Refused);
        let denying = keys.far("match = { port = 1 }\naction = 'deny'");
        let near = keys.near(closed_address(), &[denying.entry()], transport);
        expect_reset_at(near.entry());
        let detail = near.ends_with(EndReason::HopFailed).detail.unwrap();
        assert!(detail.contains("policy_denied: no rule matched; default deny"), "{detail}");
        denying.ends_with(EndReason::PolicyDenied);
    }
}

#[test]
fn half_closes_pass_in_either_direction() {
    for transport in TRANSPORTS {
        let host = Host::new();
        let nodes = Keys::new().path(host.address, transport);
        let mut client = connect(nodes[0].entry());
        let mut server = host.accept();
        client.write_all(b"question").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut server, b"question");
        server.write_all(b"answer").unwrap();
        expect(&mut client, b"answer");
        drop(server);
        expect_end(&mut client, b"");
        let mut client = connect(nodes[0].entry());
        let mut server = host.accept();
        server.write_all(b"banner").unwrap();
        server.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut client, b"banner");
        client.write_all(b"late").unwrap();
        drop(client);
        expect_end(&mut server, b"late");
        for node in &nodes {
            assert!(node.ended(2).iter().all(|ended| ended.reason == EndReason::Ok));
        }
    }
}

#[test]
fn resets_pass_after_the_bytes_before_them() {
    for transport in TRANSPORTS {
        let host = Host::new();
        let nodes = Keys::new().path(host.address, transport);
        let mut client = connect(nodes[0].entry());
        let mut server = host.accept();
        client.write_all(b"last words").unwrap();
        expect(&mut server, b"last words");
        await_made(&nodes);
        reset(client);
        expect_reset(&mut server);
        for node in &nodes {
            node.ends_with(EndReason::ClientReset);
        }
        let mut client = connect(nodes[0].entry());
        let mut server = host.accept();
        server.write_all(&[7; 100_000]).unwrap();
        await_made(&nodes);
        reset(server);
        let (bytes, end) = read_all(&mut client);
        assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        // What the server's own kernel had not sent is lost on any path.
        assert!(bytes.iter().all(|byte| *byte == 7));
        for node in &nodes {
            node.ends_with(EndReason::ServerReset);
        }
    }
}

#[test]
fn a_client_that_resets_after_its_fin_is_noticed() {
    for transport in TRANSPORTS {
        let host = Host::new();
        let nodes = Keys::new().path(host.address, transport);
        let client = connect(nodes[0].entry());
        let mut server = host.accept();
        client.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut server, b"");
        await_made(&nodes);
        reset(client);
        for node in &nodes {
            node.ends_with(EndReason::ClientReset);
        }
        // The server learns of it by a reset when it says something.
        awaited("the server is reset", || server.write_all(b"x").is_err().then_some(()));
    }
}

#[test]
fn five_hundred_flows_at_a_time() {
    sidetrack_sys::caps::raise_open_files_limit().unwrap();
    for transport in TRANSPORTS {
        let server = Server::echo();
        let nodes = Keys::new().path(server.address, transport);
        let mut clients: Vec<_> = (0..500_u32).map(|number| (number, connect(nodes[0].entry()))).collect();
        for (number, client) in &mut clients {
            client.write_all(&number.to_be_bytes()).unwrap();
        }
        for (number, client) in &mut clients {
            expect(client, &number.to_be_bytes());
        }
        awaited("all are in flight at the far side", || (nodes[1].live().len() == 500).then_some(()));
        for (_, mut client) in clients {
            client.shutdown(Shutdown::Write).unwrap();
            expect_end(&mut client, b"");
        }
        for node in &nodes {
            assert!(node.ended(500).iter().all(|ended| ended.reason == EndReason::Ok));
        }
    }
}

#[test]
fn a_flow_that_nobody_reads_holds_up_no_other() {
    for transport in TRANSPORTS {
        let host = Host::new();
        let nodes = Keys::new().path(host.address, transport);
        let stuck = connect(nodes[0].entry());
        let unread = host.accept();
        stuck.set_nonblocking(true).unwrap();
        let mut sent = 0;
        // Until neither the sockets nor the tunnel take more.
        let mut idle = 0;
        while idle < 50 {
            match (&stuck).write(&[1; 65_536]) {
                Ok(n) => (sent, idle) = (sent + n, 0),
                Err(_) => {
                    idle += 1;
                    std::thread::park_timeout(std::time::Duration::from_millis(5));
                }
            }
            assert!(sent < 256 << 20, "nothing holds the sender back");
        }
        let mut other = connect(nodes[0].entry());
        let served = std::thread::spawn({
            let stream = host.accept();
            move || crate::peers::echo(stream)
        });
        for _ in 0..20 {
            expect_echo(&mut other, &[2; 10_000]);
        }
        drop((other, stuck, unread));
        served.join().unwrap();
    }
}

#[test]
fn a_stranger_is_let_in_at_neither_end() {
    let (keys, others) = (Keys::new(), Keys::new());
    let server = Server::echo();
    for transport in TRANSPORTS.into_iter().chain(["transport = 'auto'"]) {
        let far = keys.far("carrier = 'direct'");
        // It holds other keys, and trusts another far side.
        let near = others.near(server.address, &[far.entry()], transport);
        expect_reset_at(near.entry());
        near.ends_with(EndReason::AuthFailed);
        // It trusts the far side, which does not trust it.
        let pin = Pin::of_pem(&keys.far.certificate_pem).unwrap();
        let text = format!(
            "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{}'\n\
             [[tunnel]]\nname = 't'\naddress = '{}'\nidentity = '{}'\npins = ['{pin}']\n{transport}\n\
             [[rule]]\nname = 'all'\ncarrier = 'tunnel:t'\n",
            server.address,
            far.entry(),
            others.folder.path().join("near").display(),
        );
        let near = Node::start(&text);
        expect_reset_at(near.entry());
        near.ends_with(EndReason::AuthFailed);
        assert!(far.all_ended(0).is_empty());
    }
}

#[test]
fn where_udp_does_not_get_through_tls_does() {
    let keys = Keys::new();
    let server = Server::echo();
    let far = keys.far("carrier = 'direct'");
    // Forwards TCP and nothing else.
    let to = far.entry();
    let gate = Server::start(move |client| {
        let Ok(server) = std::net::TcpStream::connect(to) else { return };
        let (mut client_too, mut server_too) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let up = std::thread::spawn(move || {
            let _ = std::io::copy(&mut client_too, &mut server_too);
            let _ = server_too.shutdown(Shutdown::Write);
        });
        let (mut server, mut client) = (server, client);
        let _ = std::io::copy(&mut server, &mut client);
        let _ = client.shutdown(Shutdown::Write);
        let _ = up.join();
    });
    let near = keys.near(server.address, &[gate.address], "transport = 'auto'");
    for _ in 0..20 {
        let mut client = connect(near.entry());
        expect_echo(&mut client, b"over TCP");
        client.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut client, b"");
    }
    assert!(near.ended(20).iter().all(|ended| ended.reason == EndReason::Ok));
    // The gate must not wait for connections that are kept ready.
    drop(near);
}

#[test]
fn a_lost_path_ends_its_flows_and_new_ones_take_the_other() {
    for transport in TRANSPORTS {
        let keys = Keys::new();
        let host = Host::new();
        let (first, second) = (keys.far("carrier = 'direct'"), keys.far("carrier = 'direct'"));
        let near = keys.near(host.address, &[first.entry(), second.entry()], transport);
        let mut client = connect(near.entry());
        let mut server = host.accept();
        client.write_all(b"a").unwrap();
        expect(&mut server, b"a");
        await_made([&near]);
        assert_eq!(first.live().len() + second.live().len(), 1);
        let (used, other) = if first.live().len() == 1 { (first, second) } else { (second, first) };
        drop(used);
        expect_reset(&mut client);
        near.ends_with(EndReason::ServerReset);
        let mut client = connect(near.entry());
        let mut server = host.accept();
        client.write_all(b"b").unwrap();
        expect(&mut server, b"b");
        assert_eq!(other.live().len(), 1);
        drop((client, server));
        near.ends_with(EndReason::Ok);
    }
}

#[test]
fn a_far_side_that_comes_back_is_found_again() {
    let keys = Keys::new();
    let server = Server::echo();
    for transport in TRANSPORTS {
        let far = keys.far("carrier = 'direct'");
        let address = far.entry();
        let near = keys.near(server.address, &[address], transport);
        expect_echo(&mut connect(near.entry()), b"before");
        drop(far);
        let far = awaited("the address is free again", || {
            std::panic::catch_unwind(|| keys.far_on(&address.to_string(), "carrier = 'direct'")).ok()
        });
        awaited("a flow gets through", || {
            let mut client = connect(near.entry());
            let mut byte = [0];
            let wrote = client.write_all(b"x").is_ok();
            (wrote && client.read(&mut byte).is_ok_and(|n| n == 1)).then_some(())
        });
        drop(far);
    }
}

#[test]
fn bytes_survive_a_path_that_loses_datagrams() {
    let (keys, server) = (Keys::new(), Server::echo());
    let far = keys.far("carrier = 'direct'");
    let gate = Gate::to(far.entry());
    // A machine that gives its threads no time for seconds loses everything meanwhile: that is not what this is about.
    let patient = "transport = 'quic'\nlost_after_ms = 60000\n[limits]\nconnect_timeout_ms = 60000";
    let near = keys.near_through(&gate, server.address, patient);
    expect_echo(&mut connect(near.entry()), b"the path stands");
    gate.loses.store(3, Relaxed);
    std::thread::scope(|scope| {
        for number in 0..8_u8 {
            let entry = near.entry();
            scope.spawn(move || {
                let mut client = connect(entry);
                for round in 0..8 {
                    expect_echo(&mut client, &vec![number * 16 + round; 20_000]);
                }
                client.shutdown(Shutdown::Write).unwrap();
                expect_end(&mut client, b"");
            });
        }
    });
}

#[test]
fn a_path_that_falls_silent_is_noticed_at_both_ends() {
    let (keys, server) = (Keys::new(), Server::echo());
    let far = keys.far("carrier = 'direct'");
    let gate = Gate::to(far.entry());
    let lost_soon = "transport = 'quic'\nkeepalive_ms = 400\nlost_after_ms = 5000";
    let near = keys.near_through(&gate, server.address, lost_soon);
    let mut client = connect(near.entry());
    expect_echo(&mut client, b"the path stands");
    gate.loses.store(100, Relaxed);
    expect_reset(&mut client);
    let detail = near.ends_with(EndReason::ServerReset).detail.unwrap();
    assert!(detail.contains("the tunnel's connection is lost"), "{detail}");
    far.ends_with(EndReason::ClientReset);
    // And it is found again.
    gate.loses.store(0, Relaxed);
    awaited("a flow gets through", || {
        let mut client = connect(near.entry());
        let mut byte = [0];
        let wrote = client.write_all(b"x").is_ok();
        (wrote && client.read(&mut byte).is_ok_and(|n| n == 1)).then_some(())
    });
}

/// A server that answers each request with its content; gives its address.
fn http_echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().take(8).map_while(Result::ok) {
            std::thread::spawn(move || answer_requests(BufReader::new(stream)));
        }
    });
    address
}

/// Serves one connection until its client leaves.
fn answer_requests(mut stream: BufReader<TcpStream>) {
    for _ in 0..100 {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            if line == "\r\n" {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
        }
        let mut content = vec![0; length];
        stream.read_exact(&mut content).expect("content");
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
        let answer = [head.as_bytes(), &content].concat();
        if stream.get_mut().write_all(&answer).is_err() {
            return;
        }
    }
}

#[test]
fn requests_of_an_http_listener_go_through_a_tunnel() {
    for transport in TRANSPORTS {
        let keys = Keys::new();
        let far = keys.far("carrier = 'direct'");
        let text = keys.near_text(http_echo(), &[far.entry()], transport);
        let near = Node::start(&text.replace("kind = 'reverse'", "kind = 'http'"));
        let mut client = BufReader::new(connect(near.entry()));
        for length in [0, 3, 300_000, 5] {
            let content: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let head = format!("POST /p HTTP/1.1\r\nHost: h.test\r\nContent-Length: {length}\r\n\r\n");
            let mut writing = client.get_ref().try_clone().expect("a handle");
            let sent = [head.as_bytes(), &content].concat();
            let writer = std::thread::spawn(move || writing.write_all(&sent).expect("sent"));
            let mut line = String::new();
            client.read_line(&mut line).expect("an answer");
            assert!(line.starts_with("HTTP/1.1 200"), "{line}");
            while line != "\r\n" {
                line.clear();
                assert!(client.read_line(&mut line).expect("a head") > 0);
            }
            let mut answer = vec![0; length];
            client.read_exact(&mut answer).expect("the content");
            assert!(answer == content, "{length} bytes came back changed");
            writer.join().expect("the writer");
            near.ends_with(EndReason::Ok);
        }
        // With the connection that was kept for more requests: one for all of them.
        near.stop();
        far.ended(1);
    }
}
