//! What moves between a request stream and a connection in memory once the stream is a tunnel: bytes, or datagrams.
//!
//! Datagrams are capsules in memory, as over HTTP/1.1 and HTTP/2. With the peer they are datagrams of QUIC (RFC 9297 Sec. 2.1). One
//! that is too long for those, or a peer that has none, gets capsules in the stream.

use super::{Broken, Came, Datagrams, Peer, Reading, send_data};
use crate::carry::Cutter;
use bytes::{Bytes, BytesMut};
use quinn::SendStream;
use sidetrack_core::http::capsule::{Reader, put_datagram};
use sidetrack_core::http::h3::{Code, Error, datagram};
use std::pin::pin;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Most bytes of one read from a connection in memory.
const READ_BYTES: usize = 16 * 1024;

/// The beginning of a capsule. A tunnel that ends behind it counts as broken.
const CUT: &[u8] = &[0];

fn cut(_: impl Sized) -> Broken {
    Error::of_stream(Code::Connect, "the tunnel was cut").into()
}

/// Copies bytes both ways, until both ends have closed or one is cut: then the other is cut, too. `early` was read from memory
/// before.
///
/// # Errors
/// One end was cut: the stream must be reset.
pub async fn bytes(
    (mut reader, mut writer, cutter): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin, Option<Cutter>),
    early: Vec<u8>,
    (send, reading): (&mut SendStream, &mut Reading),
) -> Result<(), Broken> {
    let to_memory = async {
        while let Some(came) = reading.next().await? {
            if let Came::Content(content) = came {
                writer.write_all(&content).await.map_err(cut)?;
            }
        }
        writer.shutdown().await.map_err(cut)
    };
    let to_peer = async {
        send_data(send, early.into()).await?;
        loop {
            let mut bytes = BytesMut::with_capacity(READ_BYTES);
            if reader.read_buf(&mut bytes).await.map_err(cut)? == 0 {
                // This fails only if the stream is over.
                let _ = send.finish();
                return Ok::<(), Broken>(());
            }
            send_data(send, bytes.freeze()).await?;
        }
    };
    let moved = tokio::try_join!(to_memory, to_peer).map(drop);
    if let Some(cutter) = cutter.filter(|_| moved.is_err()) {
        cutter.cut();
    }
    moved
}

/// Moves datagrams both ways, until the connection in memory ends. `id` is that of the stream.
///
/// # Errors
/// The peer is gone or sends what is not a capsule: the stream must be reset.
pub async fn datagrams(
    (reader, writer): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    early: Vec<u8>,
    (peer, id, datagrams): (&Peer, u64, Datagrams),
    (send, reading): (&mut SendStream, &mut Reading),
) -> Result<(), Broken> {
    let mut to_memory = pin!(to_memory(writer, reading, datagrams));
    let mut to_peer = pin!(to_peer(reader, early, (peer, id), send));
    let mut is_closed = false;
    loop {
        tokio::select! {
            biased;
            moved = &mut to_memory, if !is_closed => {
                moved?;
                is_closed = true;
            }
            // The flow is over: nothing that the peer may still send matters.
            moved = &mut to_peer => return moved,
        }
    }
}

/// From the peer: its datagrams and its capsules, each whole.
async fn to_memory(
    mut writer: impl AsyncWrite + Unpin,
    reading: &mut Reading,
    mut datagrams: Datagrams,
) -> Result<(), Broken> {
    let mut capsules = Reader::default();
    let mut out = Vec::new();
    loop {
        out.clear();
        let is_well = tokio::select! {
            biased;
            came = reading.next() => match came? {
                Some(Came::Content(content)) => {
                    capsules.push(&content);
                    copy(&mut capsules, &mut out)
                }
                Some(_) => true,
                None if capsules.end().is_ok() => return writer.shutdown().await.map_err(cut),
                None => false,
            },
            payload = datagrams.next() => put_datagram(&mut out, &payload),
        };
        writer.write_all(&out).await.map_err(cut)?;
        if !is_well {
            writer.write_all(CUT).await.map_err(cut)?;
            return Err(Error::of_stream(Code::Message, "what is sent is not a capsule").into());
        }
    }
}

/// Writes the capsules again that are whole. Returns false if the bytes are not capsules.
fn copy(capsules: &mut Reader, out: &mut Vec<u8>) -> bool {
    loop {
        match capsules.payload() {
            Ok(Some(payload)) => {
                put_datagram(out, payload);
            }
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// To the peer.
async fn to_peer(
    mut reader: impl AsyncRead + Unpin,
    early: Vec<u8>,
    (peer, id): (&Peer, u64),
    send: &mut SendStream,
) -> Result<(), Broken> {
    let mut capsules = Reader::default();
    let mut bytes = BytesMut::from(&early[..]);
    loop {
        capsules.push(&bytes);
        let mut in_stream = Vec::new();
        while let Some(payload) = capsules.payload().map_err(cut)? {
            let length = datagram::header_bytes(id) + payload.len();
            if peer.takes_datagram(length) {
                let mut out = Vec::with_capacity(length);
                datagram::put(&mut out, id, payload);
                // It fails if the path has become narrower, or the connection is lost: the datagram is lost too.
                let _ = peer.connection().send_datagram(Bytes::from(out));
            } else {
                put_datagram(&mut in_stream, payload);
            }
        }
        send_data(send, in_stream.into()).await?;
        bytes.clear();
        bytes.reserve(READ_BYTES);
        if reader.read_buf(&mut bytes).await.map_err(cut)? == 0 {
            // This fails only if the stream is over.
            let _ = send.finish();
            return Ok(());
        }
    }
}
