//! The buffer of one direction of a flow: empty, bytes in memory, or bytes in a kernel pipe.

use super::pump::{SPLICE_AFTER, SPLICE_LEAST};
use super::room;
use crate::carry::Wire;
use crate::reactor::TcpStream;
use sidetrack_sys::splice::{DEFAULT_PIPE_BYTES, Fill, Mapped, Pipe, PipePool, splice_from, splice_to};
use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::task::{Context, Poll, ready};

thread_local! {
    /// The pipes of this worker; none until [`allow_pipes`]. If none is left, flows are copied.
    static PIPES: RefCell<PipePool> = const { RefCell::new(PipePool::new(0, DEFAULT_PIPE_BYTES)) };
}

/// Sets how many pipes the flows of this thread may use: its share of those that admission reserves.
pub fn allow_pipes(pipes: usize) {
    PIPES.with_borrow_mut(|pool| pool.set_limit(pipes));
}

/// One direction.
#[derive(Debug, Default)]
pub struct Lane {
    holds: Holds,
    /// Bytes moved in large pieces, until it is decided whether to use a pipe. Afterwards `u64::MAX`.
    moved: u64,
}

#[derive(Debug, Default)]
enum Holds {
    #[default]
    Nothing,
    Bytes(Buffer),
    Pipe(Box<Pipe>),
}

impl Lane {
    /// A direction that starts with `bytes` in its buffer.
    pub fn holding(bytes: Vec<u8>) -> Self {
        let holds = if bytes.is_empty() { Holds::Nothing } else { Holds::Bytes(Buffer::new(bytes)) };
        Self { holds, moved: 0 }
    }

    /// A direction that uses a pipe from the start. `None` if no pipe is left.
    pub fn piped() -> Option<Self> {
        let pipe = PIPES.with_borrow_mut(PipePool::take)?;
        Some(Self { holds: Holds::Pipe(Box::new(pipe)), moved: u64::MAX })
    }

    /// Whether no bytes are in memory.
    pub fn is_empty(&self) -> bool {
        matches!(self.holds, Holds::Nothing)
    }

    /// Whether bytes go through a pipe.
    pub fn is_piped(&self) -> bool {
        matches!(self.holds, Holds::Pipe(_))
    }

    /// Like [`Lane::keep`], but takes the bytes. They are not copied if the buffer is empty.
    pub fn keep_whole(&mut self, more: Vec<u8>) -> usize {
        if !self.is_empty() {
            return self.keep(&more);
        }
        let kept = more.len();
        self.holds = Holds::Bytes(Buffer::new(more));
        kept
    }

    /// Appends bytes to the buffer. Returns how many.
    pub fn keep(&mut self, more: &[u8]) -> usize {
        if more.is_empty() {
            return 0;
        }
        match &mut self.holds {
            Holds::Bytes(buffer) => buffer.append(more),
            holds => *holds = Holds::Bytes(Buffer::new(more.to_vec())),
        }
        more.len()
    }

    /// Takes the bytes out, also those of a pipe.
    ///
    /// # Errors
    /// The pipe cannot be read; some of its bytes may be lost.
    pub fn take_out(&mut self) -> io::Result<Vec<u8>> {
        match &mut self.holds {
            Holds::Nothing => Ok(Vec::new()),
            Holds::Bytes(buffer) => {
                let left = buffer.rest().to_vec();
                self.holds = Holds::Nothing;
                Ok(left)
            }
            Holds::Pipe(pipe) => pipe.take_out(),
        }
    }

    /// Counts bytes that were written. Nothing may be left in the thread's buffer, because this may change the
    /// direction to a pipe. After a change, returns the bytes that the direction may hold from now on.
    pub fn moved(&mut self, n: u64) -> Option<u32> {
        if self.moved == u64::MAX || !self.is_empty() {
            return None;
        }
        if n < SPLICE_LEAST {
            return None;
        }
        self.moved += n;
        if self.moved < SPLICE_AFTER {
            return None;
        }
        self.moved = u64::MAX;
        let pipe = PIPES.with_borrow_mut(PipePool::take)?;
        let limit = u32::try_from(pipe.capacity_bytes()).unwrap_or(u32::MAX);
        self.holds = Holds::Pipe(Box::new(pipe));
        Some(limit)
    }

