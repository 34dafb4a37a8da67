//! A TCP listener that limits the number of clients and the time of each, so that strangers cannot use up our
//! descriptors.

use axum::serve::Listener;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Most clients at a time. Further ones wait in the kernel's queue.
pub(super) const CLIENTS_MAX: usize = 16;

/// Longest time of one connection. A scrape takes milliseconds.
const CONNECTION_TIME: Duration = Duration::from_secs(30);

/// Pause after a listener could not accept because descriptors ran out.
const PAUSE: Duration = Duration::from_millis(100);

/// A listener with limits.
pub(super) struct Capped {
    listener: TcpListener,
    permits: Arc<Semaphore>,
}

impl Capped {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(CLIENTS_MAX)) }
    }
}

impl Listener for Capped {
    type Io = CappedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (CappedStream, SocketAddr) {
        loop {
            let permit = self.permits.clone().acquire_owned().await;
            match (permit, self.listener.accept().await) {
                (Ok(permit), Ok((stream, address))) => {
                    let time = Box::pin(tokio::time::sleep(CONNECTION_TIME));
                    return (CappedStream { stream, time, _permit: permit }, address);
                }
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails at the end of its time.
pub(super) struct CappedStream {
    stream: TcpStream,
    time: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl CappedStream {
    fn in_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.time.as_mut().poll(cx) {
            Poll::Ready(()) => Err(ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for CappedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for CappedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.in_time(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.in_time(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
