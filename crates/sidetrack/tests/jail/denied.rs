//! A denied `connect()` fails with `EACCES` over IPv4, too, before a packet is sent; and what this must not break.

use super::{command, run, text};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Stdio;

/// Prints the errors of connects in many ways, and their number of lines is known.
const WAYS: &str = "import ctypes, errno, os, socket, threading\n\
    def word(code): return errno.errorcode.get(code, 'ok')\n\
    four = ('192.0.2.1', 443)\n\
    s = socket.socket(); print('blocking', word(s.connect_ex(four)))\n\
    s = socket.socket(); s.setblocking(False); print('not blocking', word(s.connect_ex(four)))\n\
    s = socket.socket(socket.AF_INET6); print('mapped', word(s.connect_ex(('::ffff:192.0.2.1', 443))))\n\
    s = socket.socket(socket.AF_INET6); print('version 6', word(s.connect_ex(('2001:db8::1', 443))))\n\
    s = socket.socket(type=socket.SOCK_DGRAM); print('datagrams', word(s.connect_ex(four)))\n\
    found = []\n\
    def one():\n\
    \x20 for _ in range(20): found.append(word(socket.socket().connect_ex(four)))\n\
    threads = [threading.Thread(target=one) for _ in range(10)]\n\
    [t.start() for t in threads]; [t.join() for t in threads]\n\
    print('threads', len(found), *set(found))\n\
    own = socket.create_server(('127.0.0.1', 0)); s = socket.socket(); print('own', word(s.connect_ex(own.getsockname())))\n\
    a = socket.socket(socket.AF_UNIX); a.bind('\\0thirteen-char'); a.listen(); s = socket.socket(socket.AF_UNIX)\n\
    print('unix', word(s.connect_ex('\\0thirteen-char')))\n\
    child = os.fork()\n\
    if child == 0:\n\
    \x20 LIBC = ctypes.CDLL(None, use_errno=True)\n\
    \x20 if LIBC.unshare(0x50000000) == 0: print('own network', word(socket.socket().connect_ex(four)), flush=True)\n\
    \x20 else: print('own network ENETUNREACH', flush=True)\n\
    \x20 os._exit(0)\n\
    os.waitpid(child, 0)\n";

#[test]
fn every_kind_of_connect_is_refused_at_once_and_nothing_else_is() {
    let ended = run(&["--jail"], WAYS);
    let (printed, told) = (text(&ended.stdout), text(&ended.stderr));
    let mut printed: Vec<_> = printed.lines().collect();
    // The child's line may come before those of its parent, which are printed at its end.
    printed.sort_unstable();
    assert_eq!(
        printed,
        [
            "blocking EACCES",
            "datagrams ok",
            "mapped EACCES",
            "not blocking EACCES",
            "own network ENETUNREACH",
            "own ok",
            "threads 200 EACCES",
            "unix ok",
            "version 6 EACCES",
        ],
        "{told}"
    );
    assert!(
        told.contains("192.0.2.1:443: denied by policy")
            && told.contains("to allow it: --allow 192.0.2.1:443")
    );
    assert!(told.contains("sidetrack: python3"), "{told}");
}

/// Denies one network.
const RULES: &str = "version = 1\ndefault = 'direct'\n\
    [[rule]]\nname = 'no'\nmatch = { to = '192.0.2.0/24' }\naction = 'deny'\n";

#[test]
fn each_refusal_has_its_record() {
    let folder = tempfile::tempdir().unwrap();
    let (file, rules) = (folder.path().join("records"), folder.path().join("sidetrack.toml"));
    std::fs::write(&rules, RULES).unwrap();
    let arguments = ["--records", file.to_str().unwrap(), "--config", rules.to_str().unwrap()];
    let program = "import socket\nfor _ in range(3): print(socket.socket().connect_ex(('192.0.2.9', 80)))";
    let ended = run(&arguments, program);
    assert_eq!(text(&ended.stdout), "13\n13\n13\n", "{}", text(&ended.stderr));
    let records = std::fs::read_to_string(&file).unwrap();
    assert_eq!(records.lines().count(), 3, "{records}");
    for record in records.lines() {
        let record: serde_json::Value = serde_json::from_str(record).unwrap();
        let of = |field: &str| record[field].as_str().unwrap_or_default().to_owned();
        assert_eq!(
            (of("rule"), of("reason"), of("orig_dst")),
            ("no".into(), "policy_denied".into(), "192.0.2.9:80".into())
        );
        assert!(record["process"].as_str().is_some_and(|name| name.starts_with("python3")), "{record}");
    }
}

#[test]
fn a_run_in_a_run_works() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for client in server.incoming() {
            let _ = client.and_then(|mut client| client.write_all(b"hello"));
        }
    });
    let (ip, port) = address.split_once(':').unwrap();
    let program = format!(
        "import socket\nprint(socket.create_connection(('{ip}', {port})).recv(9).decode())\n\
         print(socket.socket().connect_ex(('192.0.2.1', 443)) != 0)"
    );
    let folder = tempfile::tempdir().unwrap();
    let rules = folder.path().join("sidetrack.toml");
    std::fs::write(&rules, RULES).unwrap();
    let with = ["--quiet", "--config", rules.to_str().unwrap()];
    let inner =
        [&[env!("CARGO_BIN_EXE_sidetrack"), "run"], &with[..], &["--", "python3", "-c", &program]].concat();
    let ended = command(&with, &inner).output().unwrap();
    assert_eq!(text(&ended.stdout), "hello\nTrue\n", "{}", text(&ended.stderr));
}

/// A process that outlives the command, and connects when a line comes.
const ORPHAN: &str = "import errno, os, socket, sys\n\
    if os.fork() == 0:\n\
    \x20 os.setsid(); print('ready', flush=True); sys.stdin.readline()\n\
    \x20 code = socket.socket().connect_ex(('192.0.2.1', 443))\n\
    \x20 print(errno.errorcode.get(code, 'ok'), flush=True); os._exit(0)\n\
    os.wait()\n";

#[test]
fn after_our_death_a_process_that_is_left_is_told_so_and_does_not_hang() {
    let mut left = command(&["--jail"], &["python3", "-c", ORPHAN]).stdin(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(left.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    let mut input = left.stdin.take().unwrap();
    left.kill().unwrap();
    left.wait().unwrap();
    input.write_all(b"go\n").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "ENOSYS");
}
