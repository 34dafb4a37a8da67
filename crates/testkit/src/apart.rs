//! Tests that each need a process of their own with one thread, as the user they are for: a command is started by a
//! process with one thread, which no test of the usual harness has.

use std::process::{Child, Command, ExitCode, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidetrack_sys::caps::{self, CapabilitySet};

/// `nobody`, the user without any right.
pub const NOBODY: u32 = 65_534;

/// Exit code of a scenario that lacks a program.
const SKIPPED: u8 = 77;

/// What a scenario found out.
pub enum Outcome {
    /// All was as it should be.
    Done,
    /// A program is not installed.
    Lacks(&'static str),
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// Its name, and what it does.
pub type Scenario<T> = (&'static str, fn() -> T);

/// The scenarios of one test program.
pub struct Suite<T: 'static> {
    /// What they are about.
    pub title: &'static str,
    /// Longest time for one of them, seconds.
    pub limit_seconds: i64,
    /// Run as root, if we are, and as an ordinary user.
    pub for_everybody: &'static [Scenario<T>],
    /// These need root.
    pub for_root: &'static [Scenario<T>],
    /// Started by other scenarios.
    pub internal: &'static [Scenario<T>],
}

impl<T: Into<Outcome>> Suite<T> {
    /// The program: what the scenarios to be run (user and name) need is prepared first and dropped at the end.
    pub fn main<P>(&self, prepare: impl FnOnce(&[(&str, &str)]) -> P) -> ExitCode {
        let arguments: Vec<String> = std::env::args().collect();
        if let [_, flag, user, name] = arguments.as_slice()
            && flag == "--scenario"
        {
            return self.scenario(user, name);
        }
        if arguments.iter().any(|argument| argument == "--list") {
            return ExitCode::SUCCESS;
        }
        let filter = arguments.iter().skip(1).find(|argument| !argument.starts_with('-'));
        let mut runs = self.runs();
        runs.retain(|(_, name)| filter.is_none_or(|filter| name.contains(filter.as_str())));
        let prepared = prepare(&runs);
        let outcomes: Vec<Option<u8>> = runs.iter().map(|(user, name)| self.run_apart(user, name)).collect();
        drop(prepared);
        self.summary(&outcomes)
    }

    fn runs(&self) -> Vec<(&'static str, &'static str)> {
        let root = rustix::process::geteuid().is_root();
        let mut runs = Vec::new();
        if root {
            runs.extend(self.for_everybody.iter().chain(self.for_root).map(|(name, _)| ("root", *name)));
        } else {
            eprintln!("skipped: {} scenarios need root", self.for_root.len());
        }
        runs.extend(self.for_everybody.iter().map(|(name, _)| (if root { "nobody" } else { "self" }, *name)));
        runs
    }

    fn summary(&self, outcomes: &[Option<u8>]) -> ExitCode {
        let count = |code| outcomes.iter().filter(|outcome| **outcome == Some(code)).count();
        let (passed, skipped) = (count(0), count(SKIPPED));
        let failed = outcomes.len() - passed - skipped;
        if skipped > 0 {
            eprintln!("skipped: {skipped} scenarios lack a program");
        }
        println!("\n{}: {passed} passed, {failed} failed", self.title);
        let complete =
            skipped == 0 || std::env::var_os("SIDETRACK_REQUIRE_ALL").is_none_or(|value| value != "1");
        if failed == 0 && complete { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn run_apart(&self, user: &str, name: &str) -> Option<u8> {
        let code = self.finished(again(user, name).spawn().expect("start myself"));
        let word = match code {
            Some(0) => "ok",
            Some(SKIPPED) => "skipped",
            _ => "FAILED",
        };
        println!("{name} (as {user}) ... {word}");
        code
    }

    fn finished(&self, mut child: Child) -> Option<u8> {
        let pid = rustix::process::Pid::from_child(&child);
        let handle = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).expect("pidfd");
        let limit = Timespec { tv_sec: self.limit_seconds, tv_nsec: 0 };
        if poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit)).expect("poll") == 0 {
            eprintln!("took more than {} s", self.limit_seconds);
            child.kill().expect("kill");
        }
        child.wait().expect("wait").code().and_then(|code| u8::try_from(code).ok())
    }

    fn scenario(&self, user: &str, name: &str) -> ExitCode {
        std::env::set_current_dir("/").expect("chdir");
        if user == "nobody" {
            become_nobody(CapabilitySet::empty());
        }
        let all = self.for_everybody.iter().chain(self.for_root).chain(self.internal);
        let (_, test) = all.into_iter().find(|(other, _)| *other == name).expect("a scenario of this name");
        match test().into() {
            Outcome::Done => ExitCode::SUCCESS,
            Outcome::Lacks(program) => {
                eprintln!("skipped: {program} is not installed");
                ExitCode::from(SKIPPED)
            }
        }
    }
}

/// This program again, for one scenario. The link works for a user who cannot reach the build directory, too.
pub fn again(user: &str, name: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--scenario", user, name]).stdin(Stdio::null());
    command
}

/// Becomes the user `nobody`, with no more than these capabilities.
pub fn become_nobody(keep: CapabilitySet) {
    caps::become_user(NOBODY, NOBODY, &[], keep).expect("become nobody");
}
