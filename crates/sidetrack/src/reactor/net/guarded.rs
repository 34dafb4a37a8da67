//! A descriptor whose connection ends in order only if this process says so.
//!
//! The kernel closes the sockets of a killed process as close(2) does: with FIN. The peer would take a stream that was cut
//! for one that is complete. So the sockets of flows carry `SO_LINGER` of zero from the listener or from before the connect
//! on, which makes every close a reset, and the option is taken back just before an orderly close.

use sidetrack_sys::sockopt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An open socket. Its drop ends the connection in order, unless a reset was asked for or the thread panics.
#[derive(Debug)]
pub struct Guarded {
    /// Always there until [`Guarded::into_fd`] or the drop.
    fd: Option<OwnedFd>,
    resets: bool,
}

impl Guarded {
    pub const fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), resets: false }
    }

    /// Makes the drop send a reset, whatever the socket's option was.
    pub fn reset_on_close(&mut self) {
        self.resets = true;
        // Cannot fail on a TCP socket; if it did, the peer would see an orderly end of a broken stream.
        let _ = sockopt::reset_on_close(self.as_fd());
    }

    /// Gives the descriptor away, with its options as they are.
    pub fn into_fd(mut self) -> OwnedFd {
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
            // Cannot fail on a TCP socket, and other kinds know no reset.
            let _ = sockopt::end_in_order_on_close(fd);
        }
    }
}
