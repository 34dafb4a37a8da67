//! What a SOCKS6 request asks for beyond a connection, and destinations by name: done, and told as it was done.

use crate::node::Node;
use crate::path::Hop;
use crate::path::Path;
use crate::peers::{Host, Server, connect, echo, expect, expect_echo, expect_end};
use crate::random::Random;
use crate::socks::{v5_connect, v6_ask, v6_config};
use sidetrack::live::Multipath;
use sidetrack_core::flow::EndReason;
use sidetrack_core::socks::Server as Machine;
use sidetrack_core::socks::server::{Input, Output, Reply, Request, ServerConfig};
use sidetrack_core::socks::v6::{ClientCommand, ClientConfig, Leg, Metadata, SessionUse, StackOption};
use sidetrack_core::time::Instant;
use sidetrack_sys::sockopt::{self, ListenOptions};
use sidetrack_testkit::{Line, in_namespace, is_root};
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;

/// Connects through version 6 with these options; the stream and the proxy's answers.
fn asked(node: &Node, to: &str, stack: &[StackOption], data: &[u8]) -> (TcpStream, Vec<StackOption>) {
    let mut stream = connect(node.entry());
    let config = ClientConfig { stack: stack.to_vec(), initial_data: data.to_vec(), ..v6_config(to) };
    let connected = v6_ask(&mut stream, config).expect("connected");
    (stream, connected.stack)
}

fn sorted(mut options: Vec<StackOption>) -> Vec<String> {
    options.sort_by_key(|option| format!("{option:?}"));
    options.iter().map(|option| format!("{option:?}")).collect()
}

#[test]
fn stack_options_are_answered_as_done() {
    let (node, server) = (Node::socks(), Server::echo());
    let wanted = [
        StackOption::Tfo(0),
        StackOption::Multipath(true),
        StackOption::HappyEyeballs(true),
        StackOption::Tos(Leg::Both, 0x28),
        StackOption::Ttl(Leg::Client, 9),
        StackOption::NoFragmentation(Leg::Both, true),
    ];
    let (mut stream, done) = asked(&node, &server.address.to_string(), &wanted, b"");
    let expected = vec![
        // No data to put into the SYN; a server of plain TCP; an address, not a name.
        StackOption::Tfo(0),
        StackOption::Multipath(false),
        StackOption::HappyEyeballs(false),
        StackOption::Tos(Leg::Client, 0x28),
        StackOption::Tos(Leg::Remote, 0x28),
        StackOption::Ttl(Leg::Client, 9),
        StackOption::NoFragmentation(Leg::Client, true),
        StackOption::NoFragmentation(Leg::Remote, true),
    ];
    assert_eq!(sorted(done), sorted(expected));
    expect_echo(&mut stream, b"and it works");
    // Who asks for nothing is told nothing.
    let (_stream, done) = asked(&node, &server.address.to_string(), &[], b"");
    assert_eq!(done, []);
}

#[test]
fn the_last_proxy_of_a_chain_answers() {
    let (last, server) = (Node::socks(), Server::echo());
    let first = Node::start(&format!(
        "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
         [[rule]]\nname = 'all'\ncarrier = ['socks6://{}']\n",
        last.entry()
    ));
    let wanted = [StackOption::Ttl(Leg::Remote, 33), StackOption::Tos(Leg::Client, 0x20)];
    let (mut stream, done) = asked(&first, &server.address.to_string(), &wanted, b"");
    assert_eq!(sorted(done), sorted(wanted.to_vec()));
    expect_echo(&mut stream, b"through both");
}

/// A server that accepts by hand, with these options.
fn listening(options: &ListenOptions) -> Host {
    let listener = sockopt::listen("127.0.0.1:0".parse().unwrap(), options).unwrap();
    listener.set_nonblocking(false).unwrap();
    let address = listener.local_addr().unwrap();
    Host { listener, address }
}

/// One that takes bytes with the SYN, in a namespace that allows it.
fn fast_open() -> Host {
    sidetrack_sys::sysctl::write("net/ipv4/tcp_fastopen", "3").unwrap();
    listening(&ListenOptions { fastopen_queue_len: Some(16), ..ListenOptions::default() })
}

#[test]
fn multipath_is_used_where_both_have_it() {
    let host = listening(&ListenOptions { mptcp: true, ..ListenOptions::default() });
    let address = host.address;
    let server = Server::start_on(host, echo);
    let (_, kernel_has_it) = sockopt::mptcp_socket(&address).unwrap();
    let node = Node::socks();
    let (stream, done) = asked(&node, &address.to_string(), &[StackOption::Multipath(true)], b"");
    assert_eq!(done, [StackOption::Multipath(kernel_has_it)]);
    // Far beyond where copying ends and splice(2) begins.
    let bytes = Random::new(3).bytes(2 << 20);
    std::thread::scope(|scope| {
        scope.spawn(|| (&stream).write_all(&bytes).unwrap());
        expect(&mut &stream, &bytes);
    });
    drop(stream);
    assert_eq!(node.ends_with(EndReason::Ok).flow.bytes(), (2 << 20, 2 << 20));
    drop(server);
}

