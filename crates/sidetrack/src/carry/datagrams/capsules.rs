//! A tunnel of datagrams to one destination in a connection: capsules, after CONNECT-UDP (RFC 9298), or in a flow of a tunnel
//! between two Sidetracks. There, what fits travels beside the stream, in QUIC datagrams ([`Lane`]).
//!
//! The far end of the connection is a hop, or a client of ours. Datagrams that leave in one turn are written together. The
//! connection is reliable: a datagram that finds too many before it is dropped, as on any path of UDP, and never cut.

use super::{Came, Datagrams, Lost, Remote};
use crate::carry::tunnel::lanes::{Lane, Sent};
use crate::carry::{Failure, Order, Stream, Wire, hop_name, hops, tunnel};
use crate::live::Taken;
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
    /// Carries what fits in a QUIC datagram.
    lane: Option<Lane>,
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
    let capsules = Some(Capsules::new(carried.stream, &carried.early, None));
    Ok(ToHop { capsules, name: hop_name(index, hops), taken: None })
}

/// Asks the far side of a tunnel to carry datagrams to the order's destination.
pub(super) async fn through_tunnel(order: &Order<'_>, name: &str) -> Result<ToHop, Failure> {
    let (carried, lane) = tunnel::associate(order, name).await?;
    let capsules = Some(Capsules::new(carried.stream, &carried.early, lane));
    Ok(ToHop { capsules, name: format!("tunnel '{name}'"), taken: carried.taken })
}

/// A tunnel to a hop, or to the far side of a tunnel.
#[derive(Debug)]
pub(super) struct ToHop {
    /// `None` only while it is dropped.
    capsules: Option<Capsules>,
    /// The hop, for details.
    name: String,
    taken: Option<Taken>,
}

impl Drop for ToHop {
    /// The far end learns an orderly end.
    fn drop(&mut self) {
        if let Some(capsules) = self.capsules.take() {
            capsules.close(false);
        }
    }
}

impl ToHop {
    /// As [`Capsules::send`].
    pub(super) fn send(&mut self, payload: &[u8]) -> Result<(), Lost> {
        self.capsules.as_mut().map_or(Ok(()), |capsules| capsules.send(payload))
    }

    /// As [`Capsules::poll_receive`]. The failure names the hop.
    pub(super) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        take: &mut dyn FnMut(&[u8]),
    ) -> Poll<Result<(), Failure>> {
        let Some(capsules) = &mut self.capsules else { return Poll::Pending };
        let polled = capsules.poll_receive(cx, take);
        polled.map_err(|over| Failure::new(EndReason::HopFailed, format!("{}: {over}", self.name)))
    }
}

impl Capsules {
    /// Returns the tunnel in this connection, which has already brought `early`. `lane` carries what fits.
    pub fn new(stream: Stream, early: &[u8], lane: Option<Lane>) -> Self {
        let mut reader = Reader::default();
        reader.push(early);
        Self { stream, reader, unsent: Vec::new(), sent: 0, lane, waker: None }
    }

    /// Returns how many datagrams came and had no room since the last call.
    pub fn take_lost(&self) -> u64 {
        self.lane.as_ref().map_or(0, Lane::take_lost)
    }

    /// Sends a datagram with the next poll.
    ///
    /// # Errors
    /// Fails if it is too long, or if too many wait.
    pub fn send(&mut self, payload: &[u8]) -> Result<(), Lost> {
        let lost = |why, detail: &str| {
            let failure = Failure::new(EndReason::Unreachable, detail);
            Lost { why, failure, fits_bytes: None }
        };
        match self.lane.as_ref().map_or(Sent::Unfit, |lane| lane.send(payload)) {
            Sent::Gone => return Ok(()),
            Sent::Lost => return Err(lost(Dropped::Unsent, "the connection of the tunnel is full or over")),
            Sent::Unfit => {}
        }
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
        let has_more = self.lane.as_ref().is_some_and(|lane| lane.poll_receive(cx, take).is_ready());
        // What came with the answer may already be whole.
        self.pass(take)?;
        for _ in 0..READS {
            let mut buffer = [0; READ_BYTES];
            match self.stream.poll_recv(cx, &mut buffer) {
                Poll::Pending if has_more => return Poll::Ready(Ok(())),
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
        match self.stream {
            Stream::Tunnel(stream) if !reset => stream.end(),
            stream => stream.close(reset),
        }
    }
}

impl Datagrams for ToHop {
    fn send(&mut self, _: &Remote, payload: &[u8]) -> Result<(), Lost> {
        Self::send(self, payload)
    }

    fn taken(&self) -> Option<Taken> {
        self.taken
    }

    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        _: &mut Batch,
        take: &mut dyn FnMut(Came<'_>),
    ) -> Poll<Result<(), Failure>> {
        let polled =
            Self::poll_receive(self, cx, &mut |payload| take(Came::Datagram { from: None, payload }));
        for _ in 0..self.capsules.as_ref().map_or(0, Capsules::take_lost) {
            take(Came::Dropped(Dropped::Unsent));
        }
        polled
    }
}
