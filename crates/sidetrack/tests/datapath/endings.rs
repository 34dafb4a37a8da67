//! One test for every reason a flow can end with in user space: what the client sees, and the one record.

use crate::node::Node;
use crate::path::USER;
use crate::peers::{
    Host, Server, closed_address, connect, expect, expect_echo, expect_end, expect_reset, expect_reset_at,
};
use crate::socks::{v5_ask, v5_connect, v5_reply, v5_request, v5_try, v6_ask, v6_config};
use sidetrack_core::carrier::Credentials;
use sidetrack_core::flow::EndReason;
use sidetrack_core::limit::Budget;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};

/// A name that no resolver is asked for: one of its labels is longer than DNS allows (63 bytes).
const NO_SUCH_NAME: &str = "nonexistent-with-a-label-longer-than-the-sixty-three-bytes-dns-allows.invalid:80";

const SOCKS: &str = "[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n";

/// A SOCKS node whose one rule for all flows has these keys.
fn socks_with(rule: &str) -> Node {
    Node::start(&format!("default = 'deny'\n{SOCKS}[[rule]]\nname = 'all'\n{rule}\n"))
}

/// A node with these limits, and a SOCKS listener.
fn socks_within(limits: &str) -> Node {
    Node::start(&format!("limits = {{ {limits} }}\n{SOCKS}"))
}

/// The code that version 5 and version 6 clients get for `to`; the flows end for this reason.
fn codes(node: &Node, to: &str, reason: EndReason) -> (u8, String) {
    let mut client = connect(node.entry());
    let code = v5_ask(&mut client, 1, to);
    expect_end(&mut client, b"");
    node.ends_with(reason);
    let mut client = connect(node.entry());
    let words = v6_ask(&mut client, v6_config(to)).expect_err("a refusal");
    expect_end(&mut client, b"");
    let ended = node.ends_with(reason);
    assert!(ended.detail.is_some(), "a failure says more than its reason");
    assert_eq!(ended.flow.bytes(), (0, 0));
    (code, words)
}

#[test]
fn policy_denied() {
    let node = Node::start(&format!(
        "default = 'deny'\n{SOCKS}[[rule]]\nname = 'some'\nmatch = {{ port = 1 }}\naction = 'deny'\n"
    ));
    let (code, words) = codes(&node, "127.0.0.1:1", EndReason::PolicyDenied);
    assert_eq!(code, 2);
    assert!(words.contains("(code 2)"), "{words}");
    assert_eq!(codes(&node, "127.0.0.1:2", EndReason::PolicyDenied).0, 2);
    let node = Node::reverse(closed_address(), "action = 'deny'");
    expect_reset_at(node.entry());
    let ended = node.ends_with(EndReason::PolicyDenied);
    assert_eq!(ended.flow.decided().unwrap().rule().map(|rule| &**rule), Some("all"));
}

#[test]
fn refused() {
    let (code, words) = codes(&Node::socks(), &closed_address().to_string(), EndReason::Refused);
    assert_eq!(code, 5);
    assert!(words.contains("(code 5)"), "{words}");
    let node = Node::reverse(closed_address(), "carrier = 'direct'");
    expect_reset_at(node.entry());
    node.ends_with(EndReason::Refused);
}

#[test]
fn refused_behind_a_hop_says_which_hop() {
    let last = Node::socks();
    for scheme in ["socks5", "socks6", "socks6+socksx", "socks6+socksx010"] {
        let node = socks_with(&format!("carrier = ['{scheme}://{}']", last.entry()));
        let mut client = connect(node.entry());
        assert_eq!(v5_ask(&mut client, 1, &closed_address().to_string()), 5, "{scheme}");
        let ended = node.ends_with(EndReason::Refused);
        assert!(ended.detail.as_ref().unwrap().contains("hop 1 of 1"), "{ended:?}");
        last.ends_with(EndReason::Refused);
    }
}

#[test]
fn unreachable() {
    // connect(2) says so at once: TCP has no broadcasts.
    let (code, words) = codes(&Node::socks(), "255.255.255.255:80", EndReason::Unreachable);
    assert_eq!(code, 3, "the network, not a host, cannot be reached");
    assert!(words.contains("(code 3)"), "{words}");
}

#[test]
fn dns() {
    let (code, words) = codes(&Node::socks(), NO_SUCH_NAME, EndReason::Dns);
    assert_eq!(code, 4);
    assert!(words.contains("(code 4)"), "{words}");
}

/// A listener whose queue is full: it answers no SYN. The connections that fill it live as long as it does.
pub(crate) fn deaf() -> (socket2::Socket, SocketAddr, Vec<TcpStream>) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let wait = std::time::Duration::from_secs(1);
    let queue: Vec<_> = (0..16).map_while(|_| TcpStream::connect_timeout(&address, wait).ok()).collect();
    assert!(queue.len() < 16, "the queue never filled");
    (socket, address, queue)
}