/// A counter of the kernel's MPTCP in the network namespace of this thread.
fn mptcp_counter(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").expect("counters");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("MPTcpExt: "));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let found = names.split(' ').zip(values.split(' ')).find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no counter {name} in {names}")).1.parse().expect("a number")
}

/// Two nodes on two hosts with a router between them; the far one accepts Multipath TCP.
#[test]
fn two_nodes_speak_multipath_and_a_plain_client_plain_tcp() {
    if !is_root() {
        return;
    }
    let has_it = sidetrack_sys::probe::has_mptcp();
    let line = Line::new();
    let (far, server) = line.server.run(|| {
        let listen = "[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '10.0.2.1:0'\nmptcp = true\n";
        (Node::start(listen), Server::start_on(Host::on("10.0.2.1:0"), echo))
    });
    let (hop, to) = (far.entry(), server.address);
    let near = line.client.run(move || {
        Node::start(&format!(
            "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nto = '{to}'\n\
             [[rule]]\nname = 'all'\ncarrier = 'socks6://{hop}?mptcp=true'\n"
        ))
    });
    let entry = near.entry();
    line.client.run(move || {
        let mut stream = connect(entry);
        let bytes = Random::new(5).bytes(1 << 20);
        std::thread::scope(|scope| {
            let mut reader = stream.try_clone().expect("a clone");
            let expected = &bytes;
            scope.spawn(move || expect(&mut reader, expected));
            stream.write_all(&bytes).expect("written");
        });
    });
    let (near, far_end) = (near.ends_with(EndReason::Ok).flow, far.ends_with(EndReason::Ok).flow);
    assert_eq!(near.bytes(), (1 << 20, 1 << 20));
    assert_eq!(near.multipath(), Multipath { client: false, server: has_it });
    assert_eq!(far_end.multipath(), Multipath { client: has_it, server: false });
    if has_it {
        // What the kernel of the far host counted says the same.
        line.server.run(|| {
            assert_eq!((mptcp_counter("MPCapableACKRX"), mptcp_counter("MPCapableFallbackACK")), (1, 0));
        });
    }
    line.client.run(move || {
        let mut stream = v5_connect(hop, &to.to_string());
        expect_echo(&mut stream, b"over plain TCP");
    });
    let plain = far.ends_with(EndReason::Ok).flow;
    assert_eq!(plain.multipath(), Multipath::default());
    drop(server);
}

#[test]
fn fast_open_puts_the_first_bytes_into_the_syn() {
    in_namespace(|| {
        let host = fast_open();
        let address = host.address;
        let _server = Server::start_on(host, echo);
        let node = Node::socks();
        let to = address.to_string();
        // The first connection brings the cookie, the second uses it.
        for (size, used) in [(0, 0), (0, 5), (3, 3)] {
            let (mut stream, done) = asked(&node, &to, &[StackOption::Tfo(size)], b"hello");
            assert_eq!(done, [StackOption::Tfo(used)]);
            expect(&mut stream, b"hello");
            expect_echo(&mut stream, b" and more");
            drop(stream);
            assert_eq!(node.ends_with(EndReason::Ok).flow.bytes(), (14, 14));
        }
        // A hop, too; and a refusal is still one.
        let path = Path::over(&[Hop::new("socks5").with("?tfo=true")], address, "");
        for _ in 0..2 {
            expect_echo(&mut path.open(), b"through a hop");
        }
        let gone = crate::peers::closed_address().to_string();
        let mut stream = connect(node.entry());
        let config = ClientConfig {
            stack: vec![StackOption::Tfo(0)],
            initial_data: b"hello".to_vec(),
            ..v6_config(&gone)
        };
        assert!(v6_ask(&mut stream, config).unwrap_err().contains("(code 5)"));
    });
}

#[test]
fn fast_open_does_not_hold_a_server_that_speaks_first() {
    in_namespace(|| {
        let host = fast_open();
        let node = Node::reverse(host.address, "carrier = 'direct'\ntfo = true");
        // The second time there is a cookie.
        for _ in 0..2 {
            let mut client = connect(node.entry());
            let mut accepted = host.accept();
            accepted.write_all(b"220 banner\r\n").unwrap();
            expect(&mut client, b"220 banner\r\n");
        }
    });
}

