//! What moves between a stream of HTTP/2 and a connection in memory once the stream is a tunnel: bytes, which may be capsules.

use crate::carry::Cutter;
use bytes::{Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Most bytes of one read.
const READ_BYTES: usize = 16 * 1024;

/// How a connection in memory that was cut ends the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// In order: what passes marks its own end, and a reset would discard what is on its way.
    Ends,
    /// With a reset.
    Resets,
}

/// Both directions of a connection in memory, and what cuts it.
pub type Pipe<R, W> = (R, W, Option<Cutter>);

/// Copies bytes both ways, until both ends have closed or one is cut: then the other is cut, too. `early` was read from memory
/// before.
pub async fn tunnel(
    (mut reader, mut writer, cutter): Pipe<impl AsyncRead + Unpin, impl AsyncWrite + Unpin>,
    early: Vec<u8>,
    (mut body, mut to): (RecvStream, SendStream<Bytes>),
    on_cut: Cut,
) {
    let up = async {
        while let Some(data) = body.data().await {
            let data = data.map_err(io::Error::other)?;
            writer.write_all(&data).await?;
            // This fails only if the stream is over; then the capacity does not matter.
            let _ = body.flow_control().release_capacity(data.len());
        }
        writer.shutdown().await
    };
    let down = async {
        send(&mut to, early.into()).await?;
        loop {
            let mut bytes = BytesMut::with_capacity(READ_BYTES);
            let read = match reader.read_buf(&mut bytes).await {
                Err(error) if on_cut == Cut::Ends && error.kind() == ErrorKind::ConnectionReset => 0,
                read => read?,
            };
            if read == 0 {
                return to.send_data(Bytes::new(), true).map_err(io::Error::other);
            }
            send(&mut to, bytes.freeze()).await?;
        }
    };
    if let Err(error) = tokio::try_join!(up, down) {
        tracing::debug!(%error, "a tunnel over HTTP/2 was cut");
        if let Some(cutter) = cutter {
            cutter.cut();
        }
        to.send_reset(Reason::CANCEL);
    }
}

/// Sends data as flow control gives room.
///
/// # Errors
/// The stream or the connection has ended.
pub async fn send(to: &mut SendStream<Bytes>, mut data: Bytes) -> io::Result<()> {
    while !data.is_empty() {
        to.reserve_capacity(data.len());
        let room = match poll_fn(|cx| to.poll_capacity(cx)).await {
            Some(room) => room.map_err(io::Error::other)?,
            None => return Err(ErrorKind::BrokenPipe.into()),
        };
        let part = data.split_to(room.min(data.len()));
        to.send_data(part, false).map_err(io::Error::other)?;
    }
    Ok(())
}
