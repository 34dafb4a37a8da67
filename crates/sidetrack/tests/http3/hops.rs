//! Hops that are reached by TLS and by HTTP/3: our own node as the proxy.

use super::Site;
use super::node::{self, Up};
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, eventually, in_namespace};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;

/// A server that returns what it gets.
pub(crate) fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut all = Vec::new();
                // A client that is cut gets nothing.
                if stream.read_to_end(&mut all).is_ok() {
                    drop(stream.write_all(&all));
                }
            });
        }
    });
    address
}

/// A node that leads a TCP port and a UDP port through a hop.
pub(crate) fn near(hop: &str, servers: (SocketAddr, SocketAddr)) -> Up {
    let tables = format!(
        "[[listen]]\nname = \"tcp\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[listen]]\nname = \"udp\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"tcp\"\nmatch = {{ listener = \"tcp\" }}\ncarrier = \"{hop}\"\n\
         [[rule]]\nname = \"udp\"\nmatch = {{ protocol = \"udp\", listener = \"udp\" }}\ncarrier = \"{hop}\"\n",
        servers.0, servers.1
    );
    Up::start("default = \"deny\"\n", &tables)
}

/// A name for each chain of hops, and a listener of TCP and one of UDP that lead through it.
fn chains(chains: &[(&str, Vec<&str>)], servers: (SocketAddr, SocketAddr)) -> String {
    let mut tables = String::new();
    for (name, hops) in chains {
        for (protocol, server) in [("tcp", servers.0), ("udp", servers.1)] {
            tables.push_str(&format!(
                "[[listen]]\nname = \"{name}-{protocol}\"\nkind = \"reverse\"\nprotocol = \"{protocol}\"\naddress = \"127.0.0.1:0\"\n\
                 to = \"{server}\"\n[[rule]]\nname = \"{name}-{protocol}\"\n\
                 match = {{ protocol = \"{protocol}\", listener = \"{name}-{protocol}\" }}\ncarrier = {hops:?}\n"
            ));
        }
    }
    tables
}

pub(crate) fn hop(scheme: &str, site: &Site, ca: &Path) -> String {
    format!("{scheme}://localhost:{}?ca={}", site.address().port(), ca.display())
}

/// Sends through the TCP port, and returns what comes back.
fn through(near: &Up, bytes: &[u8]) -> Vec<u8> {
    through_port(near, "tcp", bytes)
}

pub(crate) fn through_port(near: &Up, listener: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(near.addresses(listener)[0]).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // A flow that ends at once may reset us here.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    all
}

fn datagram(near: &Up, payload: &[u8]) -> Vec<u8> {
    datagram_through(near, "udp", payload)
}

pub(crate) fn datagram_through(near: &Up, listener: &str, payload: &[u8]) -> Vec<u8> {
    let to = near.addresses(listener)[0];
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.connect(to).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    client.send(payload).unwrap();
    let mut buffer = vec![0; 65_536];
    let length = client.recv(&mut buffer).expect("an answer");
    buffer.truncate(length);
    buffer
}

#[test]
fn tcp_and_udp_pass_a_hop_of_tls_and_one_of_http_3() {
    let servers = (echo(), Echo::start("127.0.0.1"));
    for scheme in ["https", "h3"] {
        let mut site = Site::named("localhost", "");
        let mut near = near(&hop(scheme, &site, &site.ca_file()), (servers.0, servers.1.address));
        let content: Vec<u8> = (0..500_000_u32).map(|at| (at % 251) as u8).collect();
        assert!(through(&near, &content) == content, "{scheme}");
        for length in [0, 1000, 9000] {
            assert!(datagram(&near, &content[..length]) == content[..length], "{scheme}: {length} bytes");
        }
        let record = near.record();
        let carrier = format!("{scheme}://localhost:{}", site.address().port());
        assert_eq!(record.fate(), ("tcp", &*carrier, "ok"), "{record:?}");
        assert_eq!(site.up.record().text("intercept"), "http");
        near.signal(Signal::TERM);
    }
}

#[test]
fn a_hop_whose_certificate_is_not_trusted_gets_no_flow() {
    let servers = (echo(), Echo::start("127.0.0.1"));
    for scheme in ["https", "h3"] {
        let (site, other) = (Site::named("localhost", ""), Site::named("localhost", ""));
        let mut doubting = near(&hop(scheme, &site, &other.ca_file()), (servers.0, servers.1.address));
        assert_eq!(through(&doubting, b"x"), b"");
        let record = doubting.record();
        assert_eq!(record.text("reason"), "certificate", "{scheme}: {record:?}");
    }
}

#[test]
fn a_hop_of_tls_that_dies_is_named() {
    let (server, datagrams) = (echo(), Echo::start("127.0.0.1"));
    let site = Site::named("localhost", "");
    let mut near = near(&hop("https", &site, &site.ca_file()), (server, datagrams.address));
    assert_eq!(through(&near, b"hello"), b"hello");
    assert_eq!(near.record().text("reason"), "ok");
    let port = site.address().port();
    drop(site.up.stop());
    assert_eq!(through(&near, b"hello"), b"");
    let record = near.record();
    assert_eq!(record.text("reason"), "refused", "{record:?}");
    assert!(record.text("detail").contains(&format!(":{port}")), "{record:?}");
}

