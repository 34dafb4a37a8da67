//! What holds in a network of its own, whatever the program.

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::netns::NetNs;
use sidetrack_sys::route;
use socket2::{Domain, Protocol, Socket, Type};

use crate::served::{self, options, run, start};
use sidetrack_testkit::apart::{Outcome, become_nobody};

/// Names reach us exactly as the program says them: no search list, no dots counted, no host name appended.
pub(crate) fn names() -> Outcome {
    for name in ["db", "db.corp", "a-very-long-label.deep.below.example.test", "UPPER.Example"] {
        let (code, seen) =
            run(&["curl", "-sS", "-o", "/dev/null", "--max-time", "60", &format!("http://{name}/")]);
        assert_eq!(code, 0, "{name}");
        let expected = format!("{}:80", name.to_lowercase());
        assert_eq!(seen.keys().collect::<Vec<_>>(), [&expected]);
    }
    // Reverse, too, with glibc's own functions.
    let script = "import socket; a=socket.gethostbyname('who.example'); assert socket.gethostbyaddr(a)[0]=='who.example'";
    assert_eq!(run(&["/usr/bin/python3", "-c", script]).0, 0);
    Outcome::Done
}

/// A resolver that prefers TCP is answered, by the server that resolv.conf names.
pub(crate) fn dns_over_tcp() -> Outcome {
    let script = "import socket\n\
        q=bytes.fromhex('abcd01000001000000000000')+b'\\x03tcp\\x07example\\x00\\x00\\x01\\x00\\x01'\n\
        s=socket.create_connection(('198.18.0.1',53),60); s.sendall(len(q).to_bytes(2,'big')+q)\n\
        f=s.makefile('rb'); r=f.read(int.from_bytes(f.read(2),'big')); assert r[:2]==q[:2], r\n\
        a='.'.join(map(str,r[-4:])); s.close()\n\
        s=socket.create_connection((a,80),60); s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n')\n\
        assert s.makefile('rb').read().endswith(b'you reached tcp.example:80\\n')";
    let (code, seen) = run(&["/usr/bin/python3", "-c", script]);
    assert_eq!(code, 0);
    assert_eq!(seen.keys().collect::<Vec<_>>(), ["tcp.example:80"]);
    Outcome::Done
}

pub(crate) fn exit_codes() -> Outcome {
    let error = sidetrack::intercept::run::launch(&options(&["no-such-program"])).expect_err("no program");
    assert_eq!((error.exit_code(), error.to_string().as_str()), (127, "no-such-program: command not found"));
    assert_eq!(run(&["sh", "-c", "exit 42"]).0, 42);
    assert_eq!(run(&["sh", "-c", "kill -SEGV $$"]).0, 139);
    // A signal for us alone reaches the command, which here says that it did by its exit code.
    let script = "import os, signal, time\n\
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\n\
        os.kill(os.getppid(), signal.SIGTERM)\n\
        time.sleep(60)";
    assert_eq!(run(&["/usr/bin/python3", "-c", script]).0, 9);
    Outcome::Done
}

