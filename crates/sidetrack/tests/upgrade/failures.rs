//! A new process that fails: the old one goes on as before.

use crate::load::Load;
use crate::node::peers::{Server, visit};
use crate::node::{Up, send};
use crate::replaced::{TOP, tables};
use crate::{Upgrade, runs};
use rustix::process::Signal;

/// A node under load, and whether new connections may break.
fn with_load(may_break: bool, test: impl FnOnce(&Up, &Load)) {
    let server = Server::start("127.0.0.1");
    let up = Up::start(TOP, &tables(server.address));
    let entry = up.addresses("reverse")[0];
    let load = Load::start(entry, 3, may_break);
    load.goes_on();
    test(&up, &load);
    load.goes_on();
    assert!(runs(up.pid()));
    let (flows, visits) = load.finish();
    visit(entry, b"after");
    let (status, records) = up.stop();
    assert!(status.success());
    let ok = records.iter().filter(|record| record.text("reason") == "ok").count() as u64;
    // What a killed process has carried has no record.
    assert!(may_break || ok > visits, "{ok} records of {visits} connections");
    for address in flows {
        let ours: Vec<_> = records.iter().filter(|record| record.address("client") == address).collect();
        assert!(ours.len() == 1 && ours[0].text("reason") == "ok", "{ours:?}");
    }
}

#[test]
fn what_is_no_sidetrack_and_a_wrong_configuration_change_nothing() {
    with_load(false, |up, _| {
        let (success, said) = Upgrade::start(&up.folder(), &["/bin/true"]).ended();
        assert!(!success && said.contains("has ended") && said.contains("nothing has moved"), "{said}");
        let (success, said) = Upgrade::start(&up.folder(), &["/etc/passwd"]).ended();
        assert!(!success && said.contains("cannot be started"), "{said}");
        let good = std::fs::read_to_string(up.folder().join("sidetrack.toml")).expect("text");
        std::fs::write(up.folder().join("sidetrack.toml"), "version = 1\nnonsense = 1\n").expect("written");
        let (success, said) = Upgrade::start(&up.folder(), &[]).ended();
        assert!(!success && said.contains("nonsense") && said.contains("nothing has moved"), "{said}");
        std::fs::write(up.folder().join("sidetrack.toml"), good).expect("written");
    });
}

#[test]
fn an_upgrade_that_is_not_confirmed_is_taken_back() {
    with_load(false, |up, load| {
        let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "300ms"]);
        let new = upgrade.started();
        upgrade.until("serves new connections");
        let (success, said) = upgrade.ended();
        assert!(
            !success && said.contains("not confirmed") && said.contains("taken everything back"),
            "{said}"
        );
        load.goes_on();
        crate::ends(&new);
        // It can be tried again.
        let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", "1ms"]);
        let new = upgrade.started();
        assert!(!upgrade.ended().0);
        crate::ends(&new);
    });
}

#[test]
fn a_new_process_that_is_killed_or_hangs_is_replaced_by_the_old_one() {
    with_load(true, |up, load| {
        for (signal, confirm) in [(Signal::KILL, "60s"), (Signal::STOP, "100ms")] {
            let mut upgrade = Upgrade::start(&up.folder(), &["--confirm", confirm]);
            let new = upgrade.started();
            upgrade.until("serves new connections");
            send(new.0, signal);
            let (success, said) = upgrade.ended();
            assert!(!success && said.contains("taken everything back"), "{said}");
            load.goes_on();
            crate::ends(&new);
        }
    });
}
