//! `sidetrack run` as a person types it: arguments, exit codes, what others see of it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use sidetrack_testkit::{in_namespace, ip, is_root};
use std::process::{Command, Output, Stdio};

fn run(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.arg("run").args(arguments).env_remove("SIDETRACK_VIA").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn output(arguments: &[&str]) -> Output {
    run(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn its_own_failures_have_an_exit_code_that_no_command_gives() {
    for arguments in [
        &["--config", "/nowhere/sidetrack.toml", "--", "true"][..],
        &["--via", "nonsense", "--", "true"],
        &["--via", "https://gw.example:443?ca=/nowhere/ca.pem", "--", "true"],
        &["--via-file", "/nowhere/hops", "--", "true"],
        &["--mode", "magic", "--", "true"],
        &["--tap", "--ca", "/nowhere", "--", "true"],
        &[],
    ] {
        let ended = output(arguments);
        assert_eq!(ended.status.code(), Some(125), "{arguments:?}: {}", text(&ended.stderr));
        assert!(!ended.stderr.is_empty(), "{arguments:?}");
    }
    assert_eq!(output(&["--", "sh", "-c", "exit 2"]).status.code(), Some(2), "the command's own");
    assert_eq!(output(&["--", "/nowhere/command"]).status.code(), Some(127));
    assert_eq!(output(&["--help"]).status.code(), Some(0));
}

#[test]
fn an_unknown_option_is_an_error_and_no_command() {
    for (wrong, right) in [("--vis", "--via"), ("--verbos", "--verbose"), ("--confg", "--config")] {
        let ended = output(&[wrong, "socks5://127.0.0.1:1", "--", "true"]);
        let told = text(&ended.stderr);
        assert_eq!(ended.status.code(), Some(125), "{told}");
        assert!(told.contains(&format!("unexpected argument '{wrong}'")), "{told}");
        assert!(told.contains(&format!("'{right}'")), "{told}");
    }
    // The command's own options stay its own, with and without `--`.
    for arguments in [&["--", "echo", "--via", "-v", "--", "x"][..], &["echo", "--via", "-v", "--", "x"]] {
        let ended = output(arguments);
        assert_eq!(text(&ended.stdout), "--via -v -- x\n", "{}", text(&ended.stderr));
    }
}

/// Prints the arguments of `sidetrack run`, which is the parent of this command.
const PARENTS_ARGUMENTS: [&str; 3] = ["sh", "-c", "cat /proc/$PPID/cmdline"];

#[test]
fn passwords_of_hops_are_not_seen_in_a_list_of_processes() {
    for via in
        [&["--via", "socks5://ann:sesame@127.0.0.1:1"][..], &["--via=http://ann:sesame@[::1]:1?tfo=true"]]
    {
        let arguments = [via, &["--"], &PARENTS_ARGUMENTS].concat();
        let ended = output(&arguments);
        let (seen, told) = (text(&ended.stdout), text(&ended.stderr));
        assert!(seen.contains("ann:******@"), "{seen} {told}");
        assert!(!seen.contains("sesame"), "{seen}");
        assert!(told.contains("warning") && told.contains("--via-file"), "{told}");
        assert!(!told.contains("sesame"), "{told}");
    }
}

#[test]
fn hops_come_from_a_file_or_from_the_environment() {
    let proxy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap();
    let hop = format!("http://ann:sesame@{address}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hops");
    std::fs::write(&file, format!("# a hop\n\n{hop}\n")).unwrap();
    let asked = |mut command: Command| {
        let child = command.spawn().unwrap();
        let (mut client, _) = proxy.accept().unwrap();
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            std::io::Read::read_exact(&mut client, &mut byte).unwrap();
            request.push(byte[0]);
        }
        std::io::Write::write_all(&mut client, b"HTTP/1.1 503 no\r\nContent-Length: 0\r\n\r\n").unwrap();
        drop(client);
        let ended = child.wait_with_output().unwrap();
        assert!(!text(&ended.stderr).contains("sesame"), "{}", text(&ended.stderr));
        assert_eq!(text(&ended.stdout).trim(), "", "the command does not see the hops");
        text(&request)
    };
    // The variable is for us, not for the command.
    let script = "echo $SIDETRACK_VIA; exec 3<>/dev/tcp/192.0.2.1/80; read -r _ <&3";
    let command = ["--", "bash", "-c", script];
    let by_file = asked(run(&[&["--via-file", file.to_str().unwrap()], &command[..]].concat()));
    let mut with_variable = run(&command);
    with_variable.env("SIDETRACK_VIA", format!(" {hop} "));
    for request in [by_file, asked(with_variable)] {
        assert!(request.starts_with("CONNECT 192.0.2.1:80 "), "{request}");
        assert!(request.contains("Proxy-Authorization: Basic"), "{request}");
    }
    for bad in ["", "# nothing\n", "gw:sesame\n"] {
        std::fs::write(&file, bad).unwrap();
        let ended = output(&["--via-file", file.to_str().unwrap(), "--", "true"]);
        assert_eq!(ended.status.code(), Some(125), "{bad}");
        assert!(!text(&ended.stderr).contains("sesame"), "{}", text(&ended.stderr));
    }
    let mut bad = run(&["--", "true"]);
    let ended = bad.env("SIDETRACK_VIA", "socks5://a:1 gw:sesame").output().unwrap();
    assert_eq!(ended.status.code(), Some(125));
    assert!(text(&ended.stderr).contains("hop 2"), "{}", text(&ended.stderr));
}

/// A server on a free port of `argv[1]`, and a client of it, in one program.
const SERVER_AND_CLIENT: &str = "import socket, sys, threading\n\
    family = socket.AF_INET6 if ':' in sys.argv[1] else socket.AF_INET\n\
    server = socket.create_server((sys.argv[2], 0), family=family)\n\
    port = server.getsockname()[1]\n\
    def serve():\n\
    \x20 for _ in range(2):\n\
    \x20\x20 peer, _ = server.accept(); peer.sendall(b'inside'); peer.close()\n\
    threading.Thread(target=serve).start()\n\
    for _ in range(2):\n\
    \x20 with socket.create_connection((sys.argv[1], port)) as client: print(client.recv(9).decode())\n";

#[test]
fn a_server_that_the_command_starts_is_reached_by_the_command() {
    // No rule lets anything out: what answers is inside.
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("sidetrack.toml");
    std::fs::write(&config, "version = 1\ndefault = 'deny'\n").unwrap();
    let options = ["--config", config.to_str().unwrap(), "--", "python3", "-c", SERVER_AND_CLIENT];
    for place in
        [["127.0.0.1", "127.0.0.1"], ["127.0.0.1", "0.0.0.0"], ["localhost", "127.0.0.1"], ["::1", "::"]]
    {
        let ended = output(&[&options[..], &place].concat());
        assert_eq!(text(&ended.stdout), "inside\ninside\n", "{place:?}: {}", text(&ended.stderr));
    }
}

#[test]
fn a_server_of_the_host_is_reached_where_the_command_has_none() {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; cat <&3");
    let child = run(&["--", "bash", "-c", &script]).spawn().unwrap();
    let (mut client, _) = server.accept().unwrap();
    std::io::Write::write_all(&mut client, b"the host's").unwrap();
    drop(client);
    let ended = child.wait_with_output().unwrap();
    assert_eq!(text(&ended.stdout), "the host's", "{}", text(&ended.stderr));
}

/// The name server of a host: `there.example` has an address and a TXT record, nothing else exists. Tells what it is asked.
const NAME_SERVER: &str = r#"
import socket, struct, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 53))
print('ready', flush=True)
while True:
    q, peer = s.recvfrom(4096)
    at, labels = 12, []
    while q[at]: labels.append(q[at+1:at+1+q[at]].decode()); at += 1 + q[at]
    kind = struct.unpack('>H', q[at+1:at+3])[0]
    name = '.'.join(labels).lower()
    print(name, kind, file=sys.stderr, flush=True)
    data = {1: bytes([127, 0, 0, 1]), 16: b'\x05hello'}.get(kind, b'') if name == 'there.example' else b''
    code = 0 if name == 'there.example' else 3
    answer = b'\xc0\x0c' + struct.pack('>HHIH', kind, 1, 5, len(data)) + data if data else b''
    s.sendto(q[:2] + bytes([0x81, 0x80 | code]) + struct.pack('>HHHH', 1, bool(data), 0, 0) + q[12:at+5] + answer, peer)
