//! Whole networks: without and with a way out.

use crate::node::traces::Traces;
use crate::{Attached, Program, echo, network_of, records};
use rustix::process::Signal;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{LIMIT, Line, Node, is_root};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Rules, routes and `lo` of the calling thread's network.
fn everything() -> String {
    let shown = |command: &str, arguments: &str| {
        let output = Command::new(command).args(arguments.split_whitespace()).output().expect("the tool");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let commands =
        ["-o link show lo", "route show table all", "-6 route show table all", "rule show", "-6 rule show"];
    let shown_by_ip = commands.map(|arguments| shown("ip", arguments));
    let all = [shown("nft", "list ruleset"), shown_by_ip.join("\n")].join("\n");
    // A link-local address gets its routes when no other host has it, which takes a moment.
    all.lines().filter(|line| !line.contains("fe80")).map(|line| format!("{line}\n")).collect()
}

/// Waits until the network of the calling thread is as it was.
fn expect_back(before: &str) {
    let until = Instant::now() + LIMIT;
    while everything() != before && Instant::now() < until {
        std::thread::park_timeout(Duration::from_millis(10));
    }
    assert_eq!(everything(), before);
}

#[test]
fn a_network_without_a_way_out_becomes_usable_and_is_as_before_afterwards() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let (open, closed) = (echo(&line.server, "10.0.2.1"), echo(&line.server, "fd00:2::1"));
    let datagrams = line.server.run(|| Echo::start("10.0.2.1"));
    let lonely = Node::new();
    lonely.ip("link set lo mtu 1400");
    lonely.run(|| {
        let rules = "add table ip theirs; add chain ip theirs out { type filter hook output priority 0; }";
        assert!(Command::new("nft").arg(rules).status().expect("nft").success());
    });
    let before = lonely.run(everything);
    let mut program = Program::start(&lonely);
    assert!(program.ask(&format!("tcp 10.0.2.1 {open}")).contains("Error"), "it has no way out");
    let denied = format!("[fd00:2::1]:{closed}");
    let path = network_of(&lonely);
    let attached = Attached::start(&line.client, &["--deny", &denied, "--netns", &path]);
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {open}")), "ping");
    assert_eq!(program.ask(&format!("udp 10.0.2.1 {}", datagrams.address.port())), "ping");
    assert!(program.ask(&format!("tcp fd00:2::1 {closed}")).contains("Error"));
    let port = program.ask("listen 127.0.0.1");
    assert_eq!(program.ask(&format!("open 127.0.0.1 {port}")), "open", "its own loopback stays its own");
    attached.detach();
    let after = before.clone();
    lonely.run(move || expect_back(&after));
    // And after a kill.
    let attached = Attached::start(&line.client, &["--netns", &path]);
    assert_eq!(program.ask(&format!("tcp fd00:2::1 {closed}")), "ping");
    attached.signal(Signal::KILL);
    attached.end();
    lonely.run(move || expect_back(&before));
    assert!(program.ask(&format!("tcp 10.0.2.1 {open}")).contains("Error"));
    program.end();
}

#[test]
fn a_network_with_a_way_out_is_taken_over_and_given_back() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let (open, closed) = (echo(&line.server, "10.0.2.1"), echo(&line.server, "fd00:2::1"));
    let mut program = Program::start(&line.client);
    let port = program.ask("listen 10.0.1.1");
    let before = line.client.run(everything);
    let path = network_of(&line.client);
    let folder = tempfile::tempdir().expect("a folder");
    let kept = folder.path().join("records");
    let list = format!("10.0.2.1:{open}");
    let arguments = ["--allow", &list, "--records", kept.to_str().expect("text"), "--netns", &path];
    let attached = Attached::start(&line.router, &arguments);
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {open}")), "ping");
    assert!(program.ask(&format!("tcp fd00:2::1 {closed}")).contains("Error"));
    assert!(program.ask("raw 10.0.2.1").contains("PermissionError"));
    // Connections from outside, and those between its own programs, go on.
    for host in [&line.server, &line.client] {
        writeln!(program.orders, "accept").expect("it reads");
        let to = format!("10.0.1.1:{port}");
        let mut client = host.run(move || TcpStream::connect(to)).expect("connected");
        client.write_all(b"hello").expect("sent");
        let mut answer = String::new();
        client.read_to_string(&mut answer).expect("an answer");
        assert_eq!((answer.as_str(), program.answer().as_str()), ("hello", "served"));
    }
    attached.detach();
    line.client.run(move || expect_back(&before));
    assert_eq!(program.ask(&format!("tcp fd00:2::1 {closed}")), "ping");
    assert_eq!(records(&kept).len(), 2);
    program.end();
}

#[test]
fn a_command_runs_in_a_network_that_exists() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let port = echo(&line.server, "10.0.2.1");
    let lonely = Node::new();
    // Without a way out, and with one.
    for (inside, outside) in [(&lonely, &line.client), (&line.client, &line.router)] {
        let before = inside.run(everything);
        let traces = inside.run(Traces::now);
        let path = network_of(inside);
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        let list = format!("10.0.2.1:{port}");
        command.args(["run", "--netns", &path, "--allow", &list, "--", "python3"]);
        command.arg(Program::path()).env_remove("SIDETRACK_VIA");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = outside.run(move || Program::of(&mut command));
        assert_eq!(program.ask(&format!("tcp 10.0.2.1 {port}")), "ping");
        assert!(program.ask("tcp 10.0.2.254 9").contains("Error"));
        drop(program.orders);
        assert_eq!(program.child.wait().expect("ended").code(), Some(0));
        inside.run(move || {
            expect_back(&before);
            traces.expect_back("after the command");
        });
    }
}
