//! UDP sockets of a loop, read and written in batches.

use super::Place;
use rustix::event::epoll::EventFlags;
use sidetrack_sys::udp::batch::{Batch, Sent, Target, send_one};
use sidetrack_sys::udp::errors::{self, AboutDatagram};
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::{Context, Poll};

/// A UDP socket. Belongs to the thread that created it.
///
/// Sending never waits: a datagram that finds no room is lost, as on any path of UDP.
#[derive(Debug)]
pub struct UdpSocket {
    place: Place,
    socket: std::net::UdpSocket,
}

impl UdpSocket {
    /// Registers a non-blocking socket in this thread's loop.
    ///
    /// # Errors
    /// Fails if the kernel cannot watch it.
    ///
    /// # Panics
    /// Outside of [`super::super::block_on`].
    pub fn new(socket: std::net::UdpSocket) -> io::Result<Self> {
        let place = Place::new(&socket, EventFlags::IN, true)?;
        Ok(Self { place, socket })
    }

    /// Ready when there may be datagrams, or an ICMP error.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.poll_readable(cx)
    }

    /// Receives messages into a batch. Returns their number.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; an ICMP error about an earlier datagram.
    pub fn receive(&self, batch: &mut Batch) -> io::Result<usize> {
        batch.receive(&self.socket).inspect_err(|error| {
            if error.kind() == io::ErrorKind::WouldBlock {
                self.place.empty();
            }
        })
    }

    /// Sends messages of a batch.
    pub fn send(&self, batch: &Batch, range: Range<usize>, target: Option<&Target>) -> Sent {
        batch.send(&self.socket, range, target)
    }

    /// Sends one datagram.
    ///
    /// # Errors
    /// The system's error; the datagram is lost then.
    pub fn send_one(&self, datagram: &[u8], target: Option<&Target>) -> io::Result<()> {
        send_one(&self.socket, datagram, target)
    }

    /// Takes the oldest error about a datagram, if the socket keeps them ([`errors::report`]).
    pub fn next_error(&self) -> Option<AboutDatagram> {
        errors::next(&self.socket)
    }

    /// Returns the address it is bound to.
    ///
    /// # Errors
    /// Fails as `getsockname(2)` does.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for UdpSocket {
    fn drop(&mut self) {
        self.place.leave(&self.socket);
    }
}
