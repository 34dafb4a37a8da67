//! A process and its descendants, and a control group.

use crate::node::traces::Traces;
use crate::{Attached, Program, echo, group, records};
use sidetrack_sys::cgroup::{Hierarchy, Leaf};
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{Line, Node, eventually, is_root};
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn a_process_and_its_children_are_caught_from_now_on() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let (open, closed) = (echo(&line.server, "10.0.2.1"), echo(&line.server, "10.0.2.1"));
    let datagrams = line.server.run(|| Echo::start("fd00:2::1"));
    let mut program = Program::start(&line.client);
    assert_eq!(program.ask("child"), "child");
    assert_eq!(program.ask(&format!("open 10.0.2.1 {open}")), "open");
    let before = line.client.run(Traces::now);
    let home = group(program.pid());
    let folder = tempfile::tempdir().expect("a folder");
    let kept = folder.path().join("records");
    let pid = program.pid().to_string();
    let denied = format!("10.0.2.1:{closed},forbidden.example");
    let arguments = ["--deny", &denied, "--records", kept.to_str().expect("text"), "--report", &pid];
    let attached = Attached::start(&line.client, &arguments);
    assert_ne!(group(program.pid()), home);
    assert_eq!(program.ask("use"), "ping", "what was open stays");
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {open}")), "ping");
    assert!(program.ask(&format!("tcp 10.0.2.1 {closed}")).contains("Error"));
    assert_eq!(program.ask(&format!("udp fd00:2::1 {}", datagrams.address.port())), "ping");
    assert!(program.ask("raw 10.0.2.1").contains("PermissionError"), "nothing else leaves");
    // Its children, too, that are born from now on.
    assert_eq!(program.ask(&format!("by-child tcp 10.0.2.1 {open}")), "ping");
    let told = attached.detach();
    assert!(told.contains("1 connections that were open before"), "{told}");
    assert!(told.contains(&format!("refused 10.0.2.1 (tcp {closed}) by python3")), "{told}");
    let records = records(&kept);
    let fates: Vec<_> = records.iter().map(|record| (record.text("protocol"), record.fate().2)).collect();
    assert_eq!(fates.iter().filter(|fate| **fate == ("tcp", "ok")).count(), 2, "{fates:?}");
    assert_eq!(fates.iter().filter(|fate| **fate == ("tcp", "policy_denied")).count(), 1, "{fates:?}");
    assert_eq!(fates.iter().filter(|fate| **fate == ("udp", "ok")).count(), 1, "{fates:?}");
    line.client.run(move || before.expect_back("after it has detached"));
    assert_eq!(group(program.pid()), home);
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {closed}")), "ping", "as before");
    assert_eq!(program.ask("use"), "ping");
    program.end();
}

/// A control group below the root of the hierarchy, which goes with this.
struct Group(Leaf);

impl Group {
    fn new(name: &str) -> Self {
        let hierarchy = Hierarchy { own: "".into(), ..Hierarchy::find().expect("cgroup2") };
        Self(hierarchy.create_leaf(name).expect("a group"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.0.clear();
        let _ = self.0.remove();
    }
}

#[test]
fn a_unit_is_caught_where_it_is_and_its_servers_go_on() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let (open, closed) = (echo(&line.server, "fd00:2::1"), echo(&line.server, "fd00:2::1"));
    let unit = format!("st-attach-{}.service", std::process::id());
    let held = Group::new(&unit);
    let mut program = Program::start(&line.client);
    held.0.add(program.pid()).expect("moved");
    let port = program.ask("listen 10.0.1.1");
    let before = line.client.run(Traces::now);
    let home = group(program.pid());
    // From another network than the unit's: the rules are in that one.
    let denied = format!("[fd00:2::1]:{closed}");
    let name = format!("unit:{}", unit.trim_end_matches(".service"));
    let attached = Attached::start(&line.router, &["--deny", &denied, &name]);
    assert_eq!(group(program.pid()), home, "nothing is moved");
    assert_eq!(program.ask(&format!("tcp fd00:2::1 {open}")), "ping");
    assert!(program.ask(&format!("tcp fd00:2::1 {closed}")).contains("Error"));
    // Others reach its server as before.
    writeln!(program.orders, "accept").expect("it reads");
    let to = format!("10.0.1.1:{port}");
    let mut client = line.server.run(move || TcpStream::connect(to)).expect("connected");
    client.write_all(b"hello").expect("sent");
    let mut answer = String::new();
    client.read_to_string(&mut answer).expect("an answer");
    assert_eq!((answer.as_str(), program.answer().as_str()), ("hello", "served"));
    attached.detach();
    line.client.run(move || before.expect_back("after it has detached"));
    assert_eq!(program.ask(&format!("tcp fd00:2::1 {closed}")), "ping");
    // The end of the unit is the end.
    let attached = Attached::start(&line.router, &[&name]);
    program.end();
    let (code, told) = attached.end();
    assert_eq!(code, Some(0), "{told}");
}

#[test]
fn names_are_learnt_from_questions() {
    if !is_root() {
        return;
    }
    let host = Node::new();
    // No server of names answers here.
    host.ip("link add out type veth peer name far");
    host.ip("link set far up");
    host.ip("addr add 10.0.1.1/24 dev out");
    host.ip("link set out up");
    host.ip("route add default dev out");
    let mut program = Program::start(&host);
    let folder = tempfile::tempdir().expect("a folder");
    let kept = folder.path().join("records");
    let pid = program.pid().to_string();
    let arguments =
        ["--via", "socks5://127.0.0.1:1", "--early", "--records", kept.to_str().expect("text"), &pid];
    let attached = Attached::start(&host, &arguments);
    let address = program.ask("name service.example");
    assert!(address.starts_with("198.18."), "{address}");
    program.ask("tcp service.example 80");
    eventually("a record", || kept.exists() && !records(&kept).is_empty());
    attached.detach();
    assert_eq!(records(&kept)[0].text("orig_dst"), "service.example:80");
    program.end();
}
