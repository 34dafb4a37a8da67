//! HTTP/3 over the overlay: requests at a, their server beside c.
#![allow(clippy::unwrap_used, reason = "a test that meets an error fails")]

use crate::node::Up;
use crate::scene::Scene;
use rustix::process::Signal;
use sidetrack::tls::{authority, signed};
use sidetrack_testkit::eventually;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::Command;

/// A server of HTTP/1.1 that returns the head of each request.
fn origin() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let head = lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
            let length = head.len();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{head}"
            );
        }
    });
    address
}

#[test]
fn a_server_beside_another_node_is_asked_by_http_3() {
    let folder = tempfile::tempdir().unwrap();
    let ca = authority(3).unwrap();
    let made = signed("localhost", 3, &ca.identity_pem()).unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, &ca.certificate_pem).unwrap();
    let server = format!(
        "[[listen]]\nname = \"web\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\nidentity = \"server.pem\"\nhttp3 = true\n\
         to = \"{}\"\n",
        origin()
    );
    let server = Up::start_with("default = \"direct\"\n", &server, |folder| {
        std::fs::write(folder.join("server.pem"), made.identity_pem()).unwrap();
    });
    let port = server.addresses("web")[0].port();
    // c resolves the name, and may choose ::1 for it: the rule names the address.
    let tables = format!(
        "[[listen]]\nname = \"in\"\nkind = \"http\"\naddress = \"127.0.0.1:0\"\nto = \"https://localhost:{port}?ca={}\"\n\
         [[rule]]\nname = \"over\"\nmatch = {{ listener = \"in\" }}\nto = \"127.0.0.1:{port}\"\ncarrier = \"overlay:c\"\n\
         http3 = \"first\"\n",
        file.display()
    );
    let deliver = "[[overlay.deliver]]\nfrom = \"a\"\nto = [\"127.0.0.0/8\"]\n";
    let mut scene = Scene::with(&tables, deliver, |_, to| to);
    let url = format!("http://{}/x", scene.a.addresses("in")[0]);
    eventually("HTTP/3 is used", || {
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--max-time", "60", "--noproxy", "", &url]);
        let told = command.output().unwrap();
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
        String::from_utf8_lossy(&told.stdout).contains("Via: 3.0 sidetrack-")
    });
    scene.a.signal(Signal::TERM);
    let far =
        std::iter::repeat_with(|| scene.c.record()).find(|record| record.text("protocol") == "udp").unwrap();
    assert_eq!((far.text("listener"), far.address("orig_dst").port()), ("overlay", port), "{far:?}");
    assert!(far.number("packets_down") > 0, "{far:?}");
}
