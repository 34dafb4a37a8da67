//! A stream of a paced link, as tasks of the thread of flows use it.

use super::super::datagrams::Link;
use super::super::shared::Shared;
use super::Lane;
use crate::overlay::datagrams::Bell;
use sidetrack_core::overlay::paced::Read;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

/// A stream of a paced link. Dropping it drops the stream; [`Stream::close`] ends it in order.
pub(crate) struct Stream {
    link: Arc<Link>,
    bell: Bell,
    name: u32,
    /// Written bytes that the link has no room for yet: at most one frame.
    pending: Vec<u8>,
    is_closed: bool,
}

impl Stream {
    pub(super) fn new(shared: &Shared, link: &Arc<Link>, name: u32) -> Self {
        let bell = shared.datagrams.lanes.bell.clone();
        Self { link: link.clone(), bell, name, pending: Vec::new(), is_closed: false }
    }

    fn lane(&self) -> Option<&Lane> {
        self.link.lane.as_ref()
    }

    /// Reads bytes. Returns 0 if the neighbour has closed the stream.
    pub(crate) fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let Some(lane) = self.lane() else { return Poll::Ready(Err(ErrorKind::NotConnected.into())) };
        let mut inner = lane.lock();
        match inner.link.read(self.name, buffer) {
            Read::Bytes(count) => {
                inner.ring_if_due(&self.bell);
                Poll::Ready(Ok(count))
            }
            Read::Later => {
                inner.waiting.entry(self.name).or_default().reader = Some(cx.waker().clone());
                Poll::Pending
            }
            Read::Ended => Poll::Ready(Ok(0)),
            Read::Broken => Poll::Ready(Err(ErrorKind::ConnectionReset.into())),
        }
    }

    /// Waits until more may be written.
    pub(crate) fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_flush(cx))?;
        let Some(lane) = self.lane() else { return Poll::Ready(Ok(())) };
        let mut inner = lane.lock();
        if inner.link.has_room(self.name) {
            return Poll::Ready(Ok(()));
        }
        inner.waiting.entry(self.name).or_default().writer = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Writes bytes. What the link has no room for waits here.
    ///
    /// # Errors
    /// `BrokenPipe` if the link is down.
    pub(crate) fn write(&mut self, head: &[u8], body: &[u8]) -> io::Result<()> {
        self.pending.extend_from_slice(head);
        self.pending.extend_from_slice(body);
        self.give()
    }

    /// Gives the bytes that wait to the link, as far as it has room.
    fn give(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let Some(lane) = self.link.lane.as_ref() else { return Err(ErrorKind::BrokenPipe.into()) };
        let mut inner = lane.lock();
        let taken = inner.link.write(self.name, &self.pending).ok_or(ErrorKind::BrokenPipe)?;
        inner.ring_if_due(&self.bell);
        drop(inner);
        self.pending.drain(..taken);
        Ok(())
    }

    /// Waits until the link has taken all that was written.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.give()?;
        if self.pending.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let Some(lane) = self.link.lane.as_ref() else { return Poll::Ready(Ok(())) };
        let mut inner = lane.lock();
        // Room may have come since, and its note with it.
        if inner.link.has_room(self.name) {
            cx.waker().wake_by_ref();
        } else {
            inner.waiting.entry(self.name).or_default().writer = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Ends the stream: what was written still arrives.
    pub(crate) async fn close(mut self) {
        // An error means that the link is down, and with it the stream.
        let _ = poll_fn(|cx| self.poll_flush(cx)).await;
        self.is_closed = true;
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Some(lane) = self.link.lane.as_ref() else { return };
        let mut inner = lane.lock();
        if self.is_closed {
            inner.link.close(self.name);
        } else {
            inner.link.abandon(self.name);
        }
        inner.waiting.remove(&self.name);
        inner.ring_if_due(&self.bell);
    }
}
