//! Tables that belong to us: what happens to them when we go, in whatever way, and when others interfere.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use sidetrack_sys::netlink::{Protocol, Socket};
use sidetrack_sys::nft::{self, Family, Feature, Lifetime, OwnError, OwnedTable, Table};
use sidetrack_testkit::in_namespace;

const NAME: &str = "sidetrack";
/// Set in the environment of the child process that holds a table.
const CHILD: &str = "SIDETRACK_TEST_HOLDS_TABLE";

fn table() -> Table {
    Table { name: NAME.into(), ..nft::run_namespace(9) }
}

fn netfilter() -> Socket {
    Socket::open(Protocol::Netfilter).expect("socket")
}

fn lifetime() -> Option<Lifetime> {
    nft::find_table(&mut netfilter(), Family::Inet, NAME).expect("asked").map(|info| info.lifetime)
}

fn owner() -> Option<u32> {
    nft::find_table(&mut netfilter(), Family::Inet, NAME).expect("asked").and_then(|info| info.owner)
}

/// A process in this thread's namespace that holds the table; it says so before this returns.
fn holder(lifetime: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "holds_a_table_until_killed", "--nocapture"])
        .env(CHILD, lifetime)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("child");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let held = lines.map_while(Result::ok).take(100).any(|line| line.contains("holding"));
    assert!(held, "the child holds the table");
    child
}

/// The child's part; without the variable it does nothing.
#[test]
fn holds_a_table_until_killed() {
    let Ok(lifetime) = std::env::var(CHILD) else { return };
    let lifetime = if lifetime == "orphan" { Lifetime::SocketThenOrphan } else { Lifetime::Socket };
    let _table = OwnedTable::create(&table(), lifetime).expect("table");
    println!("\nholding");
    let _ = std::io::stdin().lines().count();
}

/// Ends a holder. Its table may live on for a moment: a process that reads the descriptors of an ending process
/// (`/proc/PID/fd`) holds them, too.
fn kill(mut child: Child) {
    child.kill().expect("SIGKILL");
    child.wait().expect("gone");
}

#[test]
fn it_goes_with_its_owner() {
    in_namespace(|| {
        let owned = OwnedTable::create(&table(), Lifetime::Socket).expect("table");
        assert_eq!(lifetime(), Some(Lifetime::Socket));
        drop(owned);
        assert_eq!(lifetime(), None);
    });
}

#[test]
fn it_goes_when_its_owner_is_killed() {
    in_namespace(|| {
        let child = holder("socket");
        assert_eq!((lifetime(), owner()), (Some(Lifetime::Socket), Some(child.id())));
        kill(child);
        sidetrack_testkit::eventually("it is gone", || lifetime().is_none());
    });
}

#[test]
fn others_cannot_touch_it() {
    in_namespace(|| {
        let child = holder("socket");
        if sidetrack_testkit::nft("flush ruleset").is_some() {
            assert_eq!(lifetime(), Some(Lifetime::Socket), "nft flush ruleset leaves it");
            let rules = sidetrack_testkit::nft("list table inet sidetrack").expect("installed");
            assert!(rules.contains("redirect to :9"), "{rules}");
        }
        match OwnedTable::create(&table(), Lifetime::Socket) {
            Err(OwnError::OwnedByAnother { port, .. }) => assert_eq!(port, child.id()),
            other => panic!("{other:?}"),
        }
        let refused = nft::delete_table(&mut netfilter(), Family::Inet, NAME).expect_err("not ours");
        assert_eq!(refused.errno(), Some(1), "{refused}");
        kill(child);
        sidetrack_testkit::eventually("it is gone", || lifetime().is_none());
        OwnedTable::create(&table(), Lifetime::Socket).expect("free again");
    });
}

#[test]
fn an_orphan_stays_until_it_is_adopted() {
    in_namespace(|| {
        let missing = OwnedTable::adopt(Family::Inet, NAME);
        assert!(matches!(missing, Err(OwnError::NoOrphan { .. })), "{missing:?}");
        if !nft::knows(&mut netfilter(), Feature::Persist).expect("asked") {
            // Before Linux 6.9 there are none: that is said, and nothing is left half made.
            let refused = OwnedTable::create(&table(), Lifetime::SocketThenOrphan);
            assert!(matches!(refused, Err(OwnError::PersistUnsupported)), "{refused:?}");
            assert_eq!(lifetime(), None);
            return;
        }
        let child = holder("orphan");
        let taken = OwnedTable::adopt(Family::Inet, NAME);
        assert!(matches!(taken, Err(OwnError::OwnedByAnother { .. })), "{taken:?}");
        kill(child);
        sidetrack_testkit::eventually("it is an orphan", || owner().is_none());
        assert_eq!(lifetime(), Some(Lifetime::SocketThenOrphan), "it stays");
        let mut adopted = OwnedTable::adopt(Family::Inet, NAME).expect("adopted");
        assert!(owner().is_some());
        adopted.replace(&table()).expect("ours to change");
        drop(adopted);
        // A child that another test is starting holds a copy of the socket until it execs.
        sidetrack_testkit::eventually("it is an orphan again", || owner().is_none());
        let again = OwnedTable::create(&table(), Lifetime::SocketThenOrphan).expect("in place of the orphan");
        again.delete().expect("the orderly end");
        assert_eq!(lifetime(), None);
    });
}

#[test]
fn a_table_without_owner_is_replaced_and_deleted() {
    in_namespace(|| {
        table().apply(&mut netfilter()).expect("a leftover");
        let owned = OwnedTable::create(&table(), Lifetime::Socket).expect("in its place");
        assert_eq!(lifetime(), Some(Lifetime::Socket));
        drop(owned);
        table().apply(&mut netfilter()).expect("again");
        assert!(nft::delete_table(&mut netfilter(), Family::Inet, NAME).expect("deleted"));
        assert!(!nft::delete_table(&mut netfilter(), Family::Inet, NAME).expect("nothing there"));
    });
}

#[test]
fn a_refused_change_leaves_the_old_table_and_names_the_object() {
    in_namespace(|| {
        let mut owned = OwnedTable::create(&table(), Lifetime::Socket).expect("table");
        let mut broken = table();
        let jump = nft::Statement::Verdict(nft::Verdict::Jump("nowhere".into()));
        broken.chains[0].rules.push(nft::Rule::new([jump]));
        let error = owned.replace(&broken).expect_err("no such chain").to_string();
        assert!(error.contains("jump nowhere") && error.contains("chain output"), "{error}");
        assert_eq!(lifetime(), Some(Lifetime::Socket), "the old one is still there");
        if let Some(rules) = sidetrack_testkit::nft("list table inet sidetrack") {
            assert!(rules.contains("redirect to :9"), "{rules}");
        }
    });
}
