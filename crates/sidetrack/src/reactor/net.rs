//! Sockets of a loop.

mod datagram;
mod guarded;
mod listener;
mod udp;

use guarded::Guarded;

pub use datagram::{Arrival, QuicRuntime, arrival, proven};
pub use listener::TcpListener;
pub use udp::UdpSocket;

use super::Loop;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What epoll has reported about one socket and what was not used up yet.
#[derive(Debug, Default)]
struct Source {
    /// Distinguishes late events of a closed socket from those of the next socket with the same index.
    generation: u32,
    readable: bool,
    writable: bool,
    /// The peer has sent FIN or a reset: reads reach an end without another event.
    ended: bool,
    /// The socket has or had an error.
    failed: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// All sockets of a loop.
#[derive(Debug, Default)]
pub(super) struct Sources {
    slots: Vec<Source>,
    free: Vec<u32>,
}

impl Sources {
    fn enter(&mut self) -> (u32, u64) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Source::default());
            u32::try_from(self.slots.len() - 1).expect("descriptors are far fewer")
        });
        (index, u64::from(self.slots[index as usize].generation) << 32 | u64::from(index))
    }

    fn leave(&mut self, index: u32) {
        let source = &mut self.slots[index as usize];
        *source = Source { generation: source.generation.wrapping_add(1), ..Source::default() };
        self.free.push(index);
    }

    fn at(&mut self, index: u32) -> &mut Source {
        &mut self.slots[index as usize]
    }

    /// Stores an event from epoll and wakes the tasks that wait for it.
    pub(super) fn notice(&mut self, key: u64, flags: EventFlags) {
        let (index, generation) = (key & u64::from(u32::MAX), key >> 32);
        let Some(source) = usize::try_from(index).ok().and_then(|index| self.slots.get_mut(index)) else {
            return;
        };
        if u64::from(source.generation) != generation {
            return;
        }
        let is_over = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        source.failed |= flags.contains(EventFlags::ERR);
        source.ended |= is_over || flags.contains(EventFlags::RDHUP);
        if is_over || flags.intersects(EventFlags::IN | EventFlags::RDHUP) {
            source.readable = true;
            if let Some(waker) = source.reader.take() {
                waker.wake();
            }
        }
        if is_over || flags.contains(EventFlags::OUT) {
            source.writable = true;
            if let Some(waker) = source.writer.take() {
                waker.wake();
            }
        }
    }
}

fn remember(slot: &mut Option<Waker>, waker: &Waker) {
    if !slot.as_ref().is_some_and(|old| old.will_wake(waker)) {
        *slot = Some(waker.clone());
    }
}

/// The registration of a socket in a loop. It is dropped before the socket is closed, together with all interest
/// in events. The close then removes the socket from the epoll instance.
#[derive(Debug)]
struct Place {
    home: Rc<Loop>,
    index: u32,
}

impl Place {
    /// `ready`: whether to try reads and writes before the first event.
    fn new(fd: impl AsFd, flags: EventFlags, ready: bool) -> io::Result<Self> {
        let home = Loop::current();
        let (index, key) = home.sources.borrow_mut().enter();
        let place = Self { home, index };
        place.with(|source| (source.readable, source.writable) = (ready, ready));
        epoll::add(&place.home.epoll, fd, epoll::EventData::new_u64(key), flags | EventFlags::ET)?;
        Ok(place)
    }

    /// Ends the interest in events of a socket of which there are copies: closing it alone would not.
    fn leave(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.home.epoll, fd);
    }

    fn with<T>(&self, f: impl FnOnce(&mut Source) -> T) -> T {
        f(self.home.sources.borrow_mut().at(self.index))
    }

    fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.with(|source| {
            if source.readable {
                return Poll::Ready(());
            }
            remember(&mut source.reader, cx.waker());
            Poll::Pending
        })
    }

    fn poll_writable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.with(|source| {
            if source.writable {
                return Poll::Ready(());
            }
            remember(&mut source.writer, cx.waker());
            Poll::Pending
        })
    }

    /// A read returned fewer bytes than it had room for: no more bytes come before the next event, except for
    /// the end of the stream.
    fn drained(&self) {
        self.with(|source| source.readable = source.ended);
    }

    /// A read found neither bytes nor the end of the stream.
    fn empty(&self) {
        self.with(|source| (source.readable, source.ended) = (false, false));
    }

    fn full(&self) {
        self.with(|source| source.writable = false);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.home.sources.borrow_mut().leave(self.index);
    }
}

