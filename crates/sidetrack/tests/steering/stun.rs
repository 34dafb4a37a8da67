//! What a STUN client of others says of captured UDP: the mapping is endpoint-independent (RFC 4787 REQ-1, RFC 5780 Sec. 4.3).

use crate::datagrams::{ALL, listen};
use crate::node::Up;
use sidetrack_testkit::{Line, Node, eventually, is_root};
use std::process::{Child, Command, Stdio};

/// A STUN server with two addresses, as the test of a mapping needs it. It ends with the test.
struct Stun(Child);

impl Drop for Stun {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(host: &Node) -> Option<Stun> {
    host.ip("addr add 10.0.2.2/24 dev eth0");
    let started = host.run(|| {
        let mut server = Command::new("turnserver");
        server.args(["-n", "-S", "-L", "10.0.2.1", "-L", "10.0.2.2", "--no-tls", "--no-dtls", "--no-cli"]);
        server.args(["--log-file", "stdout", "--pidfile", "/dev/null"]);
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    });
    started.ok().map(Stun)
}

/// Waits until the client has found out what the mapping is, and returns what it says.
fn mapping(client: &Node) -> String {
    let mut said = String::new();
    eventually("the client has had all answers", || {
        said = client.run(|| {
            let mut client = Command::new("timeout");
            client.args(["20", "turnutils_natdiscovery", "-m", "-L", "10.0.1.1", "10.0.2.1"]);
            String::from_utf8_lossy(&client.output().expect("timeout").stdout).into_owned()
        });
        said.contains("Mapping")
    });
    said
}

fn says_endpoint_independent(host: impl Fn(&Line) -> &Node, kind: &str, keys: &str) {
    let line = Line::new();
    let Some(_server) = start(&line.server) else { return eprintln!("skipped: needs turnserver") };
    let tables = format!("[limits]\ndrain_ms = 0\n{}{ALL}", listen(kind, keys));
    let up = host(&line).run(move || Up::start("default = \"deny\"\n", &tables));
    let said = mapping(&line.client);
    assert!(said.contains("NAT with Endpoint Independent Mapping!"), "{said}");
    assert!(!said.contains("Dependent Mapping!") || !said.contains("Address"), "{said}");
    assert!(up.stop().0.success());
}

#[test]
fn the_mapping_of_other_hosts_is_endpoint_independent() {
    if is_root() {
        says_endpoint_independent(|line| &line.router, "tproxy", "interfaces = [\"to-client\"]\n");
    }
}

#[test]
fn the_mapping_of_programs_of_this_host_is_endpoint_independent() {
    if is_root() {
        says_endpoint_independent(|line| &line.client, "redirect", "ports = [3478, 3479]\n");
    }
}
