//! Ends connections to servers that cannot be reached: there is no route, the neighbour does not answer, or a router says
//! so.

use super::Worker;
use sidetrack_core::time::Instant;
use sidetrack_sys::raw::UnreachableSocket;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How often a busy worker reads ICMP messages. A worker that waits for packets is woken by them.
const READ_EVERY: Duration = Duration::from_millis(50);

/// The messages that one worker reads.
#[derive(Debug)]
pub(super) struct Unreachable {
    /// None: the system provided no socket.
    socket: Option<UnreachableSocket>,
    read_at: Instant,
}

impl Unreachable {
    pub(super) const fn new(socket: Option<UnreachableSocket>) -> Self {
        Self { socket, read_at: Instant::ZERO }
    }

    /// Returns descriptors that are readable when messages wait.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.socket.iter().flat_map(UnreachableSocket::descriptors)
    }

    /// Notes that the worker has waited: a message may have woken it.
    pub(super) const fn woken(&mut self) {
        self.read_at = Instant::ZERO;
    }
}

impl Worker {
    /// Ends connections whose servers cannot be reached, so that their clients need not wait for a time-out.
    pub(super) fn end_unreachable(&mut self, now: Instant) {
        for packet in self.driver.take_unrouted() {
            self.engine.unrouted(now, &packet);
        }
        if now >= self.unreachable.read_at {
            self.unreachable.read_at = now + READ_EVERY;
            // The first packet to a server goes by the kernel's IP layer, so the kernel reports a silent neighbour by ICMP.
            while let Some(message) = self.unreachable.socket.as_mut().and_then(UnreachableSocket::receive) {
                self.engine.reported(now, message.bytes, message.is_v4);
            }
        }
        self.send_own();
    }
}
