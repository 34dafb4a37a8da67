//! Programs with time-outs, retries and happy eyeballs of their own end under `sidetrack run` as they do without it.

use crate::probe::far_side;
use sidetrack_testkit::{Line, is_root, nft};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};

/// What a program prints on standard output, with its exit code; in the router's network, directly or under `run`.
fn ended(line: &Line, is_run: bool, program: &[&str]) -> (Option<i32>, String) {
    let program: Vec<String> = program.iter().map(ToString::to_string).collect();
    line.router.run(move || {
        let ours = [env!("CARGO_BIN_EXE_sidetrack"), "run", "--quiet", "--"].map(str::to_owned);
        let argv = [if is_run { ours.to_vec() } else { Vec::new() }, program].concat();
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).env_remove("SIDETRACK_VIA").stdin(Stdio::null());
        let output = command.output().expect("it is installed (DEPS_TEST)");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    })
}

/// Serves a short page at this port of both IP versions, as long as the test runs.
fn serve_page(port: u16) {
    for server in ["10.0.2.1", "fd00:2::1"] {
        let listener = TcpListener::bind((server, port)).expect("listen");
        std::thread::spawn(move || {
            for mut client in listener.incoming().map_while(Result::ok) {
                let _ = client.read(&mut [0; 4096]);
                let _ =
                    client.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
            }
        });
    }
}

#[test]
fn curl_finds_the_other_ip_version_and_keeps_its_time_outs() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    if !far_side(&line) {
        return;
    }
    line.server.run(|| {
        for (port, way) in
            [(7011, "reject with tcp reset"), (7012, "reject with icmpx type no-route"), (7013, "drop")]
        {
            let rule = format!("add rule inet far in meta nfproto ipv6 tcp dport {port} {way}");
            nft(&rule).expect("a rule");
            serve_page(port);
        }
    });
    let ask = |is_run: bool, port: &str, patience_s: &str| {
        let addresses = format!("far.test:{port}:10.0.2.1,[fd00:2::1]");
        let url = format!("http://far.test:{port}/");
        let format = "%{http_code} %{remote_ip} %{num_connects}";
        let timed = ["curl", "-s", "-w", format, "--connect-timeout", patience_s, "--resolve"];
        ended(&line, is_run, &[&timed[..], &[addresses.as_str(), url.as_str()]].concat())
    };
    for (port, patience_s, code) in [
        ("7011", "60", 0),
        ("7012", "60", 0),
        ("7013", "60", 0),
        ("7002", "60", 7),
        // Nothing answers.
        ("7007", "0.5", 28),
    ] {
        let direct = ask(false, port, patience_s);
        assert_eq!(direct.0, Some(code), "{port}: {direct:?}");
        assert_eq!(ask(true, port, patience_s), direct, "{port}");
    }
}

#[test]
fn nmap_sees_what_it_sees_without_us() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    if !far_side(&line) {
        return;
    }
    // 1,000 ports; the one that says nothing would take long.
    let scan =
        "nmap -sT -Pn -n --unprivileged --min-rtt-timeout 5s --max-retries 2 -p 7000-7006,7008-8000 10.0.2.1";
    let scan: Vec<_> = scan.split(' ').collect();
    let seen = |is_run| {
        let (code, text) = ended(&line, is_run, &scan);
        // These lines have times.
        let timed = ["Starting Nmap", "Host is up", "Nmap done"];
        let lines = text.lines().filter(|line| !timed.iter().any(|start| line.starts_with(start)));
        (code, lines.map(str::to_owned).collect::<Vec<_>>())
    };
    let direct = seen(false);
    assert!(direct.1.iter().any(|line| line.starts_with("7001/tcp open")), "{direct:?}");
    assert!(direct.1.iter().any(|line| line.contains("995 closed tcp ports (conn-refused)")), "{direct:?}");
    assert_eq!(seen(true), direct);
}
