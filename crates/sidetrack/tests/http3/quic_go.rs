//! Programs of quic-go, in both roles: client and server of HTTP/3, client and proxy of CONNECT-UDP (RFC 9298).
//!
//! The program in `quic_go/` is built by `go`, whose client fetches the modules. Where either cannot be had, the tests are skipped.

use super::hops::datagram_through;
use super::node::Up;
use super::servers::{Near, curl};
use super::{BIG, Site, origin};
use sidetrack::tls::{authority, signed};
use sidetrack_testkit::datagrams::Echo;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

/// What each client prints about `/big`.
const GOT_BIG: &str = "HTTP/3.0 200 300000\n";

/// `go` with these arguments, in the folder of the program. It uses what is installed, and ends after two minutes.
fn go(arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["120", "go"]).args(arguments).env("GOTOOLCHAIN", "local").stdin(Stdio::null());
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http3/quic_go"));
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/local/go/bin"));
    command
}

/// The program, built once for all tests of this process.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = PROGRAM.get_or_init(|| {
        let fetched = go(&["mod", "download"]).output().unwrap();
        if !fetched.status.success() {
            let why = String::from_utf8_lossy(&fetched.stderr);
            eprintln!("skipped: needs Go and its modules: {}", why.lines().last().unwrap_or_default());
            return None;
        }
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("quic-go-peer");
        let built = go(&["build", "-buildvcs=false", "-o", program.to_str().unwrap(), "."]).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Some(program)
    });
    made.as_deref()
}

/// A server of the program, with a certificate for localhost. It ends with the test.
struct Server {
    child: Child,
    address: SocketAddr,
    files: tempfile::TempDir,
}

impl Server {
    /// `role` is `serve` or `proxy`.
    fn start(program: &Path, role: &str) -> Self {
        let ca = authority(3).unwrap();
        let made = signed("localhost", 3, &ca.identity_pem()).unwrap();
        let files = tempfile::tempdir().unwrap();
        std::fs::write(files.path().join("ca.pem"), &ca.certificate_pem).unwrap();
        let identity = files.path().join("identity.pem");
        std::fs::write(&identity, made.identity_pem()).unwrap();
        let mut command = Command::new(program);
        command.args([role, "127.0.0.1:0"]).arg(identity).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { child, address: line.trim().parse().expect("it prints its address"), files }
    }

    fn ca_file(&self) -> PathBuf {
        self.files.path().join("ca.pem")
    }

    fn host(&self) -> String {
        format!("localhost:{}", self.address.port())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a client, which must succeed, and returns what it prints.
fn said(command: &mut Command) -> String {
    let told = command.stdin(Stdio::null()).output().unwrap();
    assert!(told.status.success(), "{command:?}: {}", String::from_utf8_lossy(&told.stderr));
    String::from_utf8(told.stdout).unwrap()
}

#[test]
fn clients_of_quic_go_are_served_and_datagrams_pass_our_proxy() {
    let Some(program) = program() else { return };
    let ask = |role: &str, ca: &Path, rest: &[&str]| said(Command::new(program).arg(role).arg(ca).args(rest));
    // HTTP/3 with our listener.
    let server = origin();
    let site = Site::named("localhost", &format!("to = \"{server}\""));
    let url = format!("https://localhost:{}", site.address().port());
    assert_eq!(ask("get", &site.ca_file(), &[&format!("{url}/big")]), GOT_BIG);
    let small = ask("get", &site.ca_file(), &[&format!("{url}/small")]);
    assert!(small.contains("Via: 3.0 sidetrack-"), "{small}");
    // Datagrams through our listener, and QUIC in them.
    let (echo, theirs) = (Echo::start("127.0.0.1"), Server::start(program, "serve"));
    let mut proxy = Site::named("localhost", "");
    let at = format!("localhost:{}", proxy.address().port());
    let lengths = ask("echo", &proxy.ca_file(), &[&at, &echo.address.to_string()]);
    assert_eq!(lengths, "0\n1\n500\n1200\n");
    let record = proxy.up.record();
    assert_eq!((record.text("reason"), record.number("packets_down")), ("ok", 4), "{record:?}");
    let (ca, url) = (theirs.ca_file(), format!("https://{}/big", theirs.host()));
    assert_eq!(ask("through", &proxy.ca_file(), &[&at, ca.to_str().unwrap(), &url]), GOT_BIG);
    let record = proxy.up.record();
    assert_eq!((record.text("protocol"), record.text("orig_dst")), ("udp", &*theirs.host()), "{record:?}");
}

#[test]
fn servers_and_proxies_of_quic_go_carry_our_flows() {
    let Some(program) = program() else { return };
    // HTTP/3 with their server.
    let server = Server::start(program, "serve");
    let near = Near::start(server.address.port(), &server.ca_file(), "first");
    assert_eq!(curl(&[&near.url("/big")]).len(), BIG);
    let told = near.get("/small");
    assert!(told.contains("\r\n\r\nGET /small from 127.0.0.1:"), "{told}");
    assert!(told.starts_with("HTTP/1.1 200 OK\r\n"), "{told}");
    // Datagrams through their proxy, and QUIC in them.
    let (echo, proxy) = (Echo::start("127.0.0.1"), Server::start(program, "proxy"));
    let hop = format!("h3://{}?ca={}", proxy.host(), proxy.ca_file().display());
    let tables = format!(
        "[[listen]]\nname = \"udp\"\nkind = \"reverse\"\nprotocol = \"udp\"\naddress = \"127.0.0.1:0\"\nto = \"{}\"\n\
         [[rule]]\nname = \"udp\"\nmatch = {{ protocol = \"udp\" }}\ncarrier = \"{hop}\"\n",
        echo.address
    );
    let up = Up::start("default = \"deny\"\n", &tables);
    for length in [0, 1, 500, 1200] {
        assert_eq!(datagram_through(&up, "udp", &vec![length as u8; length]), vec![length as u8; length]);
    }
    let records = proxy.files.path().join("records");
    let mut run = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    run.env_remove("SIDETRACK_VIA").args(["run", "--quiet", "--records"]).arg(&records);
    run.args(["--via", &hop, "--"]).arg(program).arg("get").arg(server.ca_file());
    assert_eq!(said(run.arg(format!("https://{}/big", server.host()))), GOT_BIG);
    let records = std::fs::read_to_string(records).unwrap();
    let carried = records.lines().find(|line| line.contains("\"protocol\":\"udp\"")).expect(&records);
    assert!(carried.contains("\"reason\":\"ok\"") && carried.contains("\"carrier\":\"h3://"), "{carried}");
}
