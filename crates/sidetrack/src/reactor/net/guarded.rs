//! A socket that ends its connection in order only if this process asks for it.
//!
//! The kernel closes the sockets of a killed process as close(2) does: with FIN. The peer would then take a cut
//! stream for a complete one. So the sockets of flows have `SO_LINGER` with zero seconds, from the listener on
//! or from before the connect. With it each close sends a reset. The option is removed just before an orderly
//! close.

use sidetrack_sys::sockopt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An open socket. Dropping it ends the connection in order, unless a reset was requested or the thread panics.
#[derive(Debug)]
pub(super) struct Guarded {
    /// Always present until [`Guarded::into_fd`] or the drop.
    fd: Option<OwnedFd>,
    resets: bool,
}

impl Guarded {
    pub(super) const fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), resets: false }
    }

    /// Makes the drop send a reset, whatever option the socket has now.
    pub(super) fn reset_on_close(&mut self) {
        self.resets = true;
        // Cannot fail on a TCP socket. If it did, the peer would see an orderly end of a cut stream.
        let _ = sockopt::reset_on_close(self.as_fd());
    }

    /// Returns the descriptor with its present options.
    pub(super) fn into_fd(mut self) -> OwnedFd {
        self.fd.take().expect("only into_fd and the drop take it")
    }
}

impl AsFd for Guarded {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("only into_fd and the drop take it").as_fd()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(fd) = &self.fd
            && !self.resets
            && !std::thread::panicking()
        {
            // Cannot fail on a TCP socket. Other kinds of socket have no reset.
            let _ = sockopt::end_in_order_on_close(fd);
        }
    }
}