#[test]
fn connect_timeout() {
    let (_socket, address, _queue) = deaf();
    let node = socks_with("carrier = 'direct'\nconnect_timeout_ms = 200");
    let mut client = connect(node.entry());
    assert_eq!(v5_ask(&mut client, 1, &address.to_string()), 6, "timed out, in version 5");
    expect_end(&mut client, b"");
    node.ends_with(EndReason::ConnectTimeout);
    let node = Node::reverse(address, "carrier = 'direct'\nconnect_timeout_ms = 200");
    expect_reset_at(node.entry());
    node.ends_with(EndReason::ConnectTimeout);
}

/// Both replies of version 6 travel in one packet where the dial is quick; where it is not, the first comes alone.
#[test]
fn the_authentication_reply_does_not_wait_for_a_slow_dial() {
    let (_socket, address, _queue) = deaf();
    let node = socks_with("carrier = 'direct'\nconnect_timeout_ms = 600000");
    let mut client = connect(node.entry());
    let SocketAddr::V4(to) = address else { panic!("{address} is not IPv4") };
    let mut request = vec![6, 1, 0, 8];
    request.extend(to.port().to_be_bytes());
    request.extend([0, 1]);
    request.extend(to.ip().octets());
    request.extend([0, 2, 0, 8, 0, 0, 0, 0]);
    client.write_all(&request).expect("write");
    let mut reply = [0; 4];
    client.read_exact(&mut reply).expect("before the dial ends");
    assert_eq!(reply, [6, 0, 0, 0]);
}

#[test]
fn a_hop_that_says_nothing_is_a_connect_timeout() {
    let hop = Host::new();
    for scheme in ["socks5", "socks6", "http"] {
        let rule = format!("carrier = ['{scheme}://{}']\nconnect_timeout_ms = 1000", hop.address);
        let node = Node::reverse(closed_address(), &rule);
        let mut client = connect(node.entry());
        let held = hop.accept();
        expect_reset(&mut client);
        node.ends_with(EndReason::ConnectTimeout);
        drop(held);
    }
}

