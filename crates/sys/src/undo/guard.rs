//! The process that outlives us to take things back.
#![allow(unsafe_code, reason = "makes system calls that no kept crate wraps safely")]

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use rustix::process::{Pid, WaitOptions};

use super::{Action, ActionError};
use crate::caps::{self, CapabilitySet};
use crate::confine;
use crate::netns::NetNs;

/// First letter of a line: take this action when the writer is gone.
const ADD: char = '+';
/// First letter of a line: it is not needed any more.
const DROP: char = '-';
/// How often what fails is tried, and the pause in between: three seconds.
const ATTEMPTS: u32 = 151;
const PAUSE: Duration = Duration::from_millis(20);
/// The line that ends the guard without any action.
const DISARM: &str = "done";

/// A child process that knows how to undo what we did. It blocks on a pipe; the end of that pipe, however it comes, is its
/// signal. Own session, deaf to the signals of a terminal or a service manager's stop, closes every descriptor but the pipe and
/// standard error: it keeps neither sockets nor nftables tables of ours alive.
///
/// It lives in the network namespace, and with the capabilities, of the moment it was started.
#[derive(Debug)]
pub struct Guard {
    pipe: File,
    child: Pid,
}

impl Guard {
    /// Starts the guard with these actions. Later ones are performed first.
    ///
    /// # Errors
    /// If this process has several threads already (a forked child of such a process may find locks taken for ever), or
    /// fork or pipe fail.
    pub fn spawn(actions: &[Action]) -> io::Result<Self> {
        let (guard, read) = Self::fork()?;
        let Some(mut guard) = guard else { live(read) };
        actions.iter().try_for_each(|action| guard.add(action))?;
        Ok(guard)
    }

    /// Starts the guard in another network namespace, where the actions are performed.
    ///
    /// # Errors
    /// As [`Guard::spawn`], or the namespace cannot be entered.
    pub fn spawn_in(network: &NetNs, actions: &[Action]) -> io::Result<Self> {
        // Says whether it can be entered: the child has no other way to tell it.
        network.run(|| Ok(()))?;
        let (guard, read) = Self::fork()?;
        let Some(mut guard) = guard else {
            if network.enter().is_err() {
                // SAFETY: ends this process at once; nothing of the parent's may run in it.
                unsafe { libc::_exit(1) }
            }
            live(read)
        };
        actions.iter().try_for_each(|action| guard.add(action))?;
        Ok(guard)
    }

    /// Starts a guard that performs exactly these actions, later ones first, and keeps only these capabilities. The writer can call
    /// all of it off ([`Guard::disarm`]), but not change it, so it may be a process that reads peers' bytes.
    ///
    /// # Errors
    /// As [`Guard::spawn`].
    pub fn spawn_fixed(actions: Vec<Action>, kept: CapabilitySet) -> io::Result<Self> {
        let (guard, read) = Self::fork()?;
        match guard {
            Some(guard) => Ok(guard),
            None => live_fixed(read, actions, kept),
        }
    }

    /// Forks: the guard's own side is none in the child.
    fn fork() -> io::Result<(Option<Self>, OwnedFd)> {
        if !crate::process::is_single_threaded() {
            return Err(io::Error::other("the undo guard must start before any other thread"));
        }
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        // SAFETY: the process has one thread, so the child finds every lock free and may allocate.
        let forked = unsafe { libc::fork() };
        match Pid::from_raw(forked) {
            None if forked == 0 => {
                drop(write);
                Ok((None, read))
            }
            None => Err(io::Error::last_os_error()),
            Some(child) => Ok((Some(Self { pipe: File::from(write), child }), read)),
        }
    }

    /// Adds an action; to be called *before* doing what it takes back.
    ///
    /// # Errors
    /// If the guard is gone.
    pub fn add(&mut self, action: &Action) -> io::Result<()> {
        self.send(&format!("{ADD}{}\n", action.to_line()))
    }

    /// Takes an action away again, because it has been performed.
    ///
    /// # Errors
    /// If the guard is gone.
    pub fn remove(&mut self, action: &Action) -> io::Result<()> {
        self.send(&format!("{DROP}{}\n", action.to_line()))
    }

    /// The orderly end: the guard goes without doing anything.
    ///
    /// # Errors
    /// If the guard is gone already.
    pub fn disarm(mut self) -> io::Result<()> {
        self.send(&format!("{DISARM}\n"))?;
        let child = self.child;
        drop(self.pipe);
        rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(child), WaitOptions::empty()))?;
        Ok(())
    }

    /// The other orderly end: the guard performs every action now, with the capabilities of the moment it was started, and is
    /// waited for. For what we ourselves may not do any more.
    ///
    /// # Errors
    /// If the guard is gone already.
    pub fn finish(self) -> io::Result<()> {
        let Self { pipe, child } = self;
        drop(pipe);
        rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(child), WaitOptions::empty()))?;
        Ok(())
    }

    fn send(&mut self, line: &str) -> io::Result<()> {
        self.pipe.write_all(line.as_bytes())
    }
}

