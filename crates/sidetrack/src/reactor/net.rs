//! TCP sockets of a loop.

mod datagram;
mod guarded;

use guarded::Guarded;

pub use datagram::QuicRuntime;

use super::Loop;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags};
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What an edge of epoll has told of one socket and nobody has used up yet.
#[derive(Debug, Default)]
struct Source {
    /// Tells an event of a socket that is gone from one of its successor in this place.
    generation: u32,
    readable: bool,
    writable: bool,
    /// The other side sent FIN or a reset: reading has an end, which no further edge announces.
    ended: bool,
    /// The socket holds an error, or did.
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

    /// Notes what epoll told of a socket, and wakes who waits for it.
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

/// A place in a loop, held as long as the socket is open. Dropped before the socket is closed, and with it every
/// interest: the close takes the socket out of the epoll instance.
#[derive(Debug)]
struct Place {
    home: Rc<Loop>,
    index: u32,
}

impl Place {
    /// `ready`: whether to try to read and to write before the first event.
    fn new(fd: impl AsFd, flags: EventFlags, ready: bool) -> io::Result<Self> {
        let home = Loop::current();
        let (index, key) = home.sources.borrow_mut().enter();
        let place = Self { home, index };
        place.with(|source| (source.readable, source.writable) = (ready, ready));
        epoll::add(&place.home.epoll, fd, epoll::EventData::new_u64(key), flags | EventFlags::ET)?;
        Ok(place)
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

    /// A read came back short: nothing more is there until the next edge, but for the end of the stream.
    fn drained(&self) {
        self.with(|source| source.readable = source.ended);
    }

    /// A read found nothing at all, not even the end.
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

/// A connected or connecting TCP socket. Belongs to the thread that made it.
///
/// Dropping it ends the connection in order, with FIN. [`TcpStream::reset_on_close`] makes the drop send a reset. If the
/// process is killed instead, the peer gets a reset if the socket was made for that ([`guarded`]).
#[derive(Debug)]
pub struct TcpStream {
    place: Place,
    fd: Guarded,
}

impl TcpStream {
    /// Takes a non-blocking socket into this thread's loop, and makes it reset its peer if the process is killed.
    ///
    /// # Errors
    /// The kernel refuses to watch it.
    ///
    /// # Panics
    /// Outside of [`super::block_on`].
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // Cannot fail on a TCP socket, and other kinds know no reset.
        let _ = sidetrack_sys::sockopt::reset_on_close(&fd);
        Self::watched(fd, false)
    }

    fn watched(fd: OwnedFd, ready: bool) -> io::Result<Self> {
        let place = Place::new(&fd, EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP, ready)?;
        Ok(Self { place, fd: Guarded::new(fd) })
    }

    /// Makes the coming drop send a reset and forget unsent bytes.
    pub fn reset_on_close(&mut self) {
        self.fd.reset_on_close();
    }

    /// Whether the other side's FIN or reset has been announced: what is left to read comes before it.
    pub fn has_ended(&self) -> bool {
        self.place.with(|source| source.ended)
    }

    /// Whether the socket has met an error.
    pub fn has_failed(&self) -> bool {
        self.place.with(|source| source.failed)
    }

    /// Takes the socket out of the loop.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    pub fn into_std(self) -> io::Result<std::net::TcpStream> {
        let Self { place, fd } = self;
        epoll::delete(&place.home.epoll, &fd)?;
        Ok(fd.into_fd().into())
    }

    /// Whether there may be something to read, as far as the loop has been told: no call, and nothing is waited for.
    pub fn may_read(&self) -> bool {
        self.place.with(|source| source.readable)
    }

    /// Whether there may be something to read.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.poll_readable(cx)
    }

