//! Connections in memory: both ends are in this process. As with a socket, one end can be cut instead of closed.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

/// One end of a connection in memory.
#[derive(Debug)]
pub struct Memory {
    stream: DuplexStream,
    is_cut: Arc<AtomicBool>,
}

/// Cuts a connection in memory.
#[derive(Clone, Debug)]
pub struct Cutter(Arc<AtomicBool>);

impl Cutter {
    /// What has been written can still be read. Then the connection counts as reset instead of closed. To be called before an end
    /// is dropped.
    pub fn cut(&self) {
        self.0.store(true, Relaxed);
    }
}

impl Memory {
    /// Returns both ends of a connection that buffers this number of bytes in each direction.
    pub fn pair(bytes: usize) -> (Self, Self) {
        let (one, other) = tokio::io::duplex(bytes);
        let is_cut = Arc::new(AtomicBool::new(false));
        (Self { stream: one, is_cut: is_cut.clone() }, Self { stream: other, is_cut })
    }

    /// Returns what cuts it.
    pub fn cutter(&self) -> Cutter {
        Cutter(self.is_cut.clone())
    }
}

impl AsyncRead for Memory {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let is_end = buffer.filled().len() == before && buffer.remaining() > 0;
        if is_end && self.is_cut.load(Relaxed) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Memory {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reactor::block_on;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn a_cut_is_seen_behind_what_was_written() {
        block_on(async {
            for is_cut in [false, true] {
                let (mut one, mut other) = Memory::pair(64);
                one.write_all(b"last words").await.unwrap();
                if is_cut {
                    one.cutter().cut();
                }
                drop(one);
                let mut all = Vec::new();
                let end = other.read_to_end(&mut all).await;
                assert_eq!((&all[..], end.is_err()), (&b"last words"[..], is_cut));
            }
        })
        .unwrap();
    }
}
