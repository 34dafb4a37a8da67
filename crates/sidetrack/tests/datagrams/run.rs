//! UDP of a command under `sidetrack run`, with Python, dig and socat: what passes, what is refused, and the records.

use super::Echo;
use super::node::{Record, Up};
use sidetrack_testkit::{eventually, is_root};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What all scripts begin with: a socket for an address, connected or not, with a time limit.
const PRELUDE: &str = "import socket, sys\n\
    def sock(ip, to=None):\n\
    \x20 s = socket.socket(socket.AF_INET6 if ':' in ip else socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(60)\n\
    \x20 if to: s.connect((ip, to))\n\
    \x20 return s\n";

/// A folder that an ordinary user may use, with the program in it: the build directory may be closed to that user.
struct Place {
    folder: tempfile::TempDir,
    /// Whether commands run as an ordinary user.
    ordinary: bool,
}

impl Place {
    fn new(ordinary: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let program = [env!("CARGO_BIN_EXE_sidetrack"), folder.path().join("sidetrack").to_str().unwrap()]
            .map(str::to_owned);
        assert!(Command::new("cp").args(program).status().unwrap().success());
        Self { folder, ordinary: ordinary && is_root() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `sidetrack run`, with records in the file of this name.
    fn command(&self, records: &str, options: &[&str], command: &[&str]) -> Command {
        let program = self.path("sidetrack");
        let mut run = match self.ordinary {
            true => {
                let mut run = Command::new("setpriv");
                run.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
                run
            }
            false => Command::new(program),
        };
        run.arg("run").arg("--records").arg(self.path(records)).args(options).arg("--").args(command);
        run.env_remove("SIDETRACK_VIA").env("XDG_RUNTIME_DIR", self.folder.path()).stdin(Stdio::null());
        run.current_dir("/");
        run
    }

    /// Runs a script and returns what it prints, and the records.
    fn python(&self, options: &[&str], script: &str, arguments: &[String]) -> (String, Vec<Record>) {
        let script = format!("{PRELUDE}{script}");
        let arguments = arguments.iter().map(String::as_str);
        let command: Vec<_> = ["python3", "-c", &script].into_iter().chain(arguments).collect();
        let ended = self.command("records", options, &command).output().unwrap();
        let told = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{told}");
        (String::from_utf8(ended.stdout).unwrap(), records(&self.path("records")))
    }

    /// Writes a configuration; returns the options that name it.
    fn config(&self, text: &str) -> [String; 2] {
        let file = self.path("sidetrack.toml");
        std::fs::write(&file, format!("version = 1\n{text}")).unwrap();
        ["--config".to_owned(), file.to_str().unwrap().to_owned()]
    }
}

fn records(file: &Path) -> Vec<Record> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let _ = std::fs::remove_file(file);
    text.lines().map(|line| Record(serde_json::from_str(line).unwrap())).collect()
}

#[test]
fn datagrams_of_every_length_are_answered_from_the_asked_address() {
    let servers = ["127.0.0.1", "::1"].map(Echo::start);
    let arguments = servers.each_ref().map(|server| server.address.port().to_string());
    let script = "\
        for ip, port in (('127.0.0.1', int(sys.argv[1])), ('::1', int(sys.argv[2]))):\n\
        \x20 for connected in (False, True):\n\
        \x20  s = sock(ip, port if connected else None)\n\
        \x20  for length in (0, 1, 1473, 65507):\n\
        \x20   sent = bytes(at % 251 for at in range(length))\n\
        \x20   s.send(sent) if connected else s.sendto(sent, (ip, port))\n\
        \x20   got, peer = s.recvfrom(70000)\n\
        \x20   assert got == sent and peer[:2] == (ip, port), (len(got), peer)\n";
    for ordinary in [false, true] {
        let (_, records) = Place::new(ordinary).python(&[], script, &arguments);
        assert_eq!(records.len(), 4, "{records:?}");
        for record in records {
            assert_eq!(record.fate(), ("", "direct", "ok"), "{record:?}");
            assert_eq!((record.text("intercept"), record.text("protocol")), ("run", "udp"));
            assert_eq!((record.number("packets_up"), record.number("packets_down")), (4, 4));
            assert!(record.text("process").starts_with("python3"), "{record:?}");
            assert!(servers.iter().any(|server| server.address == record.address("orig_dst")));
        }
    }
}

#[test]
fn one_socket_reaches_several_servers_from_one_outside_port() {
    let servers = ["127.0.0.1"; 3].map(Echo::start);
    let arguments = servers.each_ref().map(|server| server.address.port().to_string());
    let script = "\
        s = sock('127.0.0.1'); ports = [int(port) for port in sys.argv[1:]]\n\
        for port in ports: s.sendto(b'who', ('127.0.0.1', port))\n\
        heard = dict(reversed(s.recvfrom(100)) for _ in ports)\n\
        assert sorted(peer[1] for peer in heard) == sorted(ports), heard\n\
        assert len(set(heard.values())) == 1, heard\n\
        print(set(heard.values()).pop().decode())\n";
    let place = Place::new(true);
    let (said, records) = place.python(&[], script, &arguments);
    let outside: std::net::SocketAddr = said.trim().parse().unwrap();
    assert!(outside.ip().is_loopback(), "{said}");
    assert_eq!(records.len(), 3, "{records:?}");
}

#[test]
fn what_is_denied_is_refused_and_rules_see_the_program() {
    let [open, closed] = ["127.0.0.1"; 2].map(Echo::start);
    let place = Place::new(true);
    let (name, _) =
        place.python(&[], "import os; print(os.path.basename(os.readlink('/proc/self/exe')))\n", &[]);
    let options = place.config(&format!(
        "default = 'deny'\n[[rule]]\nname = 'python'\ncarrier = 'direct'\n\
         match = {{ protocol = 'udp', process = '{}', port = {} }}\n",
        name.trim(),
        open.address.port()
    ));
    let options = options.each_ref().map(String::as_str);
    let script = "\
        a, b = (sock('127.0.0.1', int(port)) for port in sys.argv[1:3])\n\
        a.send(b'allowed'); assert a.recv(100) == b'allowed'\n\
        for _ in range(3):\n\
        \x20 try: b.send(b'denied'); b.recv(100); sys.exit('answered')\n\
        \x20 except ConnectionRefusedError: pass\n\
        mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); mine.bind(('127.0.0.1', 0))\n\
        other = sock('127.0.0.1', mine.getsockname()[1]); other.send(b'inside')\n\
        mine.settimeout(60); print(mine.recv(100).decode())\n";
    let arguments = [open.address.port().to_string(), closed.address.port().to_string()];
    let (said, records) = place.python(&options, script, &arguments);
    assert_eq!(said.trim(), "inside", "sockets of the command reach each other");
    let [denied, allowed] = records.as_slice() else { panic!("{records:?}") };
    assert_eq!(denied.fate(), ("", "", "policy_denied"));
    assert_eq!(denied.address("orig_dst"), closed.address);
    assert!(denied.text("process").starts_with("python3"), "{denied:?}");
    assert_eq!(allowed.fate(), ("python", "direct", "ok"));
}

#[test]
fn a_closed_port_is_refused_as_without_us() {
    // Bound by us and connected elsewhere: the port is closed, and stays so.
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap();
    closed.connect("127.0.0.1:1").unwrap();
    let script = "\
        s = sock('127.0.0.1', int(sys.argv[1])); s.send(b'x')\n\
        try: s.recv(100); sys.exit('answered')\n\
        except ConnectionRefusedError: print('refused')\n";
    let arguments = [closed.local_addr().unwrap().port().to_string()];
    let (said, _) = Place::new(true).python(&[], script, &arguments);
    assert_eq!(said.trim(), "refused");
}

#[test]
fn hops_get_the_name_that_the_command_has_asked_for() {
    let server = Echo::start("127.0.0.1");
    let rule = format!(
        "[[rule]]\nname = 'game'\nmatch = {{ protocol = 'udp', host = 'game.example' }}\nto = '{}'\ncarrier = 'direct'\n",
        server.address
    );
    let script = "\
        s = sock('127.0.0.1'); to = socket.getaddrinfo('game.example', 3478, socket.AF_INET, socket.SOCK_DGRAM)[0][4]\n\
        assert to[0].startswith('198.1'), to\n\
        for n in range(3):\n\
        \x20 s.sendto(b'move %d' % n, to); got, peer = s.recvfrom(100)\n\
        \x20 assert got == b'move %d' % n and peer == to, (got, peer)\n";
    for (kind, scheme) in [("socks", "socks5"), ("http", "http")] {
        let listen = format!("[[listen]]\nname = 'proxy'\nkind = '{kind}'\naddress = '127.0.0.1:0'\n");
        let up = Up::start("default = \"deny\"\n", &format!("{listen}{rule}"));
        let hop = format!("{scheme}://{}", up.addresses("proxy")[0]);
        let (_, records) = Place::new(true).python(&["--via", &hop], script, &[]);
        let [record] = records.as_slice() else { panic!("{records:?}") };
        assert_eq!((record.text("carrier"), record.text("reason")), (hop.as_str(), "ok"));
        assert_eq!((record.text("orig_dst"), record.text("host")), ("game.example:3478", "game.example"));
        assert_eq!(record.number("packets_down"), 3);
    }
}

#[test]
fn the_last_datagram_before_the_end_arrives() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(sidetrack_testkit::LIMIT)).unwrap();
    let arguments = [server.local_addr().unwrap().port().to_string()];
    let script = "sock('127.0.0.1').sendto(b'last words', ('127.0.0.1', int(sys.argv[1])))\n";
    let (_, records) = Place::new(true).python(&[], script, &arguments);
    let mut buffer = [0; 100];
    let length = server.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"last words");
    assert_eq!(records.len(), 1, "{records:?}");
}

