//! HTTP/3 towards servers: our own listener and ngtcp2's server are the servers, curl is the client.

use super::hops::hop;
use super::node::{Record, Up};
use super::{BIG, Site, origin, origin_saying};
use rustix::process::Signal;
use sidetrack::cli::ca;
use sidetrack::tls::{Scope, authority, signed};
use sidetrack_testkit::{eventually, in_namespace};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A reverse proxy in front of a server of TLS.
pub(crate) struct Near {
    pub(crate) up: Up,
}

impl Near {
    /// `when` says when HTTP/3 is used.
    pub(crate) fn start(port: u16, ca: &Path, when: &str) -> Self {
        Self::through("direct", port, ca, when)
    }

    /// As [`Near::start`], with another carrier.
    fn through(carrier: &str, port: u16, ca: &Path, when: &str) -> Self {
        let tables = format!(
            "[[listen]]\nname = \"in\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\nto = \"https://localhost:{port}?ca={}\"\n\
             [[rule]]\nname = \"web\"\nmatch = {{ listener = \"in\" }}\ncarrier = \"{carrier}\"\nhttp3 = \"{when}\"\n",
            ca.display()
        );
        Self { up: Up::start("default = \"deny\"\n", &tables) }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.up.addresses("in")[0])
    }

    /// Asks for a path, and returns the head and the content of the answer.
    pub(crate) fn get(&self, path: &str) -> String {
        curl(&["--include", &self.url(path)])
    }
}

/// Runs curl, which must succeed, and returns what it prints.
pub(crate) fn curl(arguments: &[&str]) -> String {
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--max-time", "60", "--noproxy", ""]).args(arguments);
    let told = command.output().unwrap();
    assert!(told.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&told.stderr));
    String::from_utf8(told.stdout).unwrap()
}

/// The version in which the request came to the server behind `Site`, which shows its head.
pub(crate) fn version(told: &str) -> String {
    let via = told.lines().find_map(|line| line.strip_prefix("Via: ")).expect(told);
    let last = via.split(", ").last().unwrap();
    last.split(' ').next().unwrap().to_owned()
}

#[test]
fn a_server_that_announces_http_3_is_asked_by_it_from_then_on() {
    let server = origin();
    let site = Site::named("localhost", &format!("to = \"{server}\""));
    let mut near = Near::start(site.address().port(), &site.ca_file(), "announced");
    let first = near.get("/a");
    assert_eq!(version(&first), "2.0", "{first}");
    assert!(
        !first.to_ascii_lowercase().contains("alt-svc"),
        "what the server says is not for the client: {first}"
    );
    eventually("HTTP/3 is used", || version(&near.get("/b")) == "3.0");
    let told = curl(&["--data", "some content", &near.url("/c")]);
    assert_eq!(version(&told), "3.0");
    assert!(told.ends_with("body=some content"), "{told}");
    assert_eq!(curl(&[&near.url("/big")]).len(), BIG);
    assert_eq!(curl(&["--head", &near.url("/big")]).lines().next(), Some("HTTP/1.1 200 OK"));
    let path = format!("quic 127.0.0.1:{}", site.address().port());
    let is_last = |record: &Record| record.text("detail").starts_with("HEAD ");
    let record = std::iter::repeat_with(|| near.up.record()).find(is_last).unwrap();
    assert_eq!((record.text("reason"), record.text("path")), ("ok", &*path), "{record:?}");
    near.up.signal(Signal::TERM);
}