    /// Moves at most `max` bytes from the socket into the pipe; 0 is the end of the stream. `Pending` while the
    /// pipe is full: after the write that empties it, the core asks again.
    pub fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        wire: &impl Wire,
        max: usize,
    ) -> Poll<io::Result<usize>> {
        let (Holds::Pipe(pipe), Some(socket)) = (&mut self.holds, wire.socket()) else {
            return Poll::Ready(Err(io::Error::other("this direction has no pipe")));
        };
        loop {
            ready!(socket.poll_read_ready(cx));
            let fill = socket.reading(|socket| match splice_from(socket, pipe, max)? {
                // Only WouldBlock makes the loop clear the socket's readiness.
                Fill::SourceEmpty => Err(ErrorKind::WouldBlock.into()),
                fill => Ok(fill),
            });
            return match fill {
                Ok(Fill::Bytes(n)) => Poll::Ready(Ok(n)),
                Ok(Fill::End) => Poll::Ready(Ok(0)),
                Ok(Fill::PipeFull | Fill::SourceEmpty) => Poll::Pending,
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(error) => Poll::Ready(Err(error)),
            };
        }
    }

    /// Sends pages without copying them, as far as the socket has room. Returns how many bytes left. The range
    /// begins with the first unsent byte; bytes in the pipe go first.
    pub fn poll_pages(
        &mut self,
        cx: &mut Context<'_>,
        socket: &TcpStream,
        pages: &Mapped,
        range: &Range<u64>,
    ) -> Poll<io::Result<u64>> {
        let Holds::Pipe(pipe) = &mut self.holds else {
            return Poll::Ready(Err(io::Error::other("this direction has no pipe")));
        };
        loop {
            ready!(socket.poll_write_ready(cx));
            if pipe.is_empty() {
                pages.fill(pipe, range.clone())?;
            }
            let more = range.end - range.start > pipe.queued_bytes() as u64;
            match socket.writing(|socket| splice_to(pipe, socket, usize::MAX, more)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                result => return Poll::Ready(result.map(|sent| sent as u64)),
            }
        }
    }

    /// Writes at most `held` buffered bytes to the socket.
    pub fn poll_drain(
        &mut self,
        cx: &mut Context<'_>,
        wire: &mut impl Wire,
        held: usize,
    ) -> Poll<io::Result<usize>> {
        match &mut self.holds {
            Holds::Nothing => Poll::Ready(Err(io::Error::other("nothing is held for this side"))),
            Holds::Bytes(buffer) => {
                let n = ready!(wire.poll_send(cx, buffer.rest()))?;
                buffer.start += n;
                if buffer.rest().is_empty() {
                    self.holds = Holds::Nothing;
                }
                Poll::Ready(Ok(n))
            }
            Holds::Pipe(pipe) => {
                let Some(socket) = wire.socket() else {
                    return Poll::Ready(Err(io::Error::other("a pipe leads to sockets only")));
                };
                loop {
                    ready!(socket.poll_write_ready(cx));
                    match socket.writing(|socket| splice_to(pipe, socket, held, false)) {
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        result => return Poll::Ready(result),
                    }
                }
            }
        }
    }
}

/// Bytes in memory. They are counted with those of all flows ([`room`]).
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    /// The bytes before this were written.
    start: usize,
}

impl Buffer {
    fn new(bytes: Vec<u8>) -> Self {
        room::take(bytes.capacity());
        Self { bytes, start: 0 }
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn append(&mut self, more: &[u8]) {
        let before = self.bytes.capacity();
        self.bytes.drain(..self.start);
        self.start = 0;
        // Not twice as much: the limit of a direction is a limit of memory.
        self.bytes.reserve_exact(more.len());
        self.bytes.extend_from_slice(more);
        room::take(self.bytes.capacity());
        room::give_back(before);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        room::give_back(self.bytes.capacity());
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Holds::Pipe(pipe) = std::mem::take(&mut self.holds) {
            // When the thread ends, the pool may be dropped before the last flow.
            let _ = PIPES.try_with(|pool| pool.borrow_mut().put(*pipe));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_small_messages_stay_in_user_space_and_large_pieces_do_not() {
        allow_pipes(1);
        let mut lane = Lane::default();
        for _ in 0..10 * SPLICE_AFTER / 400 {
            assert_eq!(lane.moved(400), None);
        }
        assert!(!lane.is_piped());
        let pieces = SPLICE_AFTER.div_ceil(SPLICE_LEAST);
        let limits: Vec<u32> = (0..2 * pieces).filter_map(|_| lane.moved(SPLICE_LEAST)).collect();
        assert!(lane.is_piped() && limits.len() == 1 && limits[0] > 0, "{limits:?}");
    }
}
