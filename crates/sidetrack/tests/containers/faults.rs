//! Functions that misbehave: flows never pass without them unless the rule says so, and every end says who is to blame.

use crate::engine::{engine, nowhere};
use crate::node::admin;
use crate::node::{Record, Up};
use crate::scene::{Echo, ask, connect, exchange, own, tables, up};
use sidetrack_testkit::{eventually, in_namespace};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};

fn led(down: &str) -> String {
    format!("chain = ['f']\non_function_down = '{down}'\n")
}

/// A node whose function is down, and what it logged about it.
fn up_with(server: SocketAddr, down: &str, function: &str) -> Up {
    up(server, &led(down), function)
}

fn says(record: &Record, reason: &str, words: &[&str]) {
    assert_eq!(record.text("reason"), reason, "{record:?}");
    for word in words {
        assert!(record.text("detail").contains(word), "{word} is not in {record:?}");
    }
}

/// Only a function that is down can have seen the flow: the server has not.
fn unseen(server: &TcpListener) {
    server.set_nonblocking(true).expect("a listener");
    assert_eq!(server.accept().expect_err("nobody came").kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn what_happens_while_a_function_is_down_is_what_the_rule_says() {
    in_namespace(|| {
        let missing = "[function.f]\nkind = 'container'\nimage = 'localhost/nobody-made-this:1'\n";
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut denies = up_with(silent.local_addr().expect("bound"), "deny", missing);
        let log = denies.logged();
        assert!(
            log.contains("the image 'localhost/nobody-made-this:1' is not there: get it with `podman pull"),
            "{log}"
        );
        assert!(exchange(connect(&denies), b"secret").is_err());
        let words = ["function 'f'", "on_function_down = \"deny\"", "is not there"];
        says(&denies.record(), "function_failed", &words);
        unseen(&silent);
        assert!(denies.stop().0.success());

        let server = Echo::start();
        let mut skips = up_with(server.address, "skip", missing);
        assert_eq!(exchange(connect(&skips), b"open").expect("past it"), b"openbye\n");
        says(&skips.record(), "ok", &["function 'f' was skipped", "is not there"]);
        assert!(skips.stop().0.success());
    });
}

#[test]
fn a_function_whose_image_has_come_starts_when_it_is_told_to() {
    in_namespace(|| {
        let late = "localhost/late:1";
        let function = own("f", "").replace("localhost/function:1", late);
        let server = Echo::start();
        let node = up_with(server.address, "deny", &function);
        let health = |node: &Up| admin::show(node, "/v1/functions");
        assert!(health(&node).contains(&format!("\"image\":\"{late}\"")));
        let start = || assert_eq!(admin::ask(&node, "POST", "/v1/functions/f/start").0, 200);
        let falls = || {
            let body = health(&node);
            let (_, behind) = body.split_once("\"falls\":").expect("said");
            behind.split_once(',').and_then(|(falls, _)| falls.parse::<u32>().ok()).expect("a number")
        };
        // Pauses that run their course have no room for ten in a minute, which is what is waited for at most.
        eventually("each pause ends when it is told to", || {
            start();
            falls() >= 14
        });
        assert!(engine().podman(&["tag", "localhost/function:1", late]).status.success());
        eventually("it is well", || {
            start();
            health(&node).contains("\"well\":1")
        });
        assert_eq!(admin::ask(&node, "POST", "/v1/functions/nobody/start").0, 404);
        assert!(node.stop().0.success());
        assert!(engine().podman(&["untag", "localhost/function:1", late]).status.success());
    });
}

#[test]
fn containers_that_never_get_well_say_why_in_their_own_words() {
    in_namespace(|| {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = silent.local_addr().expect("bound");
        let quick = "start_timeout_ms = 1500\nprobe_timeout_ms = 400\n";
        let cases = [
            ("environment = { HOW = 'exit' }", "its program ended with code 3"),
            ("environment = { HOW = 'exit' }", "no configuration in /etc/function.conf"),
            (
                "environment = { HOW = 'deaf' }",
                "not well 1500 ms after its start: cannot connect to port 1080",
            ),
            ("environment = { HOW = 'refuse' }", "not allowed by its rules"),
            (
                "environment = { HOW = 'reorder' }",
                "it changes or reorders bytes to the server, from byte 0 on",
            ),
            ("command = ['/not-there']", "function 'f'"),
        ];
        for (keys, words) in cases {
            let keys = format!("{keys}\n{quick}");
            let function = match keys.starts_with("command") {
                true => format!("[function.f]\nkind = 'container'\nimage = 'localhost/function:1'\n{keys}"),
                false => own("f", &keys),
            };
            let mut up = up_with(server, "deny", &function);
            let log = up.logged();
            assert!(log.contains(words), "{words} is not in\n{log}");
            assert!(exchange(connect(&up), b"secret").is_err());
            says(&up.record(), "function_failed", &["function 'f'", "on_function_down"]);
            unseen(&silent);
            assert!(up.stop().0.success());
        }
    });
}

/// A function that ends a flow in order, in the middle of an answer: the client must not take what it has for all.
#[test]
fn a_function_that_cuts_a_flow_is_told_by_a_reset() {
    in_namespace(|| {
        let server = Echo::start();
        let mut up = up_with(server.address, "deny", &own("f", ""));
        let mut stream = connect(&up);
        assert_eq!(ask(&mut stream, "!cut\n").expect("the beginning of an answer"), "!cut\n");
        let error = stream.read(&mut [0; 16]).expect_err("no end in order");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        says(&up.record(), "function_failed", &["function 'f': ended the flow, which neither side had done"]);
        assert_eq!(exchange(connect(&up), b"more").expect("others go on"), b"morebye\n");
        assert!(up.stop().0.success());
    });
}

/// A function that sends without end is held to what the client takes.
#[test]
fn a_function_that_floods_is_held_by_back_pressure() {
    in_namespace(|| {
        let server = Echo::start();
        let mut up = up_with(server.address, "deny", &own("f", ""));
        let mut stream = connect(&up);
        stream.write_all(b"!flood\n").expect("an open stream");
        stream.read_exact(&mut [0; 100_000]).expect("a flood");
        let before = resident(up.pid());
        assert_eq!(exchange(connect(&up), b"more").expect("others go on"), b"morebye\n");
        assert_eq!(up.record().text("reason"), "ok");
        stream.read_exact(&mut vec![0; 32_000_000]).expect("a flood");
        let grown = resident(up.pid()).saturating_sub(before);
        assert!(grown < 16 << 20, "{grown} bytes more, for a client that reads as it likes");
        drop(stream);
        assert_eq!(up.record().text("reason"), "client_reset");
        assert!(up.stop().0.success());
    });
}

/// Resident memory, bytes.
fn resident(pid: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process that runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its memory");
    let kib: usize = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number");
    kib * 1024
}

/// One that stalls is found by its probe and replaced; its flows end and say why, new ones pass the next one.
#[test]
fn a_function_that_stalls_is_replaced() {
    in_namespace(|| {
        let server = Echo::start();
        let mut up = up_with(server.address, "deny", &own("f", "probe_timeout_ms = 1500"));
        let mut stuck = connect(&up);
        stuck.write_all(b"!stall\n").expect("an open stream");
        assert!(stuck.read(&mut [0; 16]).is_err(), "reset when its container is ended");
        says(&up.record(), "function_failed", &["function 'f'"]);
        up.log_line("the fall", |line| {
            line.contains("down: took the flow and did not pass it on within 1500 ms")
        });
        up.log_line("the next one", |line| line.contains("well"));
        assert_eq!(exchange(connect(&up), b"more").expect("new ones go on"), b"morebye\n");
        assert!(up.stop().0.success());
    });
}

/// One that dies takes its flows with it and says how; the next one is started.
#[test]
fn a_function_that_dies_is_started_again() {
    in_namespace(|| {
        let server = Echo::start();
        let mut up = up_with(server.address, "deny", &own("f", "instances = 2"));
        let mut streams = [connect(&up), connect(&up)];
        for stream in &mut streams {
            assert_eq!(ask(stream, "hello\n").expect("an answer"), "hello\n");
        }
        let mut last = connect(&up);
        last.write_all(b"!exit\n").expect("an open stream");
        assert!(last.read(&mut [0; 16]).is_err());
        up.log_line("the fall", |line| line.contains("down: its program ended with code 7"));
        let alive = streams.iter_mut().filter_map(|stream| ask(stream, "still\n").ok()).count();
        assert_eq!(alive, 1, "the flow in the other container goes on");
        up.log_line("the next one", |line| line.contains("well"));
        assert_eq!(exchange(connect(&up), b"more").expect("new ones go on"), b"morebye\n");
        assert!(up.stop().0.success());
    });
}

/// Connections that come back and that no flow waits for are reset; flows are not disturbed.
#[test]
fn nobody_can_come_in_by_the_way_back() {
    in_namespace(|| {
        let server = Echo::start();
        let up = up_with(server.address, "deny", &own("f", ""));
        let mut stream = connect(&up);
        assert_eq!(ask(&mut stream, "hello\n").expect("an answer"), "hello\n");
        // Who is in the container's network and guesses.
        let engine = crate::engine::engine();
        let name = engine.containers(&format!("sidetrack-f-{}", crate::passing::children(&up))).remove(0);
        let pid = engine.podman(&["inspect", "--format", "{{.State.Pid}}", &name]);
        let pid: u32 = String::from_utf8_lossy(&pid.stdout).trim().parse().expect("a process id");
        let network = sidetrack_sys::netns::NetNs::of_process(pid).expect("its network");
        let doors = listening(pid);
        assert!(!doors.is_empty(), "at least the worker's");
        let control = network.run(|| sidetrack_sys::sysctl::read("net/ipv4/tcp_congestion_control"));
        assert_eq!(control.expect("its network's"), "reno", "nothing there is worth a timer for each piece");
        for port in doors {
            let guess = network.run(move || std::net::TcpStream::connect(("127.9.9.9", port)));
            let mut guess = guess.expect("the door takes it");
            let end = guess.read(&mut [0; 1]);
            assert!(!matches!(end, Ok(1..)), "{end:?}");
        }
        assert_eq!(ask(&mut stream, "hello\n").expect("an answer"), "hello\n");
        drop(stream);
        assert!(up.stop().0.success());
    });
}

/// Ports of listeners on all addresses in a process's network.
fn listening(pid: u32) -> Vec<u16> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/tcp")).expect("a process that runs");
    let ports = table.lines().filter_map(|line| {
        let (local, state) = (line.split_whitespace().nth(1)?, line.split_whitespace().nth(3)?);
        (state == "0A").then_some(())?;
        u16::from_str_radix(local.strip_prefix("00000000:")?, 16).ok()
    });
    ports.collect()
}

#[test]
fn an_engine_that_is_not_there_is_named_at_the_start() {
    in_namespace(|| {
        let server = Echo::start();
        let text = tables(server.address, &led("deny"), &own("f", ""));
        let text = text.replace(
            &crate::engine::engine().socket().display().to_string(),
            &nowhere().display().to_string(),
        );
        let mut up = Up::spawn("default = 'deny'\n", &text);
        let (status, _) = up.gone();
        assert!(!status.success());
        let log = up.logged();
        assert!(
            log.contains("no container engine listens at") && log.contains("systemctl start podman.socket"),
            "{log}"
        );
    });
}
