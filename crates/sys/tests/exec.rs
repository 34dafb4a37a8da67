//! Real commands in networks of their own.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::exec::{
    ChildProcess, Isolated, IsolatedCommand, PrivateFiles, Program, spawn_in_cgroup, spawn_isolated,
};
use sidetrack_sys::{cgroup, process, sockopt, udp};
use sidetrack_testkit::apart::{NOBODY, Suite, again, become_nobody};

const SUITE: Suite<()> = Suite {
    title: "exec",
    limit_seconds: 180,
    for_everybody: &[
        ("exit codes are the command's", exit_codes),
        ("connections arrive with their destinations", connections_arrive),
        ("questions arrive at any address's port 53", dns_questions_arrive),
        ("the command is who the caller is", identity),
        ("the command cannot undo its network", no_way_out),
        ("private files are seen inside only", private_files),
        ("signals are passed on", signals),
        ("the command dies with its parent", dies_with_parent),
        ("a failed start leaves nothing", failed_start),
        ("the process behind a connection is found", owner_is_found),
    ],
    for_root: &[
        ("all ids are what they were", all_ids),
        ("a control group holds the command", in_cgroup),
        ("capabilities are dropped for good", rights_are_dropped),
    ],
    internal: &[("start and wait", start_and_wait)],
};

fn main() -> ExitCode {
    SUITE.main(|_| ())
}

fn program(argv: &[&str]) -> Program {
    Program { argv: argv.iter().map(OsString::from).collect(), ..Program::default() }
}

fn isolated(argv: &[&str]) -> IsolatedCommand {
    let files = PrivateFiles::default();
    IsolatedCommand {
        program: program(argv),
        files,
        redirect_port: 9,
        hold: None,
        publishes: false,
        captures: false,
    }
}

fn start(argv: &[&str]) -> Isolated {
    spawn_isolated(&isolated(argv)).unwrap_or_else(|error| panic!("{error}"))
}

fn shell(script: &str) -> Isolated {
    start(&["sh", "-c", script])
}

fn wait_for(fd: impl AsFd) {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).expect("poll");
    assert_eq!(ready, 1, "nothing for 60 s");
}

fn code(child: &ChildProcess) -> u8 {
    wait_for(child);
    child.try_wait().expect("wait").expect("ended")
}

fn accept(isolated: &Isolated) -> (TcpStream, SocketAddr) {
    wait_for(&isolated.listener);
    let (stream, _peer) = isolated.listener.accept().expect("accept");
    stream.set_nonblocking(false).expect("blocking");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("time-out");
    let target = sockopt::original_dst(&stream).expect("original destination");
    (stream, target)
}

fn exit_codes() {
    for (script, expected) in [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)] {
        assert_eq!(code(&shell(script).child), expected, "{script}");
    }
    let missing = spawn_isolated(&isolated(&["/nonexistent/program"])).expect_err("no file");
    assert_eq!(
        (missing.exit_code(), missing.to_string().as_str()),
        (127, "/nonexistent/program: command not found")
    );
    let plain = spawn_isolated(&isolated(&["/etc/passwd"])).expect_err("no program");
    assert_eq!(plain.exit_code(), 126, "{plain}");
    assert_eq!(spawn_isolated(&isolated(&[])).expect_err("nothing").exit_code(), 125);
}

fn connections_arrive() {
    for target in ["192.0.2.7:80", "127.0.0.1:8080", "[2001:db8::7]:443", "[::1]:22", "10.0.0.1:9"] {
        let (host, port) = target.rsplit_once(':').expect("a port");
        let host = host.trim_matches(['[', ']']);
        // Bash speaks TCP by itself: no name, no library, no proxy variable.
        let script = format!(
            "exec 3<>/dev/tcp/{host}/{port}; echo question >&3; read -r answer <&3; [ \"$answer\" = yes ]"
        );
        let isolated = start(&["bash", "-c", &script]);
        let (mut stream, seen) = accept(&isolated);
        assert_eq!(seen.to_string(), target);
        let mut question = [0; 9];
        stream.read_exact(&mut question).expect("question");
        assert_eq!(&question, b"question\n");
        stream.write_all(b"yes\n").expect("answer");
        assert_eq!(code(&isolated.child), 0);
    }
}

