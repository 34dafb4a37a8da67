//! `sidetrack cleanup`, in a network namespace of the test's own; as root only.

use sidetrack::cleanup::{Places, Running, Survey, survey};
use sidetrack::cli::cleanup::undo;
use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{self, Family, Lifetime, OwnedTable, Table};
use sidetrack_sys::route::{self, IpVersion, MarkRule};
use sidetrack_sys::undo::Action;
use sidetrack_testkit::in_namespace;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

fn places(sockets: &[&Path]) -> Places {
    let sockets = sockets.iter().map(|path| path.to_path_buf()).collect();
    Places { program: "no such program".into(), sockets, pins: None }
}

/// Leaves out control groups: those of other tests, which run at the same time, may be among them.
fn found(places: &Places) -> Survey {
    let mut survey = survey(places);
    let of_group =
        |action: &Action| matches!(action, Action::RemoveDirectory(_) | Action::ReturnProcesses { .. });
    survey.leftovers.retain(|action| !of_group(action));
    survey
}

#[test]
fn what_a_crash_left_is_found_and_taken_back_and_nothing_else() {
    in_namespace(|| {
        let places = places(&[]);
        assert_eq!(found(&places), Survey::default());
        assert_eq!(undo(&Survey::default(), false).out, "nothing of Sidetrack's is left behind\n");
        let mut socket = Socket::open(Protocol::Netfilter).unwrap();
        let running = format!("sidetrack-run-{}", std::process::id());
        for name in ["sidetrack", "sidetrack-run-4194305", "sidetracker", "filter", &running] {
            Table::new(Family::Inet, name).apply(&mut socket).unwrap();
        }
        let rule = MarkRule { version: IpVersion::V4, mark: 7, mask: 7, table: 7_007, priority: 700 };
        route::add_local_default_in("lo", rule.version, rule.table).unwrap();
        route::add_mark_rule(&rule).unwrap();
        let left = found(&places);
        assert_eq!(left.leftovers.len(), 4, "{left:?}");
        let dry = undo(&left, true);
        assert!(
            dry.code == 0 && dry.out.contains("would delete the nftables table inet sidetrack\n"),
            "{}",
            dry.out
        );
        assert_eq!(found(&places), left, "a dry run changes nothing");
        let done = undo(&left, false);
        assert!(done.code == 0 && done.out.lines().all(|line| line.starts_with("done: ")), "{done:?}");
        assert_eq!(found(&places), Survey::default());
        let names: Vec<_> =
            nft::list_tables(&mut socket).unwrap().into_iter().map(|table| table.name).collect();
        assert_eq!(names, ["sidetracker", "filter", &running], "tables of others and of the living stay");
    });
}

#[test]
fn a_table_that_somebody_owns_is_left_alone_and_an_orphan_is_not() {
    in_namespace(|| {
        let table = Table::new(Family::Inet, "sidetrack");
        let orphans = Lifetime::SocketThenOrphan;
        let owned = match OwnedTable::create(&table, orphans) {
            Ok(owned) => owned,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        assert_eq!(found(&places(&[])), Survey::default());
        drop(owned);
        // A child that another test is starting holds a copy of the socket until it execs.
        sidetrack_testkit::eventually("it is an orphan", || {
            let mut socket = Socket::open(Protocol::Netfilter).unwrap();
            let table = nft::find_table(&mut socket, Family::Inet, "sidetrack").unwrap();
            table.is_some_and(|table| table.owner.is_none())
        });
        let expected = Action::DeleteTable { family: Family::Inet, name: "sidetrack".into() };
        let left = found(&places(&[]));
        assert_eq!(left.leftovers, [expected]);
        assert_eq!(undo(&left, false).code, 0);
        assert_eq!(found(&places(&[])), Survey::default());
    });
}

#[test]
fn stale_sockets_are_found_and_live_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    let live = UnixListener::bind(path("live.sock")).unwrap();
    for stale in ["admin.sock", ".admin.sock.4194305", ".admin.sock.x"] {
        let listener = UnixListener::bind(path(stale)).unwrap();
        // Else a child that another test is starting would listen on with its copy, until it execs.
        rustix::net::shutdown(&listener, rustix::net::Shutdown::Both).unwrap();
    }
    let survey = survey(&places(&[&path("admin.sock"), &path("live.sock"), &path("none.sock")]));
    let files: Vec<_> = survey
        .leftovers
        .iter()
        .filter_map(|action| match action {
            Action::RemoveFile(path) => path.file_name()?.to_str(),
            _ => None,
        })
        .collect();
    // No process has a number above 2^22: the second socket's maker is gone.
    assert_eq!(files, ["admin.sock", ".admin.sock.4194305"]);
    drop(live);
}

#[test]
fn while_one_runs_its_rules_are_not_touched() {
    in_namespace(|| {
        let mut socket = Socket::open(Protocol::Netfilter).unwrap();
        Table::new(Family::Inet, "sidetrack").apply(&mut socket).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("sidetrack-under-test");
        // By a process of its own: a child that another test is starting would hold the file open for writing, and then
        // it cannot be executed.
        assert!(Command::new("cp").arg("/bin/cat").arg(&program).status().unwrap().success());
        // `cat up` sits in the opening of a pipe without a writer.
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("up"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let mut child = Command::new(&program).arg("up").current_dir(dir.path()).spawn().unwrap();
        // `spawn` returns while execve(2) is still setting the arguments up.
        let arguments = format!("/proc/{}/cmdline", child.id());
        while std::fs::read(&arguments).unwrap().is_empty() {
            std::thread::yield_now();
        }
        let places = Places { program: "sidetrack-under-test".into(), sockets: Vec::new(), pins: None };
        let during = found(&places);
        let said = undo(&during, false);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(during.running, [Running { pid: child.id(), command: "up".into() }]);
        assert_eq!(during.leftovers, []);
        assert!(said.code == 1 && said.err.contains("stop it first"), "{said:?}");
        assert_eq!(found(&places).leftovers.len(), 1, "now it is a leftover");
    });
}

#[test]
fn what_cannot_be_seen_is_said() {
    let unseen = vec!["nftables: only root may look; sudo sidetrack cleanup".to_owned()];
    let printed = undo(&Survey { unseen, ..Survey::default() }, false);
    assert_eq!((printed.code, printed.out.as_str()), (1, ""));
    assert!(printed.err.starts_with("not looked at: nftables: only root may look"));
}
