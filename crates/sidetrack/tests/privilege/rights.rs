//! Who may do what.

use crate::node::Up;
use sidetrack_sys::caps::CapabilitySet;
use sidetrack_testkit::{eventually, in_namespace, is_root};
use std::os::unix::fs::PermissionsExt;

const EVERYTHING: &str = "[[listen]]\nname = \"out\"\nkind = \"redirect\"\nports = 9\n\
                          [[listen]]\nname = \"router\"\nkind = \"tproxy\"\nports = 9\n\
                          [[listen]]\nname = \"port\"\nkind = \"reverse\"\naddress = \"127.0.0.1:81\"\nto = \"127.0.0.1:9\"\n";

/// /proc/PID/task/TID/status; none of a thread that has ended.
fn status(pid: u32, task: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/task/{task}/status")).ok()
}

/// A line of that.
fn line<'s>(status: &'s str, field: &str) -> &'s str {
    status.lines().find_map(|line| line.strip_prefix(field)).expect(field).trim()
}

/// A line with a set of capabilities.
fn capabilities(status: &str, field: &str) -> u64 {
    u64::from_str_radix(line(status, field), 16).expect("hex")
}

#[test]
fn every_thread_of_the_main_process_keeps_two_capabilities_at_most() {
    in_namespace(|| {
        let up = Up::start_with("default = \"direct\"\n", EVERYTHING, |folder| {
            // What its user can read needs no capability to be read again.
            std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("mode");
        });
        let allowed = (CapabilitySet::NET_RAW | CapabilitySet::NET_BIND_SERVICE).bits();
        let tasks = std::fs::read_dir(format!("/proc/{}/task", up.pid())).expect("tasks").flatten();
        let tasks: Vec<_> = tasks.map(|task| task.file_name().to_string_lossy().into_owned()).collect();
        let tasks: Vec<_> = tasks.iter().filter_map(|task| status(up.pid(), task)).collect();
        assert!(tasks.len() >= 2, "a worker and the control thread: {tasks:?}");
        for task in &tasks {
            for field in ["CapEff:", "CapPrm:", "CapBnd:", "CapInh:", "CapAmb:"] {
                let held = capabilities(task, field);
                assert_eq!(held & !allowed, 0, "{field} {held:#x} of {task}");
            }
            assert_eq!(line(task, "NoNewPrivs:"), "1");
        }
        assert!(up.stop().0.success());
    });
}

#[test]
fn the_keeper_has_what_the_rules_need_and_no_more() {
    let asks = "[[rule]]\nname = \"by\"\nmatch = { process = \"curl\" }\ncarrier = \"direct\"\n";
    let owners = CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH;
    for (rules, more) in [("", CapabilitySet::empty()), (asks, owners)] {
        in_namespace(move || {
            let up = Up::start("default = \"direct\"\n", &format!("{EVERYTHING}{rules}"));
            let keeper = up.keeper().to_string();
            let status = status(up.keeper(), &keeper).expect("it runs");
            for field in ["CapEff:", "CapPrm:", "CapBnd:"] {
                let held = capabilities(&status, field);
                assert_eq!(held, (CapabilitySet::NET_ADMIN | more).bits(), "{field} {rules}");
            }
            assert!(up.stop().0.success());
        });
    }
}

/// What the keeper gave up, and what it was not started for, no reload brings back.
#[test]
fn a_reload_that_needs_more_rights_says_so() {
    in_namespace(|| {
        let open = "default = \"direct\"\non_crash = \"open\"\n";
        let mut up = Up::start(open, EVERYTHING);
        let asks = "[[rule]]\nname = \"by\"\nmatch = { user = 0 }\ncarrier = \"direct\"\n";
        up.rewrite(open, &format!("{EVERYTHING}{asks}"));
        up.signal(rustix::process::Signal::HUP);
        up.log_line("a refusal", |line| line.contains("rules that ask for the process"));
        up.rewrite("default = \"direct\"\non_crash = \"closed\"\n", EVERYTHING);
        up.signal(rustix::process::Signal::HUP);
        up.log_line("a refusal", |line| line.contains("on_crash = \"closed\" is new"));
        assert!(up.stop().0.success());
    });
}

#[test]
fn people_can_tell_the_processes_apart() {
    in_namespace(|| {
        let up = Up::start("default = \"direct\"\n", EVERYTHING);
        let name = |pid: u32| line(&status(pid, &pid.to_string()).expect("it runs"), "Name:").to_owned();
        // The program does not wait until the guard has taken its name.
        eventually("the guard is called so", || name(up.guard()) == "sidetrack-guard");
        assert_eq!([name(up.pid()), name(up.keeper())], ["sidetrack", "sidetrack-keep"]);
        assert!(up.stop().0.success());
    });
}

#[test]
fn without_rights_the_refusal_says_what_to_do() {
    if !is_root() {
        return;
    }
    let output = std::thread::spawn(|| {
        // A thread has its own capabilities, and what it starts inherits them.
        sidetrack_sys::caps::keep_only(CapabilitySet::NET_BIND_SERVICE).expect("given up");
        let mut up = Up::spawn("default = \"direct\"\n", EVERYTHING);
        let (status, _) = up.gone();
        (status.code(), up.logged())
    });
    let (code, log) = output.join().expect("ran");
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("sudo"), "{log}");
}

/// A copy of the program that is set-user-id: its caller's environment does not steer it.
#[test]
fn the_environment_is_ignored_where_the_program_has_more_rights_than_its_caller() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("readable");
    let copy = folder.path().join("sidetrack");
    // By a program of its own: what another thread starts meanwhile would hold the file open for writing.
    let copied = std::process::Command::new("cp").arg(env!("CARGO_BIN_EXE_sidetrack")).arg(&copy).status();
    assert!(copied.expect("cp").success());
    let asked = |mode: u32, uid: u32| {
        std::os::unix::fs::chown(&copy, Some(uid), None).expect("chown");
        std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(mode)).expect("mode");
        let output = std::process::Command::new(&copy)
            .arg("flows")
            .env("SIDETRACK_ADMIN", "/nowhere/of-the-caller")
            .output();
        String::from_utf8_lossy(&output.expect("the copy").stderr).into_owned()
    };
    let ordinary = asked(0o755, 0);
    assert!(ordinary.contains("of-the-caller"), "{ordinary}");
    let set_user_id = asked(0o4755, 65_534);
    assert!(!set_user_id.contains("of-the-caller"), "{set_user_id}");
}

/// Forbidden calls themselves are tried in `crates/sys/src/confine.rs`.
#[test]
fn calls_are_confined_and_no_memory_leaves_the_processes() {
    in_namespace(|| {
        let up = Up::start("default = \"direct\"\n", EVERYTHING);
        for pid in [up.pid(), up.keeper()] {
            let status = status(pid, &pid.to_string()).expect("it runs");
            assert_eq!(line(&status, "Seccomp:"), "2", "a filter");
            let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
            let core = line(&limits, "Max core file size");
            assert!(core.starts_with('0'), "{core}");
        }
        let tasks = std::fs::read_dir(format!("/proc/{}/task", up.pid())).expect("tasks").flatten();
        let tasks = tasks.filter_map(|task| status(up.pid(), &task.file_name().to_string_lossy()));
        assert!(tasks.map(|task| line(&task, "Seccomp:").to_owned()).all(|mode| mode == "2"), "every thread");
        assert!(up.stop().0.success());
    });
}
