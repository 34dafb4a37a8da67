//! Nodes, links and launched programs in real namespaces; and that nothing of them is left behind.

#[allow(dead_code, reason = "each test file uses its part")]
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sidetrack_lab::launch::launcher;
use sidetrack_lab::topology::{self, Node};
use sidetrack_testkit::is_root;
use support::{Done, Tally};

/// Runs `body` as root; for other users the test is skipped.
fn as_root(case: &str, body: impl FnOnce()) {
    let mut tally = Tally::default();
    let done = if is_root() {
        body();
        Done::Ran
    } else {
        Done::Skipped("namespaces with links need root".into())
    };
    tally.note(case, Ok(done));
    tally.finish();
}

#[test]
fn a_link_carries_both_families_between_two_nodes_only() {
    as_root("a link carries both families", || {
        let launcher = launcher().expect("built beside the tests");
        let a = Node::new("a", &launcher).expect("a node");
        let b = Node::new("b", &launcher).expect("a node");
        let stranger = Node::new("stranger", &launcher).expect("a node");
        let link = topology::link(&a, &b, 9).expect("a link");
        for address in [IpAddr::V4(link.b.v4), IpAddr::V6(link.b.v6)] {
            let listener = b.enter(|| Ok(TcpListener::bind((address, 0))?)).expect("bound in b");
            let server = listener.local_addr().expect("bound");
            assert!(b.listens_on(server.port()).expect("readable"));
            assert!(!a.listens_on(server.port()).expect("readable"));
            let connect = move || Ok(TcpStream::connect_timeout(&server, Duration::from_secs(60))?);
            let mut client = a.enter(connect).expect("reachable over the link");
            assert!(stranger.enter(connect).is_err(), "a stranger has no way to {server}");
            let (mut accepted, _) = listener.accept().expect("connected");
            client.write_all(b"over the link").expect("connected");
            drop(client);
            let mut received = String::new();
            accepted.read_to_string(&mut received).expect("readable");
            assert_eq!(received, "over the link");
        }
    });
}

#[test]
fn rules_and_parameters_stay_in_their_node() {
    as_root("rules and parameters stay in their node", || {
        let launcher = launcher().expect("built beside the tests");
        let (a, b) = (Node::new("a", &launcher).expect("a node"), Node::new("b", &launcher).expect("a node"));
        a.sysctl("net/ipv4/ip_local_port_range", "2000 3000").expect("settable");
        let range =
            |node: &Node| node.run("cat", &["/proc/sys/net/ipv4/ip_local_port_range"]).expect("readable");
        assert_eq!(range(&a).split_whitespace().collect::<Vec<_>>(), ["2000", "3000"]);
        assert_ne!(range(&a), range(&b));
        a.nft("table ip lab {\nchain c {\n}\n}\n").expect("loaded");
        assert!(a.run("nft", &["list", "tables"]).expect("listed").contains("lab"));
        assert_eq!(b.run("nft", &["list", "tables"]).expect("listed"), "");
        a.delete_table("ip lab").expect("deleted");
        assert_eq!(a.run("nft", &["list", "tables"]).expect("listed"), "");
        let error = a.delete_table("ip lab").expect_err("it is gone").to_string();
        assert!(error.contains("nft -f - in a failed"), "{error}");
    });
}

#[test]
fn a_program_whose_asker_is_gone_does_not_start() {
    let launcher = launcher().expect("built beside the tests");
    let output =
        Command::new(launcher).args(["node-exec", "--parent", "1", "--", "echo", "started"]).output();
    let output = output.expect("the launcher runs");
    assert!(!output.status.success());
    assert!(output.stdout.is_empty(), "{output:?}");
}

/// Returns the processes that descend from `root`, itself included.
fn descendants(root: u32) -> BTreeSet<u32> {
    let parent = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.get(stat.rfind(')')? + 1..)?.split_whitespace().nth(1)?.parse().ok()
    };
    let pids = fs::read_dir("/proc")
        .expect("Linux")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let pids: Vec<u32> = pids.collect();
    let mut family = BTreeSet::from([root]);
    loop {
        let children: Vec<u32> = pids
            .iter()
            .copied()
            .filter(|pid| {
                !family.contains(pid) && parent(*pid).is_some_and(|parent| family.contains(&parent))
            })
            .collect();
        if children.is_empty() {
            return family;
        }
        family.extend(children);
    }
}

/// A zombie does not run any more; its parent reaps it.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rfind(')')
        .and_then(|end| stat.get(end + 2..end + 3))
        .is_some_and(|state| state != "Z" && state != "X")
}

/// Returns the scratch folders of a process.
fn scratch_folders(pid: u32) -> Vec<String> {
    let prefix = format!("sidetrack-lab-{pid}-");
    let names = fs::read_dir("/dev/shm")
        .expect("a memory file system")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&prefix)).collect()
}

#[test]
fn nothing_is_left_when_the_lab_is_killed() {
    as_root("nothing is left when the lab is killed", || {
        let launcher = launcher().expect("built beside the tests");
        let mut lab = Command::new(launcher)
            .args(["idle", "--flows", "50", "--only", "nginx stream"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the lab runs");
        // The heading appears when the site is ready.
        let mut heading = String::new();
        BufReader::new(lab.stdout.take().expect("piped")).read_line(&mut heading).expect("readable");
        assert!(heading.starts_with("## Idle"), "{heading}");
        let family = descendants(lab.id());
        assert_eq!(scratch_folders(lab.id()).len(), 1);
        assert!(family.len() >= 5, "the lab, three nodes and the origin: {family:?}");
        lab.kill().expect("killable");
        lab.wait().expect("killed");
        let since = Instant::now();
        loop {
            let alive: Vec<_> = family.iter().filter(|pid| is_alive(**pid)).collect();
            let folders = scratch_folders(lab.id());
            if alive.is_empty() && folders.is_empty() {
                return;
            }
            assert!(since.elapsed() < Duration::from_secs(60), "still there: {alive:?} {folders:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn a_port_that_nobody_listens_on_is_refused_over_the_link() {
    as_root("a refused port", || {
        let launcher = launcher().expect("built beside the tests");
        let (a, b) = (Node::new("a", &launcher).expect("a node"), Node::new("b", &launcher).expect("a node"));
        let link = topology::link(&a, &b, 9).expect("a link");
        let server = SocketAddr::from((link.b.v4, 9));
        let error = a.enter(|| Ok(TcpStream::connect_timeout(&server, Duration::from_secs(60)).map(|_| ())));
        assert_eq!(
            error.expect("entered").expect_err("nobody listens").kind(),
            std::io::ErrorKind::ConnectionRefused
        );
    });
}