#[test]
fn a_server_behind_hops_is_asked_by_http_3_and_by_tcp_where_they_carry_no_udp() {
    // In a network of its own: hops resolve the server's name, and may choose ::1.
    in_namespace(|| {
        let server = origin();
        let site = Site::at("*:0", "localhost", &format!("to = \"{server}\""), true);
        let secured = Site::everywhere();
        let plain = Up::start(
            "default = \"direct\"\n",
            "[[listen]]\nname = \"socks\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\n\
             [[listen]]\nname = \"deaf\"\nkind = \"socks\"\naddress = \"127.0.0.1:0\"\nudp_ports = \"off\"\n\
             [[listen]]\nname = \"http\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\n",
        );
        let of = |scheme: &str, name: &str| format!("{scheme}://{}", plain.addresses(name)[0]);
        let carries = [
            of("socks5", "socks"),
            of("http", "http"),
            hop("https", &secured, &secured.ca_file()),
            hop("h3", &secured, &secured.ca_file()),
        ];
        for carrier in carries {
            let near = Near::through(&carrier, site.address().port(), &site.ca_file(), "first");
            eventually("HTTP/3 is used", || version(&near.get("/a")) == "3.0");
            assert_eq!(curl(&[&near.url("/big")]).len(), BIG, "{carrier}");
            let told = curl(&["--data", "some content", &near.url("/c")]);
            assert_eq!(
                (version(&told), told.ends_with("body=some content")),
                ("3.0".to_owned(), true),
                "{carrier}"
            );
        }
        let mut near = Near::through(&of("socks5", "deaf"), site.address().port(), &site.ca_file(), "first");
        assert_eq!(version(&near.get("/a")), "2.0");
        near.up.log_line("the end of the attempt", |line| line.contains("no HTTP/3"));
        assert_eq!(version(&near.get("/b")), "2.0");
    });
}

#[test]
fn a_rule_that_says_nothing_leaves_it_at_tcp() {
    let server = origin();
    let site = Site::named("localhost", &format!("to = \"{server}\""));
    let near = Near::start(site.address().port(), &site.ca_file(), "never");
    for _ in 0..3 {
        assert_eq!(version(&near.get("/a")), "2.0");
    }
}

/// A folder with an authority for intercepted names, and the certificate of the world outside.
fn interception(site: &Site) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    ca::init(&folder.path().join("ca"), &[Scope::Below("site.test".parse().unwrap())], 30).unwrap();
    std::fs::write(folder.path().join("world.pem"), &site.ca).unwrap();
    folder
}

#[test]
fn intercepted_requests_follow_an_announcement_of_another_port() {
    let server = origin();
    let site = Site::named("web.site.test", &format!("to = \"{server}\""));
    let folder = interception(&site);
    let at = folder.path().display();
    let tables = |port: &str| {
        format!(
            "[tap]\nca = \"{at}/ca\"\ntrust = \"{at}/world.pem\"\nhar = \"{at}/requests.har\"\n\
             [[listen]]\nname = \"in\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\ntap = true\n\
             [[rule]]\nname = \"site\"\nmatch = {{ host = \"*.site.test\"{port} }}\nto = \"{}\"\ncarrier = \"direct\"\n\
             http3 = \"announced\"\n",
            site.address()
        )
    };
    let root = folder.path().join("ca/root.pem").display().to_string();
    let get = |near: &Up| {
        let proxy = format!("http://{}", near.addresses("in")[0]);
        curl(&["--proxy", &proxy, "--cacert", &root, "https://web.site.test/x"])
    };
    let near = Up::start("default = \"deny\"\n", &tables(""));
    let mut last = get(&near);
    assert_eq!(version(&last), "2.0", "{last}");
    eventually("HTTP/3 is used", || {
        last = get(&near);
        version(&last) == "3.0"
    });
    let used = format!("alt-used: web.site.test:{}", site.address().port());
    assert!(last.to_ascii_lowercase().contains(&used), "{last}");
    assert!(std::fs::read_to_string(folder.path().join("requests.har")).unwrap().contains("HTTP/3.0"));
    // A rule for the announced port alone would be another rule.
    let strict = Up::start("default = \"deny\"\n", &tables(", port = 443"));
    for _ in 0..3 {
        assert_eq!(version(&get(&strict)), "2.0");
    }
}

/// A UDP port that speaks no version of QUIC that anybody knows. Returns its address, and how many connections were tried.
fn of_no_known_version() -> (SocketAddr, Arc<AtomicUsize>) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (address, tried) = (socket.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = tried.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            // Flags, version, and the ids of both ends, each behind its length (RFC 8999 Sec. 5.1).
            let (ids, _) = buffer[5..length]
                .split_at(2 + usize::from(buffer[5]) + usize::from(buffer[6 + usize::from(buffer[5])]));
            let (to, own) = ids[1..].split_at(usize::from(ids[0]));
            let mut answer = vec![0x80, 0, 0, 0, 0];
            answer.extend_from_slice(own);
            answer.push(ids[0]);
            answer.extend_from_slice(to);
            answer.extend_from_slice(&[0x1a, 0x2a, 0x3a, 0x4a]);
            counted.fetch_add(1, Relaxed);
            let _ = socket.send_to(&answer, from);
        }
    });
    (address, tried)
}

