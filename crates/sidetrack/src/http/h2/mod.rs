//! HTTP/2 at both ends of intercepted connections, and from clients that ask the listener itself for tunnels of datagrams. Each stream passes through a connection in memory that speaks HTTP/1.1.
//! So policy, records, the cache and the strict parsers are the same for both versions.

pub(super) mod accept;
pub(super) mod ask;
mod connect;
mod datagrams;
mod websocket;

pub(super) use accept::Common;

use super::buffer::Buffer;
use super::copy::{Outgoing, Stopped};
use super::duplex::Duplex;
use crate::carry::h2::follow::Watch;
use crate::carry::h2::{self as carry, Cut, headers};
use crate::carry::{Memory, Stream};
use bytes::Bytes;
use h2::{RecvStream, SendStream};
use http::HeaderMap;
use sidetrack_core::http::fields::Fields;
use sidetrack_core::http::framing::{Decoder, may_trail};
use sidetrack_core::http::message::{Scan, Sender};
use std::io;

/// Bytes buffered in each direction of a connection in memory.
const PIPE_BYTES: usize = 64 * 1024;

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
async fn send(to: &mut SendStream<Bytes>, data: Bytes) -> Result<(), Stopped> {
    carry::send(to, data).await.map_err(Stopped::Sink)
}

/// Copies bytes both ways, until both ends have closed or one is cut.
async fn tunnel(pipe: Duplex, mut buffer: Buffer, stream: (RecvStream, SendStream<Bytes>), on_cut: Cut) {
    let (memory, peeked) = pipe.into_stream();
    let cutter = memory.cutter();
    let (reader, writer) = tokio::io::split(memory);
    carry::tunnel((reader, writer, cutter), [buffer.take(), peeked].concat(), stream, on_cut).await;
}