#[test]
fn hops_of_tls_and_of_http_3_stand_anywhere_in_a_chain() {
    // In a network of its own: hops resolve the name of the next one, and may choose ::1.
    in_namespace(|| {
        let servers = (echo(), Echo::start("127.0.0.1"));
        let plain = Up::start(
            "default = \"direct\"\n",
            "[[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
             [[listen]]\nname = \"http\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n",
        );
        let (one, two) = (Site::everywhere(), Site::everywhere());
        let (http, socks) = (plain.addresses("http")[0], plain.addresses("socks")[0]);
        let (http, socks5, socks6) =
            (format!("http://{http}"), format!("socks5://{socks}"), format!("socks6://{socks}"));
        let of = |scheme, site: &Site| hop(scheme, site, &site.ca_file());
        let (tls, other_tls, quic, other_quic) =
            (of("https", &one), of("https", &two), of("h3", &one), of("h3", &two));
        let all = [
            ("socks-tls", vec![&*socks5, &tls]),
            ("http-tls-socks", vec![&http, &tls, &socks5]),
            ("tls-tls", vec![&tls, &other_tls]),
            ("socks-quic", vec![&socks5, &quic]),
            ("socks6-quic", vec![&socks6, &quic]),
            ("http-quic", vec![&http, &quic]),
            ("tls-quic", vec![&tls, &other_quic]),
            ("quic-tls", vec![&quic, &other_tls]),
            ("quic-quic", vec![&quic, &other_quic]),
            ("socks-quic-tls-http", vec![&socks5, &quic, &other_tls, &http]),
        ];
        let mut near = Up::start("default = \"deny\"\n", &chains(&all, (servers.0, servers.1.address)));
        let content: Vec<u8> = (0..200_000_u32).map(|at| (at % 251) as u8).collect();
        for (name, hops) in &all {
            assert!(through_port(&near, &format!("{name}-tcp"), &content) == content, "{name}");
            let record = near.record();
            assert_eq!(record.text("reason"), "ok", "{name}: {record:?}");
            assert_eq!(record.text("carrier").matches("://").count(), hops.len(), "{record:?}");
            for length in [0, 1000] {
                let came = datagram_through(&near, &format!("{name}-udp"), &content[..length]);
                assert!(came == content[..length], "{name}: {length} bytes");
            }
        }
        near.signal(Signal::TERM);
    });
}

#[test]
fn a_later_hop_whose_certificate_is_not_trusted_is_named() {
    let servers = (echo(), Echo::start("127.0.0.1"));
    let (one, two) = (Site::named("localhost", ""), Site::named("localhost", ""));
    let wrong = hop("https", &two, &one.ca_file());
    let all = [("chain", vec![hop("https", &one, &one.ca_file()), wrong])];
    let all = all.each_ref().map(|(name, hops)| (*name, hops.iter().map(String::as_str).collect()));
    let mut near = Up::start("default = \"deny\"\n", &chains(&all, (servers.0, servers.1.address)));
    assert_eq!(through_port(&near, "chain-tcp", b"x"), b"");
    let record = near.record();
    assert_eq!(record.text("reason"), "certificate", "{record:?}");
    assert!(record.text("detail").contains("hop 2 of 2 (https://localhost"), "{record:?}");
}

#[test]
fn a_hop_of_http_3_that_never_answers_ends_its_flows_in_time() {
    let servers = (echo(), Echo::start("127.0.0.1"));
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = format!("h3://localhost:{}", silent.local_addr().unwrap().port());
    let mut near = near(&to, (servers.0, servers.1.address));
    assert_eq!(through(&near, b"x"), b"");
    let record = near.record();
    assert_eq!(record.fate().2, "connect_timeout", "{record:?}");
    assert!(record.text("detail").contains(&format!("hop 1 of 1 ({to})")), "{record:?}");
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.send_to(b"x", near.addresses("udp")[0]).unwrap();
    let record = near.record();
    assert_eq!((record.text("protocol"), record.text("reason")), ("udp", "connect_timeout"), "{record:?}");
}

/// A hop that goes silent under its flows.
fn falls_silent(scheme: &str) {
    let servers = (echo(), Echo::start("127.0.0.1"));
    let site = Site::named("localhost", "");
    let mut near = near(&hop(scheme, &site, &site.ca_file()), (servers.0, servers.1.address));
    let mut stream = TcpStream::connect(near.addresses("tcp")[0]).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"hello").unwrap();
    eventually("it is a flow of the hop", || !node::admin::flows(&site.up).is_empty());
    assert_eq!(datagram(&near, b"hello"), b"hello");
    // It says nothing any more. The kernel only acknowledges segments of TCP for it.
    site.up.signal(Signal::STOP);
    let end = stream.read(&mut [0; 16]);
    assert!(end.is_err(), "a cut is no end in order: {end:?}");
    let (mut reasons, mut count) = (Vec::new(), 0);
    while count < 2 {
        let record = near.record();
        reasons.push((record.text("protocol").to_owned(), record.text("reason").to_owned()));
        count += 1;
    }
    reasons.sort();
    assert_eq!(reasons[0], ("tcp".to_owned(), "server_reset".to_owned()), "{reasons:?}");
    assert_eq!(reasons[1], ("udp".to_owned(), "hop_failed".to_owned()), "{reasons:?}");
    site.up.signal(Signal::CONT);
    eventually("the hop carries flows again", || through(&near, b"again") == b"again");
}

#[test]
fn a_hop_that_falls_silent_loses_its_flows_and_is_used_again_when_it_is_back() {
    // At the same time: it takes half a minute.
    let both = ["https", "h3"].map(|scheme| std::thread::spawn(move || falls_silent(scheme)));
    for one in both {
        one.join().unwrap();
    }
}
