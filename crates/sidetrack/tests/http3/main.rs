//! TLS and HTTP/3 at the `http` listener: foreign clients (curl, ngtcp2, quic-go), and a client of this test that says what it wants.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

mod client;
mod crowded;
mod dying;
mod early;
mod foreign;
mod hops;
#[path = "../node/mod.rs"]
mod node;
mod quic_go;
mod servers;
mod strangers;
mod streams;
mod tunnelled;

use client::{Client, ask, run};
use node::Up;
use sidetrack::carry::h3::Came;
use sidetrack::tls::{authority, signed};
use sidetrack_core::http::h3::message::Request;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::eventually;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;

/// The length of the largest content, in bytes.
const BIG: usize = 300_000;

/// A node whose listener has a certificate.
struct Site {
    up: Up,
    ca: String,
    files: tempfile::TempDir,
}

impl Site {
    /// `keys` are lines of the listener.
    fn start(keys: &str) -> Self {
        Self::named("proxy.example", keys)
    }

    /// As [`Site::start`], with a certificate for this name.
    fn named(name: &str, keys: &str) -> Self {
        Self::made(name, keys, true)
    }

    /// As [`Site::named`], with or without HTTP/3.
    fn made(name: &str, keys: &str, has_http3: bool) -> Self {
        Self::at("127.0.0.1:0", name, keys, has_http3)
    }

    /// As [`Site::named`] for localhost, at all addresses of this network.
    fn everywhere() -> Self {
        Self::at("*:0", "localhost", "", true)
    }

    fn at(address: &str, name: &str, keys: &str, has_http3: bool) -> Self {
        let ca = authority(3).unwrap();
        let made = signed(name, 3, &ca.identity_pem()).unwrap();
        let files = tempfile::tempdir().unwrap();
        std::fs::write(files.path().join("ca.pem"), &ca.certificate_pem).unwrap();
        let tables = format!(
            "[[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"{address}\"\nidentity = \"proxy.pem\"\n\
             http3 = {has_http3}\n{keys}\n"
        );
        let up = Up::start_with("default = \"direct\"\n", &tables, |folder| {
            std::fs::write(folder.join("proxy.pem"), made.identity_pem()).unwrap();
        });
        Self { up, ca: ca.certificate_pem, files }
    }

    fn address(&self) -> SocketAddr {
        self.up.addresses("web")[0]
    }

    fn ca_file(&self) -> PathBuf {
        self.files.path().join("ca.pem")
    }

    /// Runs curl, which must succeed, and returns what it prints.
    fn curl(&self, arguments: &[&str]) -> String {
        let place = format!("proxy.example:{}:127.0.0.1", self.address().port());
        let ca = self.ca_file();
        let told = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "60", "--noproxy", "", "--resolve", &place])
            .arg("--cacert")
            .arg(&ca)
            .arg("--proxy-cacert")
            .arg(&ca)
            .args(arguments)
            .output()
            .unwrap();
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
        String::from_utf8(told.stdout).unwrap()
    }
}

/// A server of HTTP/1.1 that tells what it was asked. `/big` has much content.
fn origin() -> SocketAddr {
    origin_saying("h3=\":9\"")
}

/// The same, which says this in Alt-Svc.
fn origin_saying(alt_svc: &str) -> SocketAddr {
    let alt_svc = alt_svc.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let alt_svc = alt_svc.clone();
            std::thread::spawn(move || drop(answer(stream, &alt_svc)));
        }
    });
    address
}

fn answer(mut stream: TcpStream, alt_svc: &str) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut head, mut length, mut is_chunked) = (String::new(), 0, false);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        is_chunked |= lower.starts_with("transfer-encoding:");
        if line == "\r\n" {
            break;
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    while is_chunked {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let size = usize::from_str_radix(line.trim(), 16).unwrap();
        let mut chunk = vec![0; size + 2];
        reader.read_exact(&mut chunk)?;
        body.extend_from_slice(&chunk[..size]);
        is_chunked = size > 0;
    }
    let content = if head.contains(" /big ") {
        vec![b'x'; BIG]
    } else {
        format!("{head}body={}", String::from_utf8_lossy(&body)).into_bytes()
    };
    let start = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\nAlt-Svc: {alt_svc}\r\n\r\n",
        content.len()
    );
    stream.write_all(start.as_bytes())?;
    if head.starts_with("HEAD ") { Ok(()) } else { stream.write_all(&content) }
}