/// Plays a SOCKS6 server up to the request.
fn request_at(host: &Host) -> (TcpStream, Machine, Request) {
    let now = Instant::from_nanos(0);
    let mut stream = host.accept();
    let mut machine = Machine::new(Arc::new(ServerConfig::default()), now);
    loop {
        let mut buffer = [0; 4096];
        let n = stream.read(&mut buffer).unwrap();
        machine.handle(now, Input::Bytes(&buffer[..n]));
        while let Some(output) = machine.poll() {
            match output {
                Output::Request(request) => return (stream, machine, *request),
                Output::Send(bytes) => stream.write_all(&bytes).unwrap(),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn metadata_is_copied_hop_by_hop() {
    let last = Host::new();
    let node_to = |hop: String, metadata: &str| {
        Node::start(&format!(
            "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
             [[rule]]\nname = 'all'\ncarrier = ['socks6://{hop}']\n{metadata}\n"
        ))
    };
    let second = node_to(last.address.to_string(), "");
    let first = node_to(second.entry().to_string(), "metadata = { 7 = 'of the rule' }");
    let entry = |key, value: &str| Metadata { key, value: value.into() };
    let given = vec![entry(998, "0"), entry(1000, "socks6://a:1080"), entry(65_535, "héllo")];
    let mut client = connect(first.entry());
    let config = ClientConfig { metadata: given.clone(), ..v6_config("db.example.nl:5432") };
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| v6_ask(&mut client, config));
        let (mut stream, mut machine, request) = request_at(&last);
        assert_eq!(request.destination.to_string(), "db.example.nl:5432", "the name goes as a name");
        let mut expected = given;
        expected.push(entry(7, "of the rule"));
        assert_eq!(request.metadata, expected);
        machine.handle(Instant::from_nanos(0), Input::Reply(Reply::connected(last.address)));
        while let Some(output) = machine.poll() {
            if let Output::Send(bytes) = output {
                stream.write_all(&bytes).unwrap();
            }
        }
        let connected = asking.join().unwrap().unwrap();
        assert_eq!(connected.bound.to_string(), last.address.to_string());
        drop(stream);
    });
    expect_end(&mut client, b"");
}

#[test]
fn a_session_counts_as_used_until_its_flow_ends() {
    let (node, server) = (Node::socks(), Server::echo());
    let mut client = connect(node.entry());
    let begin = SessionUse::Begin { token_request: Some(8) };
    let config = ClientConfig { session: begin, ..v6_config(&server.address.to_string()) };
    let connected = v6_ask(&mut client, config).unwrap();
    let id = connected.session.id.expect("a session");
    let deadline = || node.shared.sessions.lock().unwrap().deadline();
    expect_echo(&mut client, b"in a session");
    assert_eq!(deadline(), None, "no time runs out while a flow is part of it");
    drop(client);
    node.ends_with(EndReason::Ok);
    sidetrack_testkit::awaited("the session falls idle", deadline);
    // And it is known to the next request.
    let mut client = connect(node.entry());
    let window = connected.session.window.expect("tokens");
    let resume = SessionUse::Resume { id, token_request: None, token_spend: Some(window.base) };
    let config = ClientConfig { command: ClientCommand::Noop, session: resume, ..v6_config("127.0.0.1:1") };
    let report = v6_ask(&mut client, config).unwrap().session;
    assert!(report.ok);
    assert_eq!(report.token_accepted, Some(true));
}

#[test]
fn ipv6_destinations() {
    let server = Server::start_on(Host::on("[::1]:0"), echo);
    let node = Node::socks();
    expect_echo(&mut v5_connect(node.entry(), &server.address.to_string()), b"five");
    expect_echo(&mut asked(&node, &server.address.to_string(), &[], b"").0, b"six");
    for ended in node.ended(2) {
        assert_eq!(ended.flow.decided().unwrap().flow.orig_dst.to_string(), server.address.to_string());
    }
}

#[test]
fn names_are_resolved_by_us_and_the_second_address_tried() {
    let all: Vec<_> = ("localhost", 1).to_socket_addrs().unwrap().collect();
    for address in all {
        let server =
            Server::start_on(Host::on(&format!("{}", std::net::SocketAddr::new(address.ip(), 0))), echo);
        let node = Node::socks();
        let name = format!("LocalHost:{}", server.address.port());
        expect_echo(&mut v5_connect(node.entry(), &name), b"by name");
        let ended = node.ends_with(EndReason::Ok);
        let decided = ended.flow.decided().unwrap();
        assert_eq!(decided.flow.orig_dst.to_string(), name.to_lowercase());
        assert_eq!(decided.flow.host.as_ref().map(|host| host.as_str()), Some("localhost"));
    }
}
