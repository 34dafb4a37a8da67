//! The running command: its end, and signals to it (pidfd_open(2), waitid(2)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};

use super::error::LaunchError;
use super::signals::ForwardedSignals;

/// A command that was started. Its descriptor ([`AsFd`]) becomes readable when it ends.
#[derive(Debug)]
pub struct ChildProcess {
    pid: Pid,
    pidfd: OwnedFd,
    signals: ForwardedSignals,
}

impl ChildProcess {
    pub(super) fn new(pid: i32, signals: ForwardedSignals) -> Result<Self, LaunchError> {
        let pid = Pid::from_raw(pid).ok_or(LaunchError::ChildVanished)?;
        // A zombie until we wait for it, so its id cannot belong to another process yet.
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| LaunchError::Fork(error.into()))?;
        Ok(Self { pid, pidfd, signals })
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
            if received.from_process && self.signal(received.signal).is_ok() {
                forwarded += 1;
            }
        }
        Ok(forwarded)
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
        self.collect(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// As [`Self::try_wait`].
    pub fn wait(&self) -> io::Result<u8> {
        self.collect(WaitIdOptions::EXITED)?.ok_or_else(|| io::ErrorKind::Interrupted.into())
    }

    /// Waits for its end and passes signals on meanwhile: for a thread of its own.
    ///
    /// # Errors
    /// As [`Self::try_wait`] and [`Self::forward`].
    pub fn supervise(&self) -> io::Result<u8> {
        loop {
            let mut fds =
                [PollFd::new(&self.pidfd, PollFlags::IN), PollFd::new(&self.signals, PollFlags::IN)];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            // First the signals: one that came before the end still finds it.
            self.forward()?;
            if let Some(code) = self.try_wait()? {
                return Ok(code);
            }
        }
    }

    fn collect(&self, options: WaitIdOptions) -> io::Result<Option<u8>> {
        let status = rustix::io::retry_on_intr(|| {
            rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options)
        })?;
        Ok(status.map(|status| {
            let code = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => code,
                (None, Some(signal)) => 128 + signal,
                (None, None) => 255,
            };
            u8::try_from(code & 0xff).unwrap_or(u8::MAX)
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
