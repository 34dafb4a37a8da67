//! HTTP/2 at both ends of intercepted connections, and from clients that ask the listener itself for tunnels of datagrams. Each stream passes through a connection in memory that speaks HTTP/1.1.
//! So policy, records, the cache and the strict parsers are the same for both versions.

pub(super) mod accept;
pub(super) mod ask;
mod connect;
mod datagrams;
mod follow;
mod websocket;

pub(super) use accept::Common;

use super::buffer::Buffer;
use super::copy::{Outgoing, Stopped};
use super::duplex::Duplex;
use crate::carry::{Memory, Stream};
use bytes::Bytes;
use follow::Watch;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::{Decoder, may_trail};
use sidetrack_core::http::h2 as map;
use sidetrack_core::http::message::{MAX_HEAD, Scan, Sender};
use std::future::poll_fn;
use std::io;

/// Bytes buffered in each direction of a connection in memory.
const PIPE_BYTES: usize = 64 * 1024;
/// Most bytes of content that are buffered for us in one stream.
const STREAM_WINDOW: u32 = 256 * 1024;
/// The same limit for all streams of a connection together.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Most streams that a client may open at the same time (RFC 9113 Sec. 5.1.2).
const STREAMS_MAX: u32 = 100;

/// Returns both ends of a connection in memory.
pub(super) fn pipe() -> (Duplex, Stream) {
    let (one, other) = Memory::pair(PIPE_BYTES);
    (Duplex::from(Stream::Memory(one)), Stream::Memory(other))
}

/// Reads a head from a connection in memory; `None` at its end.
pub(super) async fn head(from: &Duplex, buffer: &mut Buffer, sender: Sender) -> io::Result<Option<Vec<u8>>> {
    let mut scan = Scan::default();
    loop {
        match scan.advance(buffer.data(), sender) {
            Ok(Some(length)) => {
                let head = buffer.data().get(..length).unwrap_or_default().to_vec();
                buffer.consume(length);
                return Ok(Some(head));
            }
            Ok(None) => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        if buffer.fill(from).await? == 0 {
            return Ok(None);
        }
    }
}

/// Converts fields to HTTP/2 form.
fn headers(fields: &Fields) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in map::fields(fields) {
        // Fields that do not fit were rejected when the head was parsed.
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(&name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    headers
}

/// Keeps the trailers that HTTP/1.1 allows.
fn trailers(headers: Option<HeaderMap>) -> Fields {
    let mut fields = Fields::new();
    for (name, value) in headers.iter().flatten().filter(|(name, _)| may_trail(name.as_str().as_bytes())) {
        fields.push(name.as_str(), value.as_bytes());
    }
    fields
}

/// Copies content from a stream to a connection in memory. The content ends well only if its trailers are well-formed.
async fn drain(mut body: RecvStream, out: &mut Outgoing<'_>, watch: &Watch) -> Result<(), Stopped> {
    let gone = |error: h2::Error| Stopped::Source(error.to_string());
    out.flush().await.map_err(Stopped::Sink)?;
    while let Some(data) = body.data().await {
        let data = data.map_err(gone)?;
        out.push(&data).await.map_err(Stopped::Sink)?;
        out.flush().await.map_err(Stopped::Sink)?;
        // This fails only if the stream is over; then the capacity does not matter.
        let _ = body.flow_control().release_capacity(data.len());
    }
    let end = trailers(body.trailers().await.map_err(gone)?);
    watch.check().map_err(|malformed| Stopped::Source(malformed.to_string()))?;
    out.finish(&end).await.map_err(Stopped::Sink)
}

/// Copies content from a connection in memory to a stream.
async fn pour(
    (from, buffer): (&Duplex, &mut Buffer),
    decoder: &mut Decoder,
    to: &mut SendStream<Bytes>,
) -> Result<(), Stopped> {
    let broken = |error: sidetrack_core::http::message::MessageError| Stopped::Source(error.to_string());
    let gone = |error: h2::Error| Stopped::Sink(io::Error::other(error));
    loop {
        while !decoder.is_done() && !buffer.is_empty() {
            let decoded = decoder.decode(buffer.data()).map_err(broken)?;
            let (data, consumed) = (Bytes::copy_from_slice(decoded.data), decoded.consumed);
            buffer.consume(consumed);
            send(to, data).await?;
        }
        if decoder.is_done() {
            let end = headers(&decoder.take_trailers());
            let sent = if end.is_empty() { to.send_data(Bytes::new(), true) } else { to.send_trailers(end) };
            return sent.map_err(gone);
        }
        let n = buffer.fill(from).await.map_err(|error| Stopped::Source(error.to_string()))?;
        if n == 0 {
            decoder.end().map_err(broken)?;
        }
    }
}

/// Sends data as flow control gives room.
async fn send(to: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), Stopped> {
    let gone = |error: h2::Error| Stopped::Sink(io::Error::other(error));
    while !data.is_empty() {
        to.reserve_capacity(data.len());
        let room = match poll_fn(|cx| to.poll_capacity(cx)).await {
            Some(room) => room.map_err(gone)?,
            None => return Err(Stopped::Sink(io::ErrorKind::BrokenPipe.into())),
        };
        let part = data.split_to(room.min(data.len()));
        to.send_data(part, false).map_err(gone)?;
    }
    Ok(())
}

/// The largest header list that we accept, in bytes (RFC 9113 Sec. 6.5.2).
fn header_list_max() -> u32 {
    u32::try_from(MAX_HEAD).unwrap_or(u32::MAX)
}
