//! `POST /outgoing/new`, as services of Brane ask for it: ports, TLS that the service knows nothing of, and what is refused.

use crate::node::Up;
use crate::node::peers::{Client, Server};
use serde_json::{Value, json};
use sidetrack::tls::{authority, signed};
use sidetrack_testkit::{LIMIT, eventually};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A node whose services may have this number of paths; its rules allow destinations on loopback but for one address.
struct Scene {
    up: Up,
    asked_at: SocketAddr,
}

/// This number of ports in a row that are free now. Another process may take one before the node does, which the node notices.
fn ports(count: u16) -> (u16, u16) {
    for _ in 0..100 {
        let first =
            TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port();
        let Some(last) = first.checked_add(count - 1) else { continue };
        if (first..=last).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return (first, last);
        }
    }
    panic!("no {count} ports in a row");
}

impl Scene {
    fn start(count: u16, certificates: &Path, more: &str) -> Self {
        let (first, last) = ports(count);
        let asked_at = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        let tables = format!(
            "[outgoing]\nlisten = '{asked_at}'\nports = '{first}-{last}'\ncertificates = '{}'\n{more}\n\
             [[rule]]\nname = 'not-there'\nmatch = {{ to = '127.0.0.9' }}\naction = 'deny'\n\
             [[rule]]\nname = 'servers'\nmatch = {{ to = '127.0.0.0/8' }}\ncarrier = 'direct'\n\
             [[rule]]\nname = 'named'\nmatch = {{ host = 'localhost' }}\ncarrier = 'direct'\n",
            certificates.display()
        );
        Self { up: Up::start("default = 'deny'\n", &tables), asked_at }
    }

    /// Status and body.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.asked_at).expect("the listener");
        stream.set_read_timeout(Some(LIMIT)).expect("a socket");
        let length = body.len();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}")
            .expect("asked");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, body.to_owned())
    }

    fn new_path(&self, wanted: &Value) -> Result<SocketAddr, (u16, String)> {
        let (status, body) = self.ask("POST", "/outgoing/new", &wanted.to_string());
        if status != 200 {
            return Err((status, body));
        }
        Ok(([127, 0, 0, 1], body.parse().expect("a port and nothing else")).into())
    }
}

fn plain(server: SocketAddr) -> Value {
    json!({ "address": format!("http://{server}"), "tls": null })
}

/// One line there and back.
fn echoed(stream: &mut TcpStream, line: &str) -> std::io::Result<String> {
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(line.as_bytes())?;
    let mut came = vec![0; line.len()];
    stream.read_exact(&mut came)?;
    Ok(String::from_utf8_lossy(&came).into_owned())
}

#[test]
fn a_path_takes_any_number_of_connections_and_rules_decide_about_each() {
    let server = Server::start("127.0.0.1");
    let folder = tempfile::tempdir().expect("a folder");
    let mut scene = Scene::start(4, folder.path(), "");
    let path = scene.new_path(&plain(server.address)).expect("a path");
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(path).expect("the path")).collect();
    for client in &mut clients {
        client.echo(b"hello").expect("an echo");
    }
    drop(clients);
    let record = scene.up.record();
    assert_eq!((record.text("rule"), record.text("intercept")), ("servers", "reverse"));
    assert_eq!(record.text("orig_dst"), server.address.to_string());
    // The same again is the same path; another server has another one, and a rule may refuse its flows.
    assert_eq!(scene.new_path(&plain(server.address)), Ok(path));
    let refused = scene.new_path(&plain(SocketAddr::from(([127, 0, 0, 9], 80)))).expect("a path");
    assert_ne!(refused, path);
    assert!(Client::connect(refused).is_err());
    // Our own port is not a server: flows would go in circles.
    let circle = scene.new_path(&plain(path)).expect("a path");
    assert!(Client::connect(circle).is_err());
}

#[test]
fn ports_come_to_an_end_and_are_freed() {
    let servers: Vec<_> = (0..4).map(|_| Server::start("127.0.0.1")).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let scene = Scene::start(2, folder.path(), "free_after_ms = 1000");
    let first = scene.new_path(&plain(servers[0].address)).expect("a path");
    let mut held = Client::connect(first).expect("the path");
    let second = scene.new_path(&plain(servers[1].address)).expect("a path");
    let (status, body) =
        scene.new_path(&plain(servers[2].address)).expect_err("no port is left, and both were just used");
    assert!(status == 507 && body.contains("all taken"), "{status} {body}");
    let close = |port: u16| scene.ask("DELETE", &format!("/outgoing/{port}"), "").0;
    assert_eq!((close(second.port()), close(second.port())), (200, 404));
    assert_eq!(scene.new_path(&plain(servers[2].address)), Ok(second));
    // The path that has a flow stays; the other one makes room when it had none for a second.
    let mut last = Err((0, String::new()));
    eventually("the idle one makes room", || {
        last = scene.new_path(&plain(servers[3].address));
        last.is_ok()
    });
    assert_eq!(last, Ok(second));
    held.echo(b"still").expect("goes on");
}

