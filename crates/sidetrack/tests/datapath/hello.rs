//! TLS hellos that name another host than the client has asked for: rules on names see both.

use crate::node::Node;
use crate::peers::{Host, connect, expect, expect_end, expect_reset};
use crate::socks::{v5_connect, v5_request};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use sidetrack_core::flow::EndReason;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

/// What rules allow; all of it resolves to loopback without a name server.
const ALLOWED: &str = "allowed.localhost";
const OTHER: &str = "other.localhost";
const FORBIDDEN: &str = "forbidden.localhost";

const CONFIG: &str = "default = 'deny'\n[[listen]]\nname = 'in'\nkind = 'socks'\naddress = '127.0.0.1:0'\n\
                      [[listen]]\nname = 'http'\nkind = 'http'\naddress = '127.0.0.1:0'\n\
                      [[rule]]\nname = 'names'\nmatch = { host = ['allowed.localhost', 'other.localhost'] }\n";

fn node() -> Node {
    Node::start(&format!("{CONFIG}carrier = 'direct'\n"))
}

/// The first bytes of a TLS client that greets this host.
fn hello(name: &str) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let mut tls = ClientConnection::new(Arc::new(config), name.to_owned().try_into().unwrap()).unwrap();
    let mut bytes = Vec::new();
    tls.write_tls(&mut bytes).unwrap();
    bytes
}

/// Asks for a tunnel by CONNECT, and waits for the answer.
fn tunnel(node: &Node, to: &str) -> TcpStream {
    let mut stream = connect(node.address("http"));
    write!(stream, "CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n\r\n").unwrap();
    expect(&mut stream, b"HTTP/1.1 200 Connection established\r\n\r\n");
    stream
}

/// Fails unless the server of a denied flow hears nothing, and the record has both names.
fn expect_denied(node: &Node, client: &mut TcpStream, host: &Host) {
    expect_reset(client);
    let mut rest = Vec::new();
    let mut server = host.accept();
    // However it ends: nothing came.
    let _ = server.read_to_end(&mut rest);
    assert_eq!(rest, b"");
    let ended = node.ends_with(EndReason::PolicyDenied);
    let (decided, detail) = (ended.flow.decided().unwrap(), ended.detail.unwrap_or_default());
    assert_eq!(decided.flow.host.as_ref().unwrap().as_str(), ALLOWED);
    assert_eq!(ended.flow.tls_name().unwrap().as_str(), FORBIDDEN);
    assert!(detail.contains("the TLS hello names 'forbidden.localhost'"), "{detail}");
}

/// Writes one byte at a time. The reset may come before the last bytes, which say nothing of the name.
fn write_bytewise(client: &mut TcpStream, bytes: &[u8]) {
    client.set_nodelay(true).unwrap();
    for byte in bytes {
        if client.write_all(&[*byte]).is_err() {
            break;
        }
    }
}

fn write_in_two(client: &mut TcpStream, bytes: &[u8]) {
    let (first, second) = bytes.split_at(20);
    client.write_all(first).unwrap();
    client.write_all(second).unwrap();
}

#[test]
fn a_hello_for_a_denied_host_ends_the_flow_before_the_server_hears_of_it() {
    let (node, host) = (node(), Host::new());
    let to = format!("{ALLOWED}:{}", host.address.port());
    let mut client = tunnel(&node, &to);
    client.write_all(&hello(FORBIDDEN)).unwrap();
    expect_denied(&node, &mut client, &host);
    let mut client = v5_connect(node.entry(), &to);
    client.write_all(&hello(FORBIDDEN)).unwrap();
    expect_denied(&node, &mut client, &host);
}

/// Ways through functions: some that leave the bytes as they are, and a pair that encrypts and decrypts.
fn led_through_functions() -> [(Node, Option<tempfile::NamedTempFile>); 3] {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), "6b1c0f4d8e2a9b7c5d3e1f00112233445566778899aabbccddeeff0123456789\n").unwrap();
    let crypt = |kind: &str| format!("kind = '{kind}'\nkey_file = '{}'\n", key.path().display());
    let chain = |names: &str, tables: &str| {
        Node::start(&format!("{CONFIG}carrier = 'direct'\nchain = [{names}]\n{tables}"))
    };
    let count = "[function.count]\nkind = 'count'\n";
    let words = "[function.words]\nkind = 'filter'\ndeny_words = 'a word that nobody says'\n";
    let pair = format!("[function.in]\n{}[function.out]\n{}", crypt("encrypt"), crypt("decrypt"));
    [
        (chain("'count'", count), None),
        (chain("'count', 'words'", &(count.to_owned() + words)), None),
        (chain("'in', 'out'", &pair), Some(key)),
    ]
}

#[test]
fn a_flow_that_functions_hand_on_is_asked_about_for_both_names() {
    let host = Host::new();
    let to = format!("{ALLOWED}:{}", host.address.port());
    for (node, _key) in led_through_functions() {
        let mut client = tunnel(&node, &to);
        client.write_all(&hello(FORBIDDEN)).unwrap();
        expect_denied(&node, &mut client, &host);
        let mut client = v5_connect(node.entry(), &to);
        write_bytewise(&mut client, &hello(FORBIDDEN));
        expect_denied(&node, &mut client, &host);
    }
}

