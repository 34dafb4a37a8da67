//! Each carrier between two nodes: whichever of the two is killed, both applications are reset.

use crate::cut::{Flow, Server};
use crate::node::Up;
use crate::scene::Scene;
use sidetrack_testkit::LIMIT;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;

fn reverse(server: SocketAddr, carrier: &str) -> String {
    format!(
        "[[listen]]\nkind = \"reverse\"\naddress = \"127.0.0.1:0\"\nto = \"{server}\"\n\
         [[rule]]\nname = \"on\"\ncarrier = {carrier}\n"
    )
}

fn connect(up: &Up) -> TcpStream {
    TcpStream::connect_timeout(&up.addresses("reverse")[0], LIMIT).expect("a connection")
}

type Way = fn(Flow, &mut Up);

/// Each node killed with a flow that is quiet, and with one that is not.
const ALL: [(Way, bool); 4] = [
    (Flow::killed, false),
    (Flow::killed, true),
    (Flow::killed_in_upload, false),
    (Flow::killed_in_upload, true),
];

/// The same in half of the time, where the loss of a node is noticed by a time-out.
const HALF: [(Way, bool); 2] = [(Flow::killed, true), (Flow::killed_in_upload, false)];

/// A near node and a far node, of which one is killed.
fn either_end(ways: &[(Way, bool)], far: impl Fn() -> Up, near: impl Fn(&Up, SocketAddr) -> Up) {
    let server = Server::start("127.0.0.1");
    for (way, kill_far) in ways {
        let mut far = far();
        let mut near = near(&far, server.address);
        let flow = Flow::over(connect(&near), &server, |_| {});
        way(flow, if *kill_far { &mut far } else { &mut near });
    }
}

fn by_hop(scheme: &str, kind: &str) {
    let far = || {
        Up::start(
            "default = \"direct\"\n",
            &format!("[[listen]]\nname = \"far\"\nkind = \"{kind}\"\naddress = \"127.0.0.1:0\"\n"),
        )
    };
    let near = |far: &Up, server: SocketAddr| {
        let hop = far.addresses("far")[0];
        Up::start("default = \"deny\"\n", &reverse(server, &format!("\"{scheme}://{hop}\"")))
    };
    either_end(&ALL, far, near);
}

#[test]
fn socks5() {
    by_hop("socks5", "socks");
}

#[test]
fn socks6() {
    by_hop("socks6", "socks");
}

#[test]
fn http() {
    by_hop("http", "http");
}

/// What `tunnel key` writes and prints.
fn key(folder: &std::path::Path, name: &str) -> String {
    let made = Command::new(env!("CARGO_BIN_EXE_sidetrack"))
        .current_dir(folder)
        .args(["tunnel", "key", "--name", name])
        .output()
        .expect("the binary");
    assert!(made.status.success(), "{made:?}");
    let text = String::from_utf8(made.stdout).expect("text");
    let pin = text.split('"').find(|part| part.starts_with("sha256//"));
    pin.unwrap_or_else(|| panic!("no pin in {text}")).to_owned()
}

fn by_tunnel(transport: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let (near_pin, far_pin) = (key(folder.path(), "near.example"), key(folder.path(), "far.example"));
    let at = |file: &str| folder.path().join(file).display().to_string();
    let far = || {
        let identity = at("far.example.pem");
        let listen = format!(
            "[[listen]]\nname = \"far\"\nkind = \"tunnel\"\naddress = \"127.0.0.1:0\"\nidentity = \"{identity}\"\n\
             pins = [\"{near_pin}\"]\n"
        );
        Up::start("default = \"direct\"\n", &listen)
    };
    let near = |far: &Up, server: SocketAddr| {
        let (identity, address) = (at("near.example.pem"), far.addresses("far")[0]);
        let tunnel = format!(
            "[[tunnel]]\nname = \"t\"\naddress = \"{address}\"\nidentity = \"{identity}\"\npins = [\"{far_pin}\"]\n\
             {transport}"
        );
        Up::start("default = \"deny\"\n", &(tunnel + &reverse(server, "\"tunnel:t\"")))
    };
    either_end(&HALF, far, near);
}

#[test]
fn tunnel_over_quic() {
    by_tunnel("transport = \"quic\"\n");
}

#[test]
fn tunnel_over_tls() {
    by_tunnel("transport = \"tls\"\n");
}

/// `kill` says which node.
fn by_overlay(way: Way, kill: impl Fn(&mut Scene) -> &mut Up) {
    let server = Server::start("127.0.0.1");
    let deliver = "[[overlay.deliver]]\nfrom = \"a\"\nto = \"127.0.0.0/8\"\n";
    let mut scene = Scene::new(server.address, deliver);
    let client = TcpStream::connect_timeout(&scene.entry(), LIMIT).expect("a connection");
    let flow = Flow::over(client, &server, |_| {});
    way(flow, kill(&mut scene));
}

#[test]
fn overlay_at_the_clients_end() {
    by_overlay(Flow::killed, |scene| &mut scene.a);
}

#[test]
fn overlay_at_the_servers_end() {
    by_overlay(Flow::killed_in_upload, |scene| &mut scene.c);
}
