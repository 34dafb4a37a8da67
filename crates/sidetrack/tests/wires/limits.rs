//! A flow on the wire keeps its place among all flows.

use crate::listeners::Door;
use crate::node::Up;
use crate::{Flow, NO_PINS, RULE, address, flow, metric};
use sidetrack_testkit::{Line, eventually, is_root};
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};

/// With room for one flow, which is on the wire, the next client is turned away.
fn keeps_its_place(door: Door, listen: &str) {
    if !is_root() {
        return;
    }
    let (line, at) = (Line::new(), "10.0.1.254:81".parse::<SocketAddr>().expect("an address"));
    let listener = line.server.run(|| TcpListener::bind("10.0.2.1:0").expect("bound"));
    let to = address(&listener);
    let tables = format!(
        "{NO_PINS}[limits]\nmax_flows = 1\n[[listen]]\nname = \"door\"\naddress = \"{at}\"\n{}{RULE}",
        listen.replace('@', &to.to_string())
    );
    let up = line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    let client = line.client.run(move || door.connect(at, to));
    let server = listener.accept().expect("accepted").0;
    let mut flow = Flow { line, up, client, server }.wired();
    let mut second = flow.line.client.run(move || TcpStream::connect(at).expect("connected"));
    assert!(second.read(&mut [0]).is_err(), "there is room for a second flow");
    assert_eq!(flow.up.record().text("reason"), "limit");
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    assert_eq!(up.record().text("reason"), "ok");
}

#[test]
fn of_a_port_for_a_server() {
    keeps_its_place(Door::Reverse, "kind = \"reverse\"\nto = \"@\"\n");
}

#[test]
fn of_http_connect() {
    keeps_its_place(Door::Connect, "kind = \"http\"\n");
}

#[test]
fn large_flows_go_there_by_themselves() {
    if !is_root() {
        return;
    }
    let rule = "[[rule]]\nname = \"all\"\ncarrier = \"direct\"\nkernel = \"never\"\n";
    let mut flow = flow(false, "", &format!("[wire]\nauto = true\npins = \"none\"\n{rule}"));
    let is_there = |up: &Up| metric(up, "sidetrack_wire_taken_flows_total ") == 1;
    flow.exchange(8 << 20);
    assert!(!is_there(&flow.up), "half of the default");
    // It is looked at when bytes pass.
    eventually("it is on the wire", || {
        flow.exchange(1 << 20);
        is_there(&flow.up)
    });
    flow.exchange(100_000);
    let Flow { client, server, mut up, line: _line } = flow;
    drop((client, server));
    let record = up.record();
    assert_eq!((record.text("reason"), &record.0["shunted"]), ("ok", &true.into()), "{record:?}");
}
