//! Signals that the parent passes on to the command (signalfd(2)), and those that tell of it.
//!
//! The command starts in the parent's process group, so the terminal signals it (Ctrl-C, Ctrl-\, Ctrl-Z, hang-up)
//! together with us. What another process sends to us alone has to be passed on. The signals that stop are blocked here: we stop
//! when the command has, which may also catch or ignore them. SIGTTOU is blocked because our lines must not stop us.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::process::Pid;

/// What is passed on.
const FORWARDED: [libc::c_int; 9] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGCONT,
];

/// What is only read: the command has stopped or ended, and what the terminal says to jobs in the background.
const READ: [libc::c_int; 3] = [libc::SIGCHLD, libc::SIGTTIN, libc::SIGTTOU];

/// These signals, blocked in this process (in all threads it starts later, too) and readable here. Dropped by
/// the thread that began it, it lets them through again there.
#[derive(Debug)]
pub struct ForwardedSignals {
    fd: OwnedFd,
    before: libc::sigset_t,
    /// A mask belongs to its thread: another one must not get this thread's.
    thread: Pid,
}

/// One signal that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedSignal {
    /// Its number.
    pub signal: i32,
    /// True if a process sent it, to us; false if the kernel did, to the whole foreground group.
    pub from_process: bool,
    /// The id of that process.
    pub sender: u32,
}

impl ReceivedSignal {
    /// Whether it is to be passed on to `command`, which is in our process group or not.
    pub(super) fn is_for(self, command: u32, in_our_group: bool) -> bool {
        if !FORWARDED.contains(&self.signal) {
            return false;
        }
        // An editor stops its whole group, and itself at last.
        let is_its_own = self.signal == libc::SIGTSTP && self.sender == command;
        // The terminal has gone. The kernel tells the first process of the session, and that may be us.
        let is_hang_up = self.signal == libc::SIGHUP && !in_our_group;
        (self.from_process && !is_its_own) || is_hang_up
    }
}

impl ForwardedSignals {
    /// Blocks the signals and opens the descriptor, which does not block.
    pub(crate) fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises `set`, the others read it; sigprocmask writes `before` on success and
        // is called by a process with one thread. signalfd returns a descriptor that no other code owns.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in FORWARDED.into_iter().chain(READ) {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_NONBLOCK | libc::SFD_CLOEXEC);
            if fd == -1 {
                return Err(io::Error::last_os_error());
            }
            let fd = OwnedFd::from_raw_fd(fd);
            if libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr()) == -1 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self { fd, before: before.assume_init(), thread: rustix::thread::gettid() })
        }
    }

    /// The signal mask as it was before: what the command is to start with.
    pub(super) fn restore_mask(&self) -> io::Result<()> {
        // SAFETY: `before` was written by sigprocmask; no old mask is asked for.
        let result =
            unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The next signal that came; `None` if none did.
    ///
    /// # Errors
    /// What read(2) says.
    pub fn next(&self) -> io::Result<Option<ReceivedSignal>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: `info` has room for `size` bytes; any bytes are a valid `signalfd_siginfo`, all integers.
        let (read, info) = unsafe {
            let read = libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size);
            (read, info.assume_init())
        };
        if read == -1 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // SI_USER, SI_QUEUE and SI_TKILL are zero or negative, SI_KERNEL is 128 (sigaction(2)).
        Ok(Some(ReceivedSignal {
            signal: i32::try_from(info.ssi_signo).unwrap_or(0),
            from_process: info.ssi_code <= 0,
            sender: info.ssi_pid,
        }))
    }

    /// Lets one signal through in the calling thread while `work` runs.
    pub(super) fn letting_through(&self, signal: libc::c_int, work: impl FnOnce()) -> io::Result<()> {
        let change = |how| {
            let mut set = MaybeUninit::<libc::sigset_t>::uninit();
            // SAFETY: sigemptyset initialises `set`, the others read it; no old mask is asked for.
            let error = unsafe {
                libc::sigemptyset(set.as_mut_ptr());
                libc::sigaddset(set.as_mut_ptr(), signal);
                libc::pthread_sigmask(how, set.as_ptr(), std::ptr::null_mut())
            };
            if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
        };
        change(libc::SIG_UNBLOCK)?;
        work();
        change(libc::SIG_BLOCK)
    }
}

impl AsFd for ForwardedSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for ForwardedSignals {
    fn drop(&mut self) {
        if rustix::thread::gettid() == self.thread {
            // Nothing can be done about a failure, and there is none with a valid mask.
            let _ = self.restore_mask();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_passed_on_depends_on_who_sent_it() {
        let is_for = |signal, from_process, sender, in_our_group| {
            ReceivedSignal { signal, from_process, sender }.is_for(7, in_our_group)
        };
        assert!(is_for(libc::SIGTERM, true, 1, true) && is_for(libc::SIGTERM, true, 7, true));
        assert!(!is_for(libc::SIGINT, false, 0, true), "the terminal has told the command, too");
        assert!(is_for(libc::SIGTSTP, true, 1, true) && !is_for(libc::SIGTSTP, true, 7, true));
        assert!(is_for(libc::SIGHUP, false, 0, false) && !is_for(libc::SIGHUP, false, 0, true));
        assert!(!is_for(libc::SIGCHLD, true, 1, true) && !is_for(libc::SIGTTOU, true, 1, true));
    }
}
