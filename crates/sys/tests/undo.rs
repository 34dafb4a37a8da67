//! The undo guard, in processes of one thread: this file is its own test harness.
//!
//! Run without arguments it is the test. With `CHILD JOURNAL` it is the process that does things to the system and then is
//! killed, or goes in order.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{self, Family, Lifetime, OwnedTable};
use sidetrack_sys::route::{self, IpVersion, MarkRule, Ours};
use sidetrack_sys::sysctl;
use sidetrack_sys::undo::{Action, Guard, Journal};

const RULE: MarkRule = MarkRule { version: IpVersion::V4, mark: 1, mask: 0xff, table: 5300, priority: 5300 };

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [word, folder, end] if word == "CHILD" && end == "held" => child_of_held(Path::new(folder)),
        [word, folder, end] if word == "CHILD" => child(Path::new(folder), end == "orderly"),
        [word] if word == "NAMESPACE" => tests(),
        _ if arguments.iter().any(|word| word == "--list") => println!("undo: test"),
        _ if !rustix::process::geteuid().is_root() => eprintln!("skipped: needs root"),
        // The tests run in a network namespace of their own, in a process of one thread.
        _ => {
            let status = Command::new("unshare").args(["--net", "--"]).arg(this()).arg("NAMESPACE").status();
            return if status.is_ok_and(|status| status.success()) {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            };
        }
    }
    ExitCode::SUCCESS
}

fn this() -> PathBuf {
    std::env::current_exe().expect("this program")
}

/// What an undo test leaves on the system when nothing is undone.
fn actions(folder: &Path) -> Vec<Action> {
    vec![
        Action::RemoveDirectory(folder.join("directory")),
        // Inside the directory: later actions come first, else the directory is not empty.
        Action::RemoveFile(folder.join("directory/file")),
        Action::RemoveMarkRule(RULE),
        Action::RemoveLocalDefault { version: IpVersion::V4, interface: 1, table: RULE.table },
        Action::RestoreSetting { name: "net/ipv4/ip_forward".into(), value: "0".into() },
        Action::DeleteTable { family: Family::Inet, name: "unowned".into() },
    ]
}

/// The process that does things to the system.
fn child(folder: &Path, orderly: bool) {
    let (all, mut guard) = (actions(folder), Guard::spawn(&[]).expect("one thread"));
    let mut journal = Journal::open(&folder.join("journal")).expect("journal");
    for action in &all {
        journal.note(action).expect("noted");
        guard.add(action).expect("the guard lives");
    }
    std::fs::create_dir(folder.join("directory")).expect("directory");
    std::fs::write(folder.join("directory/file"), "x").expect("file");
    route::add_mark_rule(&RULE).expect("rule");
    route::add_local_default_in("lo", RULE.version, RULE.table).expect("route");
    sysctl::write("net/ipv4/ip_forward", "1").expect("setting");
    let mut socket = netfilter();
    nft::Table::new(Family::Inet, "unowned").apply(&mut socket).expect("table");
    let _owned = OwnedTable::create(&nft::run_namespace(9), Lifetime::Socket).expect("table");
    println!("done");
    let mut nothing = String::new();
    let _ = std::io::stdin().read_to_string(&mut nothing);
    if orderly {
        guard.disarm().expect("disarmed");
        journal.forget().expect("forgotten");
    }
}

/// The process whose guard is to delete a table that another one owns, and then, in the same pass, a file.
fn child_of_held(folder: &Path) {
    let mut guard = Guard::spawn(&[]).expect("one thread");
    guard.add(&Action::RemoveFile(folder.join("marker"))).expect("the guard lives");
    guard.add(&Action::DeleteTable { family: Family::Inet, name: "held".into() }).expect("the guard lives");
    println!("done");
    let _ = std::io::stdin().read_to_string(&mut String::new());
}