#[test]
fn a_foreign_client_of_http_3_gets_whole_content_and_each_request_is_a_flow() {
    let server = origin();
    let mut site = Site::start(&format!("to = \"{server}\""));
    let told = Command::new("timeout")
        .args(["60", "gtlsclient", "--no-quic-dump", "--no-http-dump", "--exit-on-all-streams-close"])
        .arg("--download")
        .arg(site.files.path())
        .args(["127.0.0.1", &site.address().port().to_string()])
        .args(["https://proxy.example/big", "https://proxy.example/small"])
        .output()
        .unwrap();
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    let read = |name: &str| std::fs::read(site.files.path().join(name)).unwrap();
    assert_eq!(read("big").len(), BIG);
    let small = String::from_utf8(read("small")).unwrap();
    assert!(small.starts_with("GET /small HTTP/1.1\r\nHost: proxy.example\r\n"), "{small}");
    assert!(small.contains("Via: 3.0 sidetrack-"), "{small}");
    for _ in 0..2 {
        let record = site.up.record();
        assert_eq!((record.text("intercept"), record.text("reason")), ("http", "ok"), "{record:?}");
        assert_eq!(record.address("orig_dst"), server);
    }
}

#[test]
fn curl_speaks_tls_to_the_listener_and_is_told_about_http_3() {
    let server = origin();
    let site = Site::start(&format!("to = \"{server}\""));
    let url = format!("https://proxy.example:{}/x", site.address().port());
    for (version, via) in [("--http1.1", "Via: 1.1 "), ("--http2", "Via: 2.0 ")] {
        let told = site.curl(&[version, "--include", "--data", "some content", &url]);
        assert!(told.contains(via) && told.ends_with("body=some content"), "{told}");
        let lower = told.to_ascii_lowercase();
        let announced = format!("alt-svc: h3=\":{}\"; ma=86400\r\n", site.address().port());
        assert!(lower.contains(&announced), "{told}");
        assert_eq!(lower.matches("alt-svc:").count(), 1, "{told}");
        assert_eq!(site.curl(&[version, &url.replace("/x", "/big")]).len(), BIG);
    }
}

#[test]
fn a_forward_proxy_is_reached_by_tls() {
    let server = origin();
    let mut site = Site::start("users = [{ user = \"ann\", password = \"secret\" }]");
    let proxy = format!("https://ann:secret@proxy.example:{}", site.address().port());
    let url = format!("http://{server}/x");
    let told = site.curl(&["--proxy", &proxy, "--include", &url]);
    assert!(told.contains("GET /x HTTP/1.1"), "{told}");
    assert!(!told.contains(&format!("h3=\":{}\"", site.address().port())), "not for other servers: {told}");
    assert!(site.curl(&["--proxy", &proxy, "--proxytunnel", &url]).contains("GET /x HTTP/1.1"));
    for _ in 0..2 {
        assert_eq!(site.up.record().text("user"), "ann");
    }
}

fn request(method: &str, scheme: &str, authority: &str, path: &str) -> Request {
    Request {
        method: method.as_bytes().to_vec(),
        scheme: Some(scheme.as_bytes().to_vec()),
        authority: Some(authority.as_bytes().to_vec()),
        path: Some(path.as_bytes().to_vec()),
        ..Request::default()
    }
}

#[test]
fn a_forward_proxy_is_asked_for_resources_and_tunnels_by_http_3() {
    let server = origin().to_string();
    let site = Site::start("");
    run(async {
        let client = Client::connect(site.address(), &site.ca).await;
        let (status, content) = client.fetch(&request("GET", "http", &server, "/a"), b"").await;
        assert!(content.starts_with("GET /a HTTP/1.1"), "{status} {content}");
        let (status, content) = client.fetch(&request("POST", "http", &server, "/a"), b"some").await;
        assert!(content.ends_with("body=some"), "{status} {content}");
        assert_eq!(client.fetch(&request("GET", "https", &server, "/"), b"").await.0, 501);
        assert_eq!(client.fetch(&request("GET", "https", "proxy.example", "/proxy.pac"), b"").await.0, 200);
        let connect = Request { scheme: None, path: None, ..request("CONNECT", "", &server, "") };
        let mut tunnel = client.open(&connect).await;
        assert_eq!(tunnel.status().await, 200);
        tunnel.send(b"GET /through HTTP/1.1\r\nHost: h\r\n\r\n").await;
        let came = tunnel.rest().await;
        assert!(came.contains("GET /through HTTP/1.1\r\n"), "{came}");
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let refused = Request { authority: Some(nobody.into_bytes()), ..connect };
        assert!(client.fetch(&refused, b"").await.0 >= 500);
    });
}

/// A request for a tunnel of datagrams to this port of 127.0.0.1 (RFC 9298).
fn datagrams_to(port: u16) -> Request {
    let path = format!("/.well-known/masque/udp/127.0.0.1/{port}/");
    Request { protocol: Some(b"connect-udp".to_vec()), ..request("CONNECT", "https", "p", &path) }
}

