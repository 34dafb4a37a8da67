//! Wakes a worker that waits for packets: to stop it, to let it look at requests of other threads, or to give it packets.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::Wake;

/// Wakes one worker.
#[derive(Debug)]
pub(super) struct Bell {
    fd: OwnedFd,
    stop: AtomicBool,
    rung: AtomicBool,
}

impl Bell {
    /// Makes a bell that has not been rung.
    ///
    /// # Errors
    /// Fails if the system provides no descriptor.
    pub(super) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self { fd, stop: AtomicBool::new(false), rung: AtomicBool::new(false) })
    }

    /// Wakes the worker. Further calls do nothing until the worker has noticed the first one.
    pub(super) fn ring(&self) {
        if !self.rung.swap(true, Relaxed) {
            // The counter cannot be full: it is read as often as it is written.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    /// True if the bell was rung since the last call.
    pub(super) fn heard(&self) -> bool {
        self.rung.swap(false, Relaxed)
    }

    /// Resets the descriptor after a wait, so that the next ring is seen.
    pub(super) fn waited(&self) {
        if rustix::io::read(&self.fd, &mut [0; 8]).is_ok() {
            self.rung.store(true, Relaxed);
        }
    }

    /// Asks the worker to end.
    pub(super) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.ring();
    }

    /// True if the worker was asked to end.
    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_heard_once_however_often_it_was_rung() {
        let bell = Bell::new().unwrap();
        assert!(!bell.heard());
        bell.ring();
        bell.ring();
        assert!(bell.heard());
        bell.waited();
        assert!(bell.heard(), "once too often rather than not at all");
        assert!(!bell.heard() && !bell.stopped());
        bell.stop();
        assert!(bell.heard() && bell.stopped());
    }
}
