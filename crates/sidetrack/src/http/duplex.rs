//! A connection that one part of a request writes to while another part reads from it. Both use a shared reference.

use crate::carry::{Stream, Wire};
use crate::live::{LiveFlow, legs};
use crate::reactor::TcpStream;
use sidetrack_core::flow::Side;
use sidetrack_sys::sockopt::Ends;
use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker, ready};

/// Most bytes that are read ahead from a stream that is not a socket, to see whether there are any.
const PEEK_MAX: usize = 4096;

/// The version of HTTP/3, as Via writes it.
const HTTP_3: &str = "3.0";

/// A connection that is read and written by shared reference.
#[derive(Debug)]
pub enum Duplex {
    /// A socket: it can be shared as it is.
    Tcp(TcpStream),
    /// Any other stream. It is borrowed for single calls only, all of them by the flow's task.
    Other(Box<RefCell<Peeked>>),
}

/// A stream, with the bytes that were read ahead to see whether there are any.
#[derive(Debug)]
pub struct Peeked {
    stream: Stream,
    held: Vec<u8>,
    has_ended: bool,
    /// The version of HTTP at the other end of a connection in memory.
    version: &'static str,
}

impl From<Stream> for Duplex {
    fn from(stream: Stream) -> Self {
        match stream {
            Stream::Tcp(stream) => Self::Tcp(stream),
            stream => {
                let (held, version) = (Vec::new(), "2.0");
                Self::Other(Box::new(RefCell::new(Peeked { stream, held, has_ended: false, version })))
            }
        }
    }
}

impl Duplex {
    /// The stream, and the bytes that were read ahead.
    pub fn into_stream(self) -> (Stream, Vec<u8>) {
        match self {
            Self::Tcp(stream) => (Stream::Tcp(stream), Vec::new()),
            Self::Other(peeked) => {
                let Peeked { stream, held, .. } = peeked.into_inner();
                (stream, held)
            }
        }
    }

    /// The socket, if it is one.
    pub fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Self::Tcp(stream) => Some(stream),
            Self::Other(_) => None,
        }
    }

    /// Tells a capture that a flow uses this connection.
    pub fn note_leg(&self, flow: &LiveFlow, side: Side) {
        match self {
            Self::Tcp(stream) => legs::note(flow, side, stream),
            Self::Other(peeked) if legs::are_wanted() => {
                let _ = peeked.borrow().stream.bottom().map(|stream| legs::note(flow, side, stream));
            }
            Self::Other(_) => {}
        }
    }

    /// The same connection in memory, whose other end is a stream of HTTP/3.
    #[must_use]
    pub fn of_http3(self) -> Self {
        if let Self::Other(peeked) = &self {
            peeked.borrow_mut().version = HTTP_3;
        }
        self
    }

    /// Whether it is a connection in memory, whose other end is a stream of HTTP/2 or HTTP/3.
    pub fn is_memory(&self) -> bool {
        self.version().is_some()
    }

    /// The version of HTTP at the other end of a connection in memory. `None`: it is none, and speaks what its messages say.
    pub fn version(&self) -> Option<&'static str> {
        let Self::Other(peeked) = self else { return None };
        let peeked = peeked.borrow();
        matches!(peeked.stream, Stream::Memory(_)).then_some(peeked.version)
    }

    /// Whether the other end is a stream of HTTP/3.
    pub fn is_http3(&self) -> bool {
        self.version() == Some(HTTP_3)
    }

    /// The addresses of its socket. What it does not tell is taken from the arguments.
    pub fn ends(&self, peer: SocketAddr, listener: SocketAddr) -> Ends {
        match self {
            Self::Tcp(stream) => Ends::of(Some(stream), peer, listener),
            Self::Other(peeked) => Ends::of(peeked.borrow().stream.bottom().ok(), peer, listener),
        }
    }

    /// The local address, if it has one.
    ///
    /// # Errors
    /// As getsockname(2), or it is not a socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.local_addr(),
            Self::Other(peeked) => peeked.borrow().stream.local_address(),
        }
    }

    /// Whether there may be something to read.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Tcp(stream) => stream.poll_read_ready(cx),
            Self::Other(peeked) => peeked.borrow_mut().peek(cx).map(|_| ()),
        }
    }

    /// Appends available bytes to a vector, up to its capacity. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// The stream's error.
    pub fn poll_recv_into(&self, cx: &mut Context<'_>, bytes: &mut Vec<u8>) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(stream) => stream.poll_recv_into(cx, bytes),
            Self::Other(peeked) => peeked.borrow_mut().poll_recv_into(cx, bytes),
        }
    }

    /// Writes the slices in their order, as far as there is room.
    ///
    /// # Errors
    /// The stream's error.
    pub fn poll_send_slices(&self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self {
            Self::Tcp(stream) => stream.poll_send_slices(cx, slices),
            Self::Other(peeked) => peeked.borrow_mut().stream.poll_send_slices(cx, slices),
        }
    }

    /// Like [`Self::is_quiet`], but without a system call: bytes since the loop's last poll are not seen.
    pub fn seems_quiet(&self) -> bool {
        match self {
            Self::Tcp(stream) => !stream.may_read() || self.is_quiet(),
            Self::Other(_) => self.is_quiet(),
        }
    }

    /// Whether the peer has neither closed nor sent anything.
    pub fn is_quiet(&self) -> bool {
        match self {
            Self::Tcp(stream) => {
                matches!(stream.try_read(&mut [0; 1]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Self::Other(peeked) => {
                // No task waits now; a later reader registers its own waker.
                peeked.borrow_mut().peek(&mut Context::from_waker(Waker::noop())).is_pending()
            }
        }
    }
}

impl Peeked {
    /// Ready if bytes were read ahead, or at the end of the stream.
    fn peek(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.held.is_empty() && !self.has_ended {
            let mut buffer = [0; PEEK_MAX];
            let n = ready!(self.stream.poll_recv(cx, &mut buffer))?;
            self.held.extend_from_slice(&buffer[..n]);
            self.has_ended = n == 0;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_recv_into(&mut self, cx: &mut Context<'_>, bytes: &mut Vec<u8>) -> Poll<io::Result<usize>> {
        self.stream.tend(cx);
        if !self.held.is_empty() || self.has_ended {
            let n = self.held.len();
            bytes.append(&mut self.held);
            return Poll::Ready(Ok(n));
        }
        let start = bytes.len();
        bytes.resize(bytes.capacity().max(start + 1), 0);
        let read = self.stream.poll_recv(cx, bytes.get_mut(start..).unwrap_or_default());
        let got = if let Poll::Ready(Ok(n)) = &read { Some(*n) } else { None };
        bytes.truncate(start + got.unwrap_or(0));
        self.has_ended = got == Some(0);
        read
    }
}
