//! `--mode cgroup`: in a network of the test's own, with one interface, so that the host's is left alone.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags};
use sidetrack_sys::caps::{self, CapabilitySet};
use sidetrack_sys::cgroup::Hierarchy;
use sidetrack_sys::netns::NetNs;
use sidetrack_sys::{process, route};

use crate::scenarios::started_in_cgroup;
use sidetrack_testkit::apart::{Outcome, again};

/// A network with a default route that leads nowhere: what is not caught is lost, or seen by `nft`.
fn own_network() {
    let name = format!("sidetrack-cgroup-{}", std::process::id());
    let network = NetNs::create_named(&name).expect("a network");
    NetNs::delete_named(&name).expect("only its name");
    network.enter().expect("enter");
    route::link_up("lo").expect("lo");
    for command in [
        "ip link add out type veth peer name far",
        "ip link set far up",
        "ip address add 10.99.0.1/24 dev out",
        "ip -6 address add fd99::1/64 dev out nodad",
        "ip link set out up",
        "ip route add default via 10.99.0.2",
        "ip -6 route add default via fd99::2",
    ] {
        let status = Command::new("sh").args(["-c", command]).status().expect("sh");
        assert!(status.success(), "{command}");
    }
}

/// Whether the table that process `pid` made is there.
fn table_exists(pid: u32) -> bool {
    let tables = Command::new("nft").args(["list", "tables"]).output().expect("nft");
    String::from_utf8_lossy(&tables.stdout).contains(&format!("sidetrack-run-{pid}"))
}

/// The directory of the control group that process `pid` made.
fn directory(pid: u32) -> PathBuf {
    let hierarchy = Hierarchy::find().expect("cgroup2");
    hierarchy.mount.join(hierarchy.own).join(format!("sidetrack-run-{pid}"))
}

fn handle(pid: u32) -> OwnedFd {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid");
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("pidfd")
}

/// Waits for its end. The group counts a process as gone a moment before its descriptor tells.
fn has_ended(process: &OwnedFd) -> bool {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)).expect("poll") == 1
}

pub(crate) fn serves() -> Outcome {
    own_network();
    let script = "import socket, urllib.request\n\
        for t in ('name.example:80', '192.0.2.1:81', '[2001:db8::1]:82', '127.0.0.1:83', '10.99.0.1:84'):\n\
        \x20 b = urllib.request.urlopen(f'http://{t}/', timeout=60).read().decode()\n\
        \x20 assert b == f'you reached {t}\\n', b\n\
        for f, a, p in ((socket.AF_INET, '8.8.8.8', 1), (socket.AF_INET6, '2001:db8::8', 58)):\n\
        \x20 s = socket.socket(f, socket.SOCK_RAW, p)\n\
        \x20 try: s.sendto(bytes(8), (a, 0)); raise SystemExit(5)\n\
        \x20 except PermissionError: pass";
    let own = std::process::id();
    let served = started_in_cgroup(&["/usr/bin/python3", "-c", script]);
    assert!(table_exists(own) && directory(own).exists());
    assert_eq!(served.code(), 0);
    assert_eq!(
        served.seen().into_keys().collect::<Vec<_>>(),
        ["10.99.0.1:84", "127.0.0.1:83", "192.0.2.1:81", "[2001:db8::1]:82", "name.example:80"]
    );
    served.finish();
    Outcome::Done
}

/// Not even what the command left running, which could go past us once the rules are gone.
pub(crate) fn leaves_nothing() -> Outcome {
    own_network();
    let own = std::process::id();
    let before = process::children(own).len();
    let served = started_in_cgroup(&["sh", "-c", "setsid sleep 1000 & exit 3"]);
    assert_eq!(served.code(), 3);
    let left = std::fs::read_to_string(directory(own).join("cgroup.procs")).expect("processes");
    let sleeper = handle(left.trim().parse().expect("the sleeper is still there"));
    served.finish();
    assert!(has_ended(&sleeper), "it is ended with the group");
    assert!(!table_exists(own) && !directory(own).exists());
    assert_eq!(process::children(own).len(), before);
    Outcome::Done
}

/// Started by [`survives_nothing`]: runs a command that does not end until it is killed itself.
pub(crate) fn start_and_wait() -> Outcome {
    own_network();
    let served = started_in_cgroup(&["sh", "-c", "setsid sleep 1000 & echo; exec sleep 1000"]);
    served.code();
    Outcome::Done
}

/// We are killed: the command, what it left running, the control group and the rules go all the same.
pub(crate) fn survives_nothing() -> Outcome {
    let mut middle = again("root", "cgroup: start and wait").stdout(Stdio::piped()).spawn().expect("start");
    let mut output = middle.stdout.take().expect("stdout");
    output.read_exact(&mut [0]).expect("the command's word that its child is there");
    let own = middle.id();
    let of_group = std::fs::read_to_string(directory(own).join("cgroup.procs")).expect("processes");
    let of_group: Vec<OwnedFd> = of_group.lines().map(|pid| handle(pid.parse().expect("a pid"))).collect();
    assert_eq!(of_group.len(), 2);
    let comm = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let guard = || process::children(own).into_iter().find(|pid| comm(pid).trim() == "sidetrack-guard");
    // The program does not wait until it has taken its name.
    let until = Instant::now() + Duration::from_secs(60);
    while guard().is_none() && Instant::now() < until {
        std::thread::yield_now();
    }
    let guard = handle(guard().expect("a guard"));
    NetNs::of_process(own).and_then(|network| network.enter()).expect("enter");
    assert!(table_exists(own));
    middle.kill().expect("kill");
    middle.wait().expect("wait");
    assert!(has_ended(&guard), "the guard ends");
    assert!(of_group.iter().all(has_ended), "what it ended");
    assert!(!table_exists(own) && !directory(own).exists());
    Outcome::Done
}

/// The listeners cannot be reached from outside the host, and the rights can be given up before the end.
pub(crate) fn without_rights() -> Outcome {
    own_network();
    let own = std::process::id();
    let served = started_in_cgroup(&["sleep", "1000"]);
    assert!(!served.launched.is_isolated());
    assert_eq!(served.launched.listeners.len(), 2, "IPv4 and IPv6");
    for listener in &served.launched.listeners {
        assert!(listener.local_addr().expect("address").ip().is_loopback());
    }
    // Keeps the rights to look afterwards.
    let mut looker = Command::new("sh")
        .args(["-c", "read -r go; nft list tables"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sh");
    assert!(table_exists(own));
    caps::keep_only(CapabilitySet::empty()).expect("give up");
    served.finish();
    assert!(!directory(own).exists());
    looker.stdin.take().expect("stdin").write_all(b"go\n").expect("go");
    let seen = looker.wait_with_output().expect("wait");
    assert!(seen.status.success());
    assert!(!String::from_utf8_lossy(&seen.stdout).contains("sidetrack-run-"));
    assert_eq!(process::children(own).len(), 1, "only the command, which was killed and not waited for");
    Outcome::Done
}
