//! `--publish`: a port of this host reaches a server of the command, and nothing else.

use super::{command, run, text};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Child;
use std::time::Duration;

/// Servers at ports 7000 (IPv4) and 7001 (IPv6 alone) that send back what they get in capitals, until standard input ends.
const SERVE: &str = "import socket, sys, threading\n\
    def serve(it):\n\
    \x20 while data := it.recv(65536): it.sendall(data.upper())\n\
    \x20 it.close()\n\
    def accept(server):\n\
    \x20 while True: threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()\n\
    for family, at in (socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1'):\n\
    \x20 server = socket.socket(family); server.bind((at, 7000 + (family == socket.AF_INET6))); server.listen()\n\
    \x20 threading.Thread(target=accept, args=(server,), daemon=True).start()\n\
    print('ready', flush=True); sys.stdin.read()";

/// A `run` whose servers are up, and where its ports are published.
fn serving(arguments: &[&str], ports: &[u16]) -> (Child, Vec<SocketAddr>) {
    let published: Vec<_> = ports.iter().map(|port| format!("--publish=0:{port}")).collect();
    let arguments: Vec<_> = arguments.iter().copied().chain(published.iter().map(String::as_str)).collect();
    let mut command = command(&arguments, &["python3", "-c", SERVE]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap());
    let address = |_| {
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        let words: Vec<_> = line.split(' ').collect();
        words.get(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{line}"))
    };
    let places = ports.iter().map(address).collect();
    let mut ready = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    // What it prints later must not fill the pipe.
    std::thread::spawn(move || std::io::copy(&mut told, &mut std::io::sink()));
    (child, places)
}

fn client(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// What comes back for this text, after the end of what is sent.
fn answered(mut stream: TcpStream, sent: &str) -> String {
    stream.write_all(sent.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    all
}

#[test]
fn servers_of_the_command_are_reached_and_seen() {
    let folder = tempfile::tempdir().unwrap();
    for (number, more) in [&[][..], &["--jail"]].into_iter().enumerate() {
        let records = folder.path().join(number.to_string());
        // A server of this host at a port where the command has none: it must not be reached.
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let ports = [7000, 7001, other.local_addr().unwrap().port()];
        let arguments = [&["--records", records.to_str().unwrap()], more].concat();
        let (mut child, places) = serving(&arguments, &ports);
        let (first, second) = (client(places[0]), client(places[0]));
        assert_eq!(answered(second, &"ab".repeat(300_000)), "AB".repeat(300_000));
        let pid = child.id().to_string();
        let flows = std::process::Command::new(env!("CARGO_BIN_EXE_sidetrack"))
            .args(["flows", "--json", "--pid", &pid, "listener == publish"])
            .output()
            .unwrap();
        assert_eq!(text(&flows.stdout).lines().count(), 1, "{}{}", text(&flows.stdout), text(&flows.stderr));
        assert_eq!(answered(first, "first"), "FIRST");
        assert_eq!(answered(client(places[1]), "six"), "SIX");
        let mut refused = client(places[2]);
        let end = refused.read(&mut [0]);
        assert!(!matches!(end, Ok(1..)), "{end:?}");
        other.set_nonblocking(true).unwrap();
        assert!(other.accept().is_err(), "the server of this host was reached");
        drop(child.stdin.take());
        assert_eq!(child.wait().unwrap().code(), Some(0));
        let written = std::fs::read_to_string(&records).unwrap();
        let of = |what: &str| written.lines().filter(|line| line.contains(what)).count();
        assert_eq!(
            (of("\"listener\":\"publish\""), of("\"orig_dst\":\"127.0.0.1:7000\"")),
            (4, 2),
            "{written}"
        );
        assert_eq!(
            (of("\"bytes_up\":600000,\"bytes_down\":600000"), of("\"reason\":\"refused\"")),
            (1, 1),
            "{written}"
        );
    }
}

#[test]
fn a_busy_port_and_a_wrong_one_are_clear_errors() {
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = busy.local_addr().unwrap().port();
    for (published, mode, why) in [
        (format!("{port}:80"), "isolated", format!("address 127.0.0.1:{port} is in use by")),
        ("0:0".to_owned(), "isolated", "write [ADDRESS:]PORT[:PORT]".to_owned()),
        ("8080".to_owned(), "cgroup", "listen in the network of this host".to_owned()),
    ] {
        let ended = run(&["--publish", &published, "--mode", mode], "print('started')");
        let said = text(&ended.stderr);
        assert!(ended.status.code() == Some(125) && ended.stdout.is_empty(), "{published}: {said}");
        assert!(said.contains(&why), "{said}");
    }
}