/// The guard's life.
fn live(pipe: OwnedFd) -> ! {
    detach(&pipe);
    // Each of these can fail only where the guard works without it as well.
    let _ = confine::confine_process(confine::Kind::Keeper);
    undo(listen(pipe))
}

/// The life of a guard whose actions do not change.
fn live_fixed(pipe: OwnedFd, actions: Vec<Action>, kept: CapabilitySet) -> ! {
    detach(&pipe);
    // Each of these can fail only where the guard works without it as well.
    let held = caps::capabilities().map_or(kept, |sets| sets.permitted);
    let _ = caps::keep_only(held & kept);
    let _ = confine::confine_process(confine::Kind::Keeper);
    let mut said = Vec::new();
    // The end of the pipe comes with the end of the writer, however that comes.
    let _ = File::from(pipe).take(64).read_to_end(&mut said);
    if said == format!("{DISARM}\n").as_bytes() {
        // SAFETY: ends this process at once; nothing of the parent's may run in it.
        unsafe { libc::_exit(0) }
    }
    undo(actions)
}

/// Performs the actions and ends.
fn undo(actions: Vec<Action>) -> ! {
    for error in perform_all(actions) {
        // The reader of our standard error may have gone, too; that must not keep us from the rest.
        let _ = writeln!(io::stderr(), "sidetrack guard: {error}; `sidetrack cleanup` tries again");
    }
    // SAFETY: ends this process at once; nothing of the parent's (its buffers, its exit hooks) may run in it.
    unsafe { libc::_exit(0) }
}

/// Performs the actions, later ones first, and those that failed again for a while; gives the errors of those that fail to
/// the last.
///
/// What the one we outlive held may live a moment longer, while another process looks at its descriptors (`/proc/PID/fd`): a table of
/// its own is still owned then, and no other process may delete it.
fn perform_all(mut actions: Vec<Action>) -> Vec<ActionError> {
    actions.reverse();
    let mut errors = Vec::new();
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            std::thread::sleep(PAUSE);
        }
        errors.clear();
        actions.retain(|action| action.perform().map_err(|error| errors.push(error)).is_err());
        if actions.is_empty() {
            break;
        }
    }
    errors
}

/// Leaves the parent's session, descriptors and working directory.
fn detach(pipe: &OwnedFd) {
    // Each of these can fail only where the guard works without it as well.
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    let _ = rustix::thread::set_name(c"sidetrack-guard");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGPIPE, libc::SIGQUIT] {
        // SAFETY: SIG_IGN is a valid disposition for these signals.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    const STANDARD_ERROR: i32 = 2;
    close_all_but([STANDARD_ERROR, pipe.as_raw_fd()]);
}

/// Closes every descriptor but two.
fn close_all_but(mut keep: [i32; 2]) {
    keep.sort_unstable();
    let [low, high] = keep.map(i32::cast_unsigned);
    let gaps = [(0, low.checked_sub(1)), (low + 1, high.checked_sub(1)), (high + 1, Some(u32::MAX))];
    let closed = gaps.into_iter().filter_map(|(first, last)| Some((first, last?))).all(|(first, last)| {
        // SAFETY: in this forked child nothing uses the parent's descriptors; what is kept is in no gap.
        first > last || unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0
    });
    if !closed {
        close_one_by_one(keep);
    }
}

/// For kernels before 5.9, which have no close_range.
fn close_one_by_one(keep: [i32; 2]) {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<i32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for fd in open.into_iter().filter(|fd| !keep.contains(fd)) {
        // SAFETY: as above; the descriptor of the listing itself is closed already, and closing it again does no harm.
        unsafe { libc::close(fd) };
    }
}

/// The actions in force when the pipe ends; none if the orderly end was said.
fn listen(pipe: OwnedFd) -> Vec<Action> {
    let mut actions: Vec<Action> = Vec::new();
    for line in BufReader::new(File::from(pipe)).lines() {
        let Ok(line) = line else { break };
        if line == DISARM {
            return Vec::new();
        }
        match (line.strip_prefix(ADD).map(str::parse), line.strip_prefix(DROP).map(str::parse)) {
            (Some(Ok(action)), _) => actions.push(action),
            (_, Some(Ok(action))) => actions.retain(|other| *other != action),
            _ => {}
        }
    }
    actions
}
