//! The running command: its end, its stops, and signals to it (pidfd_open(2), waitid(2)).
//!
//! ```text
//!             SIGTSTP, SIGTTIN, SIGTTOU, SIGSTOP stop the command
//!   [both run] ----------------------------------------------> [it is stopped]
//!     ^    |                                                       | our group gets the same signal
//!     |    `- it ends -> [ended]                                   v
//!     |                                                      [both are stopped] -- no shell would continue us: not stopped
//!     `---- SIGCONT for us is passed on to the command ----------- |
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};

use super::error::LaunchError;
use super::signals::ForwardedSignals;
use crate::terminal::Terminal;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this exit code.
    Exit(u8),
    /// By this signal.
    Signal(i32),
}

impl Ended {
    /// Returns the exit code: its own, or 128 and the number of the signal.
    pub fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(signal) => u8::try_from((128 + signal) & 0xff).unwrap_or(u8::MAX),
        }
    }
}

/// A command that was started. Its descriptor ([`AsFd`]) becomes readable when it ends.
#[derive(Debug)]
pub struct ChildProcess {
    pid: Pid,
    pidfd: OwnedFd,
    signals: ForwardedSignals,
    terminal: Option<Terminal>,
    /// The command had the terminal for its own group when it stopped, and is to have it when it goes on.
    wants_terminal: AtomicBool,
}

impl ChildProcess {
    pub(super) fn new(
        pid: i32,
        signals: ForwardedSignals,
        terminal: Option<Terminal>,
    ) -> Result<Self, LaunchError> {
        let pid = Pid::from_raw(pid).ok_or(LaunchError::ChildVanished)?;
        // A zombie until we wait for it, so its id cannot belong to another process yet.
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| LaunchError::Fork(error.into()))?;
        Ok(Self { pid, pidfd, signals, terminal, wants_terminal: AtomicBool::new(false) })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Signals to pass on with [`Self::forward`].
    pub fn signals(&self) -> &ForwardedSignals {
        &self.signals
    }

    /// Passes on every signal that has come for the command, and only for us; how many.
    ///
    /// # Errors
    /// What reading them says. A command that has ended is not an error.
    pub fn forward(&self) -> io::Result<usize> {
        let mut forwarded = 0;
        // Signals of one kind do not queue, so there are few.
        while let Some(received) = self.signals.next()? {
            if received.is_for(self.pid(), self.group().is_none()) && self.pass_on(received.signal).is_ok() {
                forwarded += 1;
            }
        }
        Ok(forwarded)
    }

    /// The process group that the command leads. `None`: it is in ours, or has ended.
    fn group(&self) -> Option<Pid> {
        let group = rustix::process::getpgid(Some(self.pid)).ok()?;
        (group == self.pid && group != rustix::process::getpgrp()).then_some(group)
    }

    /// Sends it a signal; the one that continues, to its whole group.
    fn pass_on(&self, signal: i32) -> io::Result<()> {
        let Some(group) = self.group().filter(|_| signal == libc::SIGCONT) else {
            return self.signal(signal);
        };
        // The shell around us has given the terminal to our group. A shell inside expects to have it when it goes on.
        if let Some(terminal) = self.terminal.as_ref().filter(|_| self.wants_terminal.load(Relaxed))
            && terminal.give_to(group)
        {
            self.wants_terminal.store(false, Relaxed);
        }
        Ok(rustix::process::kill_process_group(group, Signal::CONT)?)
    }

    /// Stops our job if the command has stopped, so that the shell around us has its terminal back. Returns when we go on.
    fn follow_stop(&self) -> io::Result<()> {
        let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        let stopped = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options);
        let Some(signal) = stopped.ok().flatten().and_then(|status| status.stopping_signal()) else {
            return Ok(());
        };
        let Some(named) = Signal::from_named_raw(signal) else { return Ok(()) };
        let has_terminal =
            self.group().zip(self.terminal.as_ref()).is_some_and(|(group, of)| of.is_of(group));
        self.wants_terminal.store(has_terminal, Relaxed);
        self.stop_with(named)?;
        // If we were stopped, a SIGCONT has come. If not, no shell is there, and the command would not have stopped without us.
        if self.forward()? == 0 && named == Signal::TSTP && !has_shell() {
            self.pass_on(libc::SIGCONT)?;
        }
        Ok(())
    }

    /// Stops our job. Returns when it goes on, but for SIGSTOP, which another thread may get first: then a moment before it stops.
    fn stop_with(&self, named: Signal) -> io::Result<()> {
        if named == Signal::STOP {
            // The kernel stops us even if no shell would let us go on.
            if has_shell() {
                rustix::process::kill_current_process_group(named)?;
            }
            return Ok(());
        }
        self.signals.letting_through(named.as_raw(), || {
            // It fails for processes of other users, which may be in the group, too.
            let _ = rustix::process::kill_current_process_group(named);
        })
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// `InvalidInput` if there is no such signal; ESRCH if it has ended.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(signal).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(rustix::process::pidfd_send_signal(&self.pidfd, signal)?)
    }

    /// Its exit code once it has ended: its own, or 128 and the number of the signal that ended it; `None` while
    /// it runs. After the first answer it is forgotten, and asking again says ECHILD.
    ///
    /// # Errors
    /// What waitid(2) says.
    pub fn try_wait(&self) -> io::Result<Option<u8>> {
        Ok(self.collect(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)?.map(Ended::code))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// As [`Self::try_wait`].
    pub fn wait(&self) -> io::Result<u8> {
        let ended = self.collect(WaitIdOptions::EXITED)?;
        ended.map(Ended::code).ok_or_else(|| io::ErrorKind::Interrupted.into())
    }

    /// Waits for its end, passes signals on meanwhile, and stops when it stops: for a thread of its own. Then the terminal is ours again.
    ///
    /// # Errors
    /// As [`Self::try_wait`] and [`Self::forward`].
    pub fn supervise(&self) -> io::Result<Ended> {
        loop {
            let mut fds =
                [PollFd::new(&self.pidfd, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            // First the signals: one that came before the end still finds it.
            self.forward()?;
            if let Some(ended) = self.collect(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)? {
                if let Some(terminal) = &self.terminal {
                    terminal.take_back(self.pid, matches!(ended, Ended::Signal(_)));
                }
                return Ok(ended);
            }
            self.follow_stop()?;
        }
    }

    fn collect(&self, options: WaitIdOptions) -> io::Result<Option<Ended>> {
        let status = rustix::io::retry_on_intr(|| {
            rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options)
        })?;
        Ok(status.map(|status| match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Ended::Exit(u8::try_from(code & 0xff).unwrap_or(u8::MAX)),
            (None, Some(signal)) => Ended::Signal(signal),
            (None, None) => Ended::Exit(u8::MAX),
        }))
    }

    /// Ends a child whose set-up failed.
    pub(super) fn kill_and_reap(&self) {
        // It may have ended by itself already; then only the second does something.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = self.wait();
    }
}

impl AsFd for ChildProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Whether a process of our session could continue us: our parent, if it is not of another session.
fn has_shell() -> bool {
    let Some(parent) = rustix::process::getppid() else { return false };
    let session = |pid| rustix::process::getsid(pid).ok();
    session(Some(parent)).is_some_and(|of_parent| session(None) == Some(of_parent))
}
