//! What cannot be attached to, with what to do.

use crate::{Attached, Program, attach, network_of};
use sidetrack_testkit::{Line, Node, is_root};
use std::process::{Command, Stdio};

/// What it prints, with the exit code of its own failures.
fn refusal(host: &Node, arguments: &[&str]) -> String {
    let mut command = attach(arguments);
    let ended = host.run(move || command.output()).expect("it runs");
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(125), "{arguments:?}: {told}");
    told
}

#[test]
fn what_cannot_be_attached_to_is_refused() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let host = &line.client;
    let own_network = network_of(host);
    for (arguments, expected) in [
        (&[][..], "required arguments were not provided"),
        (&["4194305"], "there is no process 4194305"),
        (&["no-such-container-or-unit"], "there is no container, unit or control group"),
        (&["unit:no-such-unit"], "there is no container, unit or control group"),
        (&["cgroup:/no/such/group"], "there is no control group /no/such/group"),
        (&["--netns", "/nowhere"], "there is no network namespace /nowhere"),
        (&["--netns", &own_network], "is the network of this sidetrack"),
        (&["--tap", "1"], "it has read its trust store already"),
        (&["--unix", "deny", "--jail", "1"], "only `run` can limit unix sockets"),
        (&["--for", "10 minutes", "1"], "such as 30s, 10m or 2h"),
    ] {
        let told = refusal(host, arguments);
        assert!(told.contains(expected), "{arguments:?}: {told}");
    }
    // The shell that has started us.
    let script = format!("{} attach $$", env!("CARGO_BIN_EXE_sidetrack"));
    let ended = Command::new("sh").args(["-c", &format!("{script}; true")]).stdin(Stdio::null()).output();
    let told = String::from_utf8_lossy(&ended.expect("sh").stderr).into_owned();
    assert!(told.contains("has started this sidetrack") && told.contains("--force"), "{told}");
    // Twice.
    let program = Program::start(host);
    let pid = program.pid().to_string();
    let attached = Attached::start(host, &[&pid]);
    let told = refusal(host, &[&pid]);
    assert!(told.contains("is caught by sidetrack already"), "{told}");
    attached.detach();
    program.end();
}

#[test]
fn an_ordinary_user_is_told_that_it_needs_root() {
    if !is_root() {
        return;
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all"]);
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let program = folder.path().join("sidetrack");
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_sidetrack")).arg(&program).status();
    assert!(copied.expect("cp").success());
    let opened = Command::new("chmod").args(["755"]).arg(folder.path()).arg(&program).status();
    assert!(opened.expect("chmod").success());
    let ended = command.arg(&program).args(["attach", "1"]).output().expect("it runs");
    let told = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(told.contains("attach needs root"), "{told}");
}
