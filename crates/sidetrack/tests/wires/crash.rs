//! Flows on the wire outlive the process, and the next one goes on with them.

use crate::node::admin::{ask, flows};
use crate::node::{Record, Up};
use crate::{RULE, on_the_wire};
use rustix::process::Signal;
use sidetrack_common::exchange;
use sidetrack_core::wire::NOTE_BYTES;
use sidetrack_sys::bpf::{Pins, WireMemory};
use sidetrack_testkit::streams::both_ways;
use sidetrack_testkit::{LIMIT, Line, eventually, is_root};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// A file system of type `bpf` that is gone with the test.
pub(crate) struct Bpf(tempfile::TempDir);

impl Bpf {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        rustix::mount::mount("bpf", folder.path(), "bpf", rustix::mount::MountFlags::empty(), None)
            .expect("mounted");
        Self(folder)
    }

    fn pins(&self) -> PathBuf {
        self.0.path().join("pins")
    }

    /// Whether a process has left something there.
    pub(crate) fn is_used(&self) -> bool {
        std::fs::read_dir(self.pins()).is_ok_and(|mut all| all.next().is_some())
    }
}

impl Drop for Bpf {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// A node with pins, and connections through it.
pub(crate) struct Scene {
    // Dropped in this order: the file system must be there as long as a process has it.
    pub(crate) up: Option<Up>,
    pins: bool,
    pub(crate) bpf: Bpf,
    line: Line,
    listener: TcpListener,
    to: SocketAddr,
}

const DOOR: &str = "10.0.1.254:80";

impl Scene {
    pub(crate) fn new(wire: &str, rule: &str) -> Self {
        Self::with_pins(true, wire, rule)
    }

    /// `pins`: whether flows outlive the process.
    pub(crate) fn with_pins(pins: bool, wire: &str, rule: &str) -> Self {
        let (bpf, line) = (Bpf::new(), Line::new());
        let listener = line.server.run(|| TcpListener::bind("10.0.2.1:0").expect("bound"));
        let to = listener.local_addr().expect("an address");
        let mut scene = Self { up: None, pins, bpf, line, listener, to };
        scene.start(wire, rule);
        scene
    }

    /// Starts another process with the same pins.
    pub(crate) fn start(&mut self, wire: &str, rule: &str) {
        let listen = format!(
            "[[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"{DOOR}\"\nto = \"{}\"\n",
            self.to
        );
        let pins = if self.pins { self.bpf.pins().display().to_string() } else { "none".to_owned() };
        let tables = format!("{listen}{rule}[wire]\npins = \"{pins}\"\nflows_max = 16\n{wire}");
        self.up = Some(self.line.router.run(move || Up::start("default = \"deny\"\n", &tables)));
    }

    pub(crate) fn up(&self) -> &Up {
        self.up.as_ref().expect("started")
    }

    pub(crate) fn record(&mut self) -> Record {
        self.up.as_mut().expect("started").record()
    }

    pub(crate) fn connect(&self) -> [TcpStream; 2] {
        let client = self.line.client.run(|| TcpStream::connect(DOOR).expect("connected"));
        let listener = self.listener.try_clone().expect("a copy");
        [client, self.line.server.run(move || listener.accept().expect("accepted").0)]
    }

    /// A connection that is on the wire and quiet: the client has sent 150,000 bytes, the server 8.
    pub(crate) fn wired(&self) -> [TcpStream; 2] {
        let [mut client, mut server] = self.connect();
        crate::pass(&mut client, &mut server, 150_000);
        crate::pass(&mut server, &mut client, 8);
        on_the_wire(self.up());
        [client, server]
    }

    /// Kills the process; returns what it had shown of its only flow.
    fn kill(&mut self) -> Record {
        let before = on_the_wire(self.up());
        let mut up = self.up.take().expect("started");
        up.signal(Signal::KILL);
        let (_, records) = up.gone();
        assert!(records.is_empty(), "{records:?}");
        before
    }

