//! `sidetrack run` with programs that know nothing of it: curl, Python, Node, Java, static Go and C.
//!
//! A command is started by a process with one thread, which no test of the usual harness has; so every scenario
//! runs in a process of its own, as the user it is for. The parent answers every connection itself and dials
//! nobody: what a program gets can only have come through it.

mod cgroup;
mod programs;
mod scenarios;
mod served;

use std::process::{Child, Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_sys::caps::{self, CapabilitySet};

/// `nobody`, the user without any right.
const NOBODY: u32 = 65_534;
/// Longest time for one scenario: Java compiles its source first.
const LIMIT: Timespec = Timespec { tv_sec: 120, tv_nsec: 0 };
/// Exit code of a scenario that lacks a program.
const SKIPPED: u8 = 77;

/// What a scenario found out.
enum Outcome {
    Done,
    /// A program is not installed.
    Lacks(&'static str),
}

type Scenario = (&'static str, fn() -> Outcome);

/// Run as root, if we are, and as an ordinary user.
const FOR_EVERYBODY: &[Scenario] = &[
    ("curl by name and by address", programs::curl),
    ("python", programs::python),
    ("node", programs::node),
    ("java", programs::java),
    ("static go", programs::go),
    ("static c", programs::musl),
    ("names arrive as the program says them", scenarios::names),
    ("dns over tcp", scenarios::dns_over_tcp),
    ("exit code and signals", scenarios::exit_codes),
    ("a terminal's interrupt", scenarios::terminal),
    ("children are served too", scenarios::children),
];

/// These need root.
const FOR_ROOT: &[Scenario] = &[
    ("nothing leaks (root)", scenarios::no_leak_as_root),
    ("nothing leaks (nobody)", scenarios::no_leak_as_nobody),
    ("cgroup: connections, names and the rest", cgroup::serves),
    ("cgroup: nothing is left behind", cgroup::leaves_nothing),
    ("cgroup: nothing survives a kill", cgroup::survives_nothing),
    ("cgroup: rights can be given up before the end", cgroup::without_rights),
];

/// Started by other scenarios.
const INTERNAL: &[Scenario] =
    &[("on a terminal", scenarios::on_terminal), ("cgroup: start and wait", cgroup::start_and_wait)];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, user, name] = arguments.as_slice()
        && flag == "--scenario"
    {
        return scenario(user, name);
    }
    if arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let filter = arguments.iter().skip(1).find(|argument| !argument.starts_with('-'));
    let root = rustix::process::geteuid().is_root();
    let mut runs: Vec<(&str, &str)> = Vec::new();
    if root {
        runs.extend(FOR_EVERYBODY.iter().chain(FOR_ROOT).map(|(name, _)| ("root", *name)));
    } else {
        eprintln!("skipped: {} scenarios need root", FOR_ROOT.len());
    }
    runs.extend(FOR_EVERYBODY.iter().map(|(name, _)| (if root { "nobody" } else { "self" }, *name)));
    runs.retain(|(_, name)| filter.is_none_or(|filter| name.contains(filter.as_str())));
    let programs = programs::build(&runs);
    let outcomes: Vec<Option<u8>> = runs.iter().map(|(user, name)| run_apart(user, name)).collect();
    drop(programs);
    let count = |code| outcomes.iter().filter(|outcome| **outcome == Some(code)).count();
    let (passed, skipped) = (count(0), count(SKIPPED));
    let failed = outcomes.len() - passed - skipped;
    if skipped > 0 {
        eprintln!("skipped: {skipped} scenarios lack a program");
    }
    println!("\nrun isolated: {passed} passed, {failed} failed");
    let complete = skipped == 0 || std::env::var_os("SIDETRACK_REQUIRE_ALL").is_none();
    if failed == 0 && complete { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_apart(user: &str, name: &str) -> Option<u8> {
    let code = finished(again(user, name).spawn().expect("start myself"));
    let word = match code {
        Some(0) => "ok",
        Some(SKIPPED) => "skipped",
        _ => "FAILED",
    };
    println!("{name} (as {user}) ... {word}");
    code
}

/// This program again, for one scenario. The link works for a user who cannot reach the build directory, too.
fn again(user: &str, name: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--scenario", user, name]).stdin(Stdio::null());
    command
}

fn finished(mut child: Child) -> Option<u8> {
    let pid = rustix::process::Pid::from_child(&child);
    let handle = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("pidfd");
    if poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&LIMIT)).expect("poll") == 0 {
        eprintln!("took too long");
        child.kill().expect("kill");
    }
    child.wait().expect("wait").code().and_then(|code| u8::try_from(code).ok())
}

fn scenario(user: &str, name: &str) -> ExitCode {
    std::env::set_current_dir("/").expect("chdir");
    if user == "nobody" {
        become_nobody();
    }
    let found = FOR_EVERYBODY.iter().chain(FOR_ROOT).chain(INTERNAL).find(|(other, _)| *other == name);
    let (_, test) = found.expect("a scenario of this name");
    match test() {
        Outcome::Done => ExitCode::SUCCESS,
        Outcome::Lacks(program) => {
            eprintln!("skipped: {program} is not installed");
            ExitCode::from(SKIPPED)
        }
    }
}

fn become_nobody() {
    caps::become_user(NOBODY, NOBODY, CapabilitySet::empty()).expect("become nobody");
}
