//! However it ends, everything is as before.

use crate::node::traces::Traces;
use crate::{Attached, Program, attach, echo, group, network_of};
use rustix::process::{Pid, Signal, kill_process};
use sidetrack::cleanup::{Places, survey};
use sidetrack_sys::process;
use sidetrack_sys::undo::Action;
use sidetrack_testkit::{Line, Node, awaited, eventually, is_root};

#[test]
fn a_kill_a_time_and_the_end_of_the_process_leave_nothing() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let port = echo(&line.server, "10.0.2.1");
    let mut program = Program::start(&line.client);
    let home = group(program.pid());
    let before = line.client.run(Traces::now);
    let pid = program.pid().to_string();
    let attached = Attached::start(&line.client, &[&pid]);
    assert_eq!(program.ask(&format!("open 10.0.2.1 {port}")), "open");
    let ours = group(program.pid());
    attached.signal(Signal::KILL);
    attached.end();
    eventually("it is back in its group", || group(program.pid()) == home);
    line.client.run({
        let before = before.clone();
        move || before.expect_back("after the kill")
    });
    let directory = sidetrack_sys::cgroup::Hierarchy::find().expect("cgroup2").mount.join(ours);
    eventually("the group is gone", || !directory.exists());
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {port}")), "ping");
    // The time.
    let (code, told) = Attached::start(&line.client, &["--for", "1s", &pid]).end();
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(group(program.pid()), home);
    line.client.run({
        let before = before.clone();
        move || before.expect_back("after the time")
    });
    // The process.
    let attached = Attached::start(&line.client, &[&pid]);
    program.end();
    let (code, told) = attached.end();
    assert_eq!(code, Some(0), "{told}");
    line.client.run(|| assert!(Traces::now().tables().is_empty()));
}

/// What `cleanup` would do on this host about the group with this name.
fn leftovers(host: &Node, name: &str) -> Vec<Action> {
    let places = Places { program: "sidetrack".into(), sockets: Vec::new() };
    let mut found = host.run(move || survey(&places).leftovers);
    // Those of other tests, which run at the same time, are left to them.
    found.retain(|action| match action {
        Action::ReturnProcesses { from, .. } | Action::RemoveDirectory(from) => from.ends_with(name),
        _ => true,
    });
    found
}

#[test]
fn cleanup_gives_processes_back_whose_guard_was_killed_too() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let port = echo(&line.server, "10.0.2.1");
    let mut program = Program::start(&line.client);
    let home = group(program.pid());
    let before = line.client.run(Traces::now);
    let pid = program.pid().to_string();
    let attached = Attached::start(&line.client, &[&pid]);
    let name = group(program.pid()).display().to_string();
    assert_eq!(leftovers(&line.client, &name), [], "it lives");
    let comm = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let is_guard = |pid: &u32| comm(pid).trim() == "sidetrack-guard";
    let guard =
        awaited("a guard", || process::children(attached.child.id()).into_iter().find(|pid| is_guard(pid)));
    kill_process(Pid::from_raw(guard.cast_signed()).expect("a pid"), Signal::KILL).expect("it lives");
    attached.signal(Signal::KILL);
    attached.end();
    assert_ne!(group(program.pid()), home, "what would have moved it is gone");
    let left = awaited("leftovers", || {
        let left = leftovers(&line.client, &name);
        left.iter().any(|action| matches!(action, Action::ReturnProcesses { .. })).then_some(left)
    });
    line.client.run(move || {
        for action in &left {
            eventually("it is undone", || action.perform().is_ok());
        }
        before.expect_back("after the cleanup");
    });
    assert_eq!(group(program.pid()), home);
    assert_eq!(program.ask(&format!("tcp 10.0.2.1 {port}")), "ping");
    program.end();
}

#[test]
fn a_plan_says_what_would_be_done_and_does_nothing() {
    if !is_root() {
        return;
    }
    let line = Line::new();
    let program = Program::start(&line.client);
    let home = group(program.pid());
    let before = line.client.run(Traces::now);
    let pid = program.pid().to_string();
    let network = network_of(&line.client);
    for (arguments, expected) in [
        (vec!["--plan", &pid], "move 1 processes into a new control group below /"),
        (vec!["--plan", "--netns", &network], "delete the nftables table inet sidetrack-attach-"),
    ] {
        let mut command = attach(&arguments);
        let ended = line.router.run(move || command.output()).expect("it runs");
        let printed = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(ended.status.success() && printed.contains(expected), "{printed}");
        assert!(printed.contains("undo, also after SIGKILL"), "{printed}");
    }
    assert_eq!(group(program.pid()), home);
    line.client.run(move || before.expect_back("after the plan"));
    program.end();
}
