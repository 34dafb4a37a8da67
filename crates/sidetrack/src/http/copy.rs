//! Copies content from one connection to another, from one framing to the other.

use super::buffer::Buffer;
use super::disk::Fill;
use super::duplex::Duplex;
use super::har::Kept;
use super::meter::Meter;
use super::pool::Route;
use super::sheet::Pages;
use crate::live::{Clock, LiveFlow};
use crate::reactor::TcpStream;
use crate::session::Lane;
use crate::worker::Worker;
use sidetrack_core::flow::{EndReason, Side};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::{Decoder, Length, write_chunk_size, write_last_chunk};
use sidetrack_core::http::message::MessageError;
#[cfg(doc)]
use sidetrack_core::placeholder::Misplaced;
use sidetrack_core::placeholder::Swapping;
use sidetrack_core::time::Instant as Moment;
use std::borrow::Cow;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::time::Duration;

/// The idle timeout during a message, if the rule has none. It is long enough for a slow server, or for one that delays
/// its response until there is news.
pub(super) const STALL: Duration = Duration::from_secs(15 * 60);

/// Content up to this size is copied behind pending bytes, so that both are written by one call.
const COPY_MAX: usize = 8 * 1024;

/// Why copying content stopped.
#[derive(Debug, thiserror::Error)]
pub(super) enum Stopped {
    /// The source is gone or ended early.
    #[error("{0}")]
    Source(String),
    /// The source closed before the content was complete.
    #[error("{0}")]
    Ended(MessageError),
    /// The source sends malformed content.
    #[error("{0}")]
    Broken(MessageError),
    /// The sink failed.
    #[error("{0}")]
    Sink(io::Error),
}

/// Moves a flow's deadline as long as there is progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress<'a> {
    /// The flow.
    pub live: &'a LiveFlow,
    /// The clock of its worker.
    pub clock: Clock,
    /// The idle timeout.
    pub stall: Duration,
    /// The end of the flow's lifetime, if it is limited.
    pub end: Option<Moment>,
}

impl<'a> Progress<'a> {
    /// Returns the progress of a flow on this route.
    pub(super) fn of(worker: &Worker, live: &'a LiveFlow, route: &Route) -> Self {
        let lifetime_ms = route.carry.lifetime_ms.or_else(|| worker.config().limits.lifetime_ms);
        let left = lifetime_ms.map(|ms| Duration::from_millis(ms).saturating_sub(live.age()));
        let end = left.map(|left| worker.clock.now() + left);
        Self { live, clock: worker.clock, stall: route.stall(), end }
    }

    /// Notes progress, or the start of a new wait.
    pub(super) fn mark(&self) {
        let idle = self.clock.now() + self.stall;
        match self.end.filter(|end| *end < idle) {
            Some(end) => self.live.set_deadline(Some(end), EndReason::Lifetime),
            None => self.live.set_deadline(Some(idle), EndReason::Idle),
        }
        self.live.touch(self.live.age());
    }
}

/// Writes all slices, with as few calls as possible.
///
/// # Errors
/// The socket's error.
pub(super) async fn write_all(to: &Duplex, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        let n = poll_fn(|cx| to.poll_send_slices(cx, slices)).await?;
        if n == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut slices, n);
    }
    Ok(())
}