"#;

/// Asks the resolver of `/etc/resolv.conf` for name and type, and prints code and the data of the first answer.
const QUESTION: &str = r#"
import socket, struct, sys
server = [l.split()[1] for l in open('/etc/resolv.conf') if l.startswith('nameserver')][0]
for word in sys.argv[1:]:
    name, kind = word.split('/')
    q = b'\x12\x34\x01\x00\x00\x01' + bytes(6)
    for label in name.split('.'): q += bytes([len(label)]) + label.encode()
    q += b'\0' + struct.pack('>HH', int(kind), 1)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(50); s.sendto(q, (server, 53))
    a = s.recv(4096)
    print(word, a[3] & 15, a[len(q)+12:].hex() if a[7] else '-')
"#;

#[test]
fn names_are_answered_by_whom_the_rules_say() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("server.py", NAME_SERVER);
    write("question.py", QUESTION);
    write("resolv.conf", "nameserver 127.0.0.1\n");
    write("nsswitch.conf", "hosts: files dns\n");
    write(
        "part.toml",
        "version = 1\ndefault = 'direct'\n[[rule]]\nname = 'p'\nmatch = { host = 'gone.example' }\ncarrier = 'socks5://127.0.0.1:1'\n",
    );
    // A host of its own, with a name server of its own.
    let script = "set -e; cd \"$1\"; ip link set lo up\n\
        mount --bind resolv.conf \"$(readlink -f /etc/resolv.conf)\"\n\
        mount --bind nsswitch.conf /etc/nsswitch.conf\n\
        mkfifo ready; python3 server.py >ready 2>asked & server=$!; read -r _ <ready\n\
        questions='there.example/1 there.example/16 gone.example/1 gone.example/15'\n\
        for options in '' '--via socks5://127.0.0.1:1' '--config part.toml' '--dns resolve --via socks5://127.0.0.1:1'; do\n\
        \x20 echo \"== $options\"; : >asked\n\
        \x20 \"$2\" run $options -- python3 question.py $questions\n\
        \x20 sed 's/^/asked /' asked | sort -u\n\
        done; kill $server";
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "bash", "-c", script, "x"]).arg(folder.path());
    let ended = command.arg(env!("CARGO_BIN_EXE_sidetrack")).env_remove("SIDETRACK_VIA").output().unwrap();
    let told = text(&ended.stdout);
    assert!(ended.status.success(), "{told}{}", text(&ended.stderr));
    let parts: Vec<&str> = told.split("== ").skip(1).map(|part| part.split_once('\n').unwrap().1).collect();
    let [direct, via, part, resolve] = parts.as_slice() else { panic!("{told}") };
    let has = |part: &str, line: &str| {
        assert!(part.lines().any(|one| one.starts_with(line)), "no '{line}' in\n{part}")
    };
    let ours = |name: &str| format!("{name}/1 0 c612");
    has(direct, &ours("there.example"));
    has(direct, "there.example/16 0 0568656c6c6f");
    has(direct, "gone.example/1 3 -");
    has(direct, "gone.example/15 3 -");
    // Names are the proxy's: no resolver here is asked.
    has(via, &ours("there.example"));
    has(via, "there.example/16 0 -");
    has(via, &ours("gone.example"));
    assert!(!via.contains("asked "), "{via}");
    // One of them is.
    has(part, "there.example/16 0 0568656c6c6f");
    has(part, &ours("gone.example"));
    assert!(!part.contains("asked gone"), "{part}");
    has(resolve, "there.example/1 0 7f000001");
    has(resolve, "gone.example/1 3 -");
    has(resolve, "gone.example/15 3 -");
    // A name that does not exist is told as it is asked for, once for each run that knows it.
    let errors = text(&ended.stderr);
    let said = "sidetrack: gone.example: the name cannot be resolved (the name does not exist)";
    assert_eq!(errors.matches(said).count(), 2, "{errors}");
}

