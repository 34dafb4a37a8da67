//! Hops that are reached by TLS and by HTTP/3: our own node as the proxy.

use super::Site;
use super::node::Up;
use rustix::process::Signal;
use sidetrack_testkit::LIMIT;
use sidetrack_testkit::datagrams::Echo;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;

/// A server that returns what it gets.
fn echo() -> SocketAddr {
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
fn near(hop: &str, servers: (SocketAddr, SocketAddr)) -> Up {
    let tables = format!(
        "[[listen]]\nname = \"tcp\"\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[listen]]\nname = \"udp\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"tcp\"\nmatch = {{ listener = \"tcp\" }}\ncarrier = \"{hop}\"\n\
         [[rule]]\nname = \"udp\"\nmatch = {{ protocol = \"udp\", listener = \"udp\" }}\ncarrier = \"{hop}\"\n",
        servers.0, servers.1
    );
    Up::start("default = \"deny\"\n", &tables)
}

fn hop(scheme: &str, site: &Site, ca: &Path) -> String {
    format!("{scheme}://localhost:{}?ca={}", site.address().port(), ca.display())
}

/// Sends through the TCP port, and returns what comes back.
fn through(near: &Up, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(near.addresses("tcp")[0]).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // A flow that ends at once may reset us here.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all);
    all
}

fn datagram(near: &Up, payload: &[u8]) -> Vec<u8> {
    let to = near.addresses("udp")[0];
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