#[test]
fn a_server_whose_http_3_fails_is_asked_by_tcp_and_that_is_remembered() {
    let (address, tried) = of_no_known_version();
    let server = origin_saying(&format!("h3=\":{}\"", address.port()));
    let site = Site::made("localhost", &format!("to = \"{server}\""), false);
    let mut near = Near::start(site.address().port(), &site.ca_file(), "announced");
    assert_eq!(version(&near.get("/a")), "2.0");
    eventually("HTTP/3 was tried", || {
        assert_eq!(version(&near.get("/b")), "2.0");
        tried.load(Relaxed) > 0
    });
    near.up.log_line("the end of the attempt", |line| line.contains("no HTTP/3"));
    let before = tried.load(Relaxed);
    for _ in 0..5 {
        assert_eq!(version(&near.get("/c")), "2.0");
    }
    assert_eq!(tried.load(Relaxed), before, "a failure is remembered");
}

/// ngtcp2's server, which has no TCP.
struct Foreign {
    child: Child,
    port: u16,
}

impl Foreign {
    fn start(folder: &Path) -> Self {
        for _ in 0..20 {
            // A port that is free now; if another takes it first, the server ends and the next is tried.
            let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let mut child = Command::new("/usr/sbin/gtlsserver")
                .args(["--quiet", "--htdocs"])
                .arg(folder.join("docs"))
                .args(["127.0.0.1", &port.to_string()])
                .args([folder.join("key.pem"), folder.join("cert.pem")])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("gtlsserver (ngtcp2-server)");
            let mut is_bound = false;
            eventually("it has bound its port, or has ended", || {
                is_bound = UdpSocket::bind(("127.0.0.1", port)).is_err();
                is_bound || child.try_wait().unwrap().is_some()
            });
            if is_bound && child.try_wait().unwrap().is_none() {
                return Self { child, port };
            }
        }
        panic!("no port for gtlsserver");
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_foreign_server_that_has_only_http_3_is_asked_at_once() {
    let ca = authority(3).unwrap();
    let made = signed("localhost", 3, &ca.identity_pem()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| std::fs::write(folder.path().join(name), content).unwrap();
    write("ca.pem", ca.certificate_pem.as_bytes());
    write("cert.pem", made.certificate_pem.as_bytes());
    write("key.pem", made.key_pem.as_bytes());
    std::fs::create_dir(folder.path().join("docs")).unwrap();
    let big: Vec<u8> = (0..1_000_000_u32).map(|at| b'a' + (at % 23) as u8).collect();
    write("docs/big.txt", &big);
    write("docs/small.txt", b"from ngtcp2");
    let foreign = Foreign::start(folder.path());
    let mut near = Near::start(foreign.port, &folder.path().join("ca.pem"), "first");
    assert_eq!(curl(&[&near.url("/small.txt")]), "from ngtcp2");
    assert!(curl(&[&near.url("/big.txt")]).into_bytes() == big);
    assert!(near.get("/none").starts_with("HTTP/1.1 404 "));
    for _ in 0..3 {
        let record = near.up.record();
        assert_eq!(record.text("path"), format!("quic 127.0.0.1:{}", foreign.port), "{record:?}");
    }
}

#[test]
fn a_server_with_neither_is_the_failure_of_tcp() {
    let ca = tempfile::tempdir().unwrap();
    let file = ca.path().join("ca.pem");
    std::fs::write(&file, authority(3).unwrap().certificate_pem).unwrap();
    // A bound socket that never answers, so that the port stays ours.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let mut near = Near::start(port, &file, "first");
    if TcpListener::bind(("127.0.0.1", port)).is_err() {
        return;
    }
    let told = near.get("/");
    assert!(told.starts_with("HTTP/1.1 502 "), "{told}");
    let record = near.up.record();
    assert_eq!((record.text("reason"), record.text("path")), ("refused", ""), "{record:?}");
}