/// The sink of content, in its new framing.
pub(super) struct Outgoing<'a> {
    /// The connection; `None`: content is only copied on the way.
    to: Option<&'a Duplex>,
    /// Bytes to be written before the next content: a head, or a chunk's size.
    pending: Vec<u8>,
    is_chunked: bool,
    /// Counting functions that content passes, and the side it comes from.
    meter: Option<(&'a Meter, Side, Clock)>,
    /// The flow in which sent bytes are counted, and the side they come from.
    counted: Option<(&'a LiveFlow, Side)>,
    /// Replaces secrets or their placeholders in the content.
    swapping: Option<Swapping>,
    /// Keeps the content for the archive of requests, and the side it comes from.
    kept: Option<(&'a Kept, Side)>,
    /// Bytes written so far.
    pub written: u64,
}

impl<'a> Outgoing<'a> {
    /// Content in this framing behind a head. The head is sent together with the first content.
    pub(super) fn new(to: &'a Duplex, head: Vec<u8>, length: Length) -> Self {
        let is_chunked = length == Length::Chunked;
        Self {
            to: Some(to),
            pending: head,
            is_chunked,
            meter: None,
            counted: None,
            swapping: None,
            kept: None,
            written: 0,
        }
    }

    /// Content that is not sent.
    pub(super) const fn nowhere() -> Self {
        Self {
            to: None,
            pending: Vec::new(),
            is_chunked: false,
            meter: None,
            counted: None,
            swapping: None,
            kept: None,
            written: 0,
        }
    }

    /// Counts sent bytes in a flow; `from` is the side they come from.
    #[must_use]
    pub(super) fn counted(self, live: &'a LiveFlow, from: Side) -> Self {
        Self { counted: Some((live, from)), ..self }
    }

    /// Replaces secrets or their placeholders in the content.
    #[must_use]
    pub(super) fn swapped(self, swapping: Option<Swapping>) -> Self {
        Self { swapping, ..self }
    }

    /// Keeps the content as the client has sent or gets it, without secrets. `from` is the side it comes from.
    #[must_use]
    pub(super) fn kept(self, kept: Option<&'a Kept>, from: Side) -> Self {
        Self { kept: kept.map(|kept| (kept, from)), ..self }
    }

    /// Keeps content of this side.
    fn keep(&self, from: Side, data: &[u8]) {
        if let Some((kept, its)) = self.kept
            && its == from
        {
            kept.push(from, data);
        }
    }

    /// Counts bytes that were written.
    fn wrote(&mut self, bytes: u64) {
        self.written += bytes;
        match self.counted {
            Some((live, Side::Client)) => live.count(bytes, 0),
            Some((live, Side::Server)) => live.count(0, bytes),
            None => {}
        }
    }

    /// Lets content pass counting functions; `from` is the side it comes from.
    #[must_use]
    pub(super) fn metered(self, meter: Option<&'a Meter>, from: Side, clock: Clock) -> Self {
        Self { meter: meter.map(|meter| (meter, from, clock)), ..self }
    }

    /// Writes content; small pieces wait for [`Self::flush`].
    ///
    /// # Errors
    /// The socket's error, or a [`Misplaced`] placeholder.
    pub(super) async fn push(&mut self, data: &[u8]) -> io::Result<()> {
        self.keep(Side::Client, data);
        let Some(swapping) = &mut self.swapping else {
            self.keep(Side::Server, data);
            return self.pass(data).await;
        };
        let mut out = Vec::with_capacity(data.len());
        swapping.push(data, &mut out).map_err(io::Error::other)?;
        self.keep(Side::Server, &out);
        self.pass(&out).await
    }

    async fn pass(&mut self, data: &[u8]) -> io::Result<()> {
        let Some((meter, from, clock)) = self.meter else { return self.take(data).await };
        let mut rest = data;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(meter.room(clock, from, rest.len()).await.min(rest.len()));
            self.take(now).await?;
            if !later.is_empty() {
                // Send what may pass now, before waiting for the rest.
                self.flush().await?;
            }
            rest = later;
        }
        Ok(())
    }

    /// Writes content that lies in several pieces. Uses as few calls as possible if nothing has to be inserted between
    /// them.
    ///
    /// # Errors
    /// The socket's error.
    pub(super) async fn push_all(&mut self, pieces: &[&[u8]]) -> io::Result<()> {
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        let plain = self.meter.is_none() && self.swapping.is_none() && self.kept.is_none();
        let Some(to) = self.to.filter(|_| length > COPY_MAX && !self.is_chunked && plain) else {
            for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
                self.push(piece).await?;
            }
            return Ok(());
        };
        let all = std::iter::once(self.pending.as_slice()).chain(pieces.iter().copied());
        let mut slices: Vec<IoSlice<'_>> = all.map(IoSlice::new).collect();
        write_all(to, &mut slices).await?;
        self.wrote((self.pending.len() + length) as u64);
        self.pending.clear();
        Ok(())
    }

    /// The socket, if content may be sent to it without framing.
    fn bare_socket(&self) -> Option<&'a TcpStream> {
        let is_bare =
            !self.is_chunked && self.meter.is_none() && self.swapping.is_none() && self.kept.is_none();
        self.to.filter(|_| is_bare)?.tcp()
    }

    /// Whether [`Self::push_pages`] works here.
    pub(super) fn sends_pages(&self) -> bool {
        self.bare_socket().is_some()
    }

    /// Sends these bytes of a sheet without copying them; sends nothing if that is not possible.
    ///
    /// # Errors
    /// The socket's error.
    pub(super) async fn push_pages(
        &mut self,
        pages: &Pages,
        mut range: Range<u64>,
        progress: Progress<'_>,
    ) -> io::Result<()> {
        self.flush().await?;
        let Some(socket) = self.bare_socket() else { return Ok(()) };
        // Prefer a pipe: the kernel then does not look up every page.
        let mut lane = pages.mapped().and_then(|mapped| Some((mapped, Lane::piped()?)));
        while !range.is_empty() {
            let n = match &mut lane {
                Some((mapped, lane)) => poll_fn(|cx| lane.poll_pages(cx, socket, mapped, &range)).await?,
                None => poll_fn(|cx| pages.poll_send(cx, socket, &range)).await?,
            };
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            range.start += n;
            self.wrote(n);
            progress.mark();
        }
        Ok(())
    }

    async fn take(&mut self, data: &[u8]) -> io::Result<()> {
        let Some(to) = self.to.filter(|_| !data.is_empty()) else { return Ok(()) };
        if self.is_chunked {
            write_chunk_size(&mut self.pending, data.len());
        }
        if data.len() <= COPY_MAX {
            self.pending.extend_from_slice(data);
            if self.is_chunked {
                self.pending.extend_from_slice(b"\r\n");
            }
            if self.pending.len() > 4 * COPY_MAX {
                self.flush().await?;
            }
            return Ok(());
        }
        let end: &[u8] = if self.is_chunked { b"\r\n" } else { b"" };
        let slices = &mut [IoSlice::new(&self.pending), IoSlice::new(data), IoSlice::new(end)];
        write_all(to, slices).await?;
        self.wrote((self.pending.len() + data.len() + end.len()) as u64);
        self.pending.clear();
        Ok(())
    }

    /// Writes the pending bytes.
    ///
    /// # Errors
    /// The socket's error.
    pub(super) async fn flush(&mut self) -> io::Result<()> {
        if let Some(to) = self.to.filter(|_| !self.pending.is_empty()) {
            write_all(to, &mut [IoSlice::new(&self.pending)]).await?;
            self.wrote(self.pending.len() as u64);
            self.pending.clear();
        }
        Ok(())
    }

    /// Ends the message.
    ///
    /// # Errors
    /// The socket's error, or a [`Misplaced`] placeholder.
    pub(super) async fn finish(&mut self, trailers: &Fields) -> io::Result<()> {
        let mut trailers = Cow::Borrowed(trailers);
        if let Some(mut swapping) = self.swapping.take() {
            let mut rest = Vec::new();
            swapping.finish(&mut rest).map_err(io::Error::other)?;
            self.keep(Side::Server, &rest);
            self.pass(&rest).await?;
            swapping.trailers(trailers.to_mut()).map_err(io::Error::other)?;
        }
        if self.is_chunked {
            write_last_chunk(&mut self.pending, &trailers);
        }
        self.flush().await
    }
}