#[test]
fn a_flow_can_be_killed_and_the_next_datagram_begins_another() {
    let server = Echo::start("127.0.0.1");
    let place = Place::new(false);
    let script = format!(
        "{PRELUDE}s = sock('127.0.0.1', {})\n\
         for line in sys.stdin:\n\
         \x20 s.send(line.encode()); assert s.recv(100) == line.encode(); print('echo', flush=True)\n",
        server.address.port()
    );
    let mut command = place.command("records", &[], &["python3", "-c", &script]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut lines = BufReader::new(output).lines();
    let mut say = |text: &[u8]| {
        input.write_all(text).unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "echo");
    };
    say(b"one\n");
    let flows = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
        command.env("XDG_RUNTIME_DIR", place.folder.path()).arg("flows");
        let ended = command.args(["--pid", &child.id().to_string()]).args(arguments).output().unwrap();
        String::from_utf8(ended.stdout).unwrap()
    };
    eventually("the flow is listed", || flows(&["--json"]).contains("\"protocol\":\"udp\""));
    assert!(flows(&["kill", "protocol == udp"]).contains('1'));
    eventually("it has ended", || !flows(&["--json"]).contains("\"protocol\":\"udp\""));
    say(b"two\n");
    drop(input);
    assert!(child.wait().unwrap().success());
    let records = records(&place.path("records"));
    let reasons: Vec<_> = records.iter().map(|record| record.text("reason")).collect();
    assert_eq!(reasons, ["killed", "ok"], "{records:?}");
}

