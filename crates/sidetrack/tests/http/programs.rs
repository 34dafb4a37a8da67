//! Real programs: curl as the client, nginx as the server.

use crate::client::Client;
use crate::proxy::node;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

struct Nginx {
    child: Child,
    address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Nginx {
    /// nginx that serves a folder; `None` where it is not installed.
    fn start() -> Option<Self> {
        let program =
            ["/usr/sbin/nginx", "/usr/bin/nginx"].into_iter().find(|path| Path::new(path).exists())?;
        // nginx cannot be given port 0. The kernel gives no connection or other test a port below its own range, and one
        // that is taken all the same ends nginx at once.
        let first = 10_000 + u16::try_from(std::process::id() % 20_000).unwrap();
        let started = (first..first + 100).find_map(|port| Self::at(program, port));
        Some(started.expect("nginx on one of a hundred ports"))
    }

    /// `None` if it cannot listen on this port.
    fn at(program: &str, port: u16) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::write(root.join("page"), "x".repeat(100_000)).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        // Bound only: no client may be answered by a copy that a child of another test holds until it execs.
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&address.into()).ok()?;
        drop(socket);
        let at = root.display();
        let text = format!(
            "daemon off; master_process off; pid {at}/pid; error_log {at}/error;\nevents {{}}\nhttp {{ access_log off; \
             client_body_temp_path {at}/b; proxy_temp_path {at}/p; fastcgi_temp_path {at}/f; uwsgi_temp_path {at}/u; \
             scgi_temp_path {at}/s; server {{ listen {address}; root {at}; add_header Cache-Control max-age=60; }} }}\n"
        );
        std::fs::write(root.join("conf"), text).unwrap();
        let child = Command::new(program)
            .args(["-p".as_ref(), root.as_os_str(), "-c".as_ref(), root.join("conf").as_os_str()])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut nginx = Self { child, address, _folder: folder };
        let runs = sidetrack_testkit::awaited("nginx listens", || {
            let has_ended = nginx.child.try_wait().unwrap().is_some();
            (has_ended || TcpStream::connect(address).is_ok()).then_some(!has_ended)
        });
        runs.then_some(nginx)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs curl through the proxy; its output. `None` where it is not installed.
fn curl(proxy: SocketAddr, arguments: &[&str]) -> Option<(i32, String)> {
    let done = Command::new("curl")
        .args(["-sS", "--max-time", "60", "-x", &format!("http://{proxy}"), "--noproxy", ""])
        .args(arguments)
        .output();
    let done = done.ok()?;
    Some((done.status.code().unwrap_or(-1), String::from_utf8_lossy(&done.stdout).into_owned()))
}

#[test]
fn curl_and_nginx_through_the_proxy_and_its_cache() {
    let Some(nginx) = Nginx::start() else { return eprintln!("skipped: needs nginx") };
    let node = node("cache = {}", "");
    let url = format!("http://{}/page", nginx.address);
    let write = ["-o", "/dev/null", "-w", "%{http_code} %{size_download} %{num_connects}"];
    let Some((code, out)) = curl(node.entry(), &[&write[..], &[&url]].concat()) else {
        return eprintln!("skipped: needs curl");
    };
    assert_eq!((code, out.as_str()), (0, "200 100000 1"));
    let (_, out) = curl(node.entry(), &[&write[..], &[&url, "-o", "/dev/null", &url]].concat()).unwrap();
    assert!(out.ends_with("200 100000 0"), "kept alive: {out}");
    let (_, out) = curl(node.entry(), &["-r", "10-19", "-D", "-", &url]).unwrap();
    assert!(
        out.contains("206 Partial Content") && out.contains("; hit") && out.ends_with("xxxxxxxxxx"),
        "{out}"
    );
    let (_, out) =
        curl(node.entry(), &["-p", "-o", "/dev/null", "-w", "%{http_connect} %{http_code}", &url]).unwrap();
    assert_eq!(out, "200 200", "CONNECT");
    let (_, out) =
        curl(node.entry(), &["-o", "/dev/null", "-w", "%{http_code}", &format!("{url}-none")]).unwrap();
    assert_eq!(out, "404");
    let mut client = Client::new(node.entry());
    assert!(client.fetch(&url).is_hit());
}