#[test]
fn what_may_pass_passes_through_functions_as_it_is() {
    let host = Host::new();
    let to = format!("{ALLOWED}:{}", host.address.port());
    for (node, _key) in led_through_functions() {
        // Another name that rules allow: both are recorded.
        let mut client = tunnel(&node, &to);
        let (hello, mut server) = (hello(OTHER), host.accept());
        write_in_two(&mut client, &hello);
        expect(&mut server, &hello);
        let rest = vec![7; 200_000];
        let more = rest.clone();
        let sending = std::thread::spawn(move || {
            client.write_all(&more).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            client
        });
        expect_end(&mut server, &rest);
        server.write_all(b"answer").unwrap();
        drop(server);
        expect_end(&mut sending.join().unwrap(), b"answer");
        let ended = node.ends_with(EndReason::Ok);
        assert_eq!(ended.flow.tls_name().unwrap().as_str(), OTHER);
        // A server that speaks first, and a client whose bytes look like the beginning of a hello for ever.
        let mut client = tunnel(&node, &to);
        let mut server = host.accept();
        client.write_all(&[22]).unwrap();
        server.write_all(b"220 ready\r\n").unwrap();
        expect(&mut client, b"220 ready\r\n");
        expect(&mut server, &[22]);
        client.write_all(&[3]).unwrap();
        expect(&mut server, &[3]);
        drop((client, server));
        // A client that ends in the middle of a hello.
        let mut client = tunnel(&node, &to);
        let mut server = host.accept();
        client.write_all(&hello[..9]).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut server, &hello[..9]);
        drop((client, server));
        node.all_ended(2);
    }
}

#[test]
fn a_hello_in_pieces_is_put_together() {
    let (node, host) = (node(), Host::new());
    let mut client = tunnel(&node, &format!("{ALLOWED}:{}", host.address.port()));
    write_bytewise(&mut client, &hello(FORBIDDEN));
    expect_denied(&node, &mut client, &host);
}

#[test]
fn a_hello_that_comes_with_the_request_is_not_sent_ahead() {
    // To a hop that takes first bytes with its request.
    let (far, host) = (Node::socks(), Host::new());
    let near = format!("{CONFIG}carrier = 'socks6://{}'\n", far.entry());
    for node in [node(), Node::start(&near)] {
        let to = format!("{ALLOWED}:{}", host.address.port());
        let mut client = connect(node.entry());
        let request = [&[5, 1, 0], &v5_request(1, &to)[..], &hello(FORBIDDEN)].concat();
        client.write_all(&request).unwrap();
        expect(&mut client, &[5, 0, 5, 0]);
        let mut rest = [0; 8];
        let _ = client.read_exact(&mut rest);
        expect_denied(&node, &mut client, &host);
    }
}

#[test]
fn hellos_for_allowed_hosts_pass_and_both_names_are_recorded() {
    let (node, host) = (node(), Host::new());
    for (name, recorded) in [(ALLOWED, None), (OTHER, Some(OTHER))] {
        let mut client = tunnel(&node, &format!("{ALLOWED}:{}", host.address.port()));
        let (hello, mut server) = (hello(name), host.accept());
        write_in_two(&mut client, &hello);
        expect(&mut server, &hello);
        server.write_all(b"answer").unwrap();
        expect(&mut client, b"answer");
        client.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut server, b"");
        drop(server);
        expect_end(&mut client, b"");
        let ended = node.ends_with(EndReason::Ok);
        assert_eq!(ended.flow.tls_name().map(|name| name.as_str()), recorded);
        assert_eq!(ended.flow.bytes(), (hello.len() as u64, 6));
    }
}

#[test]
fn what_is_no_tls_is_not_held() {
    let (node, host) = (node(), Host::new());
    let to = format!("{ALLOWED}:{}", host.address.port());
    // The server speaks first, and the client's bytes look like the beginning of a hello for ever.
    let mut client = tunnel(&node, &to);
    let mut server = host.accept();
    server.write_all(b"220 ready\r\n").unwrap();
    expect(&mut client, b"220 ready\r\n");
    client.write_all(&[22]).unwrap();
    expect(&mut server, &[22]);
    client.shutdown(Shutdown::Write).unwrap();
    expect_end(&mut server, b"");
    drop(server);
    expect_end(&mut client, b"");
    node.ends_with(EndReason::Ok);
    // The client speaks first, and something else.
    let mut client = tunnel(&node, &to);
    let mut server = host.accept();
    client.write_all(b"SSH-2.0-x\r\n").unwrap();
    expect(&mut server, b"SSH-2.0-x\r\n");
    // Or it ends in the middle of a hello.
    let mut other = tunnel(&node, &to);
    let mut far = host.accept();
    other.write_all(&hello(ALLOWED)[..9]).unwrap();
    other.shutdown(Shutdown::Write).unwrap();
    expect_end(&mut far, &hello(ALLOWED)[..9]);
    drop((client, server, other, far));
    node.all_ended(2);
}