fn dns_questions_arrive() {
    for server in ["198.18.0.1", "8.8.8.8", "2001:db8::53"] {
        let family = if server.contains(':') { "AF_INET6" } else { "AF_INET" };
        let script = format!(
            "import socket; s=socket.socket(socket.{family},socket.SOCK_DGRAM); s.settimeout(60)\n\
             s.connect(('{server}',53)); s.send(b'who?'); assert s.recv(99)==b'me'"
        );
        let isolated = start(&["python3", "-c", &script]);
        wait_for(&isolated.dns);
        let mut buffer = [0; 512];
        let datagram = udp::receive(&isolated.dns, &mut buffer).expect("question");
        assert_eq!(&buffer[..datagram.len], b"who?");
        assert_eq!(datagram.to.to_canonical().to_string(), server);
        udp::send(&isolated.dns, b"me", datagram.from, datagram.to).expect("answer");
        assert_eq!(code(&isolated.child), 0, "{server}");
    }
}

fn identity() {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let script = format!(
        "[ $(id -u) = {uid} ] && [ $(id -g) = {gid} ] && [ $PWD = /tmp ] && [ \"$A\" = b ] && [ -z \"$HOME\" ]"
    );
    let mut command = isolated(&["sh", "-c", &script]);
    command.program.directory = Some("/tmp".into());
    command.program.env = vec![("A".into(), Some("b".into())), ("HOME".into(), None)];
    command.program.open_files_limit = Some(64);
    assert_eq!(code(&spawn_isolated(&command).expect("start").child), 0);
    command.program.argv = ["sh", "-c", "[ $(ulimit -n) = 64 ]"].map(OsString::from).to_vec();
    assert_eq!(code(&spawn_isolated(&command).expect("start").child), 0);
}

fn no_way_out() {
    let parent = std::process::id();
    let ways = [
        "ip link set lo down".to_owned(),
        "ip route flush table local".to_owned(),
        "nft flush ruleset".to_owned(),
        format!("nsenter --net=/proc/{parent}/ns/net true"),
        "umount /etc/resolv.conf".to_owned(),
    ];
    for way in ways {
        let isolated = shell(&format!("{way} 2>/dev/null && exit 99; exit 0"));
        assert_eq!(code(&isolated.child), 0, "{way}");
    }
    let devices = shell(
        "[ \"$(ls /proc/self/net/dev_snmp6 2>/dev/null || ip -o link | cut -d: -f2 | tr -d ' ')\" = lo ]",
    );
    assert_eq!(code(&devices.child), 0, "only lo is there");
}

fn private_files() {
    let mut command = isolated(&[
        "sh",
        "-c",
        "grep -q 198.18.0.1 /etc/resolv.conf && ! (echo >>/etc/resolv.conf) 2>/dev/null && grep -q '^hosts: files dns$' /etc/nsswitch.conf",
    ]);
    command.files.contents = vec![
        ("/etc/resolv.conf".into(), "nameserver 198.18.0.1\n".into()),
        ("/etc/nsswitch.conf".into(), "hosts: files dns\n".into()),
        ("/etc/no-such-file".into(), Vec::new()),
    ];
    let before = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    assert_eq!(code(&spawn_isolated(&command).expect("start").child), 0);
    assert!(!std::fs::read_to_string("/etc/resolv.conf").expect("resolv.conf").contains("198.18.0.1"));
    assert_eq!(std::fs::read_to_string("/proc/self/mountinfo").expect("mounts"), before);

    let socket = format!("/tmp/sidetrack-exec-{}", std::process::id());
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("bind");
    let connect = format!(
        "import socket\ns=socket.socket(socket.AF_UNIX)\ntry: s.connect('{socket}')\nexcept ConnectionRefusedError: raise SystemExit(5)"
    );
    let mut command = isolated(&["python3", "-c", &connect]);
    assert_eq!(
        code(&spawn_isolated(&command).expect("start").child),
        0,
        "a path reaches out of the namespace"
    );
    command.files.masked_sockets = vec![socket.clone().into(), "/run/no-such-socket".into()];
    assert_eq!(code(&spawn_isolated(&command).expect("start").child), 5, "masked");
    drop(listener);
    std::fs::remove_file(socket).expect("remove");
}

fn signals() {
    let isolated = shell("trap 'exit 42' TERM; while :; do sleep 0.05; done");
    // Sent to us alone: read, known as a process's, and passed on.
    let own = rustix::process::getpid();
    let mut ended = None;
    for _ in 0..100 {
        // Until its trap is set the shell dies of the signal, with 143: the mask it got lets it through.
        rustix::process::kill_process(own, rustix::process::Signal::TERM).expect("kill");
        wait_for(isolated.child.signals());
        assert_eq!(isolated.child.forward().expect("forward"), 1);
        wait_for(&isolated.child);
        ended = isolated.child.try_wait().expect("wait");
        if ended.is_some() {
            break;
        }
    }
    assert!(matches!(ended, Some(42 | 143)), "{ended:?}");
    drop(isolated);
    // Afterwards the mask is as it was.
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    assert!(
        status
            .lines()
            .any(|line| line.strip_prefix("SigBlk:").is_some_and(|mask| mask.trim() == "0000000000000000"))
    );
}

