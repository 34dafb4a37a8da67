//! `--mode cgroup`: in a network of the test's own, with one interface, so that the host's is left alone.

use std::path::PathBuf;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags};
use sidetrack_sys::cgroup::Hierarchy;
use sidetrack_sys::netns::NetNs;
use sidetrack_sys::{process, route};

use crate::Outcome;
use crate::scenarios::started_in_cgroup;

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

fn table_exists() -> bool {
    let tables = Command::new("nft").args(["list", "tables"]).output().expect("nft");
    String::from_utf8_lossy(&tables.stdout).contains(&format!("sidetrack-run-{}", std::process::id()))
}

fn directory() -> PathBuf {
    let hierarchy = Hierarchy::find().expect("cgroup2");
    hierarchy.mount.join(hierarchy.own).join(format!("sidetrack-run-{}", std::process::id()))
}

pub fn serves() -> Outcome {
    own_network();
    let script = "import socket, urllib.request\n\
        for t in ('name.example:80', '192.0.2.1:81', '[2001:db8::1]:82', '127.0.0.1:83', '10.99.0.1:84'):\n\
        \x20 b = urllib.request.urlopen(f'http://{t}/', timeout=30).read().decode()\n\
        \x20 assert b == f'you reached {t}\\n', b\n\
        for f, a in ((socket.AF_INET, '8.8.8.8'), (socket.AF_INET6, '2001:db8::8')):\n\
        \x20 s = socket.socket(f, socket.SOCK_DGRAM)\n\
        \x20 try: s.sendto(b'leak?', (a, 53)); raise SystemExit(5)\n\
        \x20 except PermissionError: pass";
    let served = started_in_cgroup(&["/usr/bin/python3", "-c", script]);
    assert!(table_exists() && directory().exists());
    assert_eq!(served.code(), 0);
    assert_eq!(
        served.seen().into_keys().collect::<Vec<_>>(),
        ["10.99.0.1:84", "127.0.0.1:83", "192.0.2.1:81", "[2001:db8::1]:82", "name.example:80"]
    );
    served.finish();
    Outcome::Done
}

/// Not even what the command left running, which could go past us once the rules are gone.
pub fn leaves_nothing() -> Outcome {
    own_network();
    let before = process::children(std::process::id()).len();
    let served = started_in_cgroup(&["sh", "-c", "setsid sleep 1000 & exit 3"]);
    assert_eq!(served.code(), 3);
    let left = std::fs::read_to_string(directory().join("cgroup.procs")).expect("processes");
    let sleeper =
        Pid::from_raw(left.trim().parse().expect("one process")).expect("the sleeper is still there");
    let sleeper = rustix::process::pidfd_open(sleeper, PidfdFlags::empty()).expect("pidfd");
    served.finish();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&sleeper, PollFlags::IN)], Some(&now)).expect("poll");
    assert_eq!(ended, 1, "the sleeper has ended");
    assert!(!table_exists() && !directory().exists());
    assert_eq!(process::children(std::process::id()).len(), before);
    Outcome::Done
}

pub fn sees_loops() -> Outcome {
    own_network();
    let served = started_in_cgroup(&["sleep", "1000"]);
    let listeners = &served.launched.listeners;
    assert_eq!(listeners.len(), 2, "IPv4 and IPv6");
    for listener in listeners {
        let address = listener.local_addr().expect("address");
        assert!(address.ip().is_loopback());
        assert!(served.launched.is_loop(address));
    }
    assert!(!served.launched.is_loop("127.0.0.1:1".parse().expect("address")));
    served.finish();
    Outcome::Done
}
