//! `splice(2)`: bytes move between sockets through a kernel pipe and are never copied to user space.
//!
//! A [`Pipe`] counts what it holds, so a driver always knows which bytes are under way; a [`PipePool`] keeps
//! drained pipes for the next flow, because making one costs two descriptors and two system calls.

mod pages;

pub use pages::Mapped;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

/// Bytes a pipe is asked to hold where the caller does not care: what the kernel gives to everybody. A larger one makes a
/// single stream slower, since server, relay and client then take turns instead of working side by side
/// (`bench/RESULTS.md`, "Size of the pipes").
pub const DEFAULT_PIPE_BYTES: usize = 64 * 1024;

/// A non-blocking kernel pipe between one source and one sink of bytes.
#[derive(Debug)]
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    capacity_bytes: usize,
    queued_bytes: usize,
}

/// What [`splice_from`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// This many bytes (at least one) moved into the pipe.
    Bytes(usize),
    /// The source has ended in order; nothing will follow.
    End,
    /// The source has nothing now: wait until it is readable.
    SourceEmpty,
    /// The pipe has no room for another segment, however few bytes it holds: drain it, then try again. The
    /// source may well be readable.
    PipeFull,
}

impl Pipe {
    /// A pipe that holds about `capacity_bytes`; where the kernel refuses that size (`fs.pipe-max-size`,
    /// `fs.pipe-user-pages-soft`) it keeps the size it gives to everybody, usually 64 KiB.
    ///
    /// # Errors
    /// No descriptors left, here (EMFILE) or in the system (ENFILE).
    pub fn new(capacity_bytes: usize) -> io::Result<Self> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let capacity_bytes = match rustix::pipe::fcntl_setpipe_size(&write, capacity_bytes) {
            Ok(_) | Err(_) => rustix::pipe::fcntl_getpipe_size(&write)?,
        };
        Ok(Self { read, write, capacity_bytes, queued_bytes: 0 })
    }

    /// Bytes it holds if every segment is full; small segments fill it earlier.
    pub fn capacity_bytes(&self) -> usize {
        self.capacity_bytes
    }

    /// Bytes in it now.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// True if nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.queued_bytes == 0
    }

    /// Takes all bytes out of it.
    ///
    /// # Errors
    /// As read(2); `UnexpectedEof` if there are fewer than were counted.
    pub fn take_out(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.queued_bytes];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::io::read(&self.read, &mut bytes[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.queued_bytes = 0;
        Ok(bytes)
    }

    /// True if it takes another segment. The kernel's own test, the one splice(2) makes.
    fn has_room(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.write, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(rustix::event::poll(&mut fds, Some(&now))? > 0)
    }
}

