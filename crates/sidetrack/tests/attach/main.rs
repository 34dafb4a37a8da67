//! `sidetrack attach` and `run --netns` on real traffic: what is caught, what is left alone, what is there afterwards.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

#[path = "../node/mod.rs"]
mod node;

mod beside;
mod containers;
mod ends;
mod networks;
mod processes;
mod refused;

use crate::node::Record;
use rustix::process::{Pid, Signal, kill_process};
use sidetrack_sys::cgroup;
use sidetrack_testkit::Node;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};

/// A program with a line for each order.
struct Program {
    child: Child,
    orders: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Program {
    /// Starts it on this host.
    fn start(host: &Node) -> Self {
        host.run(|| Self::of(Command::new("python3").arg(Self::path())))
    }

    fn path() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/attach/program.py"))
    }

    fn of(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let (orders, lines) = (child.stdin.take().expect("input"), child.stdout.take().expect("output"));
        let mut program = Self { child, orders, lines: BufReader::new(lines) };
        // On some hosts `python3` is a script: wait until it is itself.
        assert_eq!(program.ask("hello"), "unknown order");
        program
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it prints for an order.
    fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").expect("it reads");
        self.answer()
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("it answers");
        line.trim().to_owned()
    }

    /// Ends it.
    fn end(mut self) {
        drop(self.orders);
        self.child.wait().expect("ended");
    }
}

/// A running `sidetrack attach`.
struct Attached {
    child: Child,
    told: BufReader<ChildStderr>,
}

impl Attached {
    /// Starts it on this host and waits until it is attached.
    fn start(host: &Node, arguments: &[&str]) -> Self {
        Self::of(host, attach(arguments))
    }

    fn of(host: &Node, mut command: Command) -> Self {
        let mut child = host.run(move || command.spawn()).expect("it starts");
        let mut told = BufReader::new(child.stderr.take().expect("errors"));
        let mut lines = String::new();
        while !lines.contains("attached to") {
            assert_ne!(told.read_line(&mut lines).expect("a line"), 0, "it ended: {lines}");
        }
        Self { child, told }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().cast_signed()).expect("a pid");
        kill_process(pid, signal).expect("it lives");
    }

    /// Waits for its end; its exit code and what it still said.
    fn end(mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        self.told.read_to_string(&mut text).expect("text");
        (self.child.wait().expect("ended").code(), text)
    }

    /// Lets it detach.
    fn detach(self) -> String {
        self.signal(Signal::TERM);
        let (code, text) = self.end();
        assert_eq!(code, Some(0), "{text}");
        text
    }
}

fn attach(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("attach").args(arguments).env_remove("SIDETRACK_VIA").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A server of TCP that sends back what it gets; its port. It lives as long as the test.
fn echo(host: &Node, ip: &'static str) -> u16 {
    let listener = host.run(move || TcpListener::bind((ip, 0))).expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut buffer = [0; 100];
                let mut client = client;
                while let Ok(length @ 1..) = client.read(&mut buffer) {
                    if client.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// The control group of a process.
fn group(pid: u32) -> PathBuf {
    cgroup::path_of(pid).expect("it lives")
}

/// The records in a file.
fn records(path: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(path).expect("records");
    text.lines().map(|line| Record(serde_json::from_str(line).expect("a record"))).collect()
}

/// The path of a host's network.
fn network_of(host: &Node) -> String {
    format!("/proc/{}/ns/net", host.thread_id())
}
