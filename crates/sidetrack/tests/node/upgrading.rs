//! The command `sidetrack upgrade` on a running node, and the processes that it starts.

use super::{Record, Up, send};
use rustix::process::Signal;
use sidetrack_testkit::eventually;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The program under test.
pub(crate) const SIDETRACK: &str = env!("CARGO_BIN_EXE_sidetrack");

/// The program that runs as a node: that of a measurement, or the one under test.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("SIDETRACK_MEASURED").map_or_else(|| SIDETRACK.into(), PathBuf::from)
}

/// The command `upgrade`, and what it says.
pub(crate) struct Upgrade {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
    said: Vec<String>,
}

/// A process that a node has started. The test is not its parent, so it is ended here if the test fails.
pub(crate) struct Started(pub u32);

impl Drop for Started {
    fn drop(&mut self) {
        if std::thread::panicking() {
            send(self.0, Signal::KILL);
        }
    }
}

impl Upgrade {
    pub(crate) fn start(folder: &Path, words: &[&str]) -> Self {
        let mut command = Command::new(program());
        command.arg("upgrade").args(words).arg("--admin").arg(folder.join("admin.sock"));
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().expect("the binary");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, lines, said: Vec::new() }
    }

    /// Reads until a line that contains this.
    pub(crate) fn until(&mut self, what: &str) -> String {
        loop {
            let mut line = String::new();
            let bytes = self.lines.read_line(&mut line).expect("text");
            if bytes == 0 {
                let mut errors = String::new();
                let _ = self.child.stderr.take().expect("a pipe").read_to_string(&mut errors);
                panic!("it ended without '{what}': {:?} {errors}", self.said);
            }
            self.said.push(line.clone());
            if line.contains(what) {
                return line;
            }
        }
    }

    /// The process that was started.
    pub(crate) fn started(&mut self) -> Started {
        let line = self.until("was started");
        Started(line.split_whitespace().nth(1).and_then(|pid| pid.parse().ok()).expect("a process id"))
    }

    /// Waits for its end: whether it succeeded, and all that it said.
    pub(crate) fn ended(mut self) -> (bool, String) {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).expect("text");
        let mut errors = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut errors).expect("text");
        let status = self.child.wait().expect("a child");
        (status.success(), self.said.concat() + &rest + &errors)
    }
}

/// Ends the process that has replaced the node, and waits until nothing of it is left. Gives the other records.
pub(crate) fn stop(mut up: Up, last: &Started) -> Vec<Record> {
    send(last.0, Signal::TERM);
    let (status, rest) = up.gone();
    assert!(status.success(), "the old process: {status}\n{}", up.logged());
    rest
}

/// Whether a process runs.
pub(crate) fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

pub(crate) fn ends(started: &Started) {
    eventually("the process has ended", || !runs(started.0));
}