/// Makes a copy of passing content for the cache.
pub(super) struct Tee {
    /// The content so far, unless it goes to the disk.
    pub bytes: Vec<u8>,
    /// Most bytes in memory. Longer content goes to the disk, or the copy is given up.
    pub max: u64,
    /// The copy was given up.
    pub is_over: bool,
    /// Begins the copy on disk when memory does not suffice.
    pub spill: Option<Spill>,
    /// The copy on disk.
    pub fill: Option<Fill>,
}

/// A function that begins a copy on disk.
pub(super) type Spill = Box<dyn FnOnce() -> Option<Fill>>;

impl Tee {
    /// A copy of at most `max` bytes in memory.
    pub(super) const fn new(max: u64, spill: Option<Spill>) -> Self {
        Self { bytes: Vec::new(), max, is_over: false, spill, fill: None }
    }

    /// Bytes copied so far.
    pub(super) fn taken(&self) -> u64 {
        match &self.fill {
            Some(fill) => fill.taken(),
            None => self.bytes.len() as u64,
        }
    }

    /// Copies a piece.
    pub(super) async fn push(&mut self, data: &[u8]) {
        if self.is_over {
            return;
        }
        if self.fill.is_none() && (self.bytes.len() + data.len()) as u64 > self.max {
            self.fill = self.spill.take().and_then(|begin| begin());
            let held = std::mem::take(&mut self.bytes);
            self.is_over = match &mut self.fill {
                Some(fill) => !fill.push(&held).await,
                None => true,
            };
        }
        match &mut self.fill {
            Some(fill) if !self.is_over => self.is_over = !fill.push(data).await,
            None if !self.is_over => self.bytes.extend_from_slice(data),
            _ => {}
        }
        if self.is_over {
            self.fill = None;
        }
    }
}

/// Copies a whole body.
///
/// # Errors
/// Which side stopped it.
pub(super) async fn copy_body(
    (from, buffer): (&Duplex, &mut Buffer),
    decoder: &mut Decoder,
    out: &mut Outgoing<'_>,
    mut tee: Option<&mut Tee>,
    progress: Progress<'_>,
) -> Result<(), Stopped> {
    loop {
        while !decoder.is_done() && !buffer.is_empty() {
            let decoded = decoder.decode(buffer.data()).map_err(Stopped::Broken)?;
            if let Some(tee) = &mut tee {
                tee.push(decoded.data).await;
            }
            out.push(decoded.data).await.map_err(Stopped::Sink)?;
            let consumed = decoded.consumed;
            buffer.consume(consumed);
        }
        progress.mark();
        if decoder.is_done() {
            return out.finish(&decoder.take_trailers()).await.map_err(Stopped::Sink);
        }
        // Flush before waiting for more, so that the receiver does not wait for bytes that have arrived.
        out.flush().await.map_err(Stopped::Sink)?;
        let n = buffer.fill(from).await.map_err(|error| Stopped::Source(error.to_string()))?;
        if n == 0 {
            decoder.end().map_err(Stopped::Ended)?;
        }
    }
}
