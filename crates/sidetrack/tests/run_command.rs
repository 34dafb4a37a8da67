//! `sidetrack run` as a person types it: arguments, exit codes, what others see of it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

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
