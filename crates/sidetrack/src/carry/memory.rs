//! Connections in memory: both ends are in this process. As with a socket, one end can be cut instead of closed.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

/// One end of a connection in memory.
#[derive(Debug)]
pub struct Memory {
    stream: DuplexStream,
    cut: Cutter,
}

/// Cuts a connection in memory. Holds why, once it is cut.
#[derive(Clone, Debug, Default)]
pub struct Cutter(Arc<OnceLock<String>>);

impl Cutter {
    /// What has been written can still be read. Then the connection counts as reset instead of closed. To be called before an end
    /// is dropped.
    pub fn cut(&self) {
        self.cut_because(String::new());
    }

    /// The same, with what the reader is told. The first reason counts.
    pub fn cut_because(&self, why: String) {
        let _ = self.0.set(why);
    }
}

impl Memory {
    /// Returns both ends of a connection that buffers this number of bytes in each direction.
    pub fn pair(bytes: usize) -> (Self, Self) {
        let (one, other) = tokio::io::duplex(bytes);
        let cut = Cutter::default();
        (Self { stream: one, cut: cut.clone() }, Self { stream: other, cut })
    }

    /// Returns what cuts it.
    pub fn cutter(&self) -> Cutter {
        self.cut.clone()
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
        if let Some(why) = self.cut.0.get().filter(|_| is_end) {
            let reset = io::ErrorKind::ConnectionReset;
            let error = if why.is_empty() { reset.into() } else { io::Error::new(reset, why.clone()) };
            return Poll::Ready(Err(error));
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
