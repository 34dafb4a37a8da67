//! Failures of a command's connections under `sidetrack run`: one line when they happen, repeated ones as a count.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use rustix::net::{AddressFamily, SocketType};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};

fn run(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("run").args(arguments).env_remove("SIDETRACK_VIA").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A port of this host that refuses connections for as long as the socket is there: bound, and never listening.
fn refusing() -> (OwnedFd, u16) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let address: SocketAddr = rustix::net::getsockname(&socket).unwrap().try_into().unwrap();
    (socket, address.port())
}

/// A bash command that connects this number of times and reads to the end of each connection.
fn connecting(times: usize, to: &str, port: u16) -> String {
    format!("for i in $(seq {times}); do (exec 3<>/dev/tcp/{to}/{port} && cat <&3) 2>/dev/null; done; ")
}

/// Our lines of what was printed.
fn ours(errors: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(errors).into_owned();
    text.lines().filter(|line| line.starts_with("sidetrack: ")).map(str::to_owned).collect()
}

#[test]
fn the_first_of_a_kind_is_printed_while_the_command_runs_and_the_rest_as_a_count() {
    let (_socket, port) = refusing();
    let script = connecting(5, "127.0.0.1", port) + "read -r _";
    let mut child = run(&["--", "bash", "-c", &script]).stdin(Stdio::piped()).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut first = String::new();
    errors.read_line(&mut first).unwrap();
    let start = format!("sidetrack: bash: 127.0.0.1:{port}: connection refused");
    assert!(first.starts_with(&start) && first.contains("check that the server runs"), "{first}");
    // It waits for this line.
    child.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    let mut rest = Vec::new();
    errors.read_to_end(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    // On a slow machine there may be more than one count.
    let counts = ours(&rest);
    let count = |line: &String| {
        let count = line.strip_prefix(&format!("{start}, ")).unwrap_or_else(|| panic!("{counts:?}"));
        match count.split(' ').next().unwrap() {
            "once" => 1,
            number => number.parse::<usize>().unwrap(),
        }
    };
    assert_eq!(counts.iter().map(count).sum::<usize>(), 4, "{counts:?}");
}

#[test]
fn each_kind_of_failure_has_one_line_and_quiet_silences_all() {
    let folder = tempfile::tempdir().unwrap();
    let (_socket, port) = refusing();
    // A hop that never answers: the kernel accepts for it.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let hop = silent.local_addr().unwrap();
    let slow = format!(
        "version = 1\ndefault = 'deny'\n[limits]\nconnect_timeout_ms = 200\n[[rule]]\nname = 'all'\nmatch = {{}}\ncarrier = 'socks5://{hop}'\nconnect = 'early'\n"
    );
    for (config, to, port, said) in [
        ("version = 1\ndefault = 'deny'\n", "192.0.2.1", 80, "192.0.2.1:80: denied by policy ("),
        ("version = 1\ndefault = 'direct'\n", "127.0.0.1", port, "connection refused"),
        (&slow, "192.0.2.1", 80, "no answer in time"),
    ] {
        let file = folder.path().join("sidetrack.toml");
        std::fs::write(&file, config).unwrap();
        let script = connecting(1, to, port);
        let arguments = ["--config", file.to_str().unwrap(), "--", "bash", "-c", &script];
        let lines = ours(&run(&arguments).output().unwrap().stderr);
        let [line] = &lines[..] else { panic!("{said}: {lines:?}") };
        assert!(
            line.contains(said) && line.starts_with("sidetrack: bash: ") && line.contains("; "),
            "{line}"
        );
        let quiet = run(&[&["--quiet"], &arguments[..]].concat()).output().unwrap();
        assert_eq!(ours(&quiet.stderr), [""; 0], "{said}");
    }
}

#[test]
fn every_line_is_one_write() {
    let (_socket, port) = refusing();
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    // Each write to it arrives as one message.
    let script = connecting(3, "127.0.0.1", port) + "echo the command >&2";
    let status = run(&["--", "bash", "-c", &script]).stderr(OwnedFd::from(theirs)).status().unwrap();
    assert!(status.success());
    ours.set_nonblocking(true).unwrap();
    let mut messages = Vec::new();
    let mut buffer = [0; 65_536];
    while let Ok(length @ 1..) = ours.recv(&mut buffer) {
        messages.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    assert!(messages.iter().any(|message| message.contains("connection refused (")), "{messages:?}");
    assert!(messages.iter().any(|message| message.contains(" more\n")), "{messages:?}");
    for message in messages {
        let whole = message.starts_with("sidetrack: ") && message.ends_with('\n');
        assert!(whole || message == "the command\n", "{message:?}");
    }
}