    /// Whether there may be room to write; of a connecting socket: whether that is decided.
    pub fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.poll_writable(cx)
    }

    /// Waits for room to write, or for the end of the attempt to connect.
    pub async fn writable(&self) {
        poll_fn(|cx| self.poll_write_ready(cx)).await;
    }

    /// Whether a connecting socket has connected by now, as one within a host mostly has when its call returns; then there is
    /// room to write, and the loop need not say so first.
    ///
    /// # Errors
    /// It cannot be connected; the socket holds that error no more.
    pub fn has_connected(&self) -> io::Result<bool> {
        // Of no bytes: only the state of the socket is asked (tcp(7), connect(2) EINPROGRESS).
        match self.try_write(&[]) {
            Ok(_) => self.place.with(|source| source.writable = true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Waits until the socket has met an error.
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

    /// Waits until the other side's FIN or a reset is announced, also behind bytes that nobody has read.
    pub fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.with(|source| {
            if source.ended {
                return Poll::Ready(());
            }
            remember(&mut source.reader, cx.waker());
            Poll::Pending
        })
    }

    /// Whether the connection still stands, as far as the kernel knows now; reads nothing.
    pub fn stands(&self) -> bool {
        let peeked = self.reading(|fd| Ok(rustix::net::recv(fd, &mut [0; 1], RecvFlags::PEEK)?.0));
        match peeked {
            Ok(n) => n > 0 && !self.has_ended(),
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    /// A call that reads by itself; that it would block is noted.
    ///
    /// # Errors
    /// Its own.
    pub fn reading<T>(&self, call: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        call(self.fd.as_fd()).inspect_err(|error| {
            if error.kind() == io::ErrorKind::WouldBlock {
                self.place.empty();
            }
        })
    }

    /// A call that writes by itself; that it would block is noted.
    ///
    /// # Errors
    /// Its own.
    pub fn writing<T>(&self, call: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        call(self.fd.as_fd()).inspect_err(|error| {
            if error.kind() == io::ErrorKind::WouldBlock {
                self.place.full();
            }
        })
    }

    /// Forgets that there was room to write: what was seen of a socket before it connects is of no use after.
    pub fn forget_writable(&self) {
        self.place.full();
    }

    /// Reads what is there; 0 is the end of the stream.
    ///
    /// # Errors
    /// As `recv(2)`; `WouldBlock` if nothing is there.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::empty()) {
                Ok((n, _)) => {
                    if n < buffer.len() {
                        // One call less than asking again: what comes from now on is a new edge.
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

    /// As [`Self::try_read`], into room that nobody has cleared: clearing 4 KiB costs as much as reading a request.
    ///
    /// # Errors
    /// As `recv(2)`; `WouldBlock` if nothing is there.
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
            // Still readable: whoever waits for that is woken at once.
            Err(Errno::INTR) => Err(io::ErrorKind::WouldBlock.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes what there is room for.
    ///
    /// # Errors
    /// As `send(2)`; `WouldBlock` if there is no room.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.try_send(bytes, SendFlags::NOSIGNAL)
    }

    /// Writes what there is room for, and lets the kernel keep it until the next write, which makes one packet of both,
    /// though for 200 ms at most (`MSG_MORE`, tcp(7)).
    ///
    /// # Errors
    /// As [`TcpStream::try_write`].
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

    /// Reads when something is there.
    pub fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.poll_read_ready(cx));
            match self.try_read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result),
            }
        }
    }

    /// Writes when there is room.
    pub fn poll_send(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_send_flagged(cx, bytes, SendFlags::NOSIGNAL)
    }

    /// The same, where more or the end follows at once: see [`TcpStream::try_write_more`].
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

    /// Reads what is there behind what a vector holds, into the room it has; 0 is the end of the stream.
    ///
    /// # Errors
    /// As `recv(2)`.
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

    /// Writes the slices one behind the other, as far as there is room.
    ///
    /// # Errors
    /// As `sendmsg(2)`.
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
    /// As `shutdown(2)`.
    pub fn shutdown_write(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.fd, Shutdown::Write)?)
    }

    /// Takes the error that the socket holds (`SO_ERROR`).
    ///
    /// # Errors
    /// As `getsockopt(2)`.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(rustix::net::sockopt::socket_error(&self.fd)?.err().map(io::Error::from))
    }

    /// Our end's address.
    ///
    /// # Errors
    /// As `getsockname(2)`.
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

/// A listening TCP socket.
#[derive(Debug)]
pub struct TcpListener {
    place: Place,
    socket: std::net::TcpListener,
}

impl TcpListener {
    /// Takes a non-blocking listener into this thread's loop.
    ///
    /// # Errors
    /// The kernel refuses to watch it.
    ///
    /// # Panics
    /// Outside of [`super::block_on`].
    pub fn new(socket: std::net::TcpListener) -> io::Result<Self> {
        let place = Place::new(&socket, EventFlags::IN, false)?;
        Ok(Self { place, socket })
    }

    /// The next connection, if one waits.
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        loop {
            ready!(self.place.poll_readable(cx));
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            match rustix::net::acceptfrom_with(&self.socket, flags) {
                Ok((fd, peer)) => {
                    // A client that speaks first mostly has by now.
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

#[cfg(test)]
mod tests;
