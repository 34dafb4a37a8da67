//! The commands of both ends, as processes of their own.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// What a command has said, and whether it succeeded.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) is_ok: bool,
    pub(crate) text: String,
}

impl Said {
    /// Checks that it failed with these words, and said no secret.
    pub(crate) fn expect_error(&self, words: &str) {
        // Errors are wrapped at the terminal's width.
        let text = self.text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(!self.is_ok && text.contains(words), "{words}: {self:?}");
    }
}

fn sidetrack(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidetrack"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command with this text as its input.
pub(crate) fn run(arguments: &[&str], input: &str) -> Said {
    let mut child = sidetrack(arguments).spawn().unwrap();
    // A command that reads nothing may be over by now.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Said { is_ok: output.status.success(), text }
}

/// A command that invites, and waits.
pub(crate) struct Inviting {
    child: Child,
    out: BufReader<ChildStdout>,
    /// The invitation.
    pub(crate) text: String,
}

impl Inviting {
    /// Starts it and reads the invitation.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut child = sidetrack(arguments).spawn().unwrap();
        let mut text = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut text).unwrap();
        if text.is_empty() {
            let mut said = String::new();
            child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("no invitation: {said}");
        }
        Self { child, out, text: text.trim().to_owned() }
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Said {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        self.out.read_to_string(&mut text).unwrap();
        let is_ok = self.child.wait().unwrap().success();
        let secret = self.text.split_once(':').unwrap().1;
        assert!(!text.contains(secret), "the secret is in the log: {text}");
        Said { is_ok, text }
    }
}

impl Drop for Inviting {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The path as text.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
