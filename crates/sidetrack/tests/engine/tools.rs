//! Programs that know nothing of all this: curl, nginx, openssl.

use crate::site::{Site, engine};
use sidetrack_testkit::is_root;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A process that ends with the test.
pub(crate) struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a program prints, if it goes well.
pub(crate) fn tool(program: &str, arguments: &str) -> String {
    let output = Command::new(program)
        .args(arguments.split_whitespace())
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// An nginx on the server's host that serves three names, each by TLS and without; its folder.
fn nginx(site: &Site, folder: &Path) -> Running {
    let path = folder.display();
    tool(
        "openssl",
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test -keyout {path}/key -out {path}/cert"
        ),
    );
    let server = |port: u16, name: &str| {
        format!(
            "server {{ listen 10.0.2.1:{port}; listen 10.0.2.1:{} ssl; ssl_certificate {path}/cert; ssl_certificate_key \
             {path}/key; location / {{ return 200 \"{name}\\n\"; }} }}\n",
            port + 1
        )
    };
    let text = format!(
        "daemon off; master_process off; pid {path}/pid; error_log stderr; events {{}}\nhttp {{ access_log off;\n\
         client_body_temp_path {path}; proxy_temp_path {path}; fastcgi_temp_path {path}; uwsgi_temp_path {path}; \
         scgi_temp_path {path};\n{}{}}}\n",
        server(8000, "first"),
        server(9000, "second")
    );
    std::fs::write(folder.join("nginx.conf"), text).expect("written");
    let arguments = format!("-p {path} -e stderr -c {path}/nginx.conf");
    let child = site.line.server.run(move || {
        Command::new("nginx")
            .args(arguments.split_whitespace())
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nginx")
    });
    site.line.server.run(|| {
        sidetrack_testkit::eventually("nginx listens", || {
            std::net::TcpStream::connect("10.0.2.1:9001").is_ok()
        });
    });
    Running(child)
}

#[test]
fn curl_reaches_nginx_by_host_and_by_sni() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut site = Site::new();
    let _nginx = nginx(&site, folder.path());
    let names = |port: u16, name: &str, address: &str| {
        format!(
            "[[listen]]\nkind = \"engine\"\nname = \"{name}\"\naddress = \"{address}\"\ninterfaces = [\"to-client\", \
             \"to-server\"]\nengine = {{ sources = [\"10.0.2.254\"], source_ports = \"{}\" }}\nnames = {{ \"first.example\" = \
             \"10.0.2.1:{port}\", \"second.example\" = \"10.0.2.1:{}\" }}\n",
            if name == "tls" { "61000-61999" } else { "62000-62999" },
            port + 1000
        )
    };
    let tables = format!("{}{}", names(8000, "plain", "10.0.1.254:80"), names(8001, "tls", "10.0.1.254:443"));
    site.start("", &tables);
    for (scheme, listener) in [("http", "plain"), ("https", "tls")] {
        for word in ["first", "second"] {
            let port = if scheme == "http" { 80 } else { 443 };
            let arguments =
                format!("-sS -k -m 50 --resolve {word}.example:{port}:10.0.1.254 {scheme}://{word}.example/");
            let answer = site.line.client.run(move || tool("curl", &arguments));
            assert_eq!(answer.trim(), word, "{scheme}");
            let record = site.record();
            assert_eq!((record.text("listener"), record.text("reason")), (listener, "ok"));
            assert_eq!(record.text("host"), format!("{word}.example"));
        }
    }
}

#[test]
fn two_hundred_requests_close_in_order() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut site = Site::new();
    let _nginx = nginx(&site, folder.path());
    site.start("", &engine("names = { \"first.example\" = \"10.0.2.1:8000\" }"));
    // A new connection for each request, a few at a time.
    let answers = site.line.client.run(|| {
        tool(
            "curl",
            "-sS -m 50 -H Connection:close --resolve first.example:80:10.0.1.254 -Z --parallel-max 20 \
             http://first.example/[1-200]",
        )
    });
    assert_eq!(answers.lines().count(), 200);
    for _ in 0..200 {
        assert_eq!(site.record().text("reason"), "ok");
    }
}
