//! Listening sockets of a loop.

use super::{Place, TcpStream};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll, ready};

/// A listening TCP socket.
#[derive(Debug)]
pub struct TcpListener {
    place: Place,
    socket: std::net::TcpListener,
}

impl TcpListener {
    /// Registers a non-blocking listener in this thread's loop.
    ///
    /// # Errors
    /// Fails if the kernel cannot watch it.
    ///
    /// # Panics
    /// Outside of [`crate::reactor::block_on`].
    pub fn new(socket: std::net::TcpListener) -> io::Result<Self> {
        let place = Place::new(&socket, EventFlags::IN, false)?;
        Ok(Self { place, socket })
    }

    /// Accepts the next connection when there is one.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        loop {
            ready!(self.place.poll_readable(cx));
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(&self.socket, flags) {
                Ok((fd, peer)) => {
                    // `true`: if the client speaks first, its bytes have mostly arrived by now.
                    let stream = TcpStream::watched(fd, true)?;
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    let none = || io::Error::other("accept(2) gave no address");
                    return Poll::Ready(Ok((stream, peer.ok_or_else(none)?)));
                }
                Err(Errno::AGAIN) => self.place.empty(),
                Err(Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// As `accept4(2)`.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        self.place.leave(&self.socket);
    }
}