/// Moves up to `max` bytes from a socket (or any file splice takes) into the pipe, without blocking.
///
/// # Errors
/// What splice(2) says: a reset, a descriptor that cannot be spliced (EINVAL), ...
pub fn splice_from(source: impl AsFd, pipe: &mut Pipe, max: usize) -> io::Result<Fill> {
    if max == 0 {
        return Ok(Fill::PipeFull);
    }
    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
    loop {
        match rustix::pipe::splice(&source, None, &pipe.write, None, max, flags) {
            Ok(0) => return Ok(Fill::End),
            Ok(moved) => {
                pipe.queued_bytes += moved;
                return Ok(Fill::Bytes(moved));
            }
            Err(Errno::INTR) => {}
            // EAGAIN stands for both; an empty pipe always has room, which spares the poll.
            Err(Errno::AGAIN) if pipe.is_empty() || pipe.has_room()? => return Ok(Fill::SourceEmpty),
            Err(Errno::AGAIN) => return Ok(Fill::PipeFull),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Moves up to `max` bytes from the pipe to a socket, without blocking; returns how many.
///
/// `more` says that bytes will follow at once, so that the kernel fills segments (`SPLICE_F_MORE`).
/// An empty pipe gives 0.
///
/// # Errors
/// `WouldBlock` while the socket takes nothing; a reset or broken pipe if the peer is gone.
pub fn splice_to(pipe: &mut Pipe, sink: impl AsFd, max: usize, more: bool) -> io::Result<usize> {
    let len = max.min(pipe.queued_bytes);
    if len == 0 {
        return Ok(0);
    }
    let mut flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
    flags.set(SpliceFlags::MORE, more);
    loop {
        match rustix::pipe::splice(&pipe.read, None, &sink, None, len, flags) {
            Ok(moved) => {
                pipe.queued_bytes -= moved.min(pipe.queued_bytes);
                return Ok(moved);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Least bytes a pipe must hold to be of use. A user who has `fs.pipe-user-pages-soft` pages in pipes gets further ones of
/// two pages, through which bytes move slower than by copying.
const USEFUL_PIPE_BYTES: usize = DEFAULT_PIPE_BYTES;

/// Pipes lent to flows, and those kept for the next one. One per thread: nothing is locked.
#[derive(Debug)]
pub struct PipePool {
    idle: Vec<Pipe>,
    lent: usize,
    limit: usize,
    pipe_bytes: usize,
}

impl PipePool {
    /// A pool of at most `limit` pipes, lent and idle, of about `pipe_bytes` each.
    pub const fn new(limit: usize, pipe_bytes: usize) -> Self {
        Self { idle: Vec::new(), lent: 0, limit, pipe_bytes }
    }

    /// Changes how many pipes there may be. Those that are lent stay so.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        self.idle.truncate(limit.saturating_sub(self.lent));
    }

    /// Lends an empty pipe, a kept one or a new one; `None` if all are lent, or the kernel gives none that is of use: copy
    /// then. It is to be [put](Self::put) back.
    pub fn take(&mut self) -> Option<Pipe> {
        if self.lent >= self.limit {
            return None;
        }
        let fresh =
            || Pipe::new(self.pipe_bytes).ok().filter(|pipe| pipe.capacity_bytes >= USEFUL_PIPE_BYTES);
        let pipe = self.idle.pop().or_else(fresh)?;
        self.lent += 1;
        Some(pipe)
    }

    /// Takes a pipe back. One that still holds bytes is closed: they would come out in another flow.
    pub fn put(&mut self, pipe: Pipe) {
        self.lent = self.lent.saturating_sub(1);
        if pipe.is_empty() && self.lent + self.idle.len() < self.limit {
            self.idle.push(pipe);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};

    /// Two ends of a loopback connection; the second does not block.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        server.set_nonblocking(true).unwrap();
        (client, server)
    }

    fn wait(fd: impl AsFd, flags: PollFlags) {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let ready = rustix::event::poll(&mut [PollFd::new(&fd, flags)], Some(&limit)).unwrap();
        assert_eq!(ready, 1, "nothing happened for 60 s");
    }

    #[test]
    fn bytes_and_the_end_pass_through() {
        let (mut client, near) = connection();
        let (mut server, far) = connection();
        let mut pipe = Pipe::new(DEFAULT_PIPE_BYTES).unwrap();
        assert_eq!(splice_from(&near, &mut pipe, 4096).unwrap(), Fill::SourceEmpty);
        client.write_all(b"hello").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        wait(&near, PollFlags::IN);
        assert_eq!(splice_from(&near, &mut pipe, 3).unwrap(), Fill::Bytes(3));
        assert_eq!(splice_from(&near, &mut pipe, 4096).unwrap(), Fill::Bytes(2));
        assert_eq!(pipe.queued_bytes(), 5);
        wait(&near, PollFlags::RDHUP);
        assert_eq!(splice_from(&near, &mut pipe, 4096).unwrap(), Fill::End);
        assert_eq!(splice_to(&mut pipe, &far, 2, true).unwrap(), 2);
        assert_eq!(splice_to(&mut pipe, &far, usize::MAX, false).unwrap(), 3);
        assert_eq!(splice_to(&mut pipe, &far, usize::MAX, false).unwrap(), 0);
        drop(far);
        let mut got = String::new();
        server.read_to_string(&mut got).unwrap();
        assert_eq!(got, "hello");
    }

    #[test]
    fn a_pipe_full_of_crumbs_is_told_from_an_empty_source() {
        let (mut client, near) = connection();
        let mut pipe = Pipe::new(4096).unwrap();
        client.set_nodelay(true).unwrap();
        let mut full = false;
        for _ in 0..10_000 {
            client.write_all(b"x").unwrap();
            wait(&near, PollFlags::IN);
            if splice_from(&near, &mut pipe, 4096).unwrap() == Fill::PipeFull {
                full = true;
                break;
            }
        }
        assert!(full && pipe.queued_bytes() < pipe.capacity_bytes());
        let (mut server, far) = connection();
        let sent = splice_to(&mut pipe, &far, usize::MAX, false).unwrap();
        server.read_exact(&mut vec![0; sent]).unwrap();
        assert_eq!(splice_from(&near, &mut pipe, 4096).unwrap(), Fill::Bytes(1));
    }

    #[test]
    fn a_slow_sink_would_block_and_keeps_the_count() {
        let (mut client, near) = connection();
        let (mut server, far) = connection();
        let mut pipe = Pipe::new(DEFAULT_PIPE_BYTES).unwrap();
        let writer = std::thread::spawn(move || client.write_all(&vec![5; 32 << 20]).map(|()| client));
        let (mut filled, mut drained) = (0, 0);
        loop {
            wait(&near, PollFlags::IN);
            if let Fill::Bytes(moved) = splice_from(&near, &mut pipe, 1 << 20).unwrap() {
                filled += moved;
            }
            match splice_to(&mut pipe, &far, usize::MAX, false) {
                Ok(moved) => drained += moved,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    break;
                }
            }
            assert!(filled <= 32 << 20, "the sink never blocked");
        }
        assert_eq!(pipe.queued_bytes(), filled - drained);
        let reader = std::thread::spawn(move || io::copy(&mut server, &mut io::sink()).unwrap());
        while drained < 32 << 20 {
            if filled < 32 << 20 {
                wait(&near, PollFlags::IN);
                if let Fill::Bytes(moved) = splice_from(&near, &mut pipe, 1 << 20).unwrap() {
                    filled += moved;
                }
            }
            wait(&far, PollFlags::OUT);
            match splice_to(&mut pipe, &far, usize::MAX, false) {
                Ok(moved) => drained += moved,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        drop(far);
        writer.join().unwrap().unwrap();
        assert_eq!(reader.join().unwrap(), 32 << 20);
    }

    #[test]
    fn a_reset_source_is_an_error() {
        let (client, near) = connection();
        crate::sockopt::reset_on_close(&client).unwrap();
        drop(client);
        wait(&near, PollFlags::HUP);
        let mut pipe = Pipe::new(4096).unwrap();
        let error = splice_from(&near, &mut pipe, 1).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn the_pool_is_bounded_and_never_reuses_undrained_pipes() {
        let mut pool = PipePool::new(2, 65_536);
        let pipes = [pool.take().unwrap(), pool.take().unwrap()];
        assert!(pool.take().is_none(), "both are lent");
        for pipe in pipes {
            pool.put(pipe);
        }
        assert_eq!(pool.idle.len(), 2);
        let mut pipe = pool.take().unwrap();
        let (mut client, near) = connection();
        client.write_all(b"left over").unwrap();
        wait(&near, PollFlags::IN);
        assert_eq!(splice_from(&near, &mut pipe, 4).unwrap(), Fill::Bytes(4));
        pool.put(pipe);
        assert_eq!(pool.idle.len(), 1);
        assert!(pool.take().unwrap().is_empty());
    }

    #[test]
    fn a_new_limit_closes_idle_pipes_and_waits_for_lent_ones() {
        let mut pool = PipePool::new(3, 65_536);
        let mut lent: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(lent.len(), 3);
        pool.put(lent.pop().unwrap());
        pool.set_limit(1);
        assert!(pool.idle.is_empty() && pool.take().is_none());
        lent.into_iter().for_each(|pipe| pool.put(pipe));
        assert_eq!((pool.idle.len(), pool.lent), (1, 0));
        pool.set_limit(0);
        assert!(pool.take().is_none() && pool.idle.is_empty());
    }

    #[test]
    fn pipes_too_small_to_be_of_use_are_not_lent() {
        assert!(PipePool::new(1, 4096).take().is_none());
    }

    #[test]
    fn a_size_the_kernel_refuses_falls_back() {
        let pipe = Pipe::new(1 << 30).unwrap();
        assert!(pipe.capacity_bytes() >= 4096);
    }
}