/// A connected or connecting TCP socket. Belongs to the thread that created it.
///
/// Dropping it ends the connection in order, with FIN. After [`TcpStream::reset_on_close`] the drop sends a
/// reset. If the process is killed, the peer gets a reset too ([`guarded`]), provided that the socket was
/// created for that.
#[derive(Debug)]
pub struct TcpStream {
    place: Place,
    fd: Guarded,
}

impl TcpStream {
    /// Registers a non-blocking socket in this thread's loop. If the process is killed, its peer gets a reset.
    ///
    /// # Errors
    /// Fails if the kernel cannot watch it.
    ///
    /// # Panics
    /// Outside of [`super::block_on`].
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // Cannot fail on a TCP socket. Other kinds of socket have no reset.
        let _ = sidetrack_sys::sockopt::reset_on_close(&fd);
        Self::watched(fd, false)
    }

    fn watched(fd: OwnedFd, ready: bool) -> io::Result<Self> {
        let place = Place::new(&fd, EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP, ready)?;
        Ok(Self { place, fd: Guarded::new(fd) })
    }

    /// Makes the later drop send a reset and discard unsent bytes.
    pub fn reset_on_close(&mut self) {
        self.fd.reset_on_close();
    }

    /// Whether the peer's FIN or reset was reported. All unread bytes were sent before it.
    pub fn has_ended(&self) -> bool {
        self.place.with(|source| source.ended)
    }

    /// Whether the socket has had an error.
    pub fn has_failed(&self) -> bool {
        self.place.with(|source| source.failed)
    }

    /// Removes the socket from the loop.
    ///
    /// # Errors
    /// Fails as `epoll_ctl(2)` does.
    pub fn into_std(self) -> io::Result<std::net::TcpStream> {
        let Self { place, fd } = self;
        epoll::delete(&place.home.epoll, &fd)?;
        Ok(fd.into_fd().into())
    }

    /// Whether bytes may be readable, as far as the loop knows. Makes no system call and waits for nothing.
    pub fn may_read(&self) -> bool {
        self.place.with(|source| source.readable)
    }

    /// Ready when bytes may be readable.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.poll_readable(cx)
    }

    /// Ready when there may be room to write, or when a connecting socket has connected or failed.
    pub fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.poll_writable(cx)
    }

    /// Waits for room to write, or until connecting has succeeded or failed.
    pub async fn writable(&self) {
        poll_fn(|cx| self.poll_write_ready(cx)).await;
    }

    /// Whether a connecting socket has already connected. A connection within one host mostly has when
    /// connect(2) returns. Then there is room to write, and no event from the loop is needed first.
    ///
    /// # Errors
    /// Fails if connecting has failed. The socket no longer has that error then.
    pub fn has_connected(&self) -> io::Result<bool> {
        // Sending no bytes only queries the state of the socket (tcp(7), connect(2) EINPROGRESS).
        match self.try_write(&[]) {
            Ok(_) => self.place.with(|source| source.writable = true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Waits until the socket has an error.
    pub async fn failed(&self) {
        poll_fn(|cx| {
            self.place.with(|source| {
                if source.failed {
                    return Poll::Ready(());
                }
                remember(&mut source.reader, cx.waker());
                Poll::Pending
            })
        })
        .await;
    }

    /// Ready when the peer's FIN or reset is reported, also if it comes after unread bytes.
    pub fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.with(|source| {
            if source.ended {
                return Poll::Ready(());
            }
            remember(&mut source.reader, cx.waker());
            Poll::Pending
        })
    }

    /// Whether the connection is still open, as far as the kernel knows now. Reads nothing.
    pub fn stands(&self) -> bool {
        let peeked = self.reading(|fd| Ok(rustix::net::recv(fd, &mut [0; 1], RecvFlags::PEEK)?.0));
        match peeked {
            Ok(n) => n > 0 && !self.has_ended(),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    /// Runs a call that reads. If it would block, notes that.
    ///
    /// # Errors
    /// Fails as the call does.
    pub fn reading<T>(&self, call: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        call(self.fd.as_fd()).inspect_err(|error| {
            if error.kind() == io::ErrorKind::WouldBlock {
                self.place.empty();
            }
        })
    }

    /// Runs a call that writes. If it would block, notes that.
    ///
    /// # Errors
    /// Fails as the call does.
    pub fn writing<T>(&self, call: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        call(self.fd.as_fd()).inspect_err(|error| {
            if error.kind() == io::ErrorKind::WouldBlock {
                self.place.full();
            }
        })
    }

    /// Forgets that there was room to write. Readiness seen before a socket connects means nothing afterwards.
    pub fn forget_writable(&self) {
        self.place.full();
    }

    /// Reads available bytes; 0 is the end of the stream.
    ///
    /// # Errors
    /// Fails as `recv(2)` does; `WouldBlock` if no bytes are available.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::empty()) {
                Ok((n, _)) => {
                    if n < buffer.len() {
                        // Saves a second call: bytes that come from now on cause a new event.
                        self.place.drained();
                    }
                    return Ok(n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.place.empty();
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Like [`Self::try_read`], but into uninitialised room: clearing 4 KiB costs as much as reading a request.
    ///
    /// # Errors
    /// Fails as `recv(2)` does; `WouldBlock` if no bytes are available.
    pub fn try_recv<'b>(&self, buffer: &'b mut [MaybeUninit<u8>]) -> io::Result<&'b [u8]> {
        let room = buffer.len();
        match rustix::net::recv(&self.fd, buffer, RecvFlags::empty()) {
            Ok(((bytes, _), _)) => {
                if bytes.len() < room {
                    self.place.drained();
                }
                Ok(bytes)
            }
            Err(Errno::AGAIN) => {
                self.place.empty();
                Err(io::ErrorKind::WouldBlock.into())
            }
            // The socket stays readable, so a task that waits for that is woken at once.
            Err(Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes as much as there is room for.
    ///
    /// # Errors
    /// Fails as `send(2)` does; `WouldBlock` if there is no room.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_send(bytes, SendFlags::NOSIGNAL)
    }

    /// Writes as much as there is room for. The kernel keeps the bytes for one packet with the next write, at
    /// most for 200 ms (`MSG_MORE`, tcp(7)).
    ///
    /// # Errors
    /// Fails as [`TcpStream::try_write`] does.
    pub fn try_write_more(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_send(bytes, SendFlags::NOSIGNAL | SendFlags::MORE)
    }

    fn try_send(&self, bytes: &[u8], flags: SendFlags) -> io::Result<usize> {
        loop {
            match rustix::net::send(&self.fd, bytes, flags) {
                Ok(n) => {
                    if n < bytes.len() {
                        self.place.full();
                    }
                    return Ok(n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.place.full();
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads as soon as bytes are available.
    pub fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.poll_read_ready(cx));
            match self.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    /// Writes as soon as there is room.
    pub fn poll_send(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send_flagged(cx, bytes, SendFlags::NOSIGNAL)
    }

    /// The same before more bytes or the end: see [`TcpStream::try_write_more`].
    pub fn poll_send_more(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send_flagged(cx, bytes, SendFlags::NOSIGNAL | SendFlags::MORE)
    }

    fn poll_send_flagged(
        &self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        flags: SendFlags,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.poll_write_ready(cx));
            match self.try_send(bytes, flags) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    /// Appends available bytes to a vector, within its capacity; 0 is the end of the stream.
    ///
    /// # Errors
    /// Fails as `recv(2)` does.
    pub fn poll_recv_into(&self, cx: &mut Context<'_>, bytes: &mut Vec<u8>) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.poll_read_ready(cx));
            let room = bytes.capacity() - bytes.len();
            match rustix::net::recv(&self.fd, rustix::buffer::spare_capacity(bytes), RecvFlags::empty()) {
                Ok((n, _)) => {
                    if n < room {
                        self.place.drained();
                    }
                    return Poll::Ready(Ok(n));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.place.empty(),
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Writes the slices in order, as far as there is room.
    ///
    /// # Errors
    /// Fails as `sendmsg(2)` does.
    pub fn poll_send_slices(
        &self,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [one] = slices {
            return self.poll_send(cx, one);
        }
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        loop {
            ready!(self.poll_write_ready(cx));
            let control = &mut rustix::net::SendAncillaryBuffer::default();
            match rustix::net::sendmsg(&self.fd, slices, control, SendFlags::NOSIGNAL) {
                Ok(n) => {
                    if n < total {
                        self.place.full();
                    }
                    return Poll::Ready(Ok(n));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.place.full(),
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    /// Sends FIN.
    ///
    /// # Errors
    /// Fails as `shutdown(2)` does.
    pub fn shutdown_write(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.fd, Shutdown::Write)?)
    }

    /// Takes the pending error of the socket (`SO_ERROR`).
    ///
    /// # Errors
    /// Fails as `getsockopt(2)` does.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(rustix::net::sockopt::socket_error(&self.fd)?.err().map(io::Error::from))
    }

    /// The address of our end.
    ///
    /// # Errors
    /// Fails as `getsockname(2)` does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        sidetrack_sys::sockopt::local_address(&self.fd)
    }
}

impl AsFd for TcpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let n = ready!(self.poll_recv(cx, buffer.initialize_unfilled()))?;
        buffer.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.shutdown_write())
    }
}

#[cfg(test)]
mod tests;
