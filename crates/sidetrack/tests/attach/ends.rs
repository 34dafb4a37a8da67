//! However it ends, everything is as before.

use crate::node::traces::Traces;
use crate::{Attached, Program, attach, echo, group, network_of};
use rustix::process::{Pid, Signal, kill_process};
use sidetrack::cleanup::{Places, survey};
use sidetrack_sys::process;
use sidetrack_sys::undo::Action;
use sidetrack_testkit::{Line, Node, awaited, eventually, is_root};
use std::path::PathBuf;

/// A program that runs, and how everything is before it is attached to.
struct Scene {
    line: Line,
    program: Program,
    /// The control group of the program.
    home: PathBuf,
    before: Traces,
    pid: String,
}

impl Scene {
    /// `None`: without root there is nothing to attach.
    fn new() -> Option<Self> {
        if !is_root() {
            return None;
        }
        let line = Line::new();
        let program = Program::start(&line.client);
        let (home, pid) = (group(program.pid()), program.pid().to_string());
        let before = line.client.run(Traces::now);
        Some(Self { line, program, home, before, pid })
    }

    /// The network of the program is as it was.
    fn expect_back(&self, when: &'static str) {
        let before = self.before.clone();
        self.line.client.run(move || before.expect_back(when));
    }
}

#[test]
fn a_kill_a_time_and_the_end_of_the_process_leave_nothing() {
    let Some(mut scene) = Scene::new() else { return };
    let port = echo(&scene.line.server, "10.0.2.1");
    let attached = Attached::start(&scene.line.client, &[&scene.pid]);
    assert_eq!(scene.program.ask(&format!("open 10.0.2.1 {port}")), "open");
    let ours = group(scene.program.pid());
    attached.signal(Signal::KILL);
    attached.end();
    eventually("it is back in its group", || group(scene.program.pid()) == scene.home);
    scene.expect_back("after the kill");
    let directory = sidetrack_sys::cgroup::Hierarchy::find().expect("cgroup2").mount.join(ours);
    eventually("the group is gone", || !directory.exists());
    assert_eq!(scene.program.ask(&format!("tcp 10.0.2.1 {port}")), "ping");
    // The time.
    let (code, told) = Attached::start(&scene.line.client, &["--for", "1s", &scene.pid]).end();
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(group(scene.program.pid()), scene.home);
    scene.expect_back("after the time");
    // The process.
    let attached = Attached::start(&scene.line.client, &[&scene.pid]);
    scene.program.end();
    let (code, told) = attached.end();
    assert_eq!(code, Some(0), "{told}");
    scene.line.client.run(|| assert!(Traces::now().tables().is_empty()));
}

/// What `cleanup` would do on this host about the group with this name.
fn leftovers(host: &Node, name: &str) -> Vec<Action> {
    let places = Places { program: "sidetrack".into(), sockets: Vec::new(), pins: None };
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
    let Some(scene) = Scene::new() else { return };
    let Scene { line, mut program, home, before, pid } = scene;
    let port = echo(&line.server, "10.0.2.1");
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
    let Some(scene) = Scene::new() else { return };
    let network = network_of(&scene.line.client);
    for (arguments, expected) in [
        (vec!["--plan", &scene.pid], "move 1 processes into a new control group below /"),
        (vec!["--plan", "--netns", &network], "delete the nftables table inet sidetrack-attach-"),
    ] {
        let mut command = attach(&arguments);
        let ended = scene.line.router.run(move || command.output()).expect("it runs");
        let printed = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(ended.status.success() && printed.contains(expected), "{printed}");
        assert!(printed.contains("undo, also after SIGKILL"), "{printed}");
    }
    assert_eq!(group(scene.program.pid()), scene.home);
    scene.expect_back("after the plan");
    scene.program.end();
}