/// Runs [`on_terminal`] on a terminal of its own and presses Ctrl-C when its command is ready.
pub(crate) fn terminal() -> Outcome {
    let exe = fs::read_link("/proc/self/exe").expect("own path");
    if fs::metadata(&exe).is_err() {
        // An ordinary user who cannot reach the build directory.
        return Outcome::Lacks("a readable path to this program");
    }
    // `exec`, or the interrupt also ends the shell of `script`, which bash replaces by itself and dash does not.
    let command = format!("exec {} --scenario self 'on a terminal'", exe.display());
    // A shell that starts the tests in the background ignores interrupts for them, which the inner shell cannot undo.
    let mut script = Command::new("env")
        .args([
            "--default-signal=INT",
            "script",
            "--quiet",
            "--return",
            "--flush",
            "--command",
            &command,
            "/dev/null",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script");
    let mut output = script.stdout.take().expect("stdout");
    let mut keyboard = script.stdin.take().expect("stdin");
    let mut shown = Vec::new();
    let mut buffer = [0; 256];
    while !String::from_utf8_lossy(&shown).contains("ready") {
        let len = output.read(&mut buffer).expect("read");
        assert!(len > 0, "ended early: {}", String::from_utf8_lossy(&shown));
        shown.extend_from_slice(&buffer[..len]);
    }
    keyboard.write_all(&[3]).expect("Ctrl-C");
    output.read_to_end(&mut shown).expect("read");
    let status = script.wait().expect("wait");
    assert!(status.success(), "{status}: {}", String::from_utf8_lossy(&shown));
    Outcome::Done
}

/// The command has the terminal, gets its interrupt, and we outlive it to say how it ended.
pub(crate) fn on_terminal() -> Outcome {
    let script =
        "test -t 0 && test -t 1 || exit 1; trap 'exit 33' INT; echo ready; while :; do sleep 0.05; done";
    assert_eq!(run(&["sh", "-c", script]).0, 33);
    Outcome::Done
}

pub(crate) fn children() -> Outcome {
    let script =
        "for n in 1 2 3; do (exec curl -sS -o /dev/null --max-time 60 http://child$n.example/) & done; wait";
    let (code, seen) = run(&["sh", "-c", script]);
    assert_eq!(code, 0);
    assert_eq!(
        seen.keys().collect::<Vec<_>>(),
        ["child1.example:80", "child2.example:80", "child3.example:80"]
    );
    Outcome::Done
}

/// Everything a program may try, while every packet of the parent's network is captured: there are none.
fn no_leak(as_whom: fn()) -> Outcome {
    let name = format!("sidetrack-leak-{}", std::process::id());
    let network = NetNs::create_named(&name).expect("a network");
    NetNs::delete_named(&name).expect("only its name");
    network.enter().expect("enter");
    route::link_up("lo").expect("lo");
    const ETH_P_ALL: u16 = 3;
    let protocol = Protocol::from(i32::from(ETH_P_ALL.to_be()));
    let capture = Socket::new(Domain::PACKET, Type::RAW.nonblocking(), Some(protocol)).expect("capture");
    // That it captures at all: one datagram to ourselves.
    let own = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
    own.send_to(b"x", own.local_addr().expect("address")).expect("send");
    // Once it is here, both its captures are made.
    own.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    own.recv(&mut [0]).expect("the datagram");
    assert!(packets(&capture) > 0, "the capture sees nothing");
    drop(own);
    as_whom();
    let script = "import os, socket, urllib.request\n\
        for u in ('http://name.example/', 'http://192.0.2.1:81/', 'http://[2001:db8::1]:82/', 'http://127.0.0.1:83/'):\n\
        \x20 assert urllib.request.urlopen(u, timeout=60).status == 200\n\
        for f, a in ((socket.AF_INET, '8.8.8.8'), (socket.AF_INET6, '2001:4860:4860::8888')):\n\
        \x20 for port in (53, 123, 443, 3478):\n\
        \x20\x20 s = socket.socket(f, socket.SOCK_DGRAM); s.settimeout(0.05)\n\
        \x20\x20 s.connect((a, port))\n\
        \x20\x20 try: s.send(b'leak?'); s.recv(99)\n\
        \x20\x20 except OSError: pass\n\
        for m in ('224.0.0.251', '255.255.255.255'):\n\
        \x20 s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)\n\
        \x20 try: s.sendto(b'leak?', (m, 5353))\n\
        \x20 except OSError: pass\n\
        assert [n for _, n in socket.if_nameindex()] == ['lo']";
    let (code, seen) = served::run(&["/usr/bin/python3", "-c", script]);
    assert_eq!(code, 0);
    assert_eq!(
        seen.keys().collect::<Vec<_>>(),
        ["127.0.0.1:83", "192.0.2.1:81", "[2001:db8::1]:82", "name.example:80"]
    );
    assert_eq!(packets(&capture), 0, "packets of the command were seen in the parent's network");
    Outcome::Done
}

fn packets(capture: &Socket) -> usize {
    let mut buffer = [std::mem::MaybeUninit::uninit(); 2048];
    std::iter::from_fn(|| capture.recv(&mut buffer).ok()).take(10_000).count()
}

pub(crate) fn no_leak_as_root() -> Outcome {
    no_leak(|| {})
}

pub(crate) fn no_leak_as_nobody() -> Outcome {
    no_leak(|| become_nobody(CapabilitySet::empty()))
}

/// Starts a command in the network the scenario made.
pub(crate) fn started_in_cgroup(argv: &[&str]) -> served::Served {
    start(&served::in_cgroup(argv))
}