fn start(folder: &Path, end: &str) -> Child {
    let mut child = Command::new(this())
        .args(["CHILD".as_ref(), folder.as_os_str(), end.as_ref()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("child");
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a line");
    assert_eq!(line, "done\n");
    child
}

fn netfilter() -> Socket {
    Socket::open(Protocol::Netfilter).expect("socket")
}

/// What is left on the system of what the child did.
fn leftovers(folder: &Path) -> Vec<String> {
    let mut socket = netfilter();
    let mut table = |name| nft::find_table(&mut socket, Family::Inet, name).expect("asked").is_some();
    let found = [
        ("directory", folder.join("directory").exists()),
        ("routes", route::ours().expect("listed") != Ours::default()),
        ("setting", sysctl::read("net/ipv4/ip_forward").expect("read") != "0"),
        ("unowned", table("unowned")),
        ("owned", table("sidetrack")),
    ];
    found.into_iter().filter(|(_, there)| *there).map(|(name, _)| name.to_owned()).collect()
}

/// Waits until exactly this is left. A table may live on for a moment: a process that reads the descriptors of an
/// ending process (`/proc/PID/fd`) holds them, too.
fn expect_left(folder: &Path, expected: &[&str]) {
    let until = Instant::now() + Duration::from_secs(60);
    while leftovers(folder) != expected && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(leftovers(folder), expected);
}

/// Waits until the guard is gone too: it is the last that holds the child's standard error.
fn wait_for_guard(child: &mut Child) -> String {
    let mut said = String::new();
    child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
    said
}

fn a_table_that_is_held(folder: &Path) {
    println!("test killed: a table that still belongs to somebody goes as soon as it does not");
    let marker = folder.join("marker");
    std::fs::write(&marker, "x").expect("file");
    let held = OwnedTable::create(&nft::Table::new(Family::Inet, "held"), Lifetime::SocketThenOrphan);
    if let Ok(held) = held {
        let mut child = start(folder, "held");
        child.kill().expect("SIGKILL");
        child.wait().expect("gone");
        // The guard has tried in vain once this is gone.
        let until = Instant::now() + Duration::from_secs(60);
        while marker.exists() {
            assert!(Instant::now() < until, "the guard does nothing");
            std::thread::yield_now();
        }
        drop(held);
        assert_eq!(wait_for_guard(&mut child), "", "the guard has nothing to complain about");
        let mut socket = netfilter();
        assert_eq!(nft::find_table(&mut socket, Family::Inet, "held").expect("asked"), None);
    } else {
        println!("skipped: this kernel keeps no table for a successor");
    }
}

fn tests() {
    let folder = tempfile::tempdir().expect("folder");
    let folder = folder.path();
    route::link_up("lo").expect("lo");
    sysctl::write("net/ipv4/ip_forward", "0").expect("setting");
    println!("test killed: everything is undone");
    let mut child = start(folder, "killed");
    expect_left(folder, &["directory", "routes", "setting", "unowned", "owned"]);
    child.kill().expect("SIGKILL");
    child.wait().expect("gone");
    assert_eq!(wait_for_guard(&mut child), "", "the guard has nothing to complain about");
    expect_left(folder, &[]);

    println!("test killed: the journal tells the same, and doing it again is no error");
    let journal = folder.join("journal");
    let left: Vec<_> =
        Journal::left_behind(&journal).expect("read").into_iter().map(Result::unwrap).collect();
    let mut expected = actions(folder);
    expected.reverse();
    assert_eq!(left, expected);
    left.iter().for_each(|action| action.perform().expect("again"));
    Journal::open(&journal).expect("open").forget().expect("forgotten");

    a_table_that_is_held(folder);

    println!("test in order: nothing is undone by the guard, only the owned table goes");
    let mut child = start(folder, "orderly");
    drop(child.stdin.take());
    assert!(child.wait().expect("ended").success());
    assert_eq!(wait_for_guard(&mut child), "");
    expect_left(folder, &["directory", "routes", "setting", "unowned"]);
    assert!(Journal::left_behind(&journal).expect("read").is_empty());

    println!("test threads: a guard is refused once there are some");
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || stopped.recv());
    assert!(Guard::spawn(&[]).is_err());
    drop(stop);
    let _ = thread.join().expect("ends");
}