    /// An orderly end leaves nothing.
    fn stop(mut self) -> Vec<Record> {
        let (status, records) = self.up.take().expect("started").stop();
        assert!(status.success());
        assert!(!self.bpf.is_used(), "pins are left");
        records
    }
}

pub(crate) fn is_reset(stream: &mut TcpStream) {
    assert_eq!(stream.read(&mut [0]).expect_err("reset").kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_busy_flow_goes_on_without_a_process_and_with_the_next_one() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new("", RULE);
    let [client, server] = scene.connect();
    let (seen_client, seen_server) =
        (client.try_clone().expect("a copy"), server.try_clone().expect("a copy"));
    let enough = Arc::new(AtomicBool::new(false));
    let (of_client, of_server) = (enough.clone(), enough.clone());
    let pause = Some(Duration::from_millis(1));
    let client = std::thread::spawn(move || both_ways(client, [1, 2], &of_client, pause));
    let server = std::thread::spawn(move || both_ways(server, [2, 1], &of_server, pause));
    let received =
        |stream: &TcpStream| sidetrack_sys::sockopt::tcp_info(stream).expect("TCP_INFO").received_bytes;
    on_the_wire(scene.up());
    let before = scene.kill();
    let then = [&seen_client, &seen_server].map(received);
    eventually("both directions go on without a process", || {
        [&seen_client, &seen_server].iter().zip(then).all(|(stream, then)| received(stream) > then + 300_000)
    });
    scene.start("", RULE);
    let after = on_the_wire(scene.up());
    assert_eq!((after.text("ts"), after.number("flow")), (before.text("ts"), before.number("flow")));
    assert!(after.number("bytes_up") > before.number("bytes_up") + 300_000, "{before:?} {after:?}");
    assert_eq!(crate::metric(scene.up(), "sidetrack_wire_adopted_flows_total "), 1);
    eventually("its counts go on", || {
        on_the_wire(scene.up()).number("bytes_down") > after.number("bytes_down") + 300_000
    });
    enough.store(true, Relaxed);
    let [sent, got] = client.join().expect("the client");
    assert_eq!(server.join().expect("the server"), [got, sent]);
    drop((seen_client, seen_server));
    let record = scene.record();
    assert_eq!(record.fate(), ("all", "direct", "ok"), "{record:?}");
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (sent, got));
    for key in
        ["ts", "flow", "client", "orig_dst", "listener", "intercept", "connect_seconds", "first_byte_seconds"]
    {
        assert_eq!(record.0[key], before.0[key], "{key}");
    }
    assert_eq!(record.0["shunted"], true);
    // New flows have new numbers, and no record comes twice.
    let [mut client, mut server] = scene.connect();
    crate::pass(&mut client, &mut server, 10);
    drop((client, server));
    assert!(scene.record().number("flow") > record.number("flow"));
    assert!(scene.stop().is_empty());
}

#[test]
fn an_adopted_flow_is_killed_and_ends_when_idle() {
    if !is_root() {
        return;
    }
    let rule = format!("{RULE}idle_timeout_ms = 3000\n");
    let mut scene = Scene::new("", &rule);
    let [mut client, mut server] = scene.wired();
    scene.kill();
    crate::pass(&mut client, &mut server, 1000);
    scene.start("", &rule);
    let id = on_the_wire(scene.up()).number("flow");
    let (status, body) = ask(scene.up(), "DELETE", &format!("/v1/flows/{id}"));
    assert_eq!(status, 200, "{body}");
    is_reset(&mut client);
    is_reset(&mut server);
    let record = scene.record();
    assert_eq!(record.text("reason"), "killed", "{record:?}");
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (151_000, 8));
    // The bound of the rule when the flow began, from its last byte on.
    let [mut client, mut server] = scene.wired();
    scene.kill();
    scene.start("", RULE);
    is_reset(&mut client);
    is_reset(&mut server);
    let record = scene.record();
    assert_eq!((record.text("reason"), record.number("bytes_up")), ("idle", 150_000), "{record:?}");
    assert!(scene.stop().is_empty());
}

/// A flow is left, and the next process ends it: `detail` is part of why.
fn ends(wire: &str, rule: &str, reason: &str, detail: &str) {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new(wire, RULE);
    let [mut client, mut server] = scene.wired();
    let before = scene.kill();
    crate::pass(&mut server, &mut client, 1000);
    scene.start(wire, rule);
    is_reset(&mut client);
    is_reset(&mut server);
    let record = scene.record();
    assert_eq!(
        (record.fate(), record.text("ts")),
        (("all", "direct", reason), before.text("ts")),
        "{record:?}"
    );
    assert!(record.text("detail").contains(detail), "{record:?}");
    assert_eq!((record.number("bytes_up"), record.number("bytes_down")), (150_000, 1008));
    assert!(flows(scene.up()).is_empty());
    assert!(scene.stop().is_empty());
}

#[test]
fn flows_end_if_the_configuration_says_so() {
    ends("on_crash = \"end\"\n", RULE, "shutdown", "on_crash");
}

#[test]
fn a_flow_that_is_denied_now_ends() {
    let rule =
        format!("[[rule]]\nname = \"none\"\nmatch = {{ listener = \"port\" }}\naction = \"deny\"\n{RULE}");
    ends("", &rule, "policy_denied", "none");
}

#[test]
fn a_flow_whose_rule_is_gone_ends() {
    ends("", &RULE.replace("\"all\"", "\"other\""), "policy_denied", "'all' had decided");
}

