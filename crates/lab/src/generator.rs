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

    /// Returns the number of the process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
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
    pub(crate) fn report<R: DeserializeOwned>(self) -> Result<R> {
        self.report_with(|| ()).map(|(report, ())| report)
    }

    /// Waits for the report, and calls `look` while its process is still known to the system.
    ///
    /// # Errors As [`Process::report`].
    pub(crate) fn report_with<R: DeserializeOwned, T>(mut self, look: impl FnOnce() -> T) -> Result<(R, T)> {
        let line = self.line()?;
        let seen = look();
        self.child.wait()?;
        let report = serde_json::from_str(&line);
        report
            .map(|report| (report, seen))
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
