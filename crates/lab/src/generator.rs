//! Traffic is made by the lab's own program in a process of its own, in the node where it belongs: it says on its standard
//! output how far it is, a word a line, and last its report as JSON.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;

/// A generator at work; it is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    /// What it is called in errors: `load generator`.
    name: &'static str,
    child: Child,
    /// Held open: a generator may end with its input.
    _input: Option<ChildStdin>,
    lines: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it; `command` says what its standard input is.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(name: &'static str, mut command: Command) -> Result<Self> {
        command.stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().with_context(|| format!("cannot start the {name}"))?;
        let stdout = child.stdout.take().with_context(|| format!("the {name} has no standard output"))?;
        Ok(Self { name, _input: child.stdin.take(), child, lines: BufReader::new(stdout) })
    }

    /// Waits until it says this line.
    ///
    /// # Errors
    /// It said another one, or ended before.
    pub fn wait(&mut self, wanted: &str) -> Result<()> {
        let line = self.line()?;
        if line.trim() != wanted {
            bail!("the {} said {line:?} instead of {wanted:?}", self.name);
        }
        Ok(())
    }

    /// Waits for the report.
    ///
    /// # Errors
    /// It failed, and has said why on standard error; or what it says is no report.
    pub fn report<R: DeserializeOwned>(mut self) -> Result<R> {
        let line = self.line()?;
        self.child.wait()?;
        serde_json::from_str(&line)
            .with_context(|| format!("the {}'s report is not JSON: {line:?}", self.name))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.lines.read_line(&mut line)? == 0 {
            bail!("the {} ended without a report ({})", self.name, self.child.wait()?);
        }
        Ok(line)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
