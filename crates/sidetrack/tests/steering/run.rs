//! Datagrams of a command in the host's network: `sidetrack run --mode cgroup`.

use crate::node::Record;
use crate::node::traces::Traces;
use sidetrack_testkit::datagrams::Echo;
use sidetrack_testkit::{Line, is_root};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// Asks each server, with and without a connected socket, and then the last port, which is denied.
const SCRIPT: &str = "import socket, sys\n\
    def sock(ip):\n\
    \x20 s = socket.socket(socket.AF_INET6 if ':' in ip else socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(60)\n\
    \x20 return s\n\
    for ip, port in (('10.0.2.1', int(sys.argv[1])), ('fd00:2::1', int(sys.argv[2]))):\n\
    \x20 for connected in (False, True):\n\
    \x20  s = sock(ip)\n\
    \x20  if connected: s.connect((ip, port))\n\
    \x20  for length in (0, 1, 1473, 65000):\n\
    \x20   sent = bytes(at % 251 for at in range(length))\n\
    \x20   s.send(sent) if connected else s.sendto(sent, (ip, port))\n\
    \x20   got, peer = s.recvfrom(70000)\n\
    \x20   assert got == sent and peer[:2] == (ip, port), (len(got), peer)\n\
    s = sock('10.0.2.1'); s.connect(('10.0.2.1', int(sys.argv[3])))\n\
    try: s.send(b'denied'); s.recv(100); sys.exit('answered')\n\
    except ConnectionRefusedError: print('refused')\n";

fn command(folder: &Path, rest: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.args(["run", "--mode", "cgroup", "--records"]).arg(folder.join("records"));
    command.arg("--config").arg(folder.join("sidetrack.toml")).arg("--").args(rest);
    command.env_remove("SIDETRACK_VIA").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn datagrams_of_a_command_are_carried_and_no_rule_is_left() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let servers = line.server.run(|| ["10.0.2.1", "fd00:2::1", "10.0.2.1"].map(Echo::start));
    let ports = servers.each_ref().map(|server| server.address.port().to_string());
    let before = line.client.run(Traces::now);
    let folder = tempfile::tempdir().expect("a folder");
    let rules = format!(
        "version = 1\ndefault = 'direct'\n[[rule]]\nname = 'no'\naction = 'deny'\n\
         match = {{ protocol = 'udp', to = '10.0.2.1', port = {} }}\n",
        ports[2]
    );
    std::fs::write(folder.path().join("sidetrack.toml"), rules).expect("written");
    let [a, b, c] = ports.each_ref().map(String::as_str);
    let mut run = command(folder.path(), &["python3", "-c", SCRIPT, a, b, c]);
    let ended = line.client.run(move || run.output()).expect("it runs");
    let told = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{told}");
    assert_eq!(String::from_utf8_lossy(&ended.stdout).trim(), "refused", "{told}");
    let text = std::fs::read_to_string(folder.path().join("records")).expect("records");
    let records: Vec<_> =
        text.lines().map(|line| Record(serde_json::from_str(line).expect("a record"))).collect();
    assert_eq!(records.len(), 5, "{records:?}");
    for record in &records {
        assert_eq!((record.text("intercept"), record.text("protocol")), ("run", "udp"), "{record:?}");
    }
    let carried = records.iter().filter(|record| record.fate() == ("", "direct", "ok"));
    assert!(carried.clone().all(|record| record.number("packets_down") == 4), "{records:?}");
    assert_eq!(carried.count(), 4, "{records:?}");
    line.client.run(move || before.expect_back("after the end"));
}

#[test]
fn a_kill_leaves_no_rule_of_a_command() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let before = line.client.run(Traces::now);
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("sidetrack.toml"), "version = 1\ndefault = 'direct'\n")
        .expect("written");
    let mut run = command(folder.path(), &["sh", "-c", "echo ready; exec sleep 1000"]);
    let mut child = line.client.run(move || run.spawn()).expect("it starts");
    let output = child.stdout.take().expect("its output");
    assert_eq!(BufReader::new(output).lines().next().expect("a line").expect("text"), "ready");
    child.kill().expect("killed");
    child.wait().expect("ended");
    line.client.run(move || before.expect_back("after the kill"));
}
