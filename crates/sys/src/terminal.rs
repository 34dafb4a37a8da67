//! Terminals: the one that a command shares with us, whether a program draws on it, and pairs for tests (tty_ioctl(4), pty(7)).
#![allow(unsafe_code, reason = "the kept crate has no pairs of terminals without a further feature")]

use rustix::fs::{Mode, OFlags};
use rustix::process::Pid;
use rustix::termios::{self, LocalModes, OptionalActions, Termios, Winsize};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The terminal that controls this process, as it was before a command got it.
#[derive(Debug)]
pub(crate) struct Terminal {
    device: OwnedFd,
    settings: Termios,
    /// Our job had it, and not another one of the shell.
    was_ours: bool,
}

impl Terminal {
    /// Remembers how the terminal is. `None`: there is none.
    pub(crate) fn remember() -> Option<Self> {
        let device = rustix::fs::open("/dev/tty", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let settings = termios::tcgetattr(&device).ok()?;
        let was_ours = termios::tcgetpgrp(&device).ok() == Some(rustix::process::getpgrp());
        Some(Self { device, settings, was_ours })
    }

    /// Whether this process group has it.
    pub(crate) fn is_of(&self, group: Pid) -> bool {
        termios::tcgetpgrp(&self.device).ok() == Some(group)
    }

    /// Gives it to this process group, if our job has it. Returns whether it did.
    pub(crate) fn give_to(&self, group: Pid) -> bool {
        self.is_of(rustix::process::getpgrp()) && termios::tcsetpgrp(&self.device, group).is_ok()
    }

    /// Takes the terminal back after the command's end, if the command had taken it for its own group and no other group has it now. Its
    /// settings become what they were if a signal ended the command: one that ends by itself may have changed them on purpose.
    ///
    /// SIGTTOU must be blocked, or the kernel stops us here.
    pub(crate) fn take_back(&self, command: Pid, was_killed: bool) {
        let ours = rustix::process::getpgrp();
        let Ok(now) = termios::tcgetpgrp(&self.device) else { return };
        let is_left = now == command || rustix::process::test_kill_process_group(now).is_err();
        if !self.was_ours || (now != ours && (!is_left || termios::tcsetpgrp(&self.device, ours).is_err())) {
            return;
        }
        if was_killed {
            // Nothing can be done about a terminal that is gone.
            let _ = termios::tcsetattr(&self.device, OptionalActions::Drain, &self.settings);
        }
    }
}

/// Whether a program draws on this terminal, such as an editor: it reads keys and not lines. At its prompt a shell does so too, and
/// expects lines of others there: `shell` is the id of a command that is not counted if it has taken the terminal for itself.
pub fn is_drawn_on(terminal: impl AsFd, shell: u32) -> bool {
    let Ok(settings) = termios::tcgetattr(&terminal) else { return false };
    if settings.local_modes.contains(LocalModes::ICANON) {
        return false;
    }
    match termios::tcgetpgrp(&terminal) {
        Ok(group) => Pid::from_raw(shell.cast_signed()) != Some(group),
        Err(_) => true,
    }
}

/// A terminal without a screen: what one end writes, the other end reads.
#[derive(Debug)]
pub struct Pair {
    /// The end with screen and keyboard.
    pub screen: OwnedFd,
    /// The end that programs use.
    pub line: OwnedFd,
}

impl Pair {
    /// Opens one. Both ends are closed on exec.
    ///
    /// # Errors
    /// What open(2) and ioctl(2) say.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let screen = rustix::fs::open("/dev/ptmx", flags, Mode::empty())?;
        let unlocked: libc::c_int = 0;
        // SAFETY: the request reads one number.
        if unsafe { libc::ioctl(screen.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the request takes flags and returns a descriptor.
        let line = unsafe {
            libc::ioctl(
                screen.as_raw_fd(),
                libc::TIOCGPTPEER,
                libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC,
            )
        };
        if line < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, which nothing else has.
        Ok(Self { screen, line: unsafe { OwnedFd::from_raw_fd(line) } })
    }
}

/// Sets the size of a terminal's window, in characters. The programs in its foreground get SIGWINCH.
///
/// # Errors
/// What ioctl(2) says.
pub fn resize(terminal: impl AsFd, rows: u16, columns: u16) -> io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(termios::tcsetwinsize(terminal, size)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    #[test]
    fn both_ends_are_one_terminal() {
        let pair = Pair::open().unwrap();
        resize(&pair.screen, 33, 101).unwrap();
        let size = termios::tcgetwinsize(&pair.line).unwrap();
        assert_eq!((size.ws_row, size.ws_col), (33, 101));
        File::from(pair.screen.try_clone().unwrap()).write_all(b"keys\n").unwrap();
        let mut read = [0; 5];
        File::from(pair.line.try_clone().unwrap()).read_exact(&mut read).unwrap();
        assert_eq!(&read, b"keys\n");
    }

    #[test]
    fn a_program_that_reads_keys_draws() {
        let pair = Pair::open().unwrap();
        assert!(!is_drawn_on(&pair.line, 0), "lines");
        let mut settings = termios::tcgetattr(&pair.line).unwrap();
        settings.make_raw();
        termios::tcsetattr(&pair.line, OptionalActions::Now, &settings).unwrap();
        assert!(is_drawn_on(&pair.line, 0), "keys");
        assert!(!is_drawn_on(File::open("/dev/null").unwrap(), 0), "no terminal");
    }
}
