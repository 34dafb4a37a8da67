//! A tunnel of datagrams to one destination in a connection: capsules, after CONNECT-UDP (RFC 9298).
//!
//! The far end of the connection is a hop, or a client of ours. Datagrams that leave in one turn are written together. The
//! connection is reliable: a datagram that finds too many before it is dropped, as on any path of UDP, and never cut.

use super::{Came, Datagrams, Lost, Remote};
use crate::carry::{Failure, Order, Stream, Wire, hop_name, hops};
use sidetrack_core::association::Dropped;
use sidetrack_core::carrier::Hop;
use sidetrack_core::flow::{Destination, EndReason};
use sidetrack_core::http::capsule::{CapsuleError, Reader, put_datagram};
use sidetrack_sys::udp::batch::Batch;
use std::io;
use std::task::{Context, Poll, Waker};

/// Most bytes that wait for the connection. It holds at least four datagrams of any length.
const UNSENT_MAX: usize = 256 * 1024;

/// Most bytes of one read.
const READ_BYTES: usize = 16 * 1024;

/// Reads before other work has its turn.
const READS: usize = 8;

/// How a tunnel has ended.
#[derive(Debug, thiserror::Error)]
pub enum Over {
    /// The far end has closed it between two capsules.
    #[error("it has ended the tunnel")]
    Ended,
    /// The far end has sent what is not a capsule, or has closed in the middle of one.
    #[error("it has broken the tunnel: {0}")]
    Broken(#[from] CapsuleError),
    /// The connection is cut.
    #[error("it has cut the tunnel: {0}")]
    Cut(io::Error),
}

/// A tunnel of datagrams in a connection.
#[derive(Debug)]
pub struct Capsules {
    stream: Stream,
    reader: Reader,
    /// Capsules to be sent, from `sent` on.
    unsent: Vec<u8>,
    sent: usize,
    /// Wakes the task that drives this.
    waker: Option<Waker>,
}

/// Asks the hop with this index for a tunnel to this destination.
pub(super) async fn open(
    order: &Order<'_>,
    hops: &[Hop],
    index: usize,
    to: &Destination,
) -> Result<ToHop, Failure> {
    let carried = hops::connect_udp(order, hops, index, to).await?;
    Ok(ToHop { capsules: Capsules::new(carried.stream, &carried.early), name: hop_name(index, hops) })
}

/// A tunnel to a hop.
#[derive(Debug)]
pub(super) struct ToHop {
    capsules: Capsules,
    /// The hop, for details.
    name: String,
}

impl ToHop {
    /// As [`Capsules::send`].
    pub(super) fn send(&mut self, payload: &[u8]) -> Result<(), Lost> {
        self.capsules.send(payload)
    }

    /// As [`Capsules::poll_receive`]. The failure names the hop.
    pub(super) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        take: &mut dyn FnMut(&[u8]),
    ) -> Poll<Result<(), Failure>> {
        let polled = self.capsules.poll_receive(cx, take);
        polled.map_err(|over| Failure::new(EndReason::HopFailed, format!("{}: {over}", self.name)))
    }
}

impl Capsules {
    /// Returns the tunnel in this connection, which has already brought `early`.
    pub fn new(stream: Stream, early: &[u8]) -> Self {
        let mut reader = Reader::default();
        reader.push(early);
        Self { stream, reader, unsent: Vec::new(), sent: 0, waker: None }
    }

    /// Sends a datagram with the next poll.
    ///
    /// # Errors
    /// Fails if it is too long, or if too many wait.
    pub fn send(&mut self, payload: &[u8]) -> Result<(), Lost> {
        let lost = |why, detail: &str| Lost { why, failure: Failure::new(EndReason::Unreachable, detail) };
        let waiting = self.unsent.len() - self.sent;
        if waiting > 0 && waiting + payload.len() > UNSENT_MAX {
            return Err(lost(Dropped::Unsent, "the connection that carries datagrams is full"));
        }
        if !put_datagram(&mut self.unsent, payload) {
            return Err(lost(Dropped::TooLong, "the datagram is longer than UDP carries"));
        }
        if waiting == 0
            && let Some(waker) = &self.waker
        {
            waker.wake_by_ref();
        }
        Ok(())
    }

    /// Sends what waits, and passes the payloads of what has come to `take`. Ready: there may be more.
    ///
    /// # Errors
    /// Fails if the connection has ended or its bytes are not capsules.
    pub fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        take: &mut dyn FnMut(&[u8]),
    ) -> Poll<Result<(), Over>> {
        if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
        self.flush(cx)?;
        // What came with the answer may already be whole.
        self.pass(take)?;
        for _ in 0..READS {
            let mut buffer = [0; READ_BYTES];
            match self.stream.poll_recv(cx, &mut buffer) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(0)) => {
                    let over = self.reader.end().err().map_or(Over::Ended, Over::Broken);
                    return Poll::Ready(Err(over));
                }
                Poll::Ready(Ok(read)) => self.reader.push(&buffer[..read]),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(Over::Cut(error))),
            }
            self.pass(take)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Passes on the payloads that are whole.
    fn pass(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), CapsuleError> {
        while let Some(payload) = self.reader.payload()? {
            take(payload);
        }
        Ok(())
    }

    /// Sends as much as there is room for.
    fn flush(&mut self, cx: &mut Context<'_>) -> Result<(), Over> {
        while self.sent < self.unsent.len() {
            match self.stream.poll_send(cx, &self.unsent[self.sent..]) {
                Poll::Pending => {
                    // What is sent goes away, so that the bytes that wait do not grow without end.
                    self.unsent.drain(..self.sent);
                    self.sent = 0;
                    return Ok(());
                }
                Poll::Ready(Ok(count)) => self.sent += count,
                Poll::Ready(Err(error)) => return Err(Over::Cut(error)),
            }
        }
        (self.unsent, self.sent) = (Vec::new(), 0);
        self.stream.tend(cx);
        Ok(())
    }

    /// Closes the connection. `reset`: the far end has broken the tunnel.
    pub fn close(self, reset: bool) {
        self.stream.close(reset);
    }
}

impl Datagrams for ToHop {
    fn send(&mut self, _: &Remote, payload: &[u8]) -> Result<(), Lost> {
        Self::send(self, payload)
    }

    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        _: &mut Batch,
        take: &mut dyn FnMut(Came<'_>),
    ) -> Poll<Result<(), Failure>> {
        Self::poll_receive(self, cx, &mut |payload| take(Came::Datagram { from: None, payload }))
    }
}