/// openssl's server, which turns each line around; it demands a certificate of its clients.
struct Turning(Child, SocketAddr);

impl Turning {
    fn start(folder: &Path) -> Self {
        let at = |name: &str| folder.join("lucas").join(name);
        let mut child = Command::new("openssl")
            .args([
                "s_server",
                "-accept",
                "127.0.0.1:0",
                "-rev",
                "-Verify",
                "2",
                "-verify_return_error",
                "-naccept",
                "4",
            ])
            .arg("-cert")
            .arg(at("server.pem"))
            .arg("-key")
            .arg(at("server.pem"))
            .arg("-CAfile")
            .arg(at("ca.pem"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("openssl");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
        let accept = lines.find_map(|line| line.strip_prefix("ACCEPT ")?.parse().ok());
        std::thread::spawn(move || lines.for_each(drop));
        Self(child, accept.expect("where it listens"))
    }
}

impl Drop for Turning {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_service_speaks_plain_and_the_server_gets_tls_with_a_certificate_of_ours() {
    let folder = tempfile::tempdir().expect("a folder");
    let lucas = folder.path().join("lucas");
    std::fs::create_dir(&lucas).expect("a folder");
    let ca = authority(1).expect("an authority");
    std::fs::write(lucas.join("ca.pem"), &ca.certificate_pem).expect("written");
    for (file, name) in [("server.pem", "localhost"), ("client-id.pem", "us.example")] {
        let made = signed(name, 1, &ca.identity_pem()).expect("a key");
        std::fs::write(lucas.join(file), made.identity_pem()).expect("written");
    }
    let server = Turning::start(folder.path());
    let mut scene = Scene::start(4, folder.path(), "");
    let wanted = |location: &str, host: &str, use_client_auth: bool| {
        json!({ "address": format!("https://{host}:{}", server.1.port()),
                "tls": { "location": location, "use_client_auth": use_client_auth } })
    };
    let path = scene.new_path(&wanted("lucas", "localhost", true)).expect("a path");
    let mut stream = TcpStream::connect(path).expect("the path");
    assert_eq!(echoed(&mut stream, "drawer\n").expect("turned around"), "reward\n");
    drop(stream);
    assert_eq!(scene.up.record().text("rule"), "named");
    // Without our certificate the server ends it; under a name that it has no certificate for we do.
    for (host, auth, reason) in [("localhost", false, None), ("127.0.0.1", true, Some("certificate"))] {
        let path = scene.new_path(&wanted("lucas", host, auth)).expect("a path");
        let mut stream = TcpStream::connect(path).expect("the path");
        assert!(echoed(&mut stream, "drawer\n").is_err(), "{host}");
        let record = scene.up.record();
        assert_ne!(record.text("reason"), "ok", "{record:?}");
        assert!(reason.is_none_or(|reason| record.text("reason") == reason), "{record:?}");
    }
    for (location, words) in
        [("nobody", "cannot read"), ("../lucas", "is not a location"), ("", "is not a location")]
    {
        let (status, body) =
            scene.new_path(&wanted(location, "localhost", true)).expect_err("no such location");
        assert!(status == 400 && body.contains(words), "{location}: {status} {body}");
    }
}

#[test]
fn what_is_no_request_is_refused_in_words() {
    let folder = tempfile::tempdir().expect("a folder");
    let scene = Scene::start(2, folder.path(), "");
    for (body, words) in [
        ("", "JSON"),
        ("{}", "address"),
        ("{\"address\": 5}", "JSON"),
        ("{\"address\": \"data.example\"}", "is not an address"),
        ("{\"address\": \"grpc://data.example\"}", "grpc://data.example"),
        ("{\"address\": \"https://x:1\", \"tsl\": null}", "tsl"),
    ] {
        let (status, said) = scene.ask("POST", "/outgoing/new", body);
        let said: Value = serde_json::from_str(&said).expect("JSON");
        let error = said["error"].as_str().expect("words");
        assert!(status == 400 && error.contains(words), "{body}: {status} {error}");
    }
    assert_eq!(scene.ask("GET", "/outgoing/new", "").0, 405);
    assert_eq!(scene.ask("DELETE", "/outgoing/1", "").0, 404);
}