#[test]
fn connect_udp_over_http_3_carries_datagrams_of_quic_and_capsules() {
    let server = Echo::start("127.0.0.1");
    let mut site = Site::start("");
    run(async {
        let client = Client::connect(site.address(), &site.ca).await;
        let asked = datagrams_to(server.address.port());
        let mut tunnel = client.open(&asked).await;
        assert_eq!(tunnel.status().await, 200);
        for payload in [&b"hello"[..], b"", &[7; 1000]] {
            tunnel.send_datagram(payload);
            assert_eq!(tunnel.payload().await, (payload.to_vec(), true));
        }
        // Longer than a datagram of QUIC: a capsule both ways.
        let long = vec![8; 9000];
        tunnel.send_capsule(&long).await;
        assert_eq!(tunnel.payload().await, (long, false));
        tunnel.finish();
        assert_eq!(tunnel.rest().await, "");
        let odd = Request { path: Some(b"/.well-known/masque/udp/h/0/".to_vec()), ..asked.clone() };
        assert_eq!(client.fetch(&odd, b"").await.0, 400);
        let other = Request { protocol: Some(b"websocket".to_vec()), ..asked };
        assert_eq!(client.fetch(&other, b"").await.0, 501);
    });
    let record = site.up.record();
    assert_eq!((record.text("protocol"), record.text("reason")), ("udp", "ok"), "{record:?}");
    assert_eq!((record.number("packets_up"), record.number("packets_down")), (4, 4), "{record:?}");
}

#[test]
fn what_is_broken_ends_its_stream_or_its_connection_and_nothing_else() {
    let server = origin().to_string();
    let site = Site::start("");
    let well = request("GET", "http", &server, "/a");
    run(async {
        let client = Client::connect(site.address(), &site.ca).await;
        // Malformed messages: H3_MESSAGE_ERROR, and the connection goes on.
        for odd in [
            Request { path: None, ..well.clone() },
            Request { scheme: Some(b"ftp".to_vec()), ..well.clone() },
            Request { lines: vec![(b"connection".to_vec(), b"close".to_vec())], ..well.clone() },
            Request { lines: vec![(b"content-length".to_vec(), b"x".to_vec())], ..well.clone() },
        ] {
            assert_eq!(client.open(&odd).await.reset().await, 0x10e, "{odd:?}");
        }
        let bomb = vec![(b"x".to_vec(), vec![b'v'; 70_000])];
        let bomb = Request { lines: bomb, ..well.clone() };
        assert_eq!(client.open(&bomb).await.reset().await, 0x107);
        // A request cut at every byte of its head: each stream ends alone, as a whole one still passes.
        let head = ask(&well);
        for cut in 1..head.len() {
            client.raw(&head[..cut]).await.cancel();
        }
        assert_eq!(client.fetch(&well, b"").await.0, 200);
        // What is out of order ends the connection.
        for (bytes, code) in [
            (&b"\x00\x01x"[..], 0x105),
            (b"\x04\x00", 0x105),
            (b"\x02\x00", 0x105),
            (b"\x01\x02\x02\x00", 0x200),
            (b"\x01\x05\x00\x00", 0x106),
        ] {
            let client = Client::connect(site.address(), &site.ca).await;
            let mut stream = client.raw(bytes).await;
            stream.finish();
            assert_eq!(client.closed().await, code, "{bytes:?}");
        }
        for (bytes, code) in [
            (&b"\x01\x00"[..], 0x103),
            (b"\x00\x04\x00", 0x103),
            (b"\x02\x3f\xe1\x1f", 0x201),
            (b"\x03\x80", 0x202),
        ] {
            let client = Client::connect(site.address(), &site.ca).await;
            client.uni(bytes).await;
            assert_eq!(client.closed().await, code, "{bytes:?}");
        }
        let client = Client::connect(site.address(), &site.ca).await;
        client.connection.send_datagram(vec![0xff; 9].into()).unwrap();
        assert_eq!(client.closed().await, 0x33);
    });
}

#[test]
fn a_flood_of_streams_is_bounded_and_others_are_served() {
    let server = origin().to_string();
    let site = Site::start("[limits]\nhandshake_timeout_ms = 120000");
    run(async {
        let client = Client::connect(site.address(), &site.ca).await;
        let mut silent = Vec::new();
        for _ in 0..100 {
            silent.push(client.raw(b"\x01").await);
        }
        assert!(!client.opens_another().await, "100 streams at the same time are the most");
        let other = Client::connect(site.address(), &site.ca).await;
        assert_eq!(other.fetch(&request("GET", "http", &server, "/a"), b"").await.0, 200);
        for stream in &mut silent {
            stream.cancel();
        }
        assert_eq!(client.fetch(&request("GET", "http", &server, "/a"), b"").await.0, 200);
    });
}

#[test]
fn an_operator_sees_a_tunnel_as_a_flow() {
    let server = Echo::start("127.0.0.1");
    let site = Site::start("");
    run(async {
        let client = Client::connect(site.address(), &site.ca).await;
        let asked = datagrams_to(server.address.port());
        let mut tunnel = client.open(&asked).await;
        assert_eq!(tunnel.status().await, 200);
        eventually("it is a flow", || node::admin::flows(&site.up).len() == 1);
        client.leave().await;
    });
    eventually("it has ended with its client", || node::admin::flows(&site.up).is_empty());
}
