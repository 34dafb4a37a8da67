//! `sidetrack run` inside `sidetrack run`: the limits of all count.

use super::lists::greeting;
use super::{command, text};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Output;
use std::sync::mpsc::channel;

const SIDETRACK: &str = env!("CARGO_BIN_EXE_sidetrack");

/// Prints what the server at each `HOST:PORT` says, or `refused`.
const TRY: &str = "import socket, sys\n\
    for at in sys.argv[1:]:\n\
    \x20 host, port = at.rsplit(':', 1)\n\
    \x20 try:\n\
    \x20\x20 with socket.create_connection((host, int(port)), timeout=60) as it: print(it.recv(9).decode())\n\
    \x20 except OSError: print('refused')\n";

/// Runs commands of `sidetrack run` inside each other, the outermost first, and in the last one a program that connects.
fn nested(options: &[&[&str]], destinations: &[&str]) -> Output {
    let (outer, inner) = options.split_first().unwrap();
    let mut words = Vec::new();
    for options in inner {
        words.extend([SIDETRACK, "run"]);
        words.extend(*options);
        words.push("--");
    }
    words.extend(["python3", "-c", TRY]);
    words.extend(destinations);
    command(outer, &words).output().unwrap()
}

fn printed(ended: &Output) -> Vec<String> {
    assert_eq!(ended.status.code(), Some(0), "{}", text(&ended.stderr));
    text(&ended.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn three_deep_a_server_of_the_host_is_reached() {
    let server = greeting().to_string();
    assert_eq!(printed(&nested(&[&[], &[], &[]], &[&server])), ["hello"]);
}

#[test]
fn the_limits_of_all_count() {
    let servers = [greeting(), greeting(), greeting(), greeting()].map(|at| at.to_string());
    let [a, b, c, d] = &servers;
    let all = [a.as_str(), b, c, d];
    let (outer, middle, inner) = (format!("{a},{b},{c}"), format!("{b},{c},{d}"), format!("{c},{d},{a}"));
    let jails =
        [["--nested", "--allow", &outer], ["--nested", "--allow", &middle], ["--nested", "--allow", &inner]];
    let ended = nested(&[&jails[0], &jails[1], &jails[2]], &all);
    assert_eq!(printed(&ended), ["refused", "refused", "hello", "refused"], "{}", text(&ended.stderr));
    // The outer one asks about connects, and the kernel lets only one ask.
    assert!(text(&ended.stderr).contains("asks about connects already"), "{}", text(&ended.stderr));
    // Inside, all may be allowed: the outer limit stays. Without limits inside, too.
    let open: [&[&str]; 3] = [&["--allow", "*,127.0.0.0/8,udp:*"], &["--deny", "192.0.2.1"], &[]];
    for inner in open {
        assert_eq!(printed(&nested(&[&["--nested", "--allow", b], inner], &[a, b])), ["refused", "hello"]);
    }
}

#[test]
fn hops_of_the_inner_one_are_reached_through_the_outer_one() {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = proxy.local_addr().unwrap();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let (mut client, _) = proxy.accept().unwrap();
        let mut greeting = [0; 3];
        client.read_exact(&mut greeting).unwrap();
        client.write_all(&[5, 0]).unwrap();
        let mut head = [0; 5];
        client.read_exact(&mut head).unwrap();
        let mut name = vec![0; usize::from(head[4])];
        client.read_exact(&mut name).unwrap();
        client.read_exact(&mut [0; 2]).unwrap();
        client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
        client.write_all(b"hello").unwrap();
        tell.send(text(&name)).unwrap();
    });
    let via = format!("socks5://{at}");
    let ended = nested(&[&["--nested", "--allow", &at.to_string()], &["--via", &via]], &["web.example:80"]);
    assert_eq!(printed(&ended), ["hello"], "{}", text(&ended.stderr));
    assert_eq!(told.recv().unwrap(), "web.example");
}

#[test]
fn what_cannot_be_inside_says_why() {
    let ended = nested(&[&["--jail"], &[]], &[]);
    assert_eq!(ended.status.code(), Some(125));
    assert!(text(&ended.stderr).contains("give the outer one --nested"), "{}", text(&ended.stderr));
    if rustix::process::geteuid().is_root() {
        let ended = nested(&[&[], &["--mode", "cgroup"]], &[]);
        assert_eq!(ended.status.code(), Some(125));
        assert!(text(&ended.stderr).contains("leave --mode out"), "{}", text(&ended.stderr));
    }
}
