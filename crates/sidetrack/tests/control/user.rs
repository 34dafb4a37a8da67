//! The user that orchestrators and agents become when root starts them, and what they keep.

use crate::node::agreement::trial;
use crate::node::send;
use crate::plane::Plane;
use rustix::process::Signal;
use sidetrack::control::api::{Progress, Step};
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_sys::{landlock, process};
use sidetrack_testkit::{eventually, is_root};
use std::os::unix::fs::PermissionsExt;

fn field(pid: u32, task: u32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{task}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// All threads of a process have this: user ids, capabilities, no_new_privs, a filter.
fn assert_confined(pid: u32, keeps: CapabilitySet) {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("tasks").flatten();
    let tasks: Vec<u32> = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect();
    assert!(!tasks.is_empty());
    for task in tasks {
        for ids in ["Uid:", "Gid:"] {
            let ids = field(pid, task, ids);
            let mut ids = ids.split(' ');
            let first = ids.next().expect("an id");
            assert!(first != "0" && ids.all(|id| id == first), "{pid}: {first}");
        }
        for set in ["CapEff:", "CapPrm:", "CapBnd:", "CapInh:", "CapAmb:"] {
            let held = u64::from_str_radix(&field(pid, task, set), 16).expect("hex");
            assert_eq!(held & !keeps.bits(), 0, "{pid}: {set} {held:#x}");
        }
        assert_eq!(field(pid, task, "NoNewPrivs:"), "1");
        assert_eq!(field(pid, task, "Seccomp:"), "2");
    }
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
    let core = limits.lines().find_map(|line| line.strip_prefix("Max core file size")).expect("a limit");
    assert!(core.trim_start().starts_with('0'), "{core}");
}

/// The process that uses sockets for an agent.
fn sockets_of(agent: u32) -> u32 {
    let children = process::children(agent);
    assert_eq!(children.len(), 1, "{children:?}");
    children[0]
}

#[test]
fn orchestrators_and_agents_are_unprivileged_users_and_work_as_such() {
    if !is_root() {
        return;
    }
    let mut plane = Plane::start("[[grant]]\n");
    let lines = plane.submit("one", 0, |_| {});
    assert!(matches!(lines.last(), Some(Progress::Done { step: Step::Ready, .. })), "{lines:?}");
    // The folder of its agreement belongs to root alone.
    assert_confined(plane.orchestrator.pid(), CapabilitySet::DAC_READ_SEARCH);
    for agent in [&plane.hospital, &plane.centre] {
        assert_confined(agent.pid(), CapabilitySet::empty());
        assert_confined(sockets_of(agent.pid()), CapabilitySet::DAC_OVERRIDE);
    }
    for part in [&plane.hospital, &plane.centre, &plane.orchestrator] {
        assert!(!part.logged().contains("not confined"), "{}", part.logged());
    }
    plane.end("one");
}

#[test]
fn they_stay_root_only_where_their_file_says_so() {
    if !is_root() {
        return;
    }
    let mut plane = Plane::start("[[grant]]\n");
    let file = plane.folder.path().join("hospital.toml");
    let text = std::fs::read_to_string(&file).expect("the file");
    std::fs::write(&file, format!("user = \"root\"\n{text}")).expect("written");
    plane.hospital.kill();
    plane.hospital.restart();
    let (agent, beside) = (plane.hospital.pid(), sockets_of(plane.hospital.pid()));
    for (pid, keeps) in [(agent, CapabilitySet::empty()), (beside, CapabilitySet::DAC_OVERRIDE)] {
        assert_eq!(field(pid, pid, "Uid:"), "0 0 0 0");
        let held = u64::from_str_radix(&field(pid, pid, "CapPrm:"), 16).expect("hex");
        assert_eq!(held & !keeps.bits(), 0, "{held:#x}");
    }
}

/// CAP_DAC_READ_SEARCH is there, and Landlock bounds it.
#[test]
fn an_orchestrator_reads_no_file_outside_the_folder_of_its_agreement() {
    if !is_root() || landlock::version().is_none() {
        return eprintln!("skipped: needs root and Landlock");
    }
    let plane = Plane::start("[[grant]]\n");
    let agreement = plane.folder.path().join("agreement.toml");
    let elsewhere = tempfile::tempdir().expect("a folder");
    let other = elsewhere.path().join("agreement.toml");
    std::fs::set_permissions(elsewhere.path(), std::fs::Permissions::from_mode(0o755)).expect("mode");
    std::fs::write(&other, trial(1, "withdrawn", "requires = \"counted\"\n")).expect("written");
    std::fs::remove_file(&agreement).expect("removed");
    std::os::unix::fs::symlink(&other, &agreement).expect("a link");
    eventually("it is refused", || {
        let log = plane.orchestrator.logged();
        log.contains("the agreement is rejected") && log.contains("Permission denied")
    });
}

#[test]
fn an_agent_ends_with_the_process_that_uses_its_sockets() {
    let mut plane = Plane::start("[[grant]]\n");
    send(sockets_of(plane.hospital.pid()), Signal::KILL);
    assert_eq!(plane.hospital.ended().code(), Some(1));
    eventually("it says why", || plane.hospital.logged().contains("restart the agent"));
    // And the other way round.
    let beside = sockets_of(plane.centre.pid());
    plane.centre.kill();
    // One that has ended and that nothing has waited for has no arguments any more.
    let runs = || std::fs::read(format!("/proc/{beside}/cmdline")).is_ok_and(|words| !words.is_empty());
    eventually("nothing is left", || !runs());
}
