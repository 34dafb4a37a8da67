//! A long-running program of the lab: started in a node, ready when it listens, ended with its children.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};

use crate::cpu;
use crate::topology::Node;

/// Time limit until a program listens.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// Interval between the checks for it.
const READY_POLL: Duration = Duration::from_millis(3);
/// Interval between the checks for its end.
const ENDED_POLL: Duration = Duration::from_millis(1);
/// Time that a program has to end after SIGTERM; then it is killed.
const ENDS_WITHIN: Duration = Duration::from_millis(700);
/// Number of bytes of a failed program's log that an error shows.
const LOG_TAIL_BYTES: usize = 600;

/// A running program; dropping it ends its whole session.
#[derive(Debug)]
pub struct Service {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Service {
    /// Starts `command` (from [`Node::command_at`]) with its output in `DIRECTORY/NAME.log`.
    ///
    /// # Errors
    /// The log cannot be written or the launcher cannot be started.
    pub fn start(name: &str, command: Command, directory: &Path) -> Result<Self> {
        Self::spawn(name, command, directory, false)
    }

    /// As [`Self::start`], for a program that prints a line per connection: only its errors are kept, so that writing
    /// lines does not count as its work.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_muted(name: &str, command: Command, directory: &Path) -> Result<Self> {
        Self::spawn(name, command, directory, true)
    }

    fn spawn(name: &str, mut command: Command, directory: &Path, muted: bool) -> Result<Self> {
        let log = directory.join(format!("{name}.log"));
        let errors = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let output = if muted { Stdio::null() } else { errors.try_clone()?.into() };
        let child = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn();
        let child = child.with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Waits until a socket in `node` listens on TCP `port`.
    ///
    /// # Errors
    /// The program ended or did not listen within a minute; the message shows the end of its log.
    pub fn wait_listening(&mut self, node: &Node, port: u16) -> Result<()> {
        self.wait(&format!("listens on port {port}"), || node.listens_on(port))
    }

    /// Waits until a socket in `node` takes datagrams at `port`.
    ///
    /// # Errors
    /// As [`Self::wait_listening`].
    pub fn wait_bound(&mut self, node: &Node, port: u16) -> Result<()> {
        self.wait(&format!("takes datagrams at port {port}"), || node.takes_datagrams(port))
    }

    /// Waits until a connection to this unix socket is accepted. Our program opens its admin socket after its
    /// listeners.
    ///
    /// # Errors
    /// As [`Self::wait_listening`].
    pub fn wait_socket(&mut self, path: &Path) -> Result<()> {
        self.wait(&format!("accepts at {}", path.display()), || Ok(UnixStream::connect(path).is_ok()))
    }

    /// Waits until its log has this text.
    ///
    /// # Errors
    /// As [`Self::wait_listening`].
    pub fn wait_said(&mut self, words: &str) -> Result<()> {
        let log = self.log.clone();
        let said = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains(words));
        self.wait(&format!("says {words:?}"), || Ok(said()))
    }

    fn wait(&mut self, what: &str, holds: impl Fn() -> Result<bool>) -> Result<()> {
        let since = Instant::now();
        while !holds()? {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}) before it {what}: {}", self.name, self.log_tail());
            }
            if since.elapsed() > READY_WITHIN {
                bail!("after {READY_WITHIN:?} it is not so that {} {what}: {}", self.name, self.log_tail());
            }
            std::thread::sleep(READY_POLL);
        }
        Ok(())
    }

    /// Returns the name it was started under.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the process id, which is also its session and process group.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the CPU time that the program and its children have used, in nanoseconds.
    #[must_use]
    pub fn cpu_ns(&self) -> u64 {
        cpu::session_cpu_ns(self.pid())
    }

    /// Returns the resident memory of the program and its children, in bytes.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        cpu::session_resident_bytes(self.pid())
    }

    /// Returns true if it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the program itself has ended, not its children.
    ///
    /// # Errors
    /// It still runs after a minute.
    pub fn wait_ended(&mut self) -> Result<ExitStatus> {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if since.elapsed() > READY_WITHIN {
                bail!("{} does not end within {READY_WITHIN:?}: {}", self.name, self.log_tail());
            }
            std::thread::sleep(ENDED_POLL);
        }
    }

    /// Sends a signal to the program itself, not to its children.
    ///
    /// # Errors
    /// The process is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid().cast_signed()).context("a process id is not zero")?;
        rustix::process::kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Returns everything it has written so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let start = log.char_indices().map(|(at, _)| at).find(|at| log.len() - at <= LOG_TAIL_BYTES);
        log.get(start.unwrap_or(0)..).unwrap_or_default().trim().to_owned()
    }
}

impl Service {
    /// Asks the program to end within [`ENDS_WITHIN`]; the program itself waits for its workers.
    fn ask_to_end(&mut self) {
        let since = Instant::now();
        if self.signal(Signal::TERM).is_err() {
            return;
        }
        while self.is_running() && since.elapsed() < ENDS_WITHIN {
            std::thread::sleep(READY_POLL);
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.is_running() {
            self.ask_to_end();
        }
        let members = cpu::session_members(self.pid());
        let _ = self.child.kill();
        // Workers stay in the leader's session, even if they change their process group.
        for pid in members.into_iter().filter(|pid| *pid != self.child.id()) {
            if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        }
        let _ = self.child.wait();
    }
}