/// Starts a command that does not end, says its pid, and waits until it is killed itself.
fn start_and_wait() {
    let isolated = start(&["sleep", "1000"]);
    println!("{}", isolated.child.pid());
    code(&isolated.child);
}

fn dies_with_parent() {
    let mut middle = again("self", "start and wait").stdout(Stdio::piped()).spawn().expect("start myself");
    let mut line = String::new();
    let mut output = BufReader::new(middle.stdout.take().expect("stdout"));
    output.read_line(&mut line).expect("a line");
    let command = rustix::process::Pid::from_raw(line.trim().parse().expect("a number")).expect("a pid");
    let handle = rustix::process::pidfd_open(command, rustix::process::PidfdFlags::empty()).expect("pidfd");
    middle.kill().expect("kill");
    wait_for(&handle);
    middle.wait().expect("wait");
}

fn failed_start() {
    let before = (open_descriptors(), process::children(std::process::id()));
    for argv in [&["/nonexistent/program"][..], &["/etc/passwd"], &[]] {
        spawn_isolated(&isolated(argv)).expect_err("no program");
    }
    let mut command = isolated(&["true"]);
    command.program.directory = Some("/nonexistent".into());
    let error = spawn_isolated(&command).expect_err("no directory").to_string();
    assert!(error.contains("/nonexistent"), "{error}");
    assert_eq!((open_descriptors(), process::children(std::process::id())), before);
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("fds").count()
}

fn owner_is_found() {
    let isolated = shell("bash -c 'exec 3<>/dev/tcp/192.0.2.9/80; read -r x <&3; exit 3'; exit $?");
    let (stream, target) = accept(&isolated);
    let peer = sockopt::peer_address(&stream).expect("peer");
    // Inside, the program's socket is connected to the original destination.
    let inode = process::tcp_socket(isolated.child.pid(), peer, target).expect("a socket").inode;
    let owner = process::pid_of_socket(inode, Some(isolated.child.pid())).expect("owner");
    let info = process::process_info(owner).expect("info");
    assert_eq!((info.name.as_str(), info.uid), ("bash", rustix::process::geteuid().as_raw()));
    assert_ne!(owner, isolated.child.pid());
    drop(stream);
    assert_eq!(code(&isolated.child), 3);
}

fn all_ids() {
    let script = "[ $(stat -c %u /etc/passwd) = 0 ] && setpriv --reuid 1234 --regid 4321 --clear-groups \
                  sh -c '[ $(id -u) = 1234 ] && [ $(id -g) = 4321 ]'";
    assert_eq!(code(&shell(script).child), 0);
}

fn in_cgroup() {
    let hierarchy = cgroup::Hierarchy::find().expect("cgroup2");
    let leaf = hierarchy.create_leaf(&format!("sidetrack-exec-{}", std::process::id())).expect("leaf");
    let script = format!(
        "grep -q '^0::.*/sidetrack-exec-{}$' /proc/self/cgroup && grep -q 198.18.0.1 /etc/resolv.conf",
        std::process::id()
    );
    let files = PrivateFiles {
        contents: vec![("/etc/resolv.conf".into(), "nameserver 198.18.0.1\n".into())],
        masked_sockets: Vec::new(),
    };
    let (child, _) = spawn_in_cgroup(&program(&["sh", "-c", &script]), &files, &leaf).expect("start");
    assert_eq!(code(&child), 0);
    leaf.remove().expect("empty again");
}

fn rights_are_dropped() {
    let keep = CapabilitySet::NET_RAW;
    become_nobody(keep);
    let sets = caps::capabilities().expect("capabilities");
    assert_eq!((sets.effective, sets.permitted, sets.bounding), (keep, keep, keep));
    assert_eq!(rustix::process::getuid().as_raw(), NOBODY);
    assert!(rustix::thread::set_thread_uid(rustix::process::Uid::ROOT).is_err());
    let output = Command::new("id").arg("-G").output().expect("id");
    assert_eq!(output.stdout, b"65534\n");
}
