//! The traffic generator: the lab's own program as a separate process in a node. It writes its progress on standard
//! output, one word per line, and finally its report as JSON.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;

/// A running generator; dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Process {
    /// What it is called in errors: `load generator`.
    name: &'static str,
    child: Child,
    /// Held open, because a generator may end with its input.
    _input: Option<ChildStdin>,
    lines: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it; `command` says what its standard input is.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(crate) fn start(name: &'static str, mut command: Command) -> Result<Self> {
        command.stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = command.spawn().with_context(|| format!("cannot start the {name}"))?;
        let stdout = child.stdout.take().with_context(|| format!("the {name} has no standard output"))?;
        Ok(Self { name, _input: child.stdin.take(), child, lines: BufReader::new(stdout) })
    }

    /// Waits until it writes this line.
    ///
    /// # Errors It wrote another line, or ended before.
    pub(crate) fn wait(&mut self, wanted: &str) -> Result<()> {
        let line = self.line()?;
        if line.trim() != wanted {
            bail!("the {} said {line:?} instead of {wanted:?}", self.name);
        }
        Ok(())
    }

    /// Waits for the report.
    ///
    /// # Errors It failed, and wrote the reason on standard error; or its report cannot be parsed.
    pub(crate) fn report<R: DeserializeOwned>(mut self) -> Result<R> {
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