#[test]
fn quic_is_refused_where_tls_is_intercepted() {
    let place = Place::new(false);
    let folder = place.path("ca");
    let folder = folder.to_str().unwrap();
    let mut made = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    let made = made.args(["ca", "init", "--any-name", "--dir", folder]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let script = "\
        s = sock('192.0.2.1', 443); s.send(b'x')\n\
        try: s.recv(100); sys.exit('answered')\n\
        except ConnectionRefusedError: print('refused')\n";
    let (said, records) = place.python(&["--tap", "--ca", folder], script, &[]);
    assert_eq!(said.trim(), "refused");
    let [record] = records.as_slice() else { panic!("{records:?}") };
    assert_eq!(record.text("reason"), "unsupported", "{record:?}");
    assert!(record.text("detail").contains("QUIC"), "{record:?}");
}

#[test]
fn programs_reach_their_servers() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let place = Place::new(true);
    let port = server.local_addr().unwrap().port().to_string();
    let dig = ["dig", "+short", "+tries=1", "+time=60", "@127.0.0.1", "-p", &port, "host.example", "A"];
    if super::programs::is_here("dig", &["-v"]) {
        let asking = place.command("records", &[], &dig).stdout(Stdio::piped()).spawn().unwrap();
        super::programs::answer_one(&server);
        let said = asking.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "192.0.2.53");
    }
    let echo = Echo::start("::1");
    let to = format!("UDP6:{}", echo.address);
    if super::programs::is_here("socat", &["-V"]) {
        let mut command = place.command("records", &[], &["socat", "-t", "60", "STDIO", &to]);
        let mut socat = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = socat.stdin.take().unwrap();
        input.write_all(b"a line").unwrap();
        let mut said = [0; 6];
        socat.stdout.take().unwrap().read_exact(&mut said).unwrap();
        assert_eq!(&said, b"a line");
        // It ends at its next word, because its output has no reader any more.
        input.write_all(b"again").unwrap();
        drop(input);
        let _ = socat.wait();
    }
}