/// The command's own calls and limits stay as they were.
#[test]
fn it_is_confined_and_its_command_is_not() {
    let script = "for i in $(seq 600); do \
                    grep -q 'Seccomp:.2' /proc/$PPID/status && grep -q 'core file size *0 *0' /proc/$PPID/limits && break; \
                    sleep 0.1; \
                  done; grep Seccomp: /proc/$PPID/status; grep Seccomp: /proc/self/status; ulimit -c";
    let own = text(
        &Command::new("sh")
            .args(["-c", "grep Seccomp: /proc/self/status; ulimit -c"])
            .output()
            .unwrap()
            .stdout,
    );
    let ended = output(&["--", "sh", "-c", script]);
    assert_eq!(text(&ended.stdout), format!("Seccomp:\t2\n{own}"), "{}", text(&ended.stderr));
}

/// Connects from one port to each of these ports of a host, one after the other; both ends close in order.
const ONE_PORT: &str = "
import socket, sys
for port in sys.argv[2:]:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    client.bind(('', 23456))
    client.connect((sys.argv[1], int(port)))
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b''
    client.close()
";

/// All connections of a command lead to one listener of ours. Those from one port to several servers are told apart.
#[test]
fn a_port_that_is_used_again_is_the_clients_port_again() {
    if !is_root() {
        return;
    }
    in_namespace(|| {
        ip("address add 10.99.0.1/32 dev lo");
        let servers = [(); 3].map(|()| std::net::TcpListener::bind("10.99.0.1:0").unwrap());
        let ports = servers.each_ref().map(|server| server.local_addr().unwrap().port().to_string());
        let ports = ports.each_ref().map(String::as_str);
        let accepted = servers.map(|server| {
            std::thread::spawn(move || {
                let (mut stream, _) = server.accept().unwrap();
                std::io::Read::read_to_end(&mut stream, &mut Vec::new()).unwrap();
                drop(stream);
                // No other connection was made for it.
                server.set_nonblocking(true).unwrap();
                server.accept().unwrap_err().kind()
            })
        });
        let folder = tempfile::tempdir().unwrap();
        let records = folder.path().join("records");
        let begin =
            ["--records", records.to_str().unwrap(), "--", "/usr/bin/python3", "-c", ONE_PORT, "10.99.0.1"];
        let ended = output(&[&begin[..], &ports].concat());
        assert!(ended.status.success(), "{}", text(&ended.stderr));
        for thread in accepted {
            assert_eq!(thread.join().unwrap(), std::io::ErrorKind::WouldBlock);
        }
        let lines = std::fs::read_to_string(&records).unwrap();
        let seen: Vec<_> = lines
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .map(|record| ["client", "reason"].map(|key| record[key].as_str().unwrap().to_owned()))
            .collect();
        assert_eq!(seen, [(); 3].map(|()| ["127.0.0.1:23456", "ok"]), "{lines}");
    });
}