#[test]
fn hop_failed() {
    // What the hop says, instead of what its protocol wants.
    let lies: [(&str, &'static [u8]); 6] = [
        ("socks5", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        ("socks5", b""),
        ("socks5", b"\x05\x00\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00"),
        ("socks6", b"\x05\xff"),
        ("http", b"\x06\x00\x00\x00"),
        ("http", b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"),
    ];
    for (scheme, lie) in lies {
        let hop = Server::start(move |mut stream| {
            let _ = stream.read_exact_or_end();
            let _ = stream.write_all(lie);
        });
        let node = Node::reverse(closed_address(), &format!("carrier = ['{scheme}://{}']", hop.address));
        expect_reset_at(node.entry());
        let ended = node.ends_with(EndReason::HopFailed);
        assert!(ended.detail.as_ref().unwrap().contains("hop 1 of 1"), "{ended:?}");
    }
}

/// Reads some of what a hop is told, so that closing is not a reset.
trait ReadSome {
    fn read_exact_or_end(&mut self) -> std::io::Result<usize>;
}

impl ReadSome for TcpStream {
    fn read_exact_or_end(&mut self) -> std::io::Result<usize> {
        std::io::Read::read(self, &mut [0; 4096])
    }
}

#[test]
fn a_hop_that_does_not_know_us_is_auth_failed() {
    let (user, secret) = USER;
    let last = Node::start(&format!("{SOCKS}users = [{{ user = '{user}', password = '{secret}' }}]"));
    let http = crate::path::connect_proxy(true);
    let hops =
        [("socks5", last.entry(), true), ("socks6", last.entry(), true), ("http", http.address, false)];
    for (scheme, address, ours) in hops {
        for login in ["alice:wrong@", "bob:open%20sesame@", ""] {
            let node = Node::reverse(closed_address(), &format!("carrier = ['{scheme}://{login}{address}']"));
            expect_reset_at(node.entry());
            node.ends_with(EndReason::AuthFailed);
            if ours {
                last.ends_with(EndReason::AuthFailed);
            }
        }
    }
}

#[test]
fn a_client_that_we_do_not_know_is_auth_failed() {
    let (user, secret) = USER;
    let node = Node::start(&format!("{SOCKS}users = [{{ user = '{user}', password = '{secret}' }}]"));
    let mut client = connect(node.entry());
    client.write_all(&[5, 1, 0]).unwrap();
    expect_end(&mut client, &[5, 0xff]);
    node.ends_with(EndReason::AuthFailed);
    let mut client = connect(node.entry());
    client.write_all(b"\x05\x01\x02\x01\x05alice\x05wrong").unwrap();
    expect(&mut client, &[5, 2, 1]);
    assert_ne!(crate::peers::read_all(&mut client).0, [0], "a status that is no success");
    node.ends_with(EndReason::AuthFailed);
    let mut client = connect(node.entry());
    let credentials = Some(Credentials { user: user.into(), password: "wrong".into() });
    let words = v6_ask(
        &mut client,
        sidetrack_core::socks::v6::ClientConfig { credentials, ..v6_config("127.0.0.1:1") },
    );
    assert!(words.unwrap_err().starts_with("auth_failed"));
    node.ends_with(EndReason::AuthFailed);
}

#[test]
fn bad_request() {
    let node = Node::socks();
    let mut client = connect(node.entry());
    client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let (answer, _) = crate::peers::read_all(&mut client);
    assert!(answer.starts_with(b"HTTP/1.1 400 "), "a browser is told in its own words");
    node.ends_with(EndReason::BadRequest);
    for garbage in [
        &b"\xff\xff\xff\xff"[..],
        b"\x00",
        b"\x05\x01\x00\x04\x01\x00",
        b"\x05\x01\x00\x05\x01\x00\x03\x00\x00\x50",
    ] {
        let mut client = connect(node.entry());
        client.write_all(garbage).unwrap();
        let _ = crate::peers::read_all(&mut client);
        node.ends_with(EndReason::BadRequest);
    }
    let node = Node::start(&format!("{SOCKS}accept_proxy_protocol = '127.0.0.0/8'\n"));
    for header in [
        "\x05\x01\x00",
        "PROXY TCP4 1.2.3.4\r\n",
        "PROXY TCP4 1.2.3.400 1.2.3.4 1 2\r\n",
        "\r\n\r\n\0\r\nQUIT\nxxxxxxxxxxxx",
    ] {
        let mut client = connect(node.entry());
        client.write_all(header.as_bytes()).unwrap();
        expect_reset(&mut client);
        node.ends_with(EndReason::BadRequest);
    }
    let names = "[[listen]]\nname = 'in'\nkind = 'reverse'\naddress = '127.0.0.1:0'\nnames = { 'a.example' = '127.0.0.1:1' }\n";
    let node = Node::start(names);
    for head in ["GET / HTTP/1.1\r\nHost: b.example\r\n\r\n", "SSH-2.0-x\r\n"] {
        let mut client = connect(node.entry());
        client.write_all(head.as_bytes()).unwrap();
        expect_reset(&mut client);
        node.ends_with(EndReason::BadRequest);
    }
}

#[test]
fn unsupported() {
    let node = Node::socks();
    for (command, name) in [(2, "BIND"), (0xf0, "resolve")] {
        let mut client = connect(node.entry());
        assert_eq!(v5_ask(&mut client, command, "127.0.0.1:1"), 7, "{name}");
        expect_end(&mut client, b"");
        node.ends_with(EndReason::Unsupported);
    }
    let mut client = connect(node.entry());
    client.write_all(&[5, 1, 0, 5, 1, 0, 9, 0, 0, 0]).unwrap();
    expect(&mut client, &[5, 0]);
    assert_eq!(v5_reply(&mut client), 8, "an address type that nobody knows");
    node.ends_with(EndReason::Unsupported);
    let mut client = connect(node.entry());
    client.write_all(b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00").unwrap();
    expect_end(&mut client, &[0, 0x5b, 0, 0, 0, 0, 0, 0]);
    node.ends_with(EndReason::Unsupported);
    // BIND is off by default, and the other command does not exist.
    for command in [2, 0xf0] {
        let mut client = connect(node.entry());
        client.write_all(&[6, command, 0, 0, 0, 80, 0, 1, 127, 0, 0, 1]).unwrap();
        expect(&mut client, &[6, 0, 0, 0]);
        expect(&mut client, &[6, 7]);
        node.ends_with(EndReason::Unsupported);
    }
}

#[test]
fn idle() {
    let server = Host::new();
    let node = Node::reverse(server.address, "carrier = 'direct'\nidle_timeout_ms = 2000");
    let mut client = connect(node.entry());
    let mut accepted = server.accept();
    client.write_all(b"once").unwrap();
    expect(&mut accepted, b"once");
    expect_reset(&mut client);
    expect_reset(&mut accepted);
    let ended = node.ends_with(EndReason::Idle);
    assert!(ended.duration >= std::time::Duration::from_millis(2000), "{ended:?}");
    assert_eq!(ended.flow.bytes(), (4, 0));
}

#[test]
fn lifetime() {
    let server = Server::echo();
    let node = Node::reverse(server.address, "carrier = 'direct'\nlifetime_ms = 1000");
    let mut client = connect(node.entry());
    // Busy all the time.
    while client.write_all(b"x").is_ok() && std::io::Read::read(&mut client, &mut [0; 8]).is_ok_and(|n| n > 0)
    {
    }
    let ended = node.ends_with(EndReason::Lifetime);
    assert!(ended.duration >= std::time::Duration::from_millis(1000), "{ended:?}");
}

#[test]
fn limit() {
    let server = Server::echo();
    for limits in ["max_flows = 2", "max_flows_per_client = 2"] {
        let node = socks_within(limits);
        let to = server.address.to_string();
        let first = v5_connect(node.entry(), &to);
        let mut second = v5_connect(node.entry(), &to);
        expect_reset_at(node.entry());
        drop(first);
        // There is room again, for one, as soon as the first flow is gone.
        let mut shed = 1;
        let mut third = sidetrack_testkit::awaited("there is room", || {
            let third = v5_try(node.entry(), &to);
            shed += usize::from(third.is_none());
            third
        });
        expect_echo(&mut third, b"third");
        expect_echo(&mut second, b"second");
        drop((second, third));
        let ended = node.ended(3 + shed);
        let count = |reason| ended.iter().filter(|ended| ended.reason == reason).count();
        assert_eq!((count(EndReason::Ok), count(EndReason::Limit)), (3, shed));
    }
}

#[test]
fn other_clients_have_limits_of_their_own() {
    let server = Server::echo();
    let node = socks_within("max_flows_per_client = 1");
    let to = server.address.to_string();
    let _first = v5_connect(node.entry(), &to);
    let other = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    other.bind(&"127.0.0.2:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    other.connect(&node.entry().into()).unwrap();
    let mut other = crate::peers::patient(other.into());
    assert_eq!(v5_ask(&mut other, 1, &to), 0);
}

#[test]
fn without_descriptors_for_a_single_flow_all_are_shed() {
    let node = Node::start_with(SOCKS, Budget::from_nofile(10, 64));
    for _ in 0..20 {
        expect_reset_at(node.entry());
    }
    assert!(node.ended(20).iter().all(|ended| ended.reason == EndReason::Limit));
}

#[test]
fn a_loop_is_refused() {
    let node = Node::socks();
    let entry = node.entry().to_string();
    let (code, words) = codes(&node, &entry, EndReason::Loop);
    assert_eq!(code, 2);
    assert!(words.contains("(code 2)"), "{words}");
    // By a name of ours, too.
    assert_eq!(codes(&node, &format!("localhost:{}", node.entry().port()), EndReason::Loop).0, 2);
    let node =
        Node::start("[[listen]]\nname = 'in'\nkind = 'redirect'\naddress = '127.0.0.1:0'\nports = 80\n");
    expect_reset_at(node.entry());
    node.ends_with(EndReason::Loop);
}

#[test]
fn killed() {
    let server = Server::echo();
    let node = Node::socks();
    let mut client = v5_connect(node.entry(), &server.address.to_string());
    expect_echo(&mut client, b"alive");
    let flow = node.await_live("the flow", |_| true);
    assert!(flow.end(EndReason::Killed));
    expect_reset(&mut client);
    node.ends_with(EndReason::Killed);
    // Also while its path is being made.
    let mut client = connect(node.entry());
    client.write_all(&[5]).unwrap();
    node.await_live("the flow", |_| true).end(EndReason::Killed);
    expect_reset(&mut client);
    node.ends_with(EndReason::Killed);
}

#[test]
fn shutdown() {
    let server = Server::echo();
    let node = Node::socks();
    let mut made = v5_connect(node.entry(), &server.address.to_string());
    let mut making = connect(node.entry());
    node.await_live("the second flow", |flow| flow.connect_time().is_none());
    let ended = node.stop();
    assert_eq!(ended.iter().map(|ended| ended.reason).collect::<Vec<_>>(), [EndReason::Shutdown; 2]);
    expect_reset(&mut made);
    expect_reset(&mut making);
}

#[test]
fn ok_without_a_flow() {
    let node = Node::socks();
    let mut client = connect(node.entry());
    let noop = sidetrack_core::socks::v6::ClientCommand::Noop;
    v6_ask(
        &mut client,
        sidetrack_core::socks::v6::ClientConfig { command: noop, ..v6_config("127.0.0.1:1") },
    )
    .unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    expect_end(&mut client, b"");
    node.ends_with(EndReason::Ok);
}

#[test]
fn requests_in_pieces_and_with_bytes_behind_them() {
    let server = Server::echo();
    let node = Node::socks();
    let request = v5_request(1, &server.address.to_string());
    let mut client = connect(node.entry());
    for byte in [&[5, 1, 0], &request[..], b"hello"].concat() {
        client.write_all(&[byte]).unwrap();
    }
    expect(&mut client, &[5, 0]);
    assert_eq!(v5_reply(&mut client), 0);
    expect(&mut client, b"hello");
}