#[test]
fn what_cannot_be_read_ends_cleanly() {
    if !is_root() {
        return;
    }
    let later = {
        let mut note = [0; NOTE_BYTES];
        note[..6].copy_from_slice(b"STWN\x09\x00");
        note
    };
    for (note, said) in [([0xa5; NOTE_BYTES], "damaged"), (later, "version 9")] {
        let mut scene = Scene::new("", RULE);
        let [mut client, mut server] = scene.wired();
        scene.kill();
        {
            let pins = Pins::open(&scene.bpf.pins()).expect("nobody has it");
            let (memory, _on, found) = WireMemory::adopt(&pins).expect("there");
            memory.note(found[0].id, &note).expect("written");
        }
        scene.start("", RULE);
        is_reset(&mut client);
        is_reset(&mut server);
        assert!(scene.up.as_mut().expect("started").log_so_far().contains(said));
        assert!(flows(scene.up()).is_empty());
        assert!(scene.stop().is_empty(), "nothing is known for a record");
    }
}

#[test]
fn a_folder_of_another_format_is_refused_and_its_flows_end() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new("", RULE);
    let [mut client, mut server] = scene.wired();
    scene.kill();
    std::fs::rename(scene.bpf.pins().join("format-1"), scene.bpf.pins().join("format-9")).expect("renamed");
    scene.start("", RULE);
    assert!(scene.up.as_mut().expect("started").log_so_far().contains("format 9"));
    // This host's TCP answers: it knows the connection no more.
    let _ = client.write_all(b"lost");
    let _ = server.write_all(b"lost");
    is_reset(&mut client);
    is_reset(&mut server);
    scene.wired();
    assert_eq!(scene.stop().len(), 1);
}

#[test]
fn two_processes_do_not_share_pins_and_cleanup_ends_what_was_left() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new("", RULE);
    let [mut client, mut server] = scene.wired();
    let pins = scene.bpf.pins();
    let tables = format!("[wire]\npins = \"{}\"\n", pins.display());
    let mut second = scene.line.router.run(move || Up::start("default = \"deny\"\n", &tables));
    assert!(second.log_so_far().contains("another process has"), "it starts all the same");
    assert!(second.stop().0.success());
    let said = cleanup(&scene.line, &scene.bpf.pins());
    assert!(!said.contains("end the flows"), "it is in use: {said}");
    crate::pass(&mut client, &mut server, 1000);
    scene.kill();
    crate::pass(&mut client, &mut server, 1000);
    let said = cleanup(&scene.line, &scene.bpf.pins());
    assert!(said.contains("done: end the flows on the wire"), "{said}");
    is_reset(&mut client);
    is_reset(&mut server);
    assert!(!scene.bpf.is_used());
}

fn cleanup(line: &Line, pins: &Path) -> String {
    let pins = pins.to_owned();
    line.router.run(move || {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"))
            .args(["cleanup", "--pins"])
            .arg(pins)
            .output()
            .expect("the binary");
        String::from_utf8_lossy(&output.stdout).into_owned()
    })
}

/// What this end says of its connection: whether these bytes come, or it was reset.
fn gets(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) -> bool {
    to.set_read_timeout(Some(LIMIT)).expect("a time-out");
    let mut received = vec![0; bytes.len()];
    let got = from.write_all(bytes).and_then(|()| to.read_exact(&mut received));
    match got {
        Ok(()) => {
            assert_eq!(received, bytes);
            true
        }
        Err(error) => {
            let is_end = matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe);
            assert!(is_end, "it stands still: {error}");
            false
        }
    }
}

/// The flow is on the wire as before, or has ended at both hosts.
#[test]
fn killed_while_a_flow_comes_back() {
    if !is_root() {
        return;
    }
    let mut scene = Scene::new("", RULE);
    let mut went_on = Vec::new();
    for millis in [0, 3, 6, 9, 12, 15, 18, 21, 25, 30, 50] {
        let [mut client, mut server] = scene.wired();
        let id = on_the_wire(scene.up()).number("flow");
        let socket = scene.up().folder().join("admin.sock");
        let asks =
            std::thread::spawn(move || exchange::ask(&socket, "POST", &format!("/v1/flows/{id}/back"), ""));
        std::thread::sleep(Duration::from_millis(millis));
        let mut up = scene.up.take().expect("started");
        up.signal(Signal::KILL);
        up.gone();
        // The process may be gone before it answers.
        let _ = asks.join().expect("it asks");
        scene.start("", RULE);
        let goes_on = gets(&mut client, &mut server, b"to the server");
        assert_eq!(gets(&mut server, &mut client, b"to the client"), goes_on, "after {millis} ms");
        if goes_on {
            assert_eq!(on_the_wire(scene.up()).number("flow"), id);
            drop((client, server));
            assert_eq!(scene.record().text("reason"), "ok");
        }
        went_on.push((millis, goes_on));
        eventually("no flow is left", || flows(scene.up()).is_empty());
    }
    println!("killed after these milliseconds, the flow went on: {went_on:?}");
    assert!(scene.stop().iter().all(|record| record.number("flow") > 0));
}
