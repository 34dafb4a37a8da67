//! Judges the header blocks of a connection as they arrive, before the library `h2` reads them: it repairs or hides some
//! malformed ones.

use crate::carry::Stream;
use h2::StreamId;
use sidetrack_core::http::follow::{Broken, Follower};
use sidetrack_core::http::h2::Malformed;
use sidetrack_core::http::message::Sender;
use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream that shows a follower everything that it reads. Bytes pass unchanged.
#[derive(Debug)]
pub struct Followed {
    stream: Stream,
    /// Bytes that were read before.
    early: Vec<u8>,
    follows: Follows,
    broken: Option<Broken>,
}

/// What has been read on one connection.
#[derive(Clone, Debug)]
pub struct Follows(Rc<RefCell<Follower>>);

/// Watches one stream of a connection, and forgets it at the end.
#[derive(Debug)]
pub struct Watch {
    follows: Follows,
    stream: u32,
}

impl Followed {
    /// Follows what the peer sends on this stream, from which `early` was read before.
    pub fn new(stream: Stream, early: Vec<u8>, peer: Sender) -> (Self, Follows) {
        let follows = Follows(Rc::new(RefCell::new(Follower::new(peer))));
        (Self { stream, early, follows: follows.clone(), broken: None }, follows)
    }
}

impl Follows {
    /// The receiver is a proxy, which serves requests of scheme `http` too.
    pub fn for_proxy(&self) {
        let mut follower = self.0.borrow_mut();
        *follower = std::mem::replace(&mut *follower, Follower::new(Sender::Client)).for_proxy();
    }

    /// Watches a stream that the client has opened.
    pub fn of(&self, stream: StreamId) -> Watch {
        Watch { follows: self.clone(), stream: stream.into() }
    }

    /// Watches a stream that we have opened. To be called before the peer can answer.
    pub fn open(&self, stream: StreamId) -> Watch {
        let watch = self.of(stream);
        self.0.borrow_mut().open(watch.stream);
        watch
    }
}

impl Watch {
    /// Takes the judgement of the request that has opened the stream.
    ///
    /// # Errors
    /// How it is malformed.
    pub fn take(&self) -> Result<(), Malformed> {
        self.follows.0.borrow_mut().take(self.stream)
    }

    /// Returns the judgement of all header blocks of the stream so far.
    ///
    /// # Errors
    /// How one of them is malformed.
    pub fn check(&self) -> Result<(), Malformed> {
        self.follows.0.borrow().check(self.stream)
    }

    /// Whether a header block of the stream has arrived that is malformed.
    pub fn is_malformed(&self) -> bool {
        !matches!(self.check(), Ok(()) | Err(Malformed::Unread))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.follows.0.borrow_mut().forget(self.stream);
    }
}

impl AsyncRead for Followed {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // The library still gets the bytes that broke the connection, so that it can say why in a GOAWAY. Then it ends.
        if let Some(broken) = this.broken {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, broken)));
        }
        let before = buffer.filled().len();
        if this.early.is_empty() {
            ready!(Pin::new(&mut this.stream).poll_read(cx, buffer))?;
        } else {
            let count = this.early.len().min(buffer.remaining());
            buffer.put_slice(&this.early[..count]);
            this.early.drain(..count);
        }
        let read = buffer.filled().get(before..).unwrap_or_default();
        this.broken = this.follows.0.borrow_mut().read(read).err();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Followed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
